"""Laws of training: labels, depths, compaction, chunks, accumulation over ranks, resuming."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import composed, make_drafter
from teaching import counting_batch

from dloop_train.config import LogConfig
from dloop_train.data.batches import TextBatch, micro_batches, plan_epoch
from dloop_train.drafters.losses import hits, over_rows
from dloop_train.runs import read_jsonl
from dloop_train.targets.head import TargetHead
from dloop_train.training.anchors import Origins, draw_depths, draw_origins, labels_of, run_lengths, supervised
from dloop_train.training.metrics import MetricLog
from dloop_train.training.schedule import learning_rate
from dloop_train.training.unroll import Terms, Unroll


def batch_of(mask, tokens=None):
    mask = torch.tensor([mask], dtype=torch.bool)
    tokens = torch.arange(100, 100 + mask.shape[1])[None] if tokens is None else tokens
    return TextBatch(("a",), tokens, mask, torch.zeros(1, mask.shape[1], 3), torch.arange(mask.shape[1])[None, :, None].double())


def test_labels_are_the_tokens_after_the_anchor():
    batch = batch_of([0, 0, 1, 1, 1, 1, 1, 1])
    labels = labels_of(batch, torch.tensor([[2]]), 2, 2)  # stage 2 of origin 2: anchor 4, labels 5 and 6
    assert labels.tokens.tolist() == [[[105, 106]]]
    assert labels.teacher[..., 0].tolist() == [[[4.0, 5.0]]]  # the target's state one position earlier says the label
    assert labels.mask.tolist() == [[[1.0, 1.0]]]


def test_supervision_ends_with_the_response():
    """A gap in the loss mask, or the end of the text, ends supervision for good: the cumulative product from origin + 1."""
    batch = batch_of([0, 1, 1, 1, 0, 1, 1, 1])
    assert supervised(batch, torch.tensor([[1]]), 1, 2).tolist() == [[[1, 1]]]
    assert supervised(batch, torch.tensor([[1]]), 2, 2).tolist() == [[[0, 0]]]
    assert supervised(batch, torch.tensor([[6]]), 1, 3).tolist() == [[[1, 0, 0]]]


def test_of_equal_logits_only_argmaxs_choice_is_a_hit():
    logits = torch.tensor([[1.0, 3.0, 3.0], [1.0, 3.0, 3.0], [5.0, 3.0, 3.0], [0.0, 0.0, 0.0]], dtype=torch.bfloat16)
    assert hits(logits, torch.tensor([1, 2, 1, 0])).tolist() == [True, False, False, True]


def test_depths_are_uniform_and_feasible():
    runs = np.full(60_000, 1000)
    noise = np.random.default_rng(0)
    depths = draw_depths(runs, 4, 3, noise.random(60_000), noise.random(60_000))
    shares = np.bincount(depths, minlength=5)[2:] / 60_000
    assert np.allclose(shares, 1 / 3, atol=0.01) and depths.min() == 2 and depths.max() == 4
    short = draw_depths(np.array([1, 4, 5, 9, 13]), 4, 3, np.full(5, 0.99), np.full(5, 0.99))
    assert short.tolist() == [1, 1, 2, 3, 4]  # the deepest stage that still has a supervised label
    assert draw_depths(runs, 4, 0, noise.random(60_000), noise.random(60_000)).max() == 1


def test_origins_are_response_tokens_and_keyed_by_sample():
    batch = batch_of([0, 0, 0, 1, 1, 1, 1, 0])
    origins = draw_origins(batch, 2, count=99, depth_exposure=1, seed=0, epoch=0)
    assert sorted(origins.position[0].tolist()) == [3, 4, 5]  # 6 has no supervised token after it
    assert run_lengths(batch.loss_mask[0].numpy()).tolist() == [0, 0, 4, 3, 2, 1, 0, 0]
    two = TextBatch(("b", "a"), *(torch.cat([t, t]) for t in (batch.tokens, batch.loss_mask, batch.features, batch.last_hidden)))
    together = draw_origins(two, 2, count=2, depth_exposure=3, seed=0, epoch=0)
    alone = draw_origins(batch, 2, count=2, depth_exposure=3, seed=0, epoch=0)
    assert torch.equal(together.position[1], alone.position[0]) and torch.equal(together.depth[1], alone.depth[0])


@pytest.fixture
def unrolled(variant, taught_target):
    def make(**settings):
        return Unroll(make_drafter(variant, taught_target), Terms(3), **settings)
    drafter = make().drafter
    batch, k = counting_batch(taught_target, drafter.shape.reads, count=4), drafter.k
    return make, batch, draw_origins(batch, k, count=9, depth_exposure=3, seed=0, epoch=0)


def loss_and_gradients(unroll, batch, origins):
    loss = unroll(batch, origins, unroll.weights(batch, origins), 0.0).loss
    loss.backward()
    return loss, {name: parameter.grad for name, parameter in unroll.named_parameters() if parameter.grad is not None}


def same(a, b):
    torch.testing.assert_close(a[0], b[0], rtol=0, atol=1e-10)
    assert a[1].keys() == b[1].keys() and len(a[1]) > 5
    for name in a[1]:
        torch.testing.assert_close(a[1][name], b[1][name], rtol=1e-9, atol=1e-10)


def test_compaction_changes_no_loss(unrolled):
    make, batch, origins = unrolled
    assert origins.alive(4) < origins.alive(2)
    same(loss_and_gradients(make(), batch, origins), loss_and_gradients(make(compact=False), batch, origins))


def test_chunked_loss_is_full_loss(unrolled):
    make, batch, origins = unrolled
    same(loss_and_gradients(make(max_rows=3), batch, origins), loss_and_gradients(make(max_rows=10**6), batch, origins))


def test_gradient_flows_through_own_states_unless_detached(unrolled):
    make, batch, origins = unrolled
    through, cut = loss_and_gradients(make(), batch, origins), loss_and_gradients(make(detach=True), batch, origins)
    torch.testing.assert_close(through[0], cut[0])
    assert any(not torch.allclose(through[1][name], cut[1][name]) for name in through[1])


def test_loss_equals_plain_cross_entropy(taught_target):
    """The base recipe of DFlash, written out: weighted CE over slots of every origin, divided by its weights."""
    drafter = make_drafter("dflash-shifted", taught_target)
    batch = counting_batch(taught_target, count=2)
    origins = draw_origins(batch, drafter.k, count=5, depth_exposure=0, seed=0, epoch=0)
    unroll = Unroll(drafter, Terms(0))
    loss = unroll(batch, origins, unroll.weights(batch, origins), 0.0).loss
    from dloop_train.types import Context
    total = weight = 0.0
    for row in range(2):
        for origin in origins.position[row].tolist():
            state = drafter.begin(Context(batch.tokens[row:row + 1, :origin + 1], batch.features[row:row + 1, :origin]), torch.tensor([[origin]]))
            logits = drafter.logits(drafter.stage(state, batch.tokens[row:row + 1, origin:origin + 1]).hidden)[0, 0]
            for slot in range(min(drafter.k, 31 - origin)):
                w = np.exp(-slot / 4.0)
                total -= w * torch.log_softmax(logits[slot].float(), -1)[batch.tokens[row, origin + 1 + slot]].item()
                weight += w
    assert loss.item() == pytest.approx(total / weight, rel=1e-5)


def test_the_loss_in_bf16_is_that_of_fp64_but_for_rounding(unrolled):
    """As DeepSpeed holds a drafter: parameters in bf16, buffers in fp32."""
    make, batch, origins = unrolled
    exact, _ = loss_and_gradients(make(), batch, origins)
    unroll = make()
    unroll.drafter.float()
    for parameter in unroll.drafter.parameters():
        parameter.data = parameter.data.bfloat16()
    head = unroll.drafter.head
    unroll.drafter.borrow(TargetHead(head.embed_weight.bfloat16(), head.lm_head_weight.bfloat16(), embed_scale=head.embed_scale, softcap=head.softcap))
    rounded, gradients = loss_and_gradients(unroll, batch.to(batch.tokens.device, torch.bfloat16), origins)
    assert rounded.item() == pytest.approx(exact.item(), rel=0.05)
    assert all(gradient.dtype == torch.bfloat16 and gradient.isfinite().all() for gradient in gradients.values())


def test_a_batch_without_origins_is_zero_and_finite(unrolled):
    make, batch, origins = unrolled
    empty = Origins(origins.position, origins.depth * 0)
    loss, gradients = loss_and_gradients(make(), batch, empty)
    assert loss.item() == 0 and all(g.isfinite().all() for g in gradients.values())


def test_over_rows_gradient_in_forward():
    weight = torch.randn(7, 5, dtype=torch.float64)
    def function(hidden, tokens):
        losses = torch.nn.functional.cross_entropy(hidden @ weight.T, tokens, reduction="none")
        return losses.sum(), losses.detach().sum()[None]
    tokens = torch.arange(6)
    results = []
    for chunk, frozen in ((6, False), (2, True), (4, True)):
        hidden = torch.linspace(-1, 1, 30, dtype=torch.float64).view(6, 5).requires_grad_()
        total, _ = over_rows(function, hidden, (tokens,), chunk, frozen=frozen)
        (3 * total).backward()
        results.append((total, hidden.grad))
    for total, gradient in results[1:]:
        torch.testing.assert_close(total, results[0][0])
        torch.testing.assert_close(gradient, results[0][1])


def test_learning_rate_in_closed_form():
    rates = [learning_rate(step, 100, 1e-3, 0.1) for step in range(100)]
    assert rates[0] == pytest.approx(1e-4) and rates[9] == 1e-3 and max(rates) == 1e-3
    assert all(a >= b for a, b in zip(rates[9:], rates[10:], strict=False)) and 0 < rates[-1] < 2e-6
    assert learning_rate(0, 1, 1e-3, 0.04) == 1e-3


def test_epoch_plan_is_complete_and_seeded():
    lengths = list(range(37, 0, -1))
    plan = plan_epoch(lengths, 4, 0, 0)
    assert sorted(i for step in plan for i in step) == list(range(37)) and len(plan) == 10
    assert plan == plan_epoch(lengths, 4, 0, 0) != plan_epoch(lengths, 4, 0, 1)
    assert micro_batches([1, 2, 3], 2, 3) == [[1, 2], [3], []]


def train(root: Path, *overrides: str) -> list[dict]:
    """The training phase on the tiny target as a user runs it; returns the logged rows."""
    environment = os.environ | {"DLOOP_ROOT": str(root), "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dloop_train", "+drafter=dflash", "+target=tiny_llama", "train.threads=1", "wandb.mode=disabled", "train.batch_size=4",
               "train.micro_batch_size=2", "train.validate_prompts=1", *overrides]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    name = next((o.removeprefix("name=") for o in overrides if o.startswith("name=")), "dflash-tiny_llama")
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in open(root / "runs" / name / "metrics.jsonl")]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    return root, train(root, "phases=[generate,cache,train]", "train.steps=6", "name=whole")


def numbers(rows):
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]


def test_resume_equals_uninterrupted(uninterrupted):
    """Stopped after three steps and continued: the same losses to the last digit."""
    root, whole = uninterrupted
    # a checkpoint every 3 steps; the last one is taken away as if the run had died in step 5
    train(root, "phases=[train]", "train.steps=6", "name=parts", "train.save_every=3")
    checkpoints = root / "runs" / "parts" / "checkpoints"
    (checkpoints / "last.json").write_text(json.dumps({"tag": "step-0000003", "step": 3, "world_size": 1}))
    (checkpoints / "done.json").unlink()
    again = train(root, "phases=[train]", "train.steps=6", "name=parts", "train.save_every=3")
    assert [row["step"] for row in again] == [1, 2, 3, 4, 5, 6]
    assert numbers(again) == numbers(whole)


def test_two_ranks_equal_one(uninterrupted):
    """Two gloo ranks with one micro-batch each against one rank that accumulates two."""
    root, whole = uninterrupted
    two = train(root, "phases=[train]", "train.steps=6", "name=two", "train.processes=2")
    for a, b in zip(numbers(two), numbers(whole), strict=True):
        assert a == pytest.approx(b, rel=1e-5)


def test_base_epochs_are_the_base_recipe_and_loop_aware_steps_follow(uninterrupted):
    """The first steps are those of a base run to the last digit; the later ones have a last stage, and a schedule of their own."""
    root, _ = uninterrupted
    both = train(root, "phases=[train]", "train.steps=3", "train.base_epochs=0.5", "train.base_lr=1e-3", "name=both")
    base = train(root, "phases=[train]", "train.steps=3", "train.depth_exposure=0", "train.lr=1e-3", "name=base")
    assert numbers(both[:3]) == numbers(base) and len(both) == 6
    assert ["weighted_loss_last" in row for row in both] == [False] * 3 + [True] * 3
    assert [row["lr"] for row in both[3:]] == pytest.approx([learning_rate(step, 3, 6e-5, 0.04) for step in range(3)])


def test_a_resumed_log_holds_each_step_once(tmp_path):
    """Rows past the checkpoint go; a training that begins anew, validation at step 0 included, keeps nothing."""
    def steps(start, *new):
        log = MetricLog(tmp_path, LogConfig(mode="disabled"), name="x", config={}, start=start)
        for step in new:
            log.validation(step, {"tau": 1.0})
        return [row["step"] for row in read_jsonl(tmp_path / "validation.jsonl")]
    assert steps(0, 0, 3, 6) == [0, 3, 6]
    assert steps(3, 6) == [0, 3, 6]
    assert steps(0, 0) == [0]


def test_changed_settings_are_refused(uninterrupted):
    root, _ = uninterrupted
    with pytest.raises(AssertionError, match="made with other settings"):
        train(root, "phases=[train]", "train.steps=7", "name=whole")


def test_config_errors_name_the_field():
    for override, message in (("++train.stpes=3", "stpes"), ("++train.lr=abc", "abc"), ("++drafter.width=1", "width must be"),
                              ("++train.batch_size=5", "multiple of"), ("++drafter.alignment=sideways", "alignment is required")):
        with pytest.raises(ValueError, match=message):
            composed("+drafter=dflash", "+target=tiny_llama", override)
