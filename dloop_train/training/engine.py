"""Engine: DeepSpeed around Unroll - the step loop, what is skipped, when to validate, save and stop."""

import contextlib
import copy
import io
import json
import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from dloop_train.config import DeepSpeedConfig, TrainConfig
from dloop_train.data.batches import Source, TextBatch, packed
from dloop_train.drafters.base import Drafter
from dloop_train.ranks import (
    STOP,
    barrier,
    gather_over_ranks,
    max_over_ranks,
    peak_memory,
    rank,
    say,
    sum_over_ranks,
    world_size,
)
from dloop_train.runs import keep_rows
from dloop_train.training.anchors import Origins, draw_origins
from dloop_train.training.metrics import MetricLog, Sums, add_sums, reduce_sums
from dloop_train.training.plan import Plan
from dloop_train.training.saves import Best, Checkpoints, Last, best_of, gathered, last_of
from dloop_train.training.unroll import TERMS, Terms, Unroll

SKIPPED = "skipped.jsonl"
TIMED = 10
"""Steps after which their median decides how often to validate."""


@dataclass(frozen=True)
class Validation:
    """What a validation found; the same on every rank."""

    row: dict
    """Logged as it is."""
    score: float | None = None
    """What the best checkpoint has most of: predicted tokens per second."""
    seconds: float = 0.0
    """What a validation takes, without what only the first one does."""


Validate = Callable[[int, Drafter], Validation]


@dataclass(frozen=True)
class TrainState:
    """What a resumed training knows beside its weights and its optimiser."""

    step: int = 0
    skipped: int = 0
    """Steps without an update, because a loss or a gradient was not finite."""
    skipped_in_a_row: int = 0
    worse: int = 0
    """Validations since the best one."""
    validation_seconds: float = 0.0
    """What a validation takes."""
    validate_every: int = 0
    """Steps between validations where train.validate_share decides; 0 while it has not."""


@dataclass(frozen=True)
class StepInputs:
    """What a step's micro-batches need, drawn before the first of them. None of it lies on the device yet."""

    batches: list[TextBatch]
    """As read; each leaves the list with its turn."""
    texts: list[TextBatch]
    """The same as they are trained on, padded or packed, without features."""
    origins: list[Origins]
    tokens: int
    """Of this rank's samples, without padding."""
    wait: float
    """Seconds that the step waited for its data."""


@dataclass(frozen=True)
class StepTotals:
    """What all ranks know of a step after their one sum."""

    weights: Tensor
    """Label weights of each term. [2] as TERMS"""
    tokens: float
    origins: float
    stop: bool
    """Save and leave after this step."""


@dataclass
class Throughput:
    """Sums since the last logged row."""

    started: float
    steps: int = 0
    tokens: float = 0.0
    origins: float = 0.0
    wait: float = 0.0

    def add(self, totals: StepTotals, wait: float) -> None:
        self.steps += 1
        self.tokens += totals.tokens
        self.origins += totals.origins
        self.wait += wait

    def row(self) -> dict[str, float]:
        """Rates of all ranks together, and the worst rank's memory."""
        seconds = time.perf_counter() - self.started
        wait = sum(gather_over_ranks(self.wait)) / world_size()
        return {
            "tokens_per_second": self.tokens / seconds,
            "origins_per_second": self.origins / seconds,
            "seconds_per_step": seconds / self.steps,
            "wait_share": wait / seconds,
            "memory_gb": max_over_ranks(peak_memory()) / 1e9,
        }


class Trainer:
    """Trains a drafter on a source of features; everything that decides a step's numbers is a function of its number."""

    def __init__(
        self,
        drafter: Drafter,
        source: Source,
        settings: TrainConfig,
        deepspeed: DeepSpeedConfig,
        folder: Path,
        log: MetricLog,
    ):
        self.drafter, self.source, self.settings, self.log = drafter, source, settings, log
        self.run_folder = folder.parent
        self.plan = Plan(source.lengths, settings)
        self.stand_in = self.plan.shortest
        self.dtype = torch.bfloat16 if settings.precision == "bfloat16" else torch.float32
        self.twin = twin_of(drafter) if deepspeed.stage == 3 else None
        self.saves = Checkpoints(folder, settings.keep)
        self.saves.tidy()
        last = last_of(folder)
        universal = last is not None and self.saves.universal(last, deepspeed.stage)
        unroll = Unroll(
            drafter,
            Terms(settings.depth_exposure, settings.stages),
            detach=settings.detach,
            max_rows=settings.loss_rows,
            recompute=settings.recompute,
        )
        self.engine = start_engine(
            unroll, settings, deepspeed, self.plan.micro_batches(world_size()), universal=universal
        )
        self.guarded = (
            deepspeed.stage > 0 or settings.precision == "bfloat16"
        )  # DeepSpeed's own optimisers skip what is not finite
        self.device = self.engine.device
        drafter.attach_head(drafter.head.to(self.device, self.dtype))
        self.train_state = self.resume(last, universal) if last else TrainState()
        self.best = best_of(folder)
        self.step_seconds: list[float] = []
        forget_rows_after(self.run_folder / SKIPPED, self.train_state.step)

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self.train_state.step

    def resume(self, last: Last, universal: bool) -> TrainState:
        return TrainState(**self.saves.load(self.engine, last, universal=universal)["train_state"])

    def train(self, validate: Validate | None = None) -> bool:
        """Run the remaining steps; False where a stop was asked for before the end.

        `validate` is called on every rank: before the first step, after the last and in between as the settings say.
        """
        total = self.plan.steps
        if validate is not None and self.step == 0:
            self.validate(validate)
        with (
            ThreadPoolExecutor(1) as ahead,
            tqdm(total=total, initial=self.step, unit="step", desc="train", disable=rank() != 0) as bar,
        ):
            waiting = ahead.submit(self.load, min(self.step, total - 1))
            throughput = Throughput(time.perf_counter())
            while self.step < total and not self.out_of_patience:
                began = time.perf_counter()
                inputs = self.prepare(waiting)
                if self.step + 1 < total:
                    waiting = ahead.submit(self.load, self.step + 1)
                totals = self.sum_totals(inputs)
                metrics = self.run_step(inputs, totals)
                if validate is not None and not self.validate_every:
                    self.settle_interval(time.perf_counter() - began)
                throughput.add(totals, inputs.wait)
                bar.update()
                if metrics is not None:
                    bar.set_postfix_str(f"loss {metrics['loss']:.3f}", refresh=False)
                if metrics is not None and (
                    self.step % self.settings.log_every == 0 or self.step in (1, total)
                ):  # a skipped step's rates stand in the next row
                    self.log.write(self.step, metrics | throughput.row() | {"skipped": self.train_state.skipped})
                    throughput = Throughput(time.perf_counter())
                if validate is not None and (
                    self.step == total or self.validate_every and self.step % self.validate_every == 0
                ):
                    throughput.started += self.validate(validate)
                if (
                    self.step % self.settings.save_every == 0
                    or self.step == total
                    or totals.stop
                    or self.out_of_patience
                ):
                    self.saves.save(self.engine, self.drafter, self.step, {"train_state": asdict(self.train_state)})
                if totals.stop:
                    break
        return self.end()

    def end(self) -> bool:
        """Whether training is over. A request to stop is honoured by now."""
        if rank() == 0:
            (self.run_folder / STOP).unlink(missing_ok=True)
        if self.train_state.skipped:
            say(
                f"train: {self.train_state.skipped} of {self.step} steps were skipped, since a loss or gradient was not finite; their samples stand in {self.run_folder / SKIPPED}"
            )
        if self.best is not None and self.best.step == 0 and self.step > 0:
            say(
                f"train: on the validation responses no checkpoint is predicted to be faster than the drafter that training started from "
                f"({self.best.score:.1f} tokens/s): with export.checkpoint=best that drafter is exported as it was"
            )
        if self.out_of_patience:
            say(f"train: no validation after step {self.best.step} was better; stopped early at step {self.step}")
        return self.step == self.plan.steps or self.out_of_patience

    # A step

    def load(self, step: int) -> list[TextBatch]:
        """This rank's micro-batches from the source; runs ahead in a thread, and its errors travel."""
        return [
            self.source.read(indices or [self.stand_in]) for indices in self.plan.shares(step, world_size())[rank()]
        ]

    def prepare(self, waiting: Future) -> StepInputs:
        started = time.perf_counter()
        batches = waiting.result()
        wait = time.perf_counter() - started
        texts = [self.laid_out(featureless(batch)) for batch in batches]
        share = self.plan.shares(self.step, world_size())[rank()]
        origins = [
            draw_origins(
                text,
                self.drafter.k,
                count=self.settings.origins,
                depth_exposure=self.plan.depth_exposure(self.step),
                seed=self.settings.seed,
                epoch=self.plan.epoch(self.step),
            )
            for text in texts
        ]
        origins = [
            o if indices else Origins(o.position, o.depth * 0) for o, indices in zip(origins, share, strict=True)
        ]
        return StepInputs(
            batches, texts, origins, sum(self.plan.lengths[index] for indices in share for index in indices), wait
        )

    def laid_out(self, batch: TextBatch) -> TextBatch:
        return packed(batch) if self.settings.pack else batch

    def sum_totals(self, inputs: StepInputs) -> StepTotals:
        """Sum over ranks what the loss is divided by, and hear what the first rank wants."""
        unroll = self.engine.module
        unroll.terms = Terms(self.plan.depth_exposure(self.step), self.settings.stages)
        weights = sum(unroll.weights(text, origins) for text, origins in zip(inputs.texts, inputs.origins, strict=True))
        origins = sum(int((o.depth > 0).sum()) for o in inputs.origins)
        stop = rank() == 0 and (self.run_folder / STOP).exists()
        both = sum_over_ranks(
            torch.cat([weights, torch.tensor([inputs.tokens, origins, stop]).to(weights)]).to(self.device)
        )
        tokens, origins, stop = both[len(TERMS) :].tolist()
        return StepTotals(both[: len(TERMS)], tokens, origins, bool(stop))

    def run_step(self, inputs: StepInputs, totals: StepTotals) -> dict[str, float | list[float]] | None:
        """Forward, backward and update over all micro-batches of the step. None where it was skipped."""
        rate = self.plan.learning_rate(self.step)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        count, sums, losses, norm = len(inputs.origins), {}, [], None
        for number, origins in enumerate(inputs.origins, 1):
            self.engine.set_gradient_accumulation_boundary(number == count)
            # DeepSpeed averages over ranks and micro-batches, the loss is already divided by their common weight.
            loss, measured = self.run_micro_batch(inputs.batches.pop(0), origins, totals, scale=world_size() * count)
            losses.append(loss)
            if not self.guarded and number == count:
                norm = self.checked_norm()
            self.engine.step()
            sums = add_sums(sums, measured)
        norm = float(self.engine.get_global_grad_norm()) if norm is None else norm
        if not math.isfinite(norm):
            self.skip(inputs, losses)
            return None
        self.train_state = replace(self.train_state, step=self.step + 1, skipped_in_a_row=0)
        means = reduce_sums(sums)
        loss = sum(self.engine.module.terms.share(term) * (means.get(f"weighted_loss_{term}") or 0.0) for term in TERMS)
        return {"loss": loss, "lr": rate, "grad_norm": norm, **means}

    def run_micro_batch(
        self, batch: TextBatch, origins: Origins, totals: StepTotals, *, scale: int
    ) -> tuple[Tensor, Sums]:
        """Forward and backward of one micro-batch: its loss and sums. Its features come to the device here, and leave it with the return."""
        batch = self.laid_out(self.source.ready(batch, self.device, self.dtype))
        origins = Origins(origins.position.to(self.device), origins.depth.to(self.device))
        result = self.engine(batch, origins, totals.weights, self.plan.progress(self.step))
        loss = result.loss.detach()
        # A loss that is not finite makes every gradient NaN, so that the norm over all ranks tells all of them.
        self.engine.backward(result.loss * torch.where(loss.isfinite(), scale, math.nan))
        return loss, result.sums

    def checked_norm(self) -> float:
        """The norm of gradients that all ranks have summed already; those that are not finite are dropped, and the optimiser has nothing to do."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.engine.module.parameters() if p.grad is not None])
        if not norm.isfinite():
            self.engine.zero_grad()
            self.engine.set_gradient_accumulation_boundary(False)
        return float(norm)

    def skip(self, inputs: StepInputs, losses: list[Tensor]) -> None:
        """Count a step that changed nothing, note whose samples it had, and stop the run when there are too many."""
        mine = [
            {"samples": list(text.ids), "finite": bool(loss.isfinite())}
            for text, loss in zip(inputs.texts, losses, strict=True)
        ]
        row = {"step": self.step + 1, "micro_batches": [micro for rows in gather_over_ranks(mine) for micro in rows]}
        self.train_state = replace(
            self.train_state,
            step=self.step + 1,
            skipped=self.train_state.skipped + 1,
            skipped_in_a_row=self.train_state.skipped_in_a_row + 1,
        )
        path = self.run_folder / SKIPPED
        if rank() == 0:
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        say(f"train: step {self.step} is skipped, a loss or gradient is not finite; its samples stand in {path}")
        if too_many := too_many_skipped(self.train_state, self.settings):
            raise ValueError(
                f"{too_many}. Their samples stand in {path}; the last checkpoint is kept. Lower train.lr, or look at those samples"
            )

    # Validation

    @property
    def validate_every(self) -> int:
        """Steps between validations; 0 while that is not known yet."""
        return self.settings.validate_every or self.train_state.validate_every

    def settle_interval(self, step_seconds: float) -> None:
        """By what steps and a validation take on the slowest rank. Decided once and kept in the checkpoints, so that a resumed training validates at the same steps."""
        self.step_seconds.append(step_seconds)
        if len(self.step_seconds) < TIMED:
            return
        steps = math.ceil(
            self.train_state.validation_seconds
            / statistics.median(self.step_seconds)
            * (1 / self.settings.validate_share - 1)
        )
        steps = int(max_over_ranks(max(steps, 1)))
        self.train_state = replace(self.train_state, validate_every=steps)
        say(
            f"train: validates every {steps} steps, which takes about {self.settings.validate_share:.0%} of the time (train.validate_share); train.validate_every={steps} would say it for every run"
        )

    def validate(self, validate: Validate) -> float:
        """Returns the seconds that it took."""
        started = time.perf_counter()
        found = validate(self.step, self.whole_drafter())
        if self.twin is not None:
            self.twin.to("cpu")
        self.log.validation(self.step, found.row)
        if found.score is not None:  # the start is a candidate too
            # a kill may have thrown the training back behind its best weights: until it is past them again, nothing is worse
            better = self.best is None or self.step == self.best.step or found.score > self.best.score
            behind = self.best is not None and self.step < self.best.step
            if better:
                self.best = Best(self.step, found.score)
                self.saves.mark_best(self.drafter, self.best)
            self.train_state = replace(self.train_state, worse=0 if better or behind else self.train_state.worse + 1)
        barrier()
        self.train_state = replace(self.train_state, validation_seconds=found.seconds)
        return time.perf_counter() - started

    def whole_drafter(self) -> Drafter:
        """The drafter, or where ZeRO-3 has divided it a twin with the same weights."""
        if self.twin is None:
            return self.drafter
        with gathered(self.drafter):
            self.twin.load_state_dict(self.drafter.state_dict())
        self.twin.to(self.device, self.dtype).attach_head(self.drafter.head)
        return self.twin

    @property
    def out_of_patience(self) -> bool:
        return 0 < self.settings.patience <= self.train_state.worse


def too_many_skipped(train_state: TrainState, settings: TrainConfig) -> str:
    """How many steps were skipped and how many may be, where that is more."""
    if train_state.skipped_in_a_row > settings.max_skipped:
        return f"{train_state.skipped_in_a_row} steps in a row had a loss or gradient that is not finite, train.max_skipped allows {settings.max_skipped}"
    if train_state.skipped > max(settings.max_skipped, settings.max_skipped_share * train_state.step):
        return (
            f"{train_state.skipped} of {train_state.step} steps had a loss or gradient that is not finite, train.max_skipped={settings.max_skipped} and "
            f"train.max_skipped_share={settings.max_skipped_share} allow fewer"
        )
    return ""


def featureless(batch: TextBatch) -> TextBatch:
    """What of a batch says which origins it has and what they weigh."""
    nothing = batch.features.new_empty(*batch.tokens.shape, 0)  # no view, which would keep the features alive
    return replace(batch, features=nothing, last_hidden=nothing)


def twin_of(drafter: Drafter) -> Drafter:
    """A copy that shares the target's head."""
    return copy.deepcopy(drafter, {id(drafter.head): drafter.head})


def forget_rows_after(path: Path, step: int) -> None:
    """Rows of steps that will be run again."""
    if rank() == 0 and path.is_file():
        keep_rows(path, lambda row: row["step"] <= step)


def start_engine(
    unroll: Unroll, settings: TrainConfig, deepspeed_settings: DeepSpeedConfig, accumulation: int, *, universal: bool
):
    """DeepSpeed's engine; on a CPU no op of it is compiled. `universal`: the checkpoint to be loaded is one that fits any number of ranks."""
    import deepspeed

    trained = [parameter for parameter in unroll.parameters() if parameter.requires_grad]
    config = {
        "train_micro_batch_size_per_gpu": settings.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": settings.clip,
        "steps_per_print": 10**9,
        "zero_optimization": zero_of(deepspeed_settings, sum(parameter.numel() for parameter in trained)),
        "bf16": {"enabled": settings.precision == "bfloat16"},
        "checkpoint": {"load_universal": universal},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": settings.lr,
                "betas": [0.9, settings.beta2],
                "weight_decay": settings.weight_decay,
                "torch_adam": True,
            },
        },
    }
    if deepspeed_settings.stage > 0:  # bf16 would round every sum over micro-batches; stage 0 cannot
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    with contextlib.redirect_stdout(io.StringIO()):  # the bf16 optimiser prints its memory line by line
        engine, *_ = deepspeed.initialize(model=unroll, model_parameters=trained, config=config)
    return engine


def zero_of(settings: DeepSpeedConfig, trained: int) -> dict:
    zero = {"stage": settings.stage, "reduce_bucket_size": bucket_of(trained)}
    if settings.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if settings.offload and settings.stage == 3:
        zero["offload_param"] = {"device": "cpu"}
    return zero


BUCKET = 10**8
"""Gradients that ZeRO reduces together, at most. DeepSpeed's default, five times as many, takes as much memory as a drafter's weights."""


def bucket_of(trained: int) -> int:
    """The numbers that ZeRO's bucket has room for."""
    return min(trained, BUCKET)
