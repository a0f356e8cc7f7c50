"""Tests of data/make_starter.py: a starter's provenance has the commands that made it."""

import importlib.util
import json
from pathlib import Path

from dloop_train.runs import write_atomic

spec = importlib.util.spec_from_file_location("make_starter", Path(__file__).parents[1] / "data" / "make_starter.py")
make_starter = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_starter)


def test_the_training_command_has_the_trainings_settings_and_the_export_its_own(tmp_path):
    """The overrides on disk are those of the export, whose steps and gate may differ from the training's."""
    run = tmp_path / "dspark"
    write_atomic(
        run / "training.json",
        json.dumps({"drafter": {"width": 4, "init": "scratch"}, "train": {"steps": 800, "lr": 4e-4}}),
    )
    write_atomic(run / "training_free.json", json.dumps({"train.validate_every": 400}))
    write_atomic(
        run / "validated_by.json",
        json.dumps({"gate": {"kind": "DLoop", "threshold": "replay"}, "train.validate_prompts": 16}),
    )
    words = [
        "+experiment=starter",
        "++train.steps=1600",
        "train.lr=4e-4",
        "train.validate_every=400",
        "train.validate_prompts=32",
        "gate.threshold=-1.0",
        "drafter.width=2",
        "root=/here",
    ]
    write_atomic(run / "hydra" / "overrides.yaml", json.dumps(words))
    trained, exported = make_starter.commands(run, make_starter.settings_of_training(run), 2)
    assert trained == (
        "python -m dloop_train +experiment=starter train.steps=800 train.lr=4e-4 train.validate_every=400 "
        "train.validate_prompts=16 gate.threshold=replay "
        "name=dspark drafter.width=4 phases=[generate,cache,train]"
    )
    assert exported == (
        "python -m dloop_train +experiment=starter train.steps=1600 train.lr=4e-4 train.validate_every=400 "
        "train.validate_prompts=32 gate.threshold=-1.0 "
        "name=dspark drafter.width=2 phases=[export]"
    )


def test_what_a_starter_began_as_is_kept_whole(tmp_path):
    whole = {
        "commands": ["a"],
        "bytes": 1,
        "before": None,
        "settings": {"train": {}},
        "data_keys": {"responses": "r"},
        "validation": [{"step": 0}],
        "curve": [{"step": 1}],
    }
    write_atomic(tmp_path / "first" / "provenance.json", json.dumps(whole))
    assert make_starter.before("starter:first", tmp_path / "second") == {
        "init": "starter:first",
        **{key: value for key, value in whole.items() if key != "bytes"},
    }
    assert make_starter.before("scratch", tmp_path / "second") is None
