"""Golden tests: one stage of every family equals recorded outputs of the public implementation."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dloop_train.checkpoints.files import (
    layout_modules,
    load_drafter,
    read_config,
    read_shape,
    read_tensors,
    save_drafter,
)
from dloop_train.checkpoints.parts import checked_maps
from dloop_train.config import build, option
from dloop_train.drafters.base import DrafterConfig
from dloop_train.drafters.dflash import DFlashConfig
from dloop_train.drafters.domino import DominoConfig
from dloop_train.drafters.dspark import DSparkConfig
from dloop_train.drafters.eagle3 import Eagle3Config
from dloop_train.drafters.layers import Attention, RotaryPositions
from dloop_train.drafters.mtp import MTPConfig
from dloop_train.drafters.mtp_assistant import POSITIONS, AssistantConfig
from dloop_train.targets.head import TargetHead
from dloop_train.targets.sources import read_head_tensors
from dloop_train.types import Context

GOLDEN = Path(os.environ.get("DLOOP_GOLDEN", Path(__file__).parent / "golden"))
FOLDERS = sorted(path.parent for path in GOLDEN.glob("*/io.json"))


def close(ours, golden, what):
    error = ((ours - golden).norm() / golden.norm()).item()
    assert error < 1e-4, f"{what}: relative error {error:.2e}"


def drafter_folder(folder):
    """The folder with the drafter's config.json: for an assistant a subfolder, beside that of its target."""
    return folder if (folder / "config.json").is_file() else folder / "assistant"


def layout_name(folder):
    config = read_config(drafter_folder(folder))
    return next(name for name, module in layout_modules().items() if module.matches(config))


@pytest.mark.skipif(not FOLDERS, reason=f"no golden folders in {GOLDEN}; set DLOOP_GOLDEN")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_golden(folder):
    CHECKS[layout_name(folder)](folder, load_file(folder / "io.safetensors"))


NORMS = {"specforge_eagle3": "layers.0.hidden_norm"}
JOINTS = {"gemma4_assistant": "pre_projection"}
"""Modules of a layout that a fault is put into, if they are not the first layer's q_norm (norm) and fc (concatenation).

The norm is q_norm because Gemma's norms of keys and values would cancel a change of scale before them.
"""


@pytest.mark.skipif(not FOLDERS, reason=f"no golden folders in {GOLDEN}; set DLOOP_GOLDEN")
@pytest.mark.parametrize("fault", ["norm", "offset", "concat"])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_fault_is_told(folder, fault, monkeypatch):
    """The checks fail if a norm is too large, queries are one position late, or parts of the input are reordered."""
    layout, right = layout_name(folder), Attention.forward
    loaded = load_drafter

    def faulty(*arguments, **more):
        drafter = loaded(*arguments, **more)
        with torch.no_grad():
            if fault == "norm":
                drafter.get_parameter(f"{NORMS.get(layout, 'layers.0.self_attn.q_norm')}.weight").mul_(1.5)
            if fault == "concat":
                weight = drafter.get_parameter(f"{JOINTS.get(layout, 'fc')}.weight")
                weight.copy_(weight.roll(drafter.shape.target_hidden_size, dims=1))
        return drafter

    if fault == "offset":
        monkeypatch.setattr(
            Attention,
            "forward",
            lambda self, rows, places, *rest: right(self, rows, RotaryPositions(places.positions + 1), *rest),
        )
    monkeypatch.setattr(sys.modules[__name__], "load_drafter", faulty)
    with pytest.raises(AssertionError):
        CHECKS[layout](folder, load_file(folder / "io.safetensors"))


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


def one_block(drafter, io):
    """One stage of a block drafter, with the anchor at the first position after the context."""
    length = io["target_hidden"].shape[1]
    state = drafter.begin(
        Context(torch.zeros(1, length + 1, dtype=torch.long), io["target_hidden"]), torch.tensor([[length]])
    )
    return drafter.stage(state, io["anchor"])


def deepspec_dflash(folder, io):
    drafter = load_drafter(folder, DFlashConfig(alignment="shifted"), None)
    stage = one_block(drafter, io)
    close(drafter.norm(stage.hidden[:, 0]), io["block_hidden"], "block_hidden")
    logits = drafter.logits(stage.hidden[:, 0, stage.predicts])
    close(logits, io["base_logits"], "base_logits")
    close(logits, io["draft_logits"], "draft_logits")
    assert torch.equal(logits.argmax(-1), io["draft_tokens"])


def greedy_block(drafter, stage, anchors):
    """The most likely tokens of a stage and the logits from which they are chosen. -> [1, k], [1, k, V]"""
    seen = []

    def most_likely(logits):
        seen.append(logits.reshape(1, -1, logits.shape[-1]))
        return logits.argmax(-1)

    tokens = drafter.draft_tokens(stage, anchors, most_likely)[:, 0]
    return tokens, torch.cat(seen, dim=1)


def deepspec_dspark(folder, io):
    drafter = load_drafter(folder, DSparkConfig(), None)
    stage = one_block(drafter, io)
    close(drafter.norm(stage.hidden[:, 0]), io["block_hidden"], "block_hidden")
    close(drafter.logits(stage.hidden[:, 0]), io["base_logits"], "base_logits")
    tokens, logits = greedy_block(drafter, stage, io["anchor"])
    assert torch.equal(tokens, io["draft_tokens"])
    close(logits, io["draft_logits"], "draft_logits")
    close(drafter.rescore(stage, io["anchor"], tokens[:, None])[:, 0], io["draft_logits"], "rescored logits")
    close(drafter.confidence(stage, io["anchor"], tokens[:, None])[:, 0], io["confidence_logit"], "confidence_logit")


def specforge_domino(folder, io):
    """The public implementation drafts W - 1 tokens with both alignments, and has logits of all W slots.

    A fill-in block predicts from slot 1 on.
    """
    head, shape = TargetHead(io["target_embed_tokens"], io["target_lm_head"]), read_shape(folder)
    drafter = load_drafter(
        folder, DominoConfig(alignment=shape.alignment, num_draft_tokens=io["draft_tokens"].shape[1]), head
    )
    stage = one_block(drafter, io)
    close(drafter.norm(stage.hidden[:, 0]), io["block_hidden"], "block_hidden")
    close(drafter.logits(stage.hidden[:, 0]), io["base_logits"], "base_logits")
    tokens, logits = greedy_block(drafter, stage, io["anchor"])
    assert torch.equal(tokens, io["draft_tokens"])
    whole = load_drafter(folder, DominoConfig(alignment=shape.alignment), head)
    final = io["final_logits"][:, whole.predicts]
    close(logits, final[:, : tokens.shape[1]], "final_logits")
    more = torch.cat([tokens, tokens[:, :1]], dim=1)[:, None, : whole.k]  # no slot reads the last token
    close(
        whole.rescore(one_block(whole, io), io["anchor"], more)[:, 0], final, "final_logits of all slots that predict"
    )


def qwen35_mtp(folder, io):
    """context_hidden[:, t] is the row of (input_ids[:, t + 1], target_final_hidden[:, t]).

    The chain continues from the last of these rows.
    """
    head, length, steps = (
        TargetHead(**read_head_tensors(folder)),
        io["context_hidden"].shape[1],
        io["chain_tokens"].shape[1],
    )
    drafter = load_drafter(folder, MTPConfig(tokens_per_stage=steps + 1), head)
    ids, context = io["input_ids"], Context(io["input_ids"][:, : length + 1], io["target_final_hidden"][:, :length])

    def greedy(step, hidden):
        return drafter.logits(hidden).argmax(-1)

    rows = drafter.begin(context, torch.arange(1, length + 1)[None])
    close(
        drafter.norm(drafter.stage(rows, ids[:, 1 : length + 1], greedy).hidden[:, :, 0]),
        io["context_hidden"],
        "context_hidden",
    )
    stage = drafter.stage(drafter.begin(context, torch.tensor([[length]])), ids[:, length : length + 1], greedy)
    assert torch.equal(stage.tokens[0, :, :steps], io["chain_tokens"])
    close(drafter.logits(stage.hidden[0, :, :steps]), io["chain_logits"], "chain_logits")
    close(drafter.norm(stage.hidden[0, :, 1:]), io["chain_hidden"], "chain_hidden")


def gemma4_assistant(folder, io, known=20):
    """Rows 0 to 19 are known, and the id at 20 is the anchor. Both values of drafter.draft_position are checked."""
    config = json.loads((folder / "target" / "config.json").read_text())
    head = TargetHead(
        **read_head_tensors(folder / "target"),
        embed_scale=config["hidden_size"] ** 0.5,
        softcap=config["final_logit_softcapping"],
    )
    close(head.logits(io["target_final_hidden"]), io["target_logits"], "target_logits")
    rows = [
        io[f"{kind}_attention_{what}"].transpose(1, 2).flatten(2)
        for kind in ("sliding", "full")
        for what in ("keys", "values")
    ]
    features = torch.cat([*rows, io["target_final_hidden"]], dim=-1)[:, :known]
    for position in POSITIONS:
        tokens = io[f"chain_tokens_{position}"]
        drafter = load_drafter(
            folder / "assistant", AssistantConfig(tokens_per_stage=tokens.shape[1], draft_position=position), head
        )
        state = drafter.begin(Context(io["input_ids"][:, : known + 1], features), torch.tensor([[known]]))
        stage = drafter.stage(
            state,
            io["input_ids"][:, known : known + 1],
            lambda step, hidden, drafter=drafter: drafter.logits(hidden).argmax(-1),
        )
        assert torch.equal(stage.tokens[0], tokens)
        close(drafter.logits(stage.hidden[0]), io[f"chain_logits_{position}"], f"chain_logits_{position}")
        close(drafter.feedback(stage.hidden[0]), io[f"chain_feedback_{position}"], f"chain_feedback_{position}")


def specforge_eagle3(folder, io):
    """Golden index i is row i: the target's features at position i with the token at i + 1.

    This row is the first pass of the branch of origin i + 1.
    """
    steps = sum(name.startswith("hidden_step") for name in io)
    drafter = load_drafter(folder, Eagle3Config(tokens_per_stage=steps), None)
    shifted, features = io["input_ids"], io["target_hidden"]
    batch, length = shifted.shape
    close(drafter.project_features(features), io["projected"], "projected")
    tokens = torch.cat([torch.zeros(batch, 1, dtype=torch.long), shifted], dim=1)  # position 0 is never read
    origins = torch.arange(1, length + 1).expand(batch, -1)
    state = drafter.begin(Context(tokens, features), origins)

    def text(step, hidden):  # ids shifted left by one more at each step, zero filled
        return torch.cat([shifted[:, step + 1 :], torch.zeros(batch, step + 1, dtype=torch.long)], dim=1)[:, :length]

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

    # Every context row is the first pass of a branch of its own. Drafting then starts from the last row.
    rows = drafter.begin(Context(ids, features), torch.arange(1, length + 1)[None])
    first = drafter.stage(rows, ids[:, 1:], greedy).hidden[:, :, 0]
    close(first, io["context_hidden"], "context_hidden")
    stage = drafter.stage(drafter.begin(Context(ids, features), torch.tensor([[length]])), ids[:, -1:], greedy)
    assert torch.equal(stage.tokens[0, :, :steps], io["chain_tokens"])
    close(drafter.logits(stage.hidden[0, :, :steps]), io["chain_logits"], "chain_logits")
    close(stage.hidden[0, :, 1:], io["chain_hidden"], "chain_hidden")


CHECKS = {
    function.__name__: function
    for function in (
        zlab_dflash,
        deepspec_dflash,
        deepspec_dspark,
        specforge_domino,
        specforge_eagle3,
        deepspec_eagle3,
        qwen35_mtp,
        gemma4_assistant,
    )
}


WITHOUT_FOLDER = {"speculators_dflash", "speculators_dspark"}
"""Layouts with the same modules and names as DeepSpec's; tests/test_vocabulary.py compares them."""


def test_every_layout_has_a_check():
    assert CHECKS.keys() | WITHOUT_FOLDER == layout_modules().keys()


@pytest.mark.skipif(not FOLDERS, reason=f"no golden folders in {GOLDEN}; set DLOOP_GOLDEN")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_save_back(folder, tmp_path):
    """A public checkpoint that is loaded and saved has the same tensors, and its config is read as the same shape."""
    require_saved_back(drafter_folder(folder), layout_name(folder), tmp_path)


@pytest.mark.skipif(
    not (GOLDEN / "specforge_eagle3_llama").is_dir(), reason=f"no golden EAGLE-3 folder in {GOLDEN}; set DLOOP_GOLDEN"
)
def test_save_back_of_a_whole_vocabulary_leaves_out_its_maps(tmp_path):
    """If the head has a row for every token, the maps d2t and t2d carry no information and are not saved.

    The golden file has a reduced vocabulary (see test_save_back); here its head and maps are widened to all tokens.
    """
    place = tmp_path / "whole"
    shutil.copytree(drafter_folder(GOLDEN / "specforge_eagle3_llama"), place)
    config = json.loads((place / "config.json").read_text())
    size = config["vocab_size"]
    assert config["draft_vocab_size"] < size
    (place / "config.json").write_text(json.dumps(config | {"draft_vocab_size": size}))
    tensors = load_file(place / "model.safetensors")
    head = torch.randn(size, tensors["lm_head.weight"].shape[1], generator=torch.Generator().manual_seed(0)).to(
        tensors["lm_head.weight"].dtype
    )
    save_file(
        tensors
        | {
            "lm_head.weight": head,
            "d2t": torch.zeros(size, dtype=torch.int64),
            "t2d": torch.ones(size, dtype=torch.bool),
        },
        place / "model.safetensors",
    )
    require_saved_back(place, "specforge_eagle3", tmp_path / "back")
    assert not {"d2t", "t2d"} & load_file(tmp_path / "back" / "model.safetensors").keys()


def require_saved_back(place: Path, name: str, out: Path) -> None:
    shape, module = read_shape(place), layout_modules()[name]
    family = build(
        option("drafter", module.FAMILY) | ({"alignment": shape.alignment} if shape.alignment else {}), DrafterConfig
    )
    drafter = load_drafter(place, family, None)
    save_drafter(drafter, out, section={}, target=None, dtype=torch.float32)
    before, after = (read_tensors(where, getattr(module, "PREFIX", "")) for where in (place, out))
    before = checked_maps(before)  # maps of the whole vocabulary carry no information and may be dropped
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert read_shape(out) == shape
