"""Checkpoints: what does not fit is named, and nothing is loaded by halves."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import TAPS, make_drafter
from safetensors.torch import load_file, save_file

from dloop_train.checkpoints.files import create_drafter, load_drafter, save_drafter
from dloop_train.drafters.dflash import DFlashConfig
from dloop_train.drafters.eagle3 import Eagle3Config
from dloop_train.drafters.mtp_assistant import AssistantConfig
from dloop_train.drafters.sizes import Rope, read_rope
from dloop_train.targets.head import TargetHead


@pytest.fixture
def folder(tiny_target, tmp_path):
    save_drafter(make_drafter("dflash-shifted", tiny_target), tmp_path, section={}, target=tiny_target.spec, dtype=torch.float64)
    return tmp_path


def load(folder, tiny_target, settings=None):
    return load_drafter(folder, settings or DFlashConfig(alignment="shifted"), TargetHead.of(tiny_target), dtype=torch.float64)


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("change, message", [
    (lambda t: t.pop("norm.weight"), "missing norm.weight"),
    (lambda t: t.update(extra=torch.zeros(1)), "unknown extra"),
    (lambda t: t.update({"fc.weight": torch.zeros(2, 2)}), r"fc.weight is \(2, 2\), expected"),
    (lambda t: t["fc.weight"].view(-1)[3:4].fill_(float("nan")), "fc.weight has NaN"),
    (lambda t: t["embed_tokens.weight"].add_(1), "made for another target"),
])
def test_bad_tensors_are_named(folder, tiny_target, change, message):
    change_tensors(folder, change)
    with pytest.raises(ValueError, match=message):
        load(folder, tiny_target)


def test_optional_prefixes_load(folder, tiny_target):
    def prefix(tensors):
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)
    before = load(folder, tiny_target).state_dict()
    change_tensors(folder, prefix)
    after = load(folder, tiny_target).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_truncated_file_is_named(folder, tiny_target):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="truncated"):
        load(folder, tiny_target)


def test_other_family_and_alignment_are_refused(folder, tiny_target):
    with pytest.raises(ValueError, match="family dflash"):
        load(folder, tiny_target, Eagle3Config())
    with pytest.raises(ValueError, match="is shifted, drafter.alignment says fill_in"):
        load(folder, tiny_target, DFlashConfig(alignment="fill_in"))


def test_unknown_architecture_lists_the_known(folder, tiny_target):
    change_config(folder, architectures=["Mystery"])
    with pytest.raises(ValueError, match="Known: .*zlab_dflash"):
        load(folder, tiny_target)


def test_drafter_of_another_target_is_refused(folder, tiny_target):
    settings = DFlashConfig(alignment="shifted", init=str(folder))
    create_drafter(settings, tiny_target.spec, TargetHead.of(tiny_target), TAPS)
    change_config(folder, target_layer_ids=[0, 1, 2], mask_token_id=7)
    with pytest.raises(ValueError, match=r"taps: the checkpoint has \(0, 1, 2\)[\s\S]*|mask_token_id: the checkpoint has 7"):
        create_drafter(settings, tiny_target.spec, TargetHead.of(tiny_target), TAPS)


def test_drafters_from_scratch_that_cannot_work_are_refused(tiny_target):
    """A target of linear attention alone lends no keys; DFlash's two layouts fix the alignment that they are read back with."""
    with pytest.raises(ValueError, match="no layer of softmax attention"):
        AssistantConfig().shape(replace(tiny_target.spec, shared_kv=()), [])
    with pytest.raises(ValueError, match="drafter.alignment=fill_in is zlab_dflash"):
        DFlashConfig(alignment="fill_in", format="deepspec_dflash")
    wide = AssistantConfig(hidden_size=64)
    with pytest.raises(ValueError, match="hidden_size may be at most 32"):
        wide.build(wide.shape(tiny_target.spec, []), TargetHead.of(tiny_target)).initialise(tiny_target)


def test_rope_theta_is_read_flat_and_nested():
    assert read_rope({"rope_theta": 5.0}) == Rope(5.0)
    assert read_rope({"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}) == Rope(7.0)
    by_kind = {"full_attention": {"rope_theta": 9.0, "rope_type": "proportional", "partial_rotary_factor": 0.25}, "sliding_attention": {"rope_theta": 3.0}}
    assert read_rope({"rope_parameters": by_kind}) == Rope(9.0, "proportional", 0.25)
    assert read_rope({"rope_parameters": by_kind}, "sliding_attention") == Rope(3.0)
    with pytest.raises(ValueError, match="neither"):
        read_rope({})
    with pytest.raises(ValueError, match="5.0 at the top level and 7.0"):
        read_rope({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 7.0}})
    with pytest.raises(ValueError, match="yarn"):
        read_rope({"rope_theta": 5.0, "rope_scaling": {"rope_type": "yarn", "factor": 2}})


def test_export_writes_rope_both_ways(folder):
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0


def test_llama3_rope_equals_transformers():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from dloop_train.drafters.layers import Rotary
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(hidden_size=128, num_attention_heads=1, head_dim=128, rope_parameters=scaling | {"rope_theta": 500000.0})
    theirs = LlamaRotaryEmbedding(config).inv_freq
    ours = Rotary(128, read_rope({"rope_parameters": scaling | {"rope_theta": 500000.0}}))
    torch.testing.assert_close(ours.frequencies.float(), theirs, rtol=1e-5, atol=0)


def test_a_block_is_looped_with_the_width_that_the_settings_name(folder, tiny_target):
    assert load(folder, tiny_target).k == 4
    assert load(folder, tiny_target, DFlashConfig(alignment="shifted", width=7)).k == 7
    assert DFlashConfig(alignment="shifted", width=7).as_exported({}).width == 0  # a table compares exports, each with its own k


def test_own_states_of_a_loop_aware_export_are_fixed_and_of_a_base_trained_one_free(folder, tiny_target):
    raw = DFlashConfig(alignment="shifted", state="raw")
    change_config(folder, dloop={"trained_depth_exposure": 0, "state": "context_norm", "slot": "own"})
    assert load(folder, tiny_target, raw).shape.state == "raw"
    change_config(folder, dloop={"trained_depth_exposure": 3, "state": "context_norm", "slot": "own"})
    with pytest.raises(ValueError, match="trained with state=context_norm, drafter.state says raw"):
        load(folder, tiny_target, raw)


def test_official_eagle3_files_may_leave_out_rope_theta_and_hold_empty_maps(tiny_target, tmp_path):
    """The authors' config.json has no rope_theta (Llama's default is meant); maps of the whole vocabulary say nothing."""
    settings = Eagle3Config(tokens_per_stage=3)
    drafter = settings.build(settings.shape(tiny_target.spec, TAPS), TargetHead.of(tiny_target)).double()
    save_drafter(drafter, tmp_path, section={}, target=tiny_target.spec, dtype=torch.float64)
    config = json.loads((tmp_path / "config.json").read_text())
    kept = {key: value for key, value in config.items() if not key.startswith("rope")} | {"draft_vocab_size": None}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    change_tensors(tmp_path, lambda t: t.update(d2t=torch.zeros(260, dtype=torch.int64), t2d=torch.ones(260, dtype=torch.bool)))
    again = load(tmp_path, tiny_target, settings)
    assert again.shape.layers[0].rope.theta == 10000.0 and again.d2t is None
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in drafter.state_dict().items())


def test_taps_that_a_file_does_not_name_are_the_layouts_three_or_the_callers(tiny_target):
    shape = Eagle3Config(tokens_per_stage=3).shape(tiny_target.spec, TAPS)
    deep = replace(tiny_target.spec, num_layers=36)
    assert shape.on(deep, ()).taps == tuple(TAPS)
    assert replace(shape, taps=()).on(deep, ()).taps == (1, 17, 32)
    five = replace(shape, taps=(), num_taps=5)
    assert five.on(deep, [1, 9, 17, 25, 33]).taps == (1, 9, 17, 25, 33)
    with pytest.raises(ValueError, match="reads 5 taps and names none"):
        five.on(deep, [1, 17, 32])
