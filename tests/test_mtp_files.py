"""Tests of MTP modules inside a target's files: reading them alone and merging trained ones back."""

import json

import pytest
import torch
from conftest import make_drafter, settings_of, tiny_config
from safetensors.torch import load_file, save_file

from dloop_train.checkpoints import qwen35_mtp
from dloop_train.checkpoints.files import load_drafter, read_tensors, save_drafter, weights_digest
from dloop_train.config import TargetConfig, build, option
from dloop_train.targets.sources import load_target


@pytest.fixture(scope="module")
def qwen35():
    return load_target(build(option("target", "tiny_qwen35"), TargetConfig), device="cpu")


@pytest.fixture(params=["one file", "shards", "composite"])
def target_folder(request, qwen35, tmp_path):
    """A target's folder as released, with mtp.* tensors, which transformers drops, beside the target's."""
    shards = request.param == "shards"
    qwen35.model.save_pretrained(tmp_path, max_shard_size="20KB" if shards else "1GB")
    module = {f"mtp.{name}": tensor.bfloat16() for name, tensor in make_drafter("mtp", qwen35).state_dict().items()}
    index = tmp_path / "model.safetensors.index.json"
    holder = (
        tmp_path / sorted(json.loads(index.read_text())["weight_map"].values())[1]
        if shards
        else tmp_path / "model.safetensors"
    )
    save_file(load_file(holder) | module, holder, metadata={"format": "pt"})
    if shards:
        listed = json.loads(index.read_text())
        index.write_text(json.dumps(listed | {"weight_map": listed["weight_map"] | dict.fromkeys(module, holder.name)}))
    config = json.loads((tmp_path / "config.json").read_text()) | {
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
    }
    config = (
        {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": config}
        if request.param == "composite"
        else config
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path, holder, module


def test_the_module_is_read_without_the_rest(target_folder, qwen35):
    folder, holder, module = target_folder
    for file in folder.glob("*.safetensors"):
        if file != holder:
            file.write_bytes(b"never opened")
    drafter = load_drafter(folder, settings_of("mtp"), None, dtype=torch.bfloat16)
    assert {f"mtp.{name}" for name in drafter.state_dict()} == module.keys() and len(module) == 15
    assert all(torch.equal(tensor, module[f"mtp.{name}"]) for name, tensor in drafter.state_dict().items())
    digest = weights_digest(folder)
    save_file(load_file(holder) | {"mtp.norm.weight": module["mtp.norm.weight"] + 1}, holder)
    assert weights_digest(folder) != digest


def test_a_trained_module_goes_back_under_the_same_names(target_folder, tmp_path_factory):
    """As a file of its own and merged into copies of the shards; the target's other tensors and all dtypes stay."""
    folder, holder, module = target_folder
    drafter, out = load_drafter(folder, settings_of("mtp"), None), tmp_path_factory.mktemp("export")
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(1)
    save_drafter(drafter, out, section={}, target=None)
    side = load_file(out / "model.safetensors")
    assert side.keys() == module.keys()
    again = load_drafter(out, settings_of("mtp"), None)
    assert again.shape == drafter.shape
    [merged] = qwen35_mtp.merge_into(out, folder, out / "merged")
    assert merged.name == holder.name
    before, after = load_file(holder), load_file(merged)
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype and torch.equal(
            tensor, side[name] if name in module else before[name]
        ), name


def test_key_and_tensors_must_agree(target_folder):
    folder, _holder, _module = target_folder
    config = json.loads((folder / "config.json").read_text())
    (config.get("text_config") or config).pop("mtp_num_hidden_layers")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="mtp_num_hidden_layers: None"):
        load_drafter(folder, settings_of("mtp"), None)


def test_a_target_that_transformers_saved_again_has_lost_its_module(target_folder):
    folder, holder, module = target_folder
    save_file({name: tensor for name, tensor in load_file(holder).items() if name not in module}, holder)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed = json.loads(index.read_text())
        index.write_text(
            json.dumps(
                listed
                | {"weight_map": {name: file for name, file in listed["weight_map"].items() if name not in module}}
            )
        )
    with pytest.raises(ValueError, match="hold no mtp.* tensor"):
        load_drafter(folder, settings_of("mtp"), None)
    assert read_tensors(folder, "mtp.") == {}


def test_a_target_without_a_module_gets_no_merged_copy(tmp_path):
    target = load_target(tiny_config(), device="cpu")
    target.model.save_pretrained(tmp_path / "target")
    save_drafter(make_drafter("mtp", target), tmp_path / "drafter", section={}, target=None)
    assert (
        qwen35_mtp.merge_into(tmp_path / "drafter", tmp_path / "target", tmp_path / "merged") == []
        and not (tmp_path / "merged").exists()
    )
