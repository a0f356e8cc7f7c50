"""Golden: one stage of every family equals the public implementation, folder by folder."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dloop_train.checkpoints.files import layout_modules, load_drafter, read_config
from dloop_train.drafters.dflash import DFlashConfig
from dloop_train.drafters.eagle3 import Eagle3Config
from dloop_train.targets.head import TargetHead
from dloop_train.types import Context

GOLDEN = Path(os.environ.get("DLOOP_GOLDEN", Path(__file__).parents[2] / "shared" / "golden"))
FOLDERS = sorted(path.parent for path in GOLDEN.glob("*/io.json"))


def close(ours, golden, what):
    error = ((ours - golden).norm() / golden.norm()).item()
    assert error < 1e-4, f"{what}: relative error {error:.2e}"


@pytest.mark.skipif(not FOLDERS, reason=f"no golden folders in {GOLDEN}; set DLOOP_GOLDEN")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_golden(folder):
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text()) if config_file.is_file() else {}
    layouts = [module for module in layout_modules().values() if module.matches(config)]
    if not layouts:
        pytest.skip(f"{folder.name}: family not implemented (architectures {config.get('architectures')})")
    io = load_file(folder / "io.safetensors")
    CHECKS[layouts[0].__name__.rpartition(".")[2]](folder, io)


def zlab_dflash(folder, io):
    head = TargetHead(io["target_embed_tokens"], io["target_lm_head"])
    drafter = load_drafter(folder, DFlashConfig(alignment="fill_in"), head)
    length, more = io["target_hidden"].shape[1], io["target_hidden_2"].shape[1]
    filler = torch.zeros(1, length + 1, dtype=torch.long)  # a block drafter reads no token of the context
    state = drafter.begin(Context(filler, io["target_hidden"]), torch.tensor([[length]]))
    stage = drafter.stage(state, io["anchor"])
    close(drafter.norm(stage.hidden[:, 0]), io["block_hidden"], "block_hidden")
    logits = drafter.logits(stage.hidden[:, 0, stage.predicts])
    close(logits, io["draft_logits"], "draft_logits")
    assert torch.equal(logits.argmax(-1), io["draft_tokens"])
    state = drafter.commit(stage.state, Context(filler[:, : more + 1], io["target_hidden_2"], start=length))
    stage = drafter.stage(state, io["anchor_2"])
    close(drafter.norm(stage.hidden[:, 0]), io["block_hidden_2"], "block_hidden_2")
    close(drafter.logits(stage.hidden[:, 0, stage.predicts]), io["draft_logits_2"], "draft_logits_2")


def deepspec_dflash(folder, io):
    drafter = load_drafter(folder, DFlashConfig(alignment="shifted"), None)
    length = io["target_hidden"].shape[1]
    state = drafter.begin(Context(torch.zeros(1, length + 1, dtype=torch.long), io["target_hidden"]), torch.tensor([[length]]))
    stage = drafter.stage(state, io["anchor"])
    close(drafter.norm(stage.hidden[:, 0]), io["block_hidden"], "block_hidden")
    logits = drafter.logits(stage.hidden[:, 0, stage.predicts])
    close(logits, io["base_logits"], "base_logits")
    close(logits, io["draft_logits"], "draft_logits")
    assert torch.equal(logits.argmax(-1), io["draft_tokens"])


def specforge_eagle3(folder, io):
    """Golden index i is row i: target features of position i with the token at i + 1. That row opens the branch of origin i + 1."""
    steps = sum(name.startswith("hidden_step") for name in io)
    drafter = load_drafter(folder, Eagle3Config(tokens_per_stage=steps), None)
    shifted, features = io["input_ids"], io["target_hidden"]
    batch, length = shifted.shape
    close(drafter.project_features(features), io["projected"], "projected")
    tokens = torch.cat([torch.zeros(batch, 1, dtype=torch.long), shifted], dim=1)  # position 0 is never read
    origins = torch.arange(1, length + 1).expand(batch, -1)
    state = drafter.begin(Context(tokens, features), origins)

    def text(step, hidden):  # ids shifted left by one more at each step, zero filled
        return torch.cat([shifted[:, step + 1:], torch.zeros(batch, step + 1, dtype=torch.long)], dim=1)[:, :length]

    stage = drafter.stage(state, shifted, text)
    for step in range(steps):
        close(stage.hidden[:, :, step], io[f"hidden_step{step}"], f"hidden_step{step}")
        logits = drafter.logits(stage.hidden[:, :, step])
        close(logits, io[f"logits_step{step}"], f"logits_step{step}")
        assert torch.equal(logits.argmax(-1), io[f"logits_step{step}"].argmax(-1))


def deepspec_eagle3(folder, io):
    steps = io["chain_tokens"].shape[1]
    drafter = load_drafter(folder, Eagle3Config(format="deepspec_eagle3", tokens_per_stage=steps + 1), None)
    ids, features = io["input_ids"], io["target_hidden"]
    length = features.shape[1]

    def greedy(step, hidden):
        return drafter.logits(hidden).argmax(-1)

    # Every context row is the first pass of a branch of its own; the last one then drafts.
    rows = drafter.begin(Context(ids, features), torch.arange(1, length + 1)[None])
    first = drafter.stage(rows, ids[:, 1:], greedy).hidden[:, :, 0]
    close(first, io["context_hidden"], "context_hidden")
    stage = drafter.stage(drafter.begin(Context(ids, features), torch.tensor([[length]])), ids[:, -1:], greedy)
    assert torch.equal(stage.tokens[0, :, :steps], io["chain_tokens"])
    close(drafter.logits(stage.hidden[0, :, :steps]), io["chain_logits"], "chain_logits")
    close(stage.hidden[0, :, 1:], io["chain_hidden"], "chain_hidden")


CHECKS = {function.__name__: function for function in (zlab_dflash, deepspec_dflash, specforge_eagle3, deepspec_eagle3)}


@pytest.mark.skipif(not FOLDERS, reason=f"no golden folders in {GOLDEN}; set DLOOP_GOLDEN")
@pytest.mark.parametrize("name", sorted(CHECKS))
def test_save_back(name, tmp_path):
    """A public checkpoint written back holds the same tensors and a config that reads the same."""
    from dloop_train.checkpoints.files import read_shape, read_tensors, save_drafter
    for folder in FOLDERS:
        if not (folder / "config.json").is_file() or not layout_modules()[name].matches(read_config(folder)):
            continue
        shape = read_shape(folder)
        settings = DFlashConfig(alignment=shape.alignment) if hasattr(shape, "alignment") else Eagle3Config()
        drafter = load_drafter(folder, settings, None)
        save_drafter(drafter, tmp_path, section={}, target=None, dtype=torch.float32)
        before, after = read_tensors(folder), read_tensors(tmp_path)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert read_shape(tmp_path) == shape
