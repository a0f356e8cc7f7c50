"""Benchmark of a training step: time, memory and FLOPs, against a plain reference and speculators.

    python tests/speed/train_step.py                      # every family at SmolLM2-135M's size, float32
    python tests/speed/train_step.py --target qwen3_8b --length 4096 --origins 512 --sequences 1 \\
        --loss-rows 1024 --precision bfloat16 --drafter dflash,dspark,eagle3

The step is measured with one stage (S = 1) and unrolled. It consists of forward, backward and torch's AdamW, without
DeepSpeed, whose cost is the same for everything compared. Texts and features are random, so no weights are needed and
the target's forward pass is not part of the step.

Times are medians over rounds in which the compared steps, and large matrix products for the ideal, take turns in one
process. Memory counts live tensors: those that exist before a step, and the most that a step adds. It is measured by
the allocator on CUDA and operator by operator on a CPU, so that other processes do not affect it.
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf, open_dict
from plain_reference import PlainUnroll, plain_bytes
from speculators_step import SpeculatorsStep, why_not
from torch import Tensor, nn
from watching import Watching

from dloop_train.config import CONF, Config, DeepSpeedConfig, TrainConfig, check, from_hydra
from dloop_train.data.batches import TextBatch, collate, packed
from dloop_train.drafters.base import Drafter
from dloop_train.phases import artifacts
from dloop_train.phases.plan import aligned, cost_rows, measure_rate, size
from dloop_train.targets.head import TargetHead
from dloop_train.targets.sources import as_dtype, default_device, random_config, spec_of
from dloop_train.training.accounting import StepCost, counts_of, step_cost
from dloop_train.training.anchors import Origins, draw_origins
from dloop_train.training.unroll import Terms, Unroll
from dloop_train.types import Sample, TargetSpec

FAMILIES = ("dflash", "domino", "dspark", "eagle3", "mtp", "mtp_assistant")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafter", default=",".join(FAMILIES), help="families, separated by commas")
    parser.add_argument("--target", default="smollm2_135m", help="whose sizes")
    sizes = {"length": 192, "origins": 32, "sequences": 4, "depth": 3, "loss-rows": 128, "steps": 5}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", nargs="*", default=[], help="more settings of the drafter, such as drafter.width=8")
    parser.add_argument(
        "--recompute",
        action="store_true",
        help="also the unrolled step that keeps only a stage's states (train.recompute)",
    )
    parser.add_argument(
        "--pack",
        action="store_true",
        help="texts of unequal length, and also the unrolled step that packs them into one row (train.pack)",
    )
    parser.add_argument("--terms", action="store_true", help="print the account of every step term by term")
    return parser.parse_args(words)


# What is trained


@dataclass
class Bench:
    """A drafter with random weights, its optimiser, and one batch of random texts and features."""

    family: str
    wanted: argparse.Namespace
    spec: TargetSpec
    drafter: Drafter
    batch: TextBatch
    masters: list[Tensor] = field(default_factory=list)
    """fp32 master copies of bf16 weights, which the optimiser updates, as in DeepSpeed."""

    def __post_init__(self):
        self.trained = [parameter for parameter in self.drafter.parameters() if parameter.requires_grad]
        low = self.wanted.precision == "bfloat16"
        self.masters = [parameter.detach().float() for parameter in self.trained] if low else self.trained
        self.optimiser = torch.optim.AdamW(self.masters, lr=1e-5)

    def origins(self, depth: int, batch: TextBatch | None = None) -> Origins:
        return draw_origins(
            batch or self.batch, self.drafter.k, count=self.wanted.origins, depth_exposure=depth, seed=0, epoch=0
        )

    def update(self) -> None:
        if self.masters is self.trained:
            self.optimiser.step()
        else:
            for master, parameter in zip(self.masters, self.trained, strict=True):
                master.grad, parameter.grad = parameter.grad.float(), None
            self.optimiser.step()
            with torch.no_grad():
                for master, parameter in zip(self.masters, self.trained, strict=True):
                    parameter.copy_(master)
        self.optimiser.zero_grad(set_to_none=True)

    def held(self) -> int:
        """Bytes of the tensors that exist between two steps."""
        state = [tensor for states in self.optimiser.state.values() for tensor in states.values()]
        head = [self.drafter.head.embed_weight, self.drafter.head.lm_head_weight]
        return distinct_bytes(
            [*self.drafter.parameters(), *self.masters, *state, *head, self.batch.features, self.batch.last_hidden]
        )


def distinct_bytes(tensors: Sequence[Tensor]) -> int:
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def composed(family: str, wanted: argparse.Namespace) -> Config:
    """Settings of the pair, or of a drafter from scratch if there is no pair."""
    paired = (CONF / "pair" / f"{family}_{wanted.target}.yaml").is_file()
    alone = (
        []
        if paired
        else ["drafter.init=scratch", *(["drafter.alignment=shifted"] if family in ("dflash", "domino") else [])]
    )
    overrides = [
        f"+drafter={family}",
        f"+target={wanted.target}",
        "name=speed",
        *(f"++{one}" for one in (*alone, *wanted.set)),
    ]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        tree = compose("config", overrides)
    with open_dict(tree):
        return from_hydra(OmegaConf.create(OmegaConf.to_container(tree, resolve=True)))


def make_bench(family: str, wanted: argparse.Namespace) -> Bench:
    config, dtype = composed(family, wanted), as_dtype(wanted.precision)
    spec, taps = spec_of(config.target, random_config(config.target)), artifacts.taps(config)
    shape = config.drafter.shape_unread(spec, taps) or replace(config.drafter, init="scratch").shape(
        spec, taps
    )  # None for starters; the sizes from scratch are used then
    torch.manual_seed(0)
    with torch.device(default_device() if wanted.device == "auto" else wanted.device):
        embed, lm_head = (torch.randn(spec.vocab_size, spec.hidden_size, dtype=dtype) * 0.02 for _ in range(2))
        drafter = config.drafter.build(
            shape.on(spec, taps), TargetHead(embed, lm_head, embed_scale=spec.embed_scale, softcap=spec.softcap)
        )
        tokens = torch.randint(spec.vocab_size, (wanted.sequences, wanted.length))
        features, last_hidden = (
            torch.randn(wanted.sequences, wanted.length, width, dtype=dtype)
            for width in (drafter.shape.feature_spec.width(spec), spec.hidden_size)
        )
    drafter = drafter.to(dtype)
    with torch.no_grad():
        drafter.start_vocabulary(Counter(), lm_head, spec.stop_ids)
    lengths = [
        wanted.length - number * wanted.length // (2 * wanted.sequences) * wanted.pack
        for number in range(wanted.sequences)
    ]
    samples = [
        Sample(
            str(row),
            tokens[row, :length],
            torch.arange(length, device=tokens.device) >= wanted.length // 4,  # the first quarter is the prompt
            features[row, :length],
            last_hidden[row, :length],
        )
        for row, length in enumerate(lengths)
    ]
    return Bench(family, wanted, spec, drafter, collate(samples))


# Implementations of a step


@dataclass
class Way:
    """One implementation of a step, and its measurements."""

    name: str
    loss: Callable[[], Tensor]
    update: Callable[[], None]
    held: Callable[[], int]
    """Bytes of the tensors that exist between two steps."""
    origins: int
    cost: StepCost | None = None
    seconds: list[float] = field(default_factory=list)
    value: float = 0.0
    """Loss with the initial weights."""
    peak: float = 0.0
    """Largest number of bytes in live tensors during a step."""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def step(self) -> float:
        loss = self.loss()
        loss.backward()
        self.update()
        return float(loss.detach())


def unrolled(
    bench: Bench, name: str, unroll: nn.Module, depth: int, *, batch: TextBatch | None = None, **train: bool
) -> Way:
    batch = batch or bench.batch
    origins, terms, wanted = bench.origins(depth, batch), Terms(depth), bench.wanted
    totals = Unroll(bench.drafter, terms, max_rows=wanted.loss_rows).weights(batch, origins)
    settings = TrainConfig(
        batch_size=wanted.sequences,
        micro_batch_size=wanted.sequences,
        loss_rows=wanted.loss_rows,
        precision=wanted.precision,
        **train,
    )
    cost = step_cost(
        bench.drafter, bench.spec, counts_of(bench.drafter, batch, origins, terms), settings, DeepSpeedConfig()
    )
    return Way(
        name,
        lambda: unroll(batch, origins, totals, 0.0).loss,
        bench.update,
        bench.held,
        int((origins.depth > 0).sum()),
        cost,
    )


def ways_of(bench: Bench) -> tuple[list[Way], list[str]]:
    """The implementations compared for a family, and reasons for those left out.

    One called `<kind> N=3` has the same loss as `N=3`.
    """
    wanted, drafter = bench.wanted, bench.drafter

    def unroll(depth: int, **how: bool) -> Unroll:
        return Unroll(drafter, Terms(depth), max_rows=wanted.loss_rows, **how)

    ours = [
        unrolled(bench, "S=1" if depth == 0 else f"N={depth}", unroll(depth), depth)
        for depth in dict.fromkeys((0, wanted.depth))
    ]
    deepest = ours[-1].name
    if wanted.recompute:
        ours.append(
            unrolled(bench, f"recompute {deepest}", unroll(wanted.depth, recompute=True), wanted.depth, recompute=True)
        )
    if wanted.pack:
        ours.append(
            unrolled(
                bench, f"packed {deepest}", unroll(wanted.depth), wanted.depth, batch=packed(bench.batch), pack=True
            )
        )
    skipped = []
    needed, free = (
        plain_bytes(drafter, bench.batch, bench.origins(wanted.depth), Terms(wanted.depth)),
        free_bytes(bench.batch.tokens.device),
    )
    if needed < 0.8 * free:
        plain = unrolled(bench, f"plain {deepest}", PlainUnroll(drafter, Terms(wanted.depth)), wanted.depth)
        plain.cost = None
        ours.append(plain)
    else:
        skipped.append(
            f"the plain reference would hold about {size(needed)} of logits and masks alone, {size(free)} are free"
        )
    reason = why_not(bench.family)
    if reason is None:
        theirs = SpeculatorsStep(bench)
        ours.append(Way("speculators S=1", theirs.loss, theirs.update, theirs.held, theirs.origins))
    else:
        skipped.append(f"speculators: {reason}")
    return ours, skipped


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo", encoding="utf-8") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))


def measure(ways: Sequence[Way], steps: int, device: torch.device, precision: str) -> float:
    """Measure loss, peak memory and times of the ways; the first step of each warms up.

    Returns the FLOP/s of large matrix products, measured in the same rounds.
    """
    rates = [measure_rate(precision, seconds=0.1)]
    for way in ways:
        with torch.no_grad():
            way.value = float(way.loss())
    for way in ways:
        way.step()
        way.peak = peak_of(way, device)
    for number in range(steps):
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            synchronise(device)
            started = time.perf_counter()
            way.step()
            synchronise(device)
            way.seconds.append(time.perf_counter() - started)
        rates.append(measure_rate(precision, seconds=0.1))
    return statistics.median(rates)


def peak_of(way: Way, device: torch.device) -> float:
    before = way.held()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        there = torch.cuda.memory_allocated()
        way.step()
        return before + torch.cuda.max_memory_allocated() - there
    with Watching() as watched:
        way.step()
    return before + watched.peak


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Tables


def way_rows(bench: Bench, ways: Sequence[Way], rate: float) -> list[list[str]]:
    rows, tokens = [], bench.batch.tokens.numel()
    for way in ways:
        flops = way.cost.flops if way.cost else 0.0
        rows.append(
            [
                bench.family,
                way.name,
                str(bench.drafter.k),
                f"{1000 * way.median:.0f}",
                f"{tokens / way.median:.0f}",
                f"{way.origins / way.median:.0f}",
                f"{way.peak / 1e6:.0f}",
                f"{way.cost.peak / 1e6:.0f}" if way.cost else "-",
                f"{flops / 1e9:.1f}" if flops else "-",
                f"{100 * flops / way.median / rate:.0f} %" if flops else "-",
                f"{way.value:.4f}",
            ]
        )
    return rows


def line(cells: Sequence[str]) -> str:
    """One aligned row of the first table, which is printed row by row."""
    return "  ".join(
        [
            cells[0].ljust(13),
            cells[1].ljust(15),
            *(cell.rjust(width) for cell, width in zip(cells[2:], (2, 6, 8, 9, 7, 9, 7, 8, 8), strict=True)),
        ]
    )


def ratio_rows(bench: Bench, ways: Sequence[Way]) -> list[list[str]]:
    named, one, deep = (
        {way.name.split()[0]: way for way in ways},
        ways[0],
        ways[1] if len(ways) > 1 and ways[1].cost else ways[0],
    )
    time_ratio, flop_ratio = deep.median / one.median, deep.cost.flops / one.cost.flops
    cells = [bench.family, f"{time_ratio:.2f}", f"{flop_ratio:.2f}", f"{time_ratio / flop_ratio:.2f}"]
    for name, against in (("plain", deep), ("speculators", one)):
        other = named.get(name)
        cells += [f"{other.median / against.median:.2f}", f"{other.peak / against.peak:.2f}"] if other else ["-", "-"]
    return [cells]


def require_same_loss(ways: Sequence[Way], precision: str) -> None:
    by_name = {way.name: way.value for way in ways}
    for name, value in by_name.items():
        kind, _, same = name.partition(" ")
        if kind in ("plain", "packed", "recompute"):
            ours, bound = by_name[same], 2e-2 if precision == "bfloat16" else 1e-4
            check(
                abs(value - ours) <= bound * abs(ours),
                f"the loss of {name} is {value}, of {same} {ours}: they should be the same",
            )


def main(words: Sequence[str] | None = None) -> None:
    wanted = arguments(words)
    device = default_device() if wanted.device == "auto" else torch.device(wanted.device)
    print(f"python tests/speed/train_step.py {' '.join(words if words is not None else sys.argv[1:])}".rstrip())
    print(
        f"{wanted.sequences} sequences x {wanted.origins} origins x {wanted.length} tokens, "
        f"{wanted.target}'s sizes, {wanted.precision} on {device.type} "
        f"({torch.get_num_threads()} threads); medians of {wanted.steps} steps; ideal are large products in between"
    )
    print(
        line(
            ["drafter", "way", "k", "ms", "tokens/s", "origins/s", "peak MB", "accounted", "GFLOPs", "of ideal", "loss"]
        ),
        flush=True,
    )
    ratios = [
        [
            "drafter",
            f"time N={wanted.depth}/S=1",
            "FLOPs",
            "quotient",
            "plain/ours time",
            "memory",
            "speculators/ours S=1 time",
            "memory",
        ]
    ]
    notes = []
    for family in wanted.drafter.split(","):
        bench = make_bench(family, wanted)
        ways, skipped = ways_of(bench)
        rate = measure(ways, wanted.steps, device, wanted.precision)
        require_same_loss(ways, wanted.precision)
        print("\n".join(map(line, way_rows(bench, ways, rate))), flush=True)
        ratios += ratio_rows(bench, ways)
        notes += [f"{family}: {reason}" for reason in skipped]
        if wanted.terms:
            for way in ways:
                if way.cost:
                    print("\n".join([f"{family} {way.name}", *aligned(cost_rows(way.cost))]))
    print("\n".join(["", *aligned(ratios), *dict.fromkeys(notes)]))


if __name__ == "__main__":
    main()
