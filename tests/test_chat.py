"""Tests of chat prompts: all phases and serving use the same prompt ids, with every target's template."""

import os
from pathlib import Path

import pytest
from conftest import composed, tiny_config
from transformers import AutoTokenizer

from dloop_train.config import CONF, TargetConfig, build, option
from dloop_train.data.chat import prompt_ids
from dloop_train.data.store import FeatureStore
from dloop_train.phases import artifacts, cache, generate
from dloop_train.serving import LoopedModel
from dloop_train.targets import bytes_tokenizer
from dloop_train.targets.bytes_tokenizer import byte_tokenizer

QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LLAMA31 = (
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\n"
    "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}"
    "{% set messages = messages[1:] %}{% endif %}<|eot_id|>"
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
QWEN35 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
GEMMA4 = (
    "{{ bos_token }}{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n"
    "{% if not enable_thinking | default(false) %}<|channel>thought\n<channel|>{% endif %}{% endif %}"
)
RESTATED = {
    "qwen3_4b": QWEN3,
    "qwen3_8b": QWEN3,
    "qwen3_14b": QWEN3,
    "llama31_8b": LLAMA31,
    "qwen35_9b": QWEN35,
    "gemma4_12b": GEMMA4,
}
"""Templates that give the same prompts as the hub's for conversations without tools.

test_restated_template_is_the_real_one compares them with the hub's templates where these are available. QWEN35 and
GEMMA4 were written from descriptions and have not been compared yet.
"""
THOUGHTLESS = {QWEN3: "</think>\n\n", QWEN35: "</think>\n\n", GEMMA4: "<channel|>"}
"""The end of a prompt with thinking switched off, by template."""
HUB = sorted(
    path.stem
    for path in (CONF / "target").glob("*.yaml")
    if build(option("target", path.stem), TargetConfig, "target").source == "hub"
)

USER = {"role": "user", "content": "What is 2 + 2?"}
CONVERSATIONS = [
    [USER],
    [{"role": "system", "content": "Answer briefly."}, USER],
    [USER, {"role": "assistant", "content": "4."}, {"role": "user", "content": " And 3 + 3?\n"}],
    [
        {"role": "system", "content": "A"},
        USER,
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4."},
        {"role": "user", "content": "Größe? 你好"},
    ],
]


def config_of(target: str) -> TargetConfig:
    return build(option("target", target), TargetConfig, "target")


def rendered(target: str, template: str, messages) -> str:
    """Text of the prompt ids with a template.

    A byte tokenizer replaces the target's, since the template does not depend on the tokenizer.
    """
    tokenizer = byte_tokenizer(2)
    tokenizer.bos_token = "<|begin_of_text|>"
    tokenizer.chat_template = template
    return tokenizer.decode(prompt_ids(tokenizer, messages, config_of(target)))


def real_template(target: str) -> str:
    """The template of the hub's repository, from a file in $DLOOP_TEMPLATES or from the hub's local cache.

    Without either, the test is skipped.
    """
    file = Path(os.environ.get("DLOOP_TEMPLATES", "")) / f"{target}.jinja"
    if "DLOOP_TEMPLATES" in os.environ and file.is_file():
        return file.read_text()
    config = config_of(target)
    try:
        return AutoTokenizer.from_pretrained(config.path, revision=config.revision, local_files_only=True).chat_template
    except OSError:
        pytest.skip(
            f"the template of {config.path} is neither {target}.jinja in $DLOOP_TEMPLATES nor in the hub's cache"
        )


def test_every_hub_target_is_restated():
    assert set(HUB) == set(RESTATED)


@pytest.mark.parametrize("target", HUB)
def test_restated_template_is_the_real_one(target):
    real = real_template(target)
    for messages in CONVERSATIONS:
        # Qwen's templates drop the thinking of earlier answers.
        plain = [m | {"content": m["content"].split("</think>")[-1].lstrip("\n")} for m in messages]
        expected = rendered(target, RESTATED[target], plain if target.startswith("qwen") else messages)
        assert rendered(target, real, messages) == expected


def test_qwen3_answers_without_thinking():
    assert (
        rendered("qwen3_8b", QWEN3, [USER])
        == "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_qwen35_and_gemma4_answer_without_thinking():
    assert (
        rendered("qwen35_9b", QWEN35, [USER])
        == "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert rendered("gemma4_12b", GEMMA4, [USER]).endswith(
        "<|turn>user\nWhat is 2 + 2?<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"
    )


def test_llama_has_one_bos_and_a_date_that_stands_still():
    text = rendered("llama31_8b", LLAMA31, [USER])
    assert (
        text.count("<|begin_of_text|>") == 1
        and text.startswith("<|begin_of_text|>")
        and "Today Date: 26 Jul 2024\n" in text
    )
    assert text.endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")


@pytest.mark.parametrize("target", HUB)
def test_all_phases_read_the_same_prompt_ids(target, monkeypatch, tmp_path):
    """generate, cache, evaluate and serving use the same prompt ids, on the tiny target with each template."""
    monkeypatch.setattr(bytes_tokenizer, "TEMPLATE", RESTATED[target])
    thinking = config_of(target).thinking
    config = composed(
        "+drafter=dflash",
        "+target=tiny_llama",
        f"root={tmp_path}",
        f"target.thinking={'null' if thinking is None else str(thinking).lower()}",
        "prompts.limit=6",
        "generate.max_new_tokens=4",
        "generate.greedy_max_new_tokens=4",
        "generate.greedy_prompts=3",
        "drafter.alignment=shifted",
    )
    generate.run(config)
    cache.run(config)
    tokenizer = byte_tokenizer(2)
    expected = {p.id: prompt_ids(tokenizer, list(p.messages), config.target) for p in config.prompts.read()}
    assert thinking is (False if RESTATED[target] in THOUGHTLESS else None)
    assert all(tokenizer.decode(ids).endswith(THOUGHTLESS.get(RESTATED[target], "")) for ids in expected.values())
    artifact = artifacts.features(config)
    store = FeatureStore(artifact.folder, artifact.facts(), max_length=config.train.max_length)
    assert len(store) == 6
    for sample in store:
        assert sample.tokens[~sample.loss_mask].tolist() == expected[sample.id]
    judged = [r for split in ("validation", "test") for r in artifacts.greedy_responses(config, split)]
    assert judged and all(r.prompt_ids == expected[r.id] for r in judged)
    asked = []
    prompt = next(p for p in config.prompts.read() if p.id == judged[0].id)
    served = LoopedModel(type("Target", (), {"tokenizer": tokenizer}), None, None, config.target)
    monkeypatch.setattr(served, "tokens", lambda ids, **_: asked.append(ids) or [])
    assert list(served.generate(list(prompt.messages))) == [] and asked == [expected[prompt.id]]


@pytest.mark.parametrize("template", THOUGHTLESS)
def test_a_template_of_another_mode_gives_other_ids(template):
    """target.thinking must change the prompt; otherwise a mistake in it would not be noticed."""
    tokenizer = byte_tokenizer(2)
    tokenizer.chat_template = template
    assert prompt_ids(tokenizer, [USER], tiny_config(thinking=False)) != prompt_ids(
        tokenizer, [USER], tiny_config(thinking=True)
    )
