"""Engine: DeepSpeed around Unroll - the step loop, checkpoints and resuming."""

import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from dloop_train.config import DeepSpeedConfig, TrainConfig, check
from dloop_train.data.batches import Source, TextBatch, micro_batches, packed, plan_epoch
from dloop_train.drafters.base import Drafter
from dloop_train.ranks import barrier, peak_memory, rank, say, sum_over_ranks, world_size
from dloop_train.runs import write_atomic
from dloop_train.training.anchors import Origins, draw_origins
from dloop_train.training.metrics import MetricLog, reduce_sums
from dloop_train.training.schedule import learning_rate
from dloop_train.training.unroll import Terms, Unroll

POINTER = "last.json"
WEIGHTS = "weights.safetensors"


@dataclass(frozen=True)
class Plan:
    """Every step of the training, a pure function of the data and the settings."""

    lengths: tuple[int, ...]
    settings: TrainConfig

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.lengths) // self.settings.batch_size)

    @property
    def base_steps(self) -> int:
        """Steps of the base recipe, which come first."""
        return round(self.settings.base_epochs * self.steps_per_epoch)

    @property
    def steps(self) -> int:
        return self.base_steps + (self.settings.steps or max(1, round(self.settings.epochs * self.steps_per_epoch)))

    def depth_exposure(self, step: int) -> int:
        """N of a step."""
        return 0 if step < self.base_steps else self.settings.depth_exposure

    def learning_rate(self, step: int) -> float:
        """Each recipe warms up and decays by itself."""
        if step < self.base_steps:
            return learning_rate(step, self.base_steps, self.settings.base_lr, self.settings.warmup)
        return learning_rate(step - self.base_steps, self.steps - self.base_steps, self.settings.lr, self.settings.warmup)

    def progress(self, step: int) -> float:
        """How far the released objective has come, in [0, 1]: base steps bring it to its end, without them all steps do."""
        return min(step / (self.base_steps or self.steps), 1.0)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step on each rank."""
        total = self.settings.batch_size // self.settings.micro_batch_size
        check(total % world_size() == 0, f"train.batch_size {self.settings.batch_size} / train.micro_batch_size {self.settings.micro_batch_size} = {total} "
              f"micro-batches cannot be shared by {world_size()} ranks")
        return total // world_size()

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def micros(self, step: int) -> list[list[int]]:
        """This rank's micro-batches of a step: the m-th of the step goes to rank m modulo the world size."""
        if not hasattr(self, "_epoch") or self._epoch[0] != self.epoch(step):
            order = plan_epoch(self.lengths, self.settings.batch_size, self.settings.seed, self.epoch(step))
            object.__setattr__(self, "_epoch", (self.epoch(step), order))
        indices = self._epoch[1][step % self.steps_per_epoch]
        every = micro_batches(indices, self.settings.micro_batch_size, self.settings.batch_size // self.settings.micro_batch_size)
        return every[rank()::world_size()]


@dataclass(frozen=True)
class Prepared:
    """What a step's forward passes need, drawn before the first of them."""

    batches: list[TextBatch]
    origins: list[Origins]
    tokens: int
    wait: float
    """Seconds that the step waited for its data."""


@dataclass(frozen=True)
class Validation:
    """What a validation found; the same on every rank."""

    row: dict
    """Logged as it is."""
    score: float | None = None
    """What the best checkpoint has most of: predicted tokens per second."""


class Trainer:
    """Trains a drafter on a source of features; everything that decides a step's numbers is a function of its number."""

    def __init__(self, drafter: Drafter, source: Source, settings: TrainConfig, deepspeed: DeepSpeedConfig, folder: Path, log: MetricLog):
        self.settings, self.source, self.folder, self.log = settings, source, folder, log
        self.plan = Plan(source.lengths, settings)
        self.dtype = torch.bfloat16 if settings.precision == "bfloat16" else torch.float32
        unroll = Unroll(drafter, Terms(settings.depth_exposure, settings.stages), detach=settings.detach, max_rows=settings.loss_rows, recompute=settings.recompute)
        self.drafter = drafter
        self.engine = start_engine(unroll, settings, deepspeed, self.plan.micro_batches)
        self.device = self.engine.device
        drafter.borrow(drafter.head.to(self.device, self.dtype))
        self.step = self.resume()

    def train(self, validate: Callable[[int, Drafter], Validation] | None = None) -> None:
        """Run the remaining steps. `validate` is called before the first, every validate_every steps and at the end, on every rank."""
        total = self.plan.steps
        if validate is not None and self.step == 0:
            self.validate(validate)
        started, seen = time.perf_counter(), 0
        with ThreadPoolExecutor(1) as ahead, tqdm(total=total, initial=self.step, unit="step", desc="train", disable=rank() != 0) as bar:
            waiting = ahead.submit(self.load, self.step)
            while self.step < total:
                prepared = self.prepare(waiting)
                if self.step + 1 < total:
                    waiting = ahead.submit(self.load, self.step + 1)
                metrics = self.run_step(prepared)
                seen += prepared.tokens
                self.step += 1
                elapsed = time.perf_counter() - started
                bar.update()
                bar.set_postfix_str(f"loss {metrics['loss']:.3f}", refresh=False)
                if self.step % self.settings.log_every == 0 or self.step in (1, total):
                    self.log.write(self.step, metrics | {"tokens_per_second": seen / elapsed, "wait": prepared.wait, "memory_gb": peak_memory()})
                if self.step % self.settings.save_every == 0 or self.step == total:
                    self.save()
                due = self.settings.validate_every and self.step % self.settings.validate_every == 0
                if validate is not None and (due or self.step == total):
                    self.validate(validate)

    def validate(self, validate: Callable[[int, Drafter], Validation]) -> None:
        self.log.validation(self.step, validate(self.step, self.drafter).row)
        barrier()

    def load(self, step: int) -> list[TextBatch]:
        """This rank's micro-batches from the source; runs ahead in a thread, and its errors travel."""
        return [self.source.read(indices or [0]) for indices in self.plan.micros(step)]

    def prepare(self, waiting) -> Prepared:
        started = time.perf_counter()
        read = waiting.result()
        wait = time.perf_counter() - started
        batches = [self.source.ready(batch, self.device, self.dtype) for batch in read]
        batches = [packed(batch) for batch in batches] if self.settings.pack else batches
        empty = [not indices for indices in self.plan.micros(self.step)]
        origins = [draw_origins(batch, self.drafter.k, count=self.settings.origins, depth_exposure=self.plan.depth_exposure(self.step),
                                seed=self.settings.seed, epoch=self.plan.epoch(self.step)) for batch in batches]
        origins = [Origins(o.position, o.depth * 0) if dummy else o for o, dummy in zip(origins, empty, strict=True)]
        return Prepared(batches, origins, sum(batch.tokens.numel() for batch in batches), wait)

    def run_step(self, prepared: Prepared) -> dict[str, float | list[float]]:
        """Forward, backward and update over the whole window of micro-batches."""
        unroll = self.engine.module
        unroll.terms = Terms(self.plan.depth_exposure(self.step), self.settings.stages)
        local = sum(unroll.weights(batch, origins) for batch, origins in zip(prepared.batches, prepared.origins, strict=True))
        totals = sum_over_ranks(local)
        rate = self.plan.learning_rate(self.step)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        # DeepSpeed averages over ranks and micro-batches, the loss is already divided by their common weight.
        scale = world_size() * len(prepared.batches)
        sums: dict = {}
        for batch, origins in zip(prepared.batches, prepared.origins, strict=True):
            result = self.engine(batch, origins, totals, self.plan.progress(self.step))
            self.require_finite(result.loss, batch)
            self.engine.backward(result.loss * scale)
            self.engine.step()
            for name, (total, count) in result.sums.items():
                old = sums.get(name)
                sums[name] = (total, count) if old is None else (old[0] + total, old[1] + count)
        means = reduce_sums(sums)
        shares = unroll.terms
        loss = sum(shares.share(term) * means.get(f"weighted_loss_{term}", 0.0) for term in ("first", "last"))
        return {"loss": loss, "lr": rate, "grad_norm": float(self.engine.get_global_grad_norm() or 0.0), **means}

    def require_finite(self, loss: Tensor, batch: TextBatch) -> None:
        if not bool(loss.detach().isfinite()):
            raise ValueError(f"the loss of step {self.step} is {loss.item()} on samples {list(batch.ids)}; the last checkpoint is kept in {self.folder}. "
                             f"Lower train.lr, or look at those samples")

    def save(self) -> None:
        """A checkpoint of all ranks; the pointer moves when everything lies on disk."""
        tag = f"step-{self.step:07d}"
        self.engine.save_checkpoint(str(self.folder), tag=tag, client_state={"step": self.step}, save_latest=False)
        weights = whole_weights(self.drafter)
        if rank() == 0:
            save_file(weights, self.folder / tag / WEIGHTS)
        barrier()
        if rank() == 0:
            write_atomic(self.folder / POINTER, json.dumps({"tag": tag, "step": self.step, "world_size": world_size()}))
            earlier = [path for path in sorted(self.folder.glob("step-*")) if path.name != tag]
            for old in earlier[:len(earlier) - self.settings.keep + 1]:
                shutil.rmtree(old)
        barrier()

    def resume(self) -> int:
        """The step to go on from."""
        pointer = self.folder / POINTER
        if not pointer.is_file():
            return 0
        last = json.loads(pointer.read_text())
        check(last["world_size"] == world_size(), f"{self.folder} was written by {last['world_size']} ranks, this run has {world_size()}; resume with as many")
        path, state = self.engine.load_checkpoint(str(self.folder), tag=last["tag"])
        check(path is not None and state["step"] == last["step"], f"{self.folder / last['tag']} could not be loaded; delete {pointer} to start anew")
        say(f"train: resumed at step {last['step']} from {self.folder / last['tag']}")
        return last["step"]


def start_engine(unroll: Unroll, settings: TrainConfig, deepspeed_settings: DeepSpeedConfig, accumulation: int):
    """DeepSpeed's engine; on a CPU no op of it is compiled."""
    import deepspeed
    trained = [parameter for parameter in unroll.parameters() if parameter.requires_grad]
    zero = {"stage": deepspeed_settings.stage}
    if deepspeed_settings.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {"train_micro_batch_size_per_gpu": settings.micro_batch_size, "gradient_accumulation_steps": accumulation, "gradient_clipping": settings.clip,
              "steps_per_print": 10**9, "zero_optimization": zero, "bf16": {"enabled": settings.precision == "bfloat16"},
              "optimizer": {"type": "AdamW", "params": {"lr": settings.lr, "betas": [0.9, settings.beta2], "weight_decay": settings.weight_decay, "torch_adam": True}}}
    engine, *_ = deepspeed.initialize(model=unroll, model_parameters=trained, config=config)
    return engine


def whole_weights(drafter: Drafter) -> dict[str, Tensor]:
    """Parameters and buffers as plain tensors on the CPU, gathered from all ranks under ZeRO-3."""
    import deepspeed
    sharded = [parameter for parameter in drafter.parameters() if hasattr(parameter, "ds_id")]
    with deepspeed.zero.GatheredParameters(sharded, enabled=bool(sharded)):
        return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in drafter.state_dict().items()}


def trained_drafter(folder: Path, drafter: Drafter) -> int:
    """Fill `drafter` with the weights of the last checkpoint; returns its step."""
    pointer = folder / POINTER
    check(pointer.is_file(), f"{folder} has no checkpoint; run phases=[train] first")
    last = json.loads(pointer.read_text())
    drafter.load_state_dict(load_file(folder / last["tag"] / WEIGHTS))
    return last["step"]


def initialise_distributed(threads: int) -> None:
    """Process group over the accelerator's backend; gloo on a CPU, without DeepSpeed's compiled shared-memory op."""
    import os

    import deepspeed
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator
    if get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(threads or max(1, (os.cpu_count() or 1) // ranks))
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    else:
        get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", 0)))
        deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name(), verbose=False)
