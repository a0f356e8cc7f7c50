"""Artifacts: the settings that determine the responses, the features and a run, and so their keys."""

import json
from dataclasses import asdict
from pathlib import Path

from dloop_train.config import Config
from dloop_train.data.responses import Response, Rows, read_responses
from dloop_train.runs import Artifact
from dloop_train.targets.responders import Remote
from dloop_train.types import FeatureSpec


def target_settings(config: Config) -> dict:
    """The settings of the target that change its text."""
    target = asdict(config.target)
    shaping = ("name", "source", "path", "revision", "thinking", "stop_ids", "dtype")
    # Only random targets are built from `config`; for others it only gives a dry run their sizes.
    return {key: target[key] for key in shaping} | {
        "config": target["config"] if config.target.source == "random" else {}
    }


def responses(config: Config) -> Artifact:
    """The training prompts' answers."""
    generate = {name: value for name, value in asdict(config.generate).items() if not name.startswith("greedy_")}
    if isinstance(config.responder, Remote):
        # Local bf16 sums depend on what else is in the batch; servers form batches of their own.
        generate.pop("batch_size")
    return Artifact(
        config.root / "responses",
        {
            "target": target_settings(config),
            "prompts": config.prompts.settings(),
            "sampling": asdict(config.target.sampling),
            **generate,
            **config.responder.settings(),
        },
    )


def greedy(config: Config) -> Artifact:
    """The greedy answers to the validation and test prompts, in the dtype of the evaluation.

    They have a key of their own, so that a change of their number or settings does not change the training's data.
    """
    target = target_settings(config) | {"dtype": config.evaluate.dtype}
    # prompts.limit limits the training prompts only.
    prompts = {name: value for name, value in config.prompts.settings().items() if name != "limit"}
    generate = {
        name: value
        for name, value in asdict(config.generate).items()
        if name.startswith("greedy_") or name == "max_prompt_tokens"
    }
    return Artifact(config.root / "greedy", {"target": target, "prompts": prompts, **generate})


def greedy_responses(config: Config, split: str) -> Rows[Response]:
    """The greedy answers of the split `validation` or `test`."""
    artifact = greedy(config)
    artifact.facts()
    return read_responses(artifact.folder, split)


def features(config: Config) -> Artifact:
    wanted = feature_spec(config)
    others = {name: True for name in ("shared_kv", "last_hidden") if getattr(wanted, name)}
    if config.features.source == "online":
        # bf16 sums of features computed online differ from a store's, so the training is a different one.
        others["source"] = "online"
    return Artifact(
        config.root / "features",
        {
            "responses": responses(config).key,
            "taps": list(wanted.taps),
            "dtype": config.cache.dtype,
            "max_length": config.train.max_length,
            **others,
        },
    )


def feature_spec(config: Config) -> FeatureSpec:
    """The target's states that this run's drafter reads."""
    return config.drafter.feature_spec(taps(config))


def taps(config: Config) -> list[int]:
    """The decoder layers that this run's drafter reads."""
    kind = config.drafter.kind
    if not kind:  # drafters of the MTP kind read no taps
        return []
    found = config.drafter.taps or config.target.taps.get(kind)
    if not found:
        raise ValueError(
            f"target {config.target.name} names no taps for {kind} drafters; "
            f"set drafter.taps=[...] or add target.taps.{kind}"
        )
    return list(found)


def described(config: Config) -> dict:
    """Every setting of a run as plain values, and the keys of the data it is made from."""
    return json.loads(json.dumps(asdict(config), default=str)) | {
        "data": {"responses": responses(config).key, "greedy": greedy(config).key, "features": features(config).key}
    }


def run_folder(config: Config) -> Path:
    return config.root / "runs" / config.name
