"""Tests of draft vocabularies: kept tokens, logits and losses of a reduced drafter, and file layouts."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from conftest import TAPS, make_drafter, settings_of, shape_of
from teaching import counting_batch, counting_prompts, taught_drafter

from dloop_train.checkpoints.files import (
    check_export,
    create_drafter,
    load_drafter,
    read_config,
    read_shape,
    save_drafter,
)
from dloop_train.config import build, option
from dloop_train.decoding.gates import DLoop
from dloop_train.decoding.loop import decode
from dloop_train.drafters.base import DrafterConfig, frequent_ids, with_vocabulary
from dloop_train.drafters.eagle3 import Eagle3Config
from dloop_train.targets.head import TargetHead
from dloop_train.targets.responders import decode_plain
from dloop_train.training.anchors import draw_origins
from dloop_train.training.unroll import Terms, Unroll

KEPT = torch.tensor([2, *range(60, 120)])  # the stop id, and the ids that the taught target emits


def test_stop_ids_are_kept_whatever_the_responses_say(tiny_target):
    shape = replace(shape_of("eagle3-reduced", tiny_target), draft_vocab_size=4)
    assert frequent_ids(Counter({9: 5, 7: 8, 5: 1, 30: 2}), shape, [2]).tolist() == [2, 7, 9, 30]
    assert frequent_ids(Counter({9: 5}), shape, [2]).tolist() == [0, 1, 2, 9]  # filled up with the lowest ids


REDUCIBLE = {
    "dflash-shifted": "speculators_dflash",
    "dflash-fill_in": "speculators_dflash",
    "dspark-vanilla": "speculators_dspark",
    "dspark-gated": "speculators_dspark",
    "eagle3-fc_norm": "specforge_eagle3",
}


@pytest.mark.parametrize("variant", REDUCIBLE)
def test_a_reduced_drafter_says_what_the_whole_one_says_of_the_kept_tokens(variant, taught_target, tmp_path):
    """Its logits are the kept columns, its decoded texts are the target's, and its file loads as the same drafter."""
    whole = taught_drafter(variant, taught_target)
    settings = replace(settings_of(variant), draft_vocab_size=len(KEPT), format="")
    reduced = with_vocabulary(whole, settings, KEPT)
    assert (
        reduced.shape.format == REDUCIBLE[variant] and reduced.shape.reduced and torch.equal(reduced.kept_ids(), KEPT)
    )
    hidden = torch.randn(1, 2, whole.shape.hidden_size, dtype=torch.float64)
    torch.testing.assert_close(reduced.logits(hidden), whole.logits(hidden)[..., KEPT])
    for prompt in counting_prompts(2).tolist():
        rounds = list(decode(taught_target, reduced, DLoop(threshold=-3.0, max_stages=4), prompt, max_new_tokens=24))
        assert [token for one in rounds for token in one.tokens] == decode_plain(
            taught_target, prompt, max_new_tokens=24
        )
        assert any(one.round is not None and one.round.accepted for one in rounds)
    save_drafter(
        reduced,
        tmp_path,
        section={"state": whole.shape.state, "slot": whole.shape.slot},
        target=taught_target.spec,
        dtype=torch.float64,
    )
    again = load_drafter(
        tmp_path, settings, TargetHead.of(taught_target), dtype=torch.float64, target=taught_target.spec, taps=TAPS
    )
    torch.testing.assert_close(again.logits(hidden), reduced.logits(hidden), rtol=1e-4, atol=1e-5)
    save_drafter(
        reduced.float(),
        tmp_path,
        section={"state": whole.shape.state, "slot": whole.shape.slot},
        target=taught_target.spec,
        dtype=torch.float32,
    )
    check_export(tmp_path, reduced, settings, dtype=torch.float32)


def test_released_weights_get_a_vocabulary_at_load(tiny_target, tmp_path):
    """The ids are provisional until responses are counted; the released folder, without a vocabulary, is unchanged."""
    released = make_drafter("dspark-vanilla", tiny_target)
    save_drafter(released, tmp_path, section={}, target=tiny_target.spec, dtype=torch.float64)
    settings = replace(settings_of("dspark-vanilla"), init=str(tmp_path), draft_vocab_size=40)
    drafter = create_drafter(settings, tiny_target.spec, TargetHead.of(tiny_target), TAPS, dtype=torch.float64)
    assert (
        drafter.shape.draft_vocab_size == 40
        and drafter.shape.format == "speculators_dspark"
        and 2 in drafter.kept_ids().tolist()
    )
    assert drafter.markov_head.markov_w2.weight.shape[0] == 40 and not read_shape(tmp_path).reduced
    hidden = torch.randn(1, 1, drafter.shape.hidden_size, dtype=torch.float64)
    torch.testing.assert_close(drafter.logits(hidden), released.logits(hidden)[..., drafter.kept_ids()])


@pytest.mark.parametrize("variant", ["dflash-post_norm", "dspark-rnn"])
def test_a_reduced_drafter_that_has_decoded_is_trained(variant, taught_target):
    """Decoding in inference mode, as in the validation before the first step, makes the head's rows.

    Training afterwards must still compute gradients.
    """
    drafter = make_drafter(variant, taught_target)
    drafter.attach_head(drafter.head)
    with torch.inference_mode():
        list(decode(taught_target, drafter, DLoop(threshold=-1.0), counting_prompts(1)[0].tolist(), max_new_tokens=4))
    batch = counting_batch(taught_target, drafter.shape.feature_spec, count=2)
    origins, unroll = (
        draw_origins(batch, drafter.k, count=4, depth_exposure=2, seed=0, epoch=0),
        Unroll(drafter, Terms(2), max_rows=1000),
    )
    unroll(batch, origins, unroll.weights(batch, origins), 0.0).loss.backward()
    assert any(parameter.grad is not None for parameter in drafter.parameters())


@pytest.mark.parametrize(
    "family, settings, says",
    [
        ("domino", {"alignment": "fill_in"}, "no public layout of domino can record"),
        ("mtp", {}, "no public layout of mtp can record"),
        ("mtp_assistant", {}, "no public layout of mtp_assistant can record"),
        ("eagle3", {"format": "deepspec_eagle3"}, "the layout deepspec_eagle3 has neither"),
        ("dflash", {"alignment": "shifted", "draft_vocab_size": -1}, "must not be negative"),
        ("eagle3", {"outside": "some"}, "must be skip or train"),
    ],
)
def test_layouts_without_a_vocabulary_refuse_one_by_name(family, settings, says):
    with pytest.raises(ValueError, match=says):
        build(option("drafter", family) | {"draft_vocab_size": 20} | settings, DrafterConfig, "drafter")


@pytest.mark.parametrize(
    "variant, says",
    [
        ("eagle3-deepspec", "the layout deepspec_eagle3 has no draft vocabulary"),
        ("dspark-gemma4", "holds qwen3 layers, this drafter has gemma4"),
    ],
)
def test_released_weights_of_other_layouts_refuse_one_by_name(variant, says, tiny_target):
    drafter = make_drafter(variant, tiny_target)
    with pytest.raises(ValueError, match=says):
        with_vocabulary(drafter, settings_of(variant), torch.arange(40))


def test_another_drafters_vocabulary_takes_the_rows_of_its_own(tiny_target):
    """If the ids change, by keep_tokens or by loading, the rows of the head change with them."""
    drafter, other = make_drafter("dflash-post_norm", tiny_target), make_drafter("dflash-post_norm", tiny_target)
    other.keep_tokens(torch.arange(10, 210))
    hidden = torch.randn(1, 1, drafter.shape.hidden_size, dtype=torch.float64)
    before = drafter.logits(hidden)
    assert not torch.equal(before, other.logits(hidden))
    other.load_state_dict(drafter.state_dict())
    torch.testing.assert_close(other.logits(hidden), before, rtol=0, atol=0)


def test_the_speculators_file_of_a_whole_vocabulary_is_deepspecs_drafter(tiny_target, tmp_path):
    """A DeepSpec drafter written in the speculators layout has the same modules, names and shape.

    That layout counts taps from 1.
    """
    for variant, format in (("dflash-shifted", "speculators_dflash"), ("dspark-gated", "speculators_dspark")):
        drafter, folder = make_drafter(variant, tiny_target), tmp_path / variant
        drafter.shape = replace(drafter.shape, format=format)
        save_drafter(drafter, folder, section={}, target=tiny_target.spec, dtype=torch.float64)
        config = read_config(folder)
        assert (
            config["aux_hidden_state_layer_ids"] == [tap + 1 for tap in TAPS] and config["sample_from_anchor"] is True
        )
        assert (
            config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == drafter.k
            and "rope_theta" in config["transformer_layer_config"]
        )
        again = load_drafter(
            folder,
            settings_of(variant),
            TargetHead.of(tiny_target),
            dtype=torch.float64,
            target=tiny_target.spec,
            taps=TAPS,
        )
        assert again.shape == drafter.shape and again.state_dict().keys() == drafter.state_dict().keys()
        for name in ("mask_token_id", "transformer_layer_config"):
            broken = {key: value for key, value in config.items() if key != name}
            (folder / "config.json").write_text(json.dumps(broken))
            with pytest.raises(ValueError, match=name):
                read_shape(folder)


def one_row(variant, target, kept, **settings):
    """Loss and norm of the gradient for one batch, with a drafter whose draft vocabulary is `kept`."""
    drafter = make_drafter(variant, target)
    for name, value in settings.items():
        setattr(drafter, name, value)
    drafter.keep_tokens(kept)
    batch = counting_batch(target, drafter.shape.feature_spec, count=2)
    origins = draw_origins(batch, drafter.k, count=4, depth_exposure=1, seed=0, epoch=0)
    unroll = Unroll(drafter, Terms(1), max_rows=7)
    result = unroll(batch, origins, unroll.weights(batch, origins), 0.0)
    result.loss.backward()
    norm = sum(float(parameter.grad.norm()) for parameter in drafter.parameters() if parameter.grad is not None)
    return float(result.loss), norm


@pytest.mark.parametrize("variant", ["eagle3-reduced", "dflash-post_norm", "dspark-rnn"])
def test_rows_that_a_vocabulary_cannot_say_teach_nothing(variant, taught_target):
    """Rows with a target token outside the vocabulary carry no loss; the taught target emits only 70..95."""
    inside, outside = torch.arange(50, 250), torch.tensor([*range(0, 70), *range(96, 226)])
    loss, norm = one_row(variant, taught_target, inside)
    assert loss > 0.1 and norm > 0.1
    loss, norm = one_row(
        variant, taught_target, outside, **({"confidence_head": None} if variant == "dspark-rnn" else {})
    )
    assert (loss, norm) == (0.0, 0.0)


def test_the_other_rule_is_a_switch(taught_target):
    outside = torch.tensor([*range(0, 70), *range(96, 226)])
    loss, norm = one_row("eagle3-reduced", taught_target, outside, skip_outside=False)
    assert loss > 0.1 and norm > 0.1
    assert (
        not Eagle3Config(draft_vocab_size=20, outside="train")
        .build(replace(shape_of("eagle3-reduced", taught_target), draft_vocab_size=20), None)
        .skip_outside
    )
