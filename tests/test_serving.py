"""Tests of the Python API: load an export and stream the target's own answer."""

import json

import pytest
import torch
from conftest import make_drafter, settings_of, tiny_config

import dloop_train
from dloop_train.checkpoints.files import save_drafter
from dloop_train.data.chat import prompt_ids
from dloop_train.targets.responders import decode_plain
from dloop_train.targets.sources import load_target


def exported(variant, target, folder, **section):
    drafter = make_drafter(variant, target)
    loop = {
        "threshold": -0.5,
        "tokens_per_stage": drafter.k,
        "max_stages": 4,
        "trained_depth_exposure": 3,
        "state": drafter.shape.state,
        "slot": drafter.shape.slot,
    }
    save_drafter(
        drafter,
        folder,
        section=loop | settings_of(variant).section() | section,
        target=target.spec,
        dtype=torch.float32,
    )


def test_stream_equals_plain_decoding(variant, tiny_target, tmp_path):
    if variant.endswith("gemma4") or variant == "mtp_assistant-bonus":
        pytest.skip(
            "made for a target with Gemma's scales or windows, and refused on a Llama; "
            "the pipeline's tests serve such on their own"
        )
    exported(variant, tiny_target, tmp_path)
    model = dloop_train.load(tmp_path, "tiny_llama", device="cpu")
    ours = make_drafter(variant, tiny_target)
    assert model.gate.threshold == -0.5 and model.drafter.k == ours.k and model.drafter.shape == ours.shape
    assert getattr(model.drafter, "position", None) == getattr(ours, "position", None)
    target, config = load_target(tiny_config(), device="cpu"), tiny_config()
    ids = prompt_ids(target.tokenizer, [{"role": "user", "content": "hello"}], config)
    plain = decode_plain(target, ids, max_new_tokens=20)
    assert list(model.tokens(ids, max_new_tokens=20)) == plain
    text = target.tokenizer.decode(plain, skip_special_tokens=True)
    assert text.startswith("".join(model.generate("hello", max_new_tokens=20)).rstrip("\ufffd"))


def test_a_drafter_without_dloop_section_needs_a_threshold(tiny_target, tmp_path):
    exported("dflash-shifted", tiny_target, tmp_path)
    config = (tmp_path / "config.json").read_text().replace('"dloop"', '"other"')
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match="not loop-aware"):
        dloop_train.load(tmp_path, "tiny_llama", device="cpu")
    assert dloop_train.load(tmp_path, "tiny_llama", device="cpu", threshold=-1.0).gate.threshold == -1.0


def test_an_official_eagle3_folder_that_names_no_taps_is_served_with_the_layouts_own(tiny_target, tmp_path):
    exported("eagle3-reduced", tiny_target, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("target_layer_ids", "eagle_aux_hidden_state_layer_ids", "eagle_config"):
        del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = dloop_train.load(tmp_path, "tiny_llama", device="cpu")
    assert model.drafter.shape.taps == (1, 1, 1) and list(model.tokens([60, 61, 62], max_new_tokens=6)) == decode_plain(
        model.target, [60, 61, 62], max_new_tokens=6
    )
