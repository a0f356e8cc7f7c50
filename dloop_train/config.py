"""Configuration: the dataclasses of a run, and how they are built from YAML and checked."""

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

PACKAGE = Path(__file__).resolve().parent
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"  # installed, or a checkout
DATA = PACKAGE / "data_files" if (PACKAGE / "data_files").is_dir() else PACKAGE.parent / "data"
PHASES = ("generate", "cache", "train", "export", "evaluate", "report")

T = TypeVar("T")


def check(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless the condition holds. For errors that a user can cause."""
    if not condition:
        raise ValueError(message)


RANGES = {
    "positive": lambda value: value > 0,
    "zero or more": lambda value: value >= 0,
    "in [0, 1]": lambda value: 0 <= value <= 1,
    "in (0, 1]": lambda value: 0 < value <= 1,
    "in [0, 1)": lambda value: 0 <= value < 1,
    "in (0, 1)": lambda value: 0 < value < 1,
}


def require(settings: Any, section: str, wanted: str, *names: str) -> None:
    """Raise ValueError unless each of these numbers is finite and in the range `wanted`, a key of RANGES."""
    for name in names:
        value = getattr(settings, name)
        check(math.isfinite(value) and RANGES[wanted](value), f"{section}.{name} must be {wanted}, got {value}")


def check_thresholds(name: str, thresholds: list[float]) -> None:
    wrong = [threshold for threshold in thresholds if not threshold <= 0]  # NaN too
    check(not wrong, f"{name} are log-probabilities and cannot be positive, got {wrong}")


@dataclass
class SamplingConfig:
    """How the target answers the training prompts."""

    temperature: float = 0.0
    """0 answers greedily."""
    top_p: float = 1.0
    top_k: int = 64
    """Candidates kept before top_p; also bounds the work of sampling on a CPU."""

    def __post_init__(self):
        require(self, "target.sampling", "zero or more", "temperature")
        require(self, "target.sampling", "in (0, 1]", "top_p")
        require(self, "target.sampling", "positive", "top_k")


@dataclass
class TargetConfig:
    """A frozen language model: the source of its weights, its tapped layers, and how it is prompted and sampled."""

    name: str
    source: str
    """hub | folder | package | random"""
    path: str
    """Hub id, folder, importable package that ships a GGUF, or a name of a seeded random model."""
    revision: str = "main"
    taps: dict[str, list[int]] = field(default_factory=dict)
    """Tapped decoder layers for each drafter kind; id i is the output of layer i (hidden_states[i + 1])."""
    mask_token_id: int = -1
    """Id that fills the slots of a block drafter; must be a row of the target's embedding."""
    thinking: bool | None = None
    """Passed to the chat template as enable_thinking; null if the template has no such switch."""
    stop_ids: list[int] = field(default_factory=list)
    """Tokens that end a response."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    dtype: str = "bfloat16"
    config: dict[str, Any] = field(default_factory=dict)
    """Config of the model to build, for source random; for others, sizes for a dry run without its config.json."""

    def __post_init__(self):
        sources = ("hub", "folder", "package", "random")
        check(self.source in sources, f"target.source must be one of {sources}, got {self.source!r}")
        check(bool(self.stop_ids), "target.stop_ids is empty: a response could never end")
        check(min(self.stop_ids) >= 0, f"target.stop_ids are ids of tokens, got {self.stop_ids}")
        check(
            self.mask_token_id >= -1,
            f"target.mask_token_id is the id of a token, or -1 where there is none, got {self.mask_token_id}",
        )
        check(
            all(layer >= 0 for layers in self.taps.values() for layer in layers),
            f"target.taps are layers counted from 0, got {self.taps}",
        )


@dataclass
class GenerateConfig:
    """How the target's answers to the prompts are generated."""

    max_new_tokens: int = 192
    max_prompt_tokens: int = 512
    """Longer prompts are left out, and counted."""
    batch_size: int = 192
    seed: int = 0
    greedy_prompts: int = 40
    """Validation prompts, and as many test prompts, that are answered greedily for replay."""
    greedy_validation: int = 0
    """Number of these validation prompts, if it differs from the number of test prompts; 0 is greedy_prompts."""
    greedy_max_new_tokens: int = 96
    greedy_batch: int = 1
    """Greedy answers that are decoded together.

    With 1 they are decoded exactly as in the evaluation. More is many times faster, but a text can differ from the
    evaluation's where two tokens are almost equally likely, since bf16 sums round differently in another shape.
    """

    def __post_init__(self):
        require(
            self,
            "generate",
            "positive",
            "max_new_tokens",
            "max_prompt_tokens",
            "batch_size",
            "greedy_max_new_tokens",
            "greedy_batch",
        )
        require(self, "generate", "zero or more", "seed", "greedy_prompts", "greedy_validation")


@dataclass
class CacheConfig:
    """Caching the target's features."""

    batch_tokens: int = 4096
    shard_bytes: int = 256 * 2**20
    dtype: str = "bfloat16"

    def __post_init__(self):
        require(self, "cache", "positive", "batch_tokens", "shard_bytes")


@dataclass
class FeaturesConfig:
    """Where a training gets the target's hidden states from."""

    source: str = "disk"
    """disk reads what the cache phase has written; online runs the target in the training step and stores nothing."""

    def __post_init__(self):
        check(self.source in ("disk", "online"), f"features.source must be disk or online, got {self.source!r}")


@dataclass
class TrainConfig:
    """Loop-aware training: several drafting stages are unrolled from each origin."""

    depth_exposure: int = 3
    """N: extra stages S - 1 ~ U{1..N}. 0 is the base recipe: one stage, first-stage loss alone."""
    stages: str = "first_last"
    """Which stages carry loss: first_last | all | last."""
    detach: bool = False
    """Cut the gradient through own states."""
    steps: int = 0
    """Optimiser steps; 0 means `epochs` passes over the data."""
    epochs: float = 1.0
    base_epochs: float = 0.0
    """Epochs of the base recipe (one stage, base_lr) before the others, for drafters without released weights."""
    base_lr: float = 6e-4
    batch_size: int = 32
    """Sequences per optimiser step, over all ranks and micro-batches."""
    micro_batch_size: int = 1
    """Sequences per forward on one rank."""
    origins: int = 32
    """Origins drawn per sequence (fewer where the response is short)."""
    lr: float = 1e-4
    warmup: float = 0.04
    """Share of the steps with linear warm-up; cosine to zero after it."""
    weight_decay: float = 0.0
    clip: float = 1.0
    beta2: float = 0.999
    max_length: int = 4096
    """Samples are cut on the right to this many tokens."""
    loss_rows: int = 1024
    """Most rows of logits in memory at once: losses and their gradients are computed in chunks of this size."""
    pack: bool = False
    """Concatenate the sequences of a micro-batch in one row, masked from each other, instead of padding them."""
    recompute: bool = False
    """Keep only the states of a stage and compute its backbone again in the backward pass: less memory, more time."""
    seed: int = 0
    save_every: int = 200
    keep: int = 2
    """Number of latest checkpoints that stay on disk, in addition to the best one."""
    log_every: int = 10
    validate_every: int = 0
    """Steps between two validations (replay on validation prompts); also one before the first and after the last step.

    0 chooses the interval by validate_share from the time that the first steps take.
    """
    validate_share: float = 0.05
    """Largest share of the time for validations between the first and the last step, if validate_every is 0."""
    validate_prompts: int = 16
    patience: int = 0
    """Validations in a row without a better score after which training ends; 0 never ends it early."""
    max_skipped: int = 10
    """Steps in a row that may be skipped because a loss or a gradient is not finite; one more stops the run."""
    max_skipped_share: float = 0.1
    """The run stops if more than this share of all steps so far, and more than max_skipped steps, were skipped."""
    precision: str = "bfloat16"
    """bfloat16 keeps fp32 master weights; float32 computes in fp32."""

    def __post_init__(self):
        check(
            self.stages in ("first_last", "all", "last"),
            f"train.stages must be first_last, all or last, got {self.stages!r}",
        )
        check(
            self.precision in ("bfloat16", "float32"),
            f"train.precision must be bfloat16 or float32, got {self.precision!r}",
        )
        require(
            self,
            "train",
            "positive",
            "epochs",
            "base_lr",
            "batch_size",
            "micro_batch_size",
            "origins",
            "lr",
            "max_length",
            "loss_rows",
            "save_every",
            "keep",
            "log_every",
        )
        require(
            self,
            "train",
            "zero or more",
            "depth_exposure",
            "steps",
            "base_epochs",
            "weight_decay",
            "clip",
            "seed",
            "validate_every",
            "validate_prompts",
            "patience",
            "max_skipped",
        )
        require(self, "train", "in [0, 1]", "warmup")
        require(self, "train", "in [0, 1)", "beta2")
        require(self, "train", "in (0, 1)", "validate_share")
        require(self, "train", "in (0, 1]", "max_skipped_share")


@dataclass
class ExportConfig:
    """Which checkpoint is exported as the drafter."""

    checkpoint: str = "best"
    """best | last | the number of a step whose checkpoint still exists.

    best has the most predicted tokens per second on validation responses. The weights that the training started from
    (step 0) are a candidate too.
    """

    def __post_init__(self):
        check(
            self.checkpoint in ("best", "last") or self.checkpoint.isdigit(),
            f"export.checkpoint must be best, last or the number of a step, got {self.checkpoint!r}",
        )


@dataclass
class DeepSpeedConfig:
    """The part of DeepSpeed's configuration that a user sets."""

    stage: int = 0
    """ZeRO: 1 divides the optimiser's states over the ranks, 2 the gradients too, 3 the weights too."""
    offload: bool = False
    """Keep the optimiser's states, and at stage 3 the weights, in host memory."""

    def __post_init__(self):
        check(self.stage in (0, 1, 2, 3), f"deepspeed.stage must be 0, 1, 2 or 3, got {self.stage}")
        check(self.stage or not self.offload, "deepspeed.offload needs ZeRO: choose deepspeed=zero1, zero2 or zero3")


@dataclass
class LaunchConfig:
    """How the ranks of a phase are started."""

    launcher: str = "auto"
    """torchrun: on this machine. srun: on every node of the Slurm allocation. hostfile: on its hosts, by DeepSpeed.

    auto: hostfile if one is given; srun in an allocation of several nodes or in the shell of `salloc`; else torchrun.
    """
    hostfile: str = ""
    """File with a line `name slots=n` for each host; slots are ranks."""
    processes: int = 0
    """Ranks on each node; 0 means one for each accelerator of the node, one on a CPU."""
    threads: int = 0
    """Threads of a CPU rank; 0 divides the cores among the ranks."""

    def __post_init__(self):
        launchers = ("auto", "torchrun", "srun", "hostfile")
        check(self.launcher in launchers, f"launch.launcher must be one of {launchers}, got {self.launcher!r}")
        require(self, "launch", "zero or more", "processes", "threads")
        check(
            self.launcher != "hostfile" or bool(self.hostfile),
            "launch.launcher=hostfile needs launch.hostfile=<file with a line `name slots=n` for each host>",
        )
        check(
            not self.hostfile or self.launcher in ("auto", "hostfile"),
            f"launch.launcher={self.launcher} would not read launch.hostfile={self.hostfile}; give one of them",
        )
        check(
            not (self.hostfile and self.processes),
            f"launch.processes={self.processes} and the slots of launch.hostfile both say how many ranks a host has; "
            "give one of them",
        )


@dataclass
class EvaluateConfig:
    """Live decoding and replay on test prompts."""

    prompts: int = 40
    """Test prompts that are decoded live, spread over the categories. Replay uses all generate.greedy_prompts."""
    max_new_tokens: int = 96
    replay_stages: int = 5
    """Stages that replay drafts from every position.

    Where a gate may continue, replay drafts more, up to gate.max_stages.
    """
    thresholds: list[float] = field(default_factory=lambda: [-0.25, -0.5, -0.75, -1.0])
    """Thresholds that replay simulates, and among which gate.threshold=replay chooses."""
    live_thresholds: list[float] = field(default_factory=list)
    """More rows for the table: the trained drafter decoded live at these thresholds too."""
    extra: dict[str, str] = field(default_factory=dict)
    """More drafters for the table: label -> drafter folder, or starter:<name>."""
    single_stages: list[int] = field(default_factory=lambda: [2, 3, 4, 5, 6, 8])
    """Tokens per stage among which replay on validation responses chooses the best single stage.

    That is the reference of all comparisons. If the list is empty, the first drafter's own single stage is.
    """
    rows: str = "all"
    """all: every drafter also with its own single stage, and the trained one at the paper's threshold.

    short: only gated drafters and the best single stage.
    """
    bootstrap: int = 2000
    dtype: str = "bfloat16"
    seed: int = 0

    def __post_init__(self):
        require(self, "evaluate", "positive", "prompts", "max_new_tokens", "replay_stages", "bootstrap")
        require(self, "evaluate", "zero or more", "seed")
        check(self.rows in ("all", "short"), f"evaluate.rows must be all or short, got {self.rows!r}")
        check(
            min(self.single_stages, default=2) >= 2,
            f"evaluate.single_stages are tokens per stage, at least 2, got {self.single_stages}",
        )
        check_thresholds("evaluate.thresholds and evaluate.live_thresholds", [*self.thresholds, *self.live_thresholds])


@dataclass
class LogConfig:
    """Logging to Weights & Biases."""

    project: str = "dloop_train"
    mode: str = "auto"
    """auto | online | offline | disabled. auto is WANDB_MODE if set, else online with an API key, else offline."""

    def __post_init__(self):
        modes = ("auto", "online", "offline", "disabled")
        check(self.mode in modes, f"wandb.mode must be one of {modes}, got {self.mode!r}")


@dataclass
class PairConfig:
    """Values of a pair's YAML that other YAMLs read: the threshold is for conf/gate/dloop.yaml. Only checked here."""

    threshold: float | None = None

    def __post_init__(self):
        check_thresholds("the thresholds of pairs", [] if self.threshold is None else [self.threshold])


@dataclass
class Config:
    """Everything a run needs."""

    name: str
    root: Path
    """Folder of all artifacts: responses/, greedy/, features/, runs/."""
    phases: list[str]
    drafter: Any
    """A DrafterConfig (drafters/base.py)."""
    target: TargetConfig
    prompts: Any
    """A Prompts (data/prompts.py)."""
    gate: Any
    """A Gate (decoding/gates.py)."""
    rule: Any
    """An AcceptanceRule (decoding/rules.py)."""
    responder: Any
    """A Responder (targets/responders.py)."""
    generate: GenerateConfig
    features: FeaturesConfig
    cache: CacheConfig
    train: TrainConfig
    deepspeed: DeepSpeedConfig
    export: ExportConfig
    evaluate: EvaluateConfig
    wandb: LogConfig
    launch: LaunchConfig
    dry_run: bool = False

    def __post_init__(self):
        unknown = [phase for phase in self.phases if phase not in PHASES]
        check(not unknown, f"phases has {unknown}; known phases are {list(PHASES)}")
        check(
            "/" not in self.name and self.name not in ("", ".", ".."),
            f"name must be a plain folder name, got {self.name!r}",
        )


TYPED = {
    "target": TargetConfig,
    "generate": GenerateConfig,
    "features": FeaturesConfig,
    "cache": CacheConfig,
    "train": TrainConfig,
    "deepspeed": DeepSpeedConfig,
    "export": ExportConfig,
    "evaluate": EvaluateConfig,
    "wandb": LogConfig,
    "launch": LaunchConfig,
}
PLUGINS = ("drafter", "prompts", "gate", "rule", "responder")


def build(node: DictConfig | dict, kind: type[T] = object, where: str = "") -> T:
    """Turn a config node into a checked dataclass: `kind` itself, or the subclass that `_target_` names."""
    values: Any = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else dict(node)
    named = values.pop("_target_", None)
    cls: Any = get_class(named) if named else kind
    if not issubclass(cls, kind):
        raise TypeError(f"{where or named}: {cls.__qualname__} is not a {kind.__qualname__}")
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), values))
    except OmegaConfBaseException as error:
        known = ", ".join(f.name for f in fields(cls))
        raise ValueError(f"{where}: {str(error).splitlines()[0]} (fields of {cls.__name__}: {known})") from None


def option(group: str, name: str) -> dict:
    """The values of one YAML of the tree, conf/<group>/<name>.yaml, without its defaults list."""
    path = CONF / group / f"{name}.yaml"
    check(
        path.is_file(),
        f"there is no {group} {name!r}; choose one of {sorted(file.stem for file in path.parent.glob('*.yaml'))}",
    )
    values: Any = OmegaConf.to_container(OmegaConf.load(path))
    values.pop("defaults", None)
    return values


def from_hydra(tree: DictConfig) -> Config:
    """The whole composed tree as one Config; unknown keys and wrong types fail here."""
    build(tree.get("pair") or {}, PairConfig, "pair")
    values = {key: tree[key] for key in tree if key != "pair"}
    for key, kind in TYPED.items():
        values[key] = build(tree[key], kind, key)
    require_init(tree)
    for key in PLUGINS:
        values[key] = build(tree[key], object, key)
    unknown = set(values) - {f.name for f in fields(Config)}
    check(not unknown, f"unknown settings {sorted(unknown)}")
    values["root"] = Path(values["root"]).expanduser()
    values["phases"] = list(values["phases"])
    return Config(**values)


def require_init(tree: DictConfig) -> None:
    """Raise ValueError if neither a pair's YAML nor the user sets drafter.init."""
    if tree["drafter"].get("init"):
        return
    drafter: Any = get_class(tree["drafter"]["_target_"])
    target = tree["target"]["name"]
    files = {
        name: CONF / "pair" / f"{drafter.family}_{name}.yaml"
        for name in sorted(file.stem for file in (CONF / "target").glob("*.yaml"))
    }
    paired, pair = [name for name, file in files.items() if file.is_file()], f"conf/pair/{drafter.family}_{target}.yaml"
    missing = (
        f"{pair} is there, but drafter.init is empty"
        if target in paired
        else f"there is no {pair} to name the weights that the drafter starts from: {drafter.unpaired}"
    )
    needed = f", and {drafter.needs}" if drafter.needs else ""
    raise ValueError(
        f"{missing}\n  {drafter.family} has pairs for {', '.join(paired) or 'no target'}\n"
        f"  for {target} set drafter.init=scratch (with train.base_epochs=3 the base recipe comes first), "
        f"or to a folder or hub id{needed}"
    )
