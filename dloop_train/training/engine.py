"""Engine: the training loop with DeepSpeed, which skips bad steps, validates, saves and stops."""

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
"""Number of steps whose median duration decides how often to validate."""


@dataclass(frozen=True)
class Validation:
    """Result of a validation; the same on every rank."""

    row: dict
    """Row for the log, written unchanged."""
    score: float | None = None
    """Predicted tokens per second; the best checkpoint has the highest score."""
    seconds: float = 0.0
    """Duration of a validation, without work that only the first one does."""


Validate = Callable[[int, Drafter], Validation]


@dataclass(frozen=True)
class TrainState:
    """State that a checkpoint keeps in addition to weights and optimiser."""

    step: int = 0
    skipped: int = 0
    """Steps without an update because a loss or gradient was not finite."""
    skipped_in_a_row: int = 0
    worse: int = 0
    """Validations since the best one."""
    validation_seconds: float = 0.0
    """Duration of the last validation."""
    validate_every: int = 0
    """Steps between validations as derived from train.validate_share; 0 until that is done."""


@dataclass(frozen=True)
class StepInputs:
    """Inputs of a step's micro-batches, prepared before the first one runs. All tensors are on the CPU."""

    batches: list[TextBatch]
    """As read. Each is removed from the list when it runs."""
    texts: list[TextBatch]
    """The same batches in the layout of training, padded or packed, without features."""
    origins: list[Origins]
    tokens: int
    """Tokens of this rank's samples, without padding."""
    wait: float
    """Seconds that the step waited for its data."""


@dataclass(frozen=True)
class StepTotals:
    """Totals of a step over all ranks, from one all-reduce."""

    weights: Tensor
    """Label weights of each term. [2] as TERMS"""
    tokens: float
    origins: float
    stop: bool
    """Save and stop after this step."""


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
        """Rates of all ranks together, their mean waiting share, and the largest peak memory of a rank."""
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
    """Trains a drafter on a source of features.

    Samples, origins, learning rate and N of a step are functions of the step's number, so that a resume is exact.
    """

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
        # DeepSpeed's own optimisers skip updates that are not finite. At stage 0 in fp32 the optimiser is torch's.
        self.guarded = deepspeed.stage > 0 or settings.precision == "bfloat16"
        self.device = self.engine.device
        drafter.attach_head(drafter.head.to(self.device, self.dtype))
        self.train_state = self.resume(last, universal) if last else TrainState()
        self.best = best_of(folder)
        self.step_seconds: list[float] = []
        forget_rows_after(self.run_folder / SKIPPED, self.train_state.step)

    @property
    def step(self) -> int:
        """Number of completed steps, skipped ones included."""
        return self.train_state.step

    def resume(self, last: Last, universal: bool) -> TrainState:
        return TrainState(**self.saves.load(self.engine, last, universal=universal)["train_state"])

    def train(self, validate: Validate | None = None) -> bool:
        """Run the remaining steps. Returns False if a stop was requested before the end.

        `validate` is called on every rank: before the first step, after the last, and in between by the settings.
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
                # The rates of a skipped step are part of the next row.
                if metrics is not None and (self.step % self.settings.log_every == 0 or self.step in (1, total)):
                    self.log.write(self.step, metrics | throughput.row() | {"skipped": self.train_state.skipped})
                    throughput = Throughput(time.perf_counter())
                if validate is not None and (
                    self.step == total or (self.validate_every and self.step % self.validate_every == 0)
                ):
                    throughput.started += self.validate(validate)  # rates do not count time in validations
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
        """Print closing messages and delete the stop request. Returns whether training is complete."""
        if rank() == 0:
            (self.run_folder / STOP).unlink(missing_ok=True)
        if self.train_state.skipped:
            say(
                f"train: {self.train_state.skipped} of {self.step} steps were skipped, since a loss or gradient was "
                f"not finite; their samples are in {self.run_folder / SKIPPED}"
            )
        if self.best is not None and self.best.step == 0 and self.step > 0:
            say(
                f"train: on the validation responses no checkpoint is predicted to be faster than the drafter "
                f"that training started from "
                f"({self.best.score:.1f} tokens/s): with export.checkpoint=best that drafter is exported as it was"
            )
        if self.out_of_patience:
            say(f"train: no validation after step {self.best.step} was better; stopped early at step {self.step}")
        return self.step == self.plan.steps or self.out_of_patience

    # A step

    def load(self, step: int) -> list[TextBatch]:
        """This rank's micro-batches of a step. Runs ahead in a thread; its errors are raised in `prepare`."""
        return [
            self.source.read(indices or [self.stand_in]) for indices in self.plan.shares(step, world_size())[rank()]
        ]

    def prepare(self, waiting: Future) -> StepInputs:
        """Wait for the step's micro-batches and draw their origins."""
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
        # An empty micro-batch runs the stand-in sample with all its origins masked.
        origins = [
            o if indices else Origins(o.position, o.depth * 0) for o, indices in zip(origins, share, strict=True)
        ]
        return StepInputs(
            batches, texts, origins, sum(self.plan.lengths[index] for indices in share for index in indices), wait
        )

    def laid_out(self, batch: TextBatch) -> TextBatch:
        return packed(batch) if self.settings.pack else batch

    def sum_totals(self, inputs: StepInputs) -> StepTotals:
        """Sum loss weights and counts over ranks, and pass on whether the first rank found a stop request."""
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
        """Forward, backward and update over all micro-batches of the step. None if the step was skipped."""
        rate = self.plan.learning_rate(self.step)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        count, sums, losses, norm = len(inputs.origins), {}, [], None
        for number, origins in enumerate(inputs.origins, 1):
            self.engine.set_gradient_accumulation_boundary(number == count)
            # DeepSpeed averages over ranks and micro-batches. The loss is already divided by the weight of the whole
            # step, so `scale` undoes the average.
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
        """Forward and backward of one micro-batch. Returns its loss and sums.

        Features are on the device only during this call.
        """
        batch = self.laid_out(self.source.ready(batch, self.device, self.dtype))
        origins = Origins(origins.position.to(self.device), origins.depth.to(self.device))
        result = self.engine(batch, origins, totals.weights, self.plan.progress(self.step))
        loss = result.loss.detach()
        # NaN as a factor makes every gradient NaN, so that all ranks detect the loss in the global gradient norm.
        self.engine.backward(result.loss * torch.where(loss.isfinite(), scale, math.nan))
        return loss, result.sums

    def checked_norm(self) -> float:
        """Norm of the gradients, which are already summed over all ranks.

        If it is not finite, gradients are dropped and engine.step() makes no update.
        """
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.engine.module.parameters() if p.grad is not None])
        if not norm.isfinite():
            self.engine.zero_grad()
            self.engine.set_gradient_accumulation_boundary(False)
        return float(norm)

    def skip(self, inputs: StepInputs, losses: list[Tensor]) -> None:
        """Count a step without an update and record its samples. Raises ValueError if too many were skipped."""
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
                f"{too_many}. Their samples stand in {path}; the last checkpoint is kept. "
                f"Lower train.lr, or look at those samples"
            )

    # Validation

    @property
    def validate_every(self) -> int:
        """Steps between validations; 0 until the number is decided."""
        return self.settings.validate_every or self.train_state.validate_every

    def settle_interval(self, step_seconds: float) -> None:
        """Set the number of steps between validations from the durations of steps and of a validation.

        The largest number of all ranks is taken.
        It is decided once and kept in the checkpoints, so that a resumed training validates at the same steps.
        """
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
            f"train: validates every {steps} steps, which takes about {self.settings.validate_share:.0%} of the time "
            f"(train.validate_share); train.validate_every={steps} would say it for every run"
        )

    def validate(self, validate: Validate) -> float:
        """Validate, log the result and mark the best weights. Returns the duration in seconds."""
        started = time.perf_counter()
        found = validate(self.step, self.whole_drafter())
        if self.twin is not None:
            self.twin.to("cpu")
        self.log.validation(self.step, found.row)
        if found.score is not None:  # also at step 0: the initial drafter is a candidate
            # After a kill the training may resume before the step of its best weights.
            # No validation counts as worse until it passes that step again.
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
        """The drafter, or under ZeRO-3, which divides its weights over ranks, a whole copy of it."""
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
    """Error message if more steps were skipped than the settings allow, else an empty string."""
    if train_state.skipped_in_a_row > settings.max_skipped:
        return (
            f"{train_state.skipped_in_a_row} steps in a row had a loss or gradient that is not finite, "
            f"train.max_skipped allows {settings.max_skipped}"
        )
    if train_state.skipped > max(settings.max_skipped, settings.max_skipped_share * train_state.step):
        return (
            f"{train_state.skipped} of {train_state.step} steps had a loss or gradient that is not finite, "
            f"train.max_skipped={settings.max_skipped} and "
            f"train.max_skipped_share={settings.max_skipped_share} allow fewer"
        )
    return ""


def featureless(batch: TextBatch) -> TextBatch:
    """The batch without features; it suffices to draw origins and to compute their weights."""
    nothing = batch.features.new_empty(*batch.tokens.shape, 0)  # not a view, which would keep the features in memory
    return replace(batch, features=nothing, last_hidden=nothing)


def twin_of(drafter: Drafter) -> Drafter:
    """A copy of the drafter that shares the target's head."""
    return copy.deepcopy(drafter, {id(drafter.head): drafter.head})


def forget_rows_after(path: Path, step: int) -> None:
    """Delete the rows of steps that will be run again."""
    if rank() == 0 and path.is_file():
        keep_rows(path, lambda row: row["step"] <= step)


def start_engine(
    unroll: Unroll, settings: TrainConfig, deepspeed_settings: DeepSpeedConfig, accumulation: int, *, universal: bool
):
    """DeepSpeed's engine. On a CPU none of its ops is compiled.

    `universal`: the checkpoint to load is in DeepSpeed's universal form, which fits any number of ranks.
    """
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
    # In bf16 every sum over micro-batches would be rounded. Stage 0 does not support sums in fp32.
    if deepspeed_settings.stage > 0:
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
"""Largest number of gradients that ZeRO reduces together.

DeepSpeed's default is five times as large, which takes as much memory as a drafter's weights.
"""


def bucket_of(trained: int) -> int:
    """Size of ZeRO's bucket, in gradients."""
    return min(trained, BUCKET)
