"""Turn a trained run into a starter: its export without copies of the target, and its provenance.

python -m dloop_train +experiment=starter drafter.tokens_per_stage=4 phases=[generate,cache,train]
python -m dloop_train +experiment=starter drafter.tokens_per_stage=2 phases=[export]
python data/make_starter.py artifacts/runs/starter-eagle3 data/starters/eagle3_smollm2_135m
"""

import json
import sys
from pathlib import Path

from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from dloop_train.checkpoints.files import layout_of, read_config
from dloop_train.runs import read_jsonl

LIMIT = 40 * 10**6


def main(run: Path, out: Path) -> None:
    config = read_config(run / "drafter")
    copies = set(layout_of(config, run).COPIES.values())
    tensors = {
        name: tensor for name, tensor in load_file(run / "drafter" / "model.safetensors").items() if name not in copies
    }
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    size = (out / "model.safetensors").stat().st_size
    if size > LIMIT:
        sys.exit(f"{out / 'model.safetensors'} has {size} bytes, at most {LIMIT} are wanted")
    composed, trained = (
        OmegaConf.to_container(OmegaConf.load(run / "config.yaml")),
        json.loads((run / "training.json").read_text()),
    )
    curve = [{key: row[key] for key in ("step", "loss", "accuracy_first")} for row in read_jsonl(run / "metrics.jsonl")]
    provenance = {
        "commands": commands(run, settings_of_training(run), config["dloop"]["tokens_per_stage"]),
        "bytes": size,
        "before": before(trained["drafter"]["init"], out),
        "settings": {
            **{key: trained[key] for key in ("drafter", "train")},
            **{key: composed[key] for key in ("generate", "prompts")},
        },
        "data_keys": {key: config["dloop"]["provenance"][key] for key in ("responses", "features")},
        "validation": read_jsonl(run / "validation.jsonl"),
        "curve": curve,
    }
    (out / "provenance.json").write_text(json.dumps(provenance, indent=1) + "\n", encoding="utf-8")


THIS_MACHINES = ("launch.", "responder.path=", "phases=", "name=", "root=", "wandb.")
"""Overrides without effect on the result: they set where a command ran and which phases."""


def settings_of_training(run: Path) -> dict:
    """The settings of the training and its validations, by their dotted names."""
    trained, free, validated = (
        json.loads((run / name).read_text()) for name in ("training.json", "training_free.json", "validated_by.json")
    )
    sections = {"drafter": trained["drafter"], "train": trained["train"], "gate": validated["gate"]}
    dotted = {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}
    return dotted | free | {"train.validate_prompts": validated["train.validate_prompts"]}


def commands(run: Path, trained: dict, tokens_per_stage: int) -> list[str]:
    """The two commands that made the run: the training with its tokens per stage, the export with `tokens_per_stage`.

    The overrides on disk are those of the last command, the export. A setting that differed in the training has the
    training's value in the first command.
    """
    key = "drafter.width" if "drafter.width" in trained else "drafter.tokens_per_stage"
    words = [
        word.lstrip("+") if word.startswith("++") else word
        for word in OmegaConf.to_container(OmegaConf.load(run / "hydra" / "overrides.yaml"))
    ]
    kept = [word for word in words if not word.startswith((*THIS_MACHINES, f"{key}="))]
    named = [
        ([as_trained(word, trained) for word in kept], trained[key], "generate,cache,train"),
        (kept, tokens_per_stage, "export"),
    ]
    return [
        f"python -m dloop_train {' '.join(settings)} name={run.name} {key}={tokens} phases=[{phases}]"
        for settings, tokens, phases in named
    ]


def as_trained(override: str, trained: dict) -> str:
    """An override with the training's value; unchanged if the two are equal."""
    name, _, value = override.partition("=")
    if name not in trained or value == str(trained[name]) or as_number(value) == trained[name]:
        return override
    return f"{name}={trained[name]}"


def as_number(text: str) -> float | None:
    """The number that a text denotes, or None. Numbers may be written differently: 4e-4 is 0.0004."""
    try:
        return float(text)
    except ValueError:
        return None


KEPT = ("commands", "settings", "data_keys", "validation", "curve", "before")


def before(init: str, out: Path) -> dict | None:
    """The provenance of the starter that the training started from; None if it started from other weights.

    The folder of that starter may be `out`, which is about to be replaced.
    """
    found = out.parent / init.removeprefix("starter:") / "provenance.json"
    if not init.startswith("starter:") or not found.is_file():
        return None
    kept = json.loads(found.read_text())
    return {"init": init, **{key: kept[key] for key in KEPT if key in kept}}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
