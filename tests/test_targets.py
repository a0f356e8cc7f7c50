"""Tests of every target: the cache after a commit equals a fresh prefill, for all kinds of attention."""

import gc
import json
import os
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import make_drafter
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from dloop_train.config import CONF, SamplingConfig, TargetConfig, build, option
from dloop_train.data.online import read_batch, text_of
from dloop_train.data.responses import Response
from dloop_train.decoding.gates import Always
from dloop_train.decoding.loop import decode
from dloop_train.decoding.rules import confirmed
from dloop_train.targets import sources
from dloop_train.targets.head import TargetHead
from dloop_train.targets.responders import decode_plain, respond
from dloop_train.targets.sources import load_head, load_spec, load_target
from dloop_train.types import FeatureSpec

TINY = sorted(path.stem for path in (CONF / "target").glob("tiny_*.yaml"))
REAL = {"qwen3_14b": 14_768_307_200, "qwen35_9b": 8_953_803_264, "gemma4_12b": 11_907_350_272}
"""Published numbers of parameters of the text models."""
GOLDEN = Path(os.environ.get("DLOOP_GOLDEN", Path(__file__).parent / "golden"))


def config_of(name: str, **changes) -> TargetConfig:
    return build(option("target", name) | changes, TargetConfig, "target")


@pytest.fixture(scope="module")
def targets():
    return {name: load_target(config_of(name), dtype="float64", device="cpu") for name in TINY}


@pytest.fixture(params=TINY)
def target(request, targets):
    return targets[request.param]


def all_states(target) -> FeatureSpec:
    return FeatureSpec(taps=tuple(range(target.spec.num_layers - 1)), shared_kv=True, last_hidden=True)


def random_tokens(count: int, seed: int) -> torch.Tensor:
    return torch.randint(4, 260, (1, count), generator=torch.Generator().manual_seed(seed))


def close(ours, expected, atol=1e-10):
    torch.testing.assert_close(ours, expected, rtol=0, atol=atol)


def read_in_rounds(target, text, *, prefill: int, seed: int, atol: float):
    """Read `text` in rounds of kept and rejected tokens; every kept row must equal that of one pass over the text."""
    generator = torch.Generator().manual_seed(seed)
    feature_spec = all_states(target)
    fresh = target.read(text, feature_spec=feature_spec, logits=slice(None))
    cache, past = target.new_cache(), 0
    while past < text.shape[1]:
        kept = min(text.shape[1] - past, int(torch.randint(1, 7, (), generator=generator)) if past else prefill)
        rejected = int(torch.randint(0, 5, (), generator=generator)) if past else 0
        tokens = torch.cat(
            [text[:, past : past + kept], torch.randint(4, 260, (1, rejected), generator=generator)], dim=1
        )
        output = target.read(tokens, cache=cache, feature_spec=feature_spec, logits=slice(None))
        for name in ("logits", "features", "last_hidden"):
            close(getattr(output, name)[:, :kept], getattr(fresh, name)[:, past : past + kept], atol)
        if past:
            target.commit(cache, past, range(kept))
        past += kept
        assert cache.get_seq_length() == past


@pytest.mark.parametrize("seed", range(6))
def test_rounds_of_commits_are_one_prefill(target, seed, exact):
    """Logits, every tap, shared keys and values and the last hidden state are equal, also beyond a window of 8."""
    read_in_rounds(target, random_tokens(60, seed), prefill=[1, 3, 7, 8, 9, 20][seed], seed=seed, atol=1e-10)


def test_rounds_of_commits_are_one_prefill_in_the_precision_that_qwen35_has(targets):
    read_in_rounds(targets["tiny_qwen35"], random_tokens(60, 0), prefill=5, seed=0, atol=1e-3)


def test_a_crop_of_qwen35s_cache_is_silently_wrong(targets, exact):
    """transformers crops keys, values and the convolution's inputs, but rejected tokens stay in the recurrent state.

    A commit removes them there too.
    """
    target, text = targets["tiny_qwen35"], random_tokens(20, 1)
    fresh = target.read(text, logits=slice(-1, None)).logits
    errors = {}
    for way in ("crop", "commit"):
        cache = target.new_cache()
        if way == "crop":
            cache.activate_past_recording()
        target.read(text[:, :10], cache=cache)
        target.read(torch.cat([text[:, 10:14], random_tokens(4, 2)], dim=1), cache=cache)
        cache.crop(-4) if way == "crop" else target.commit(cache, 10, range(4))
        errors[way] = float((target.read(text[:, 14:], cache=cache, logits=slice(-1, None)).logits - fresh).abs().max())
    assert errors["commit"] < 1e-10 and errors["crop"] > 1e-3


def test_plain_decoding_pays_for_no_snapshot(targets):
    target = targets["tiny_qwen35"]
    cache, text = target.new_cache(), random_tokens(12, 0)
    for piece in (text[:, :10], text[:, 10:11], text[:, 11:]):
        target.read(piece, cache=cache)
        assert cache.rewind is None and target._inputs.rows is None
    target.read(text, cache=cache)
    assert set(cache.rewind.inputs) == {0, 1, 2, 4, 5, 6}


def test_nothing_is_replayed_where_everything_was_accepted(targets, monkeypatch):
    target = targets["tiny_qwen35"]
    cache, text = target.new_cache(), random_tokens(12, 0)
    target.read(text[:, :8], cache=cache)
    target.read(text[:, 8:], cache=cache)
    monkeypatch.setattr(target, "_replay", lambda *_: pytest.fail("replayed for nothing"))
    target.commit(cache, 8, range(4))


def test_a_tree_on_qwen35_is_refused(targets):
    target = targets["tiny_qwen35"]
    cache = target.new_cache()
    target.read(random_tokens(4, 0), cache=cache)
    target.read(random_tokens(3, 1), cache=cache)
    with pytest.raises(ValueError, match="draft chains, or choose a target with plain attention"):
        target.commit(cache, 4, [0, 2])


def tree_mask(target, past: int, kept: int, seen: list[list[bool]], positions: list[int], window: int | None):
    """Mask of a tree's rows over the newest `kept` rows of the text and the tree itself. [1, 1, rows, kept + rows]

    With a window, only positions less than `window` before the row are visible.
    """
    places = torch.tensor([*range(past - kept, past), *positions])
    own = torch.tensor(seen)
    visible = torch.cat([torch.ones(len(seen), kept, dtype=torch.bool), own], dim=1)
    if window is not None:
        visible &= torch.tensor(positions)[:, None] - places < window
    return visible[None, None]


@pytest.mark.parametrize("past", [4, 7, 8, 20])
@pytest.mark.parametrize("name", [name for name in TINY if name != "tiny_qwen35"])
def test_a_path_through_a_tree_is_its_tokens_alone(targets, name, past):
    """Two siblings after one token, of which the second is accepted.

    Its rows and all later ones equal those of a text without the first sibling.
    """
    target = targets[name]
    text, seen, positions = (
        random_tokens(past + 12, past),
        [[True, False, False], [True, True, False], [True, False, True]],
        [past, past + 1, past + 1],
    )
    fresh = target.read(text, feature_spec=all_states(target), logits=slice(None))
    cache = target.new_cache()
    target.read(text[:, :past], cache=cache)
    window = target.spec.shared_kv[0].window
    mask = tree_mask(target, past, past, seen, positions, None)
    if window is not None:
        mask = {
            "full_attention": mask,
            "sliding_attention": tree_mask(target, past, min(past, window - 1), seen, positions, window),
        }
    tree = torch.stack([text[0, past], torch.tensor(99), text[0, past + 1]])[None]
    output = target.read(
        tree,
        cache=cache,
        mask=mask,
        positions=torch.tensor([positions]),
        feature_spec=all_states(target),
        logits=slice(None),
    )
    close(output.features[:, [0, 2]], fresh.features[:, past : past + 2])
    target.commit(cache, past, [0, 2])
    assert cache.get_seq_length() == past + 2
    output = target.read(text[:, past + 2 :], cache=cache, feature_spec=all_states(target), logits=slice(None))
    close(output.features, fresh.features[:, past + 2 :])
    close(output.logits, fresh.logits[:, past + 2 :])


def test_a_commit_keeps_exactly_the_rows_of_its_path(targets):
    """In every layer of Gemma 4 the cache holds the rows before the tree and those of the path, and no others."""
    target = targets["tiny_gemma4"]
    cache = target.new_cache()
    target.read(random_tokens(20, 0), cache=cache)
    target.read(random_tokens(5, 1), cache=cache)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    target.commit(cache, 20, [0, 3])
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        rows = [*range(keys.shape[2] - 5), keys.shape[2] - 5, keys.shape[2] - 2]
        assert (
            torch.equal(layer.keys, keys[:, :, rows])
            and torch.equal(layer.values, values[:, :, rows])
            and layer.get_seq_length() == 22
        )


def test_gemmas_sliding_layers_forget_what_no_row_can_see(targets):
    target = targets["tiny_gemma4"]
    cache = target.new_cache()
    for _ in range(20):
        target.read(random_tokens(3, 0), cache=cache)
    assert [layer.keys.shape[2] for layer in cache.layers] == [7 + 3] * 5 + [60]


def speculate(target, prompt: list[int], plain: list[int], seed: int) -> list[int]:
    """Greedy speculative decoding with drafts cut from the known text `plain`, in some of which one token is wrong."""
    generator = torch.Generator().manual_seed(seed)
    cache = target.new_cache()
    target.read(torch.tensor([prompt]), cache=cache)
    text = plain[:1]
    while len(text) < len(plain):
        drafted = list(plain[len(text) : len(text) + int(torch.randint(1, 8, (), generator=generator))])
        lie = int(torch.randint(0, 9, (), generator=generator))
        drafted[lie : lie + 1] = [99] if lie < len(drafted) else []
        output = target.read(torch.tensor([[text[-1], *drafted]]), cache=cache, logits=slice(None))
        predicted = output.logits[0].argmax(-1).tolist()
        said = confirmed(drafted, predicted)
        target.commit(cache, len(prompt) + len(text) - 1, range(len(said)))
        text = text + said
    return text[: len(plain)]


def test_drafts_never_change_the_text(target, exact):
    """The greedy text equals plain decoding's token for token, whatever is drafted and rejected."""
    for seed in range(12):
        prompt = random_tokens(3 + seed, seed)[0].tolist()
        plain = decode_plain(target, prompt, max_new_tokens=40)
        assert speculate(target, prompt, plain, seed) == plain


@pytest.mark.parametrize("name", ["tiny_qwen3", "tiny_qwen35"])
def test_drafters_never_change_the_text(targets, name, exact):
    """The same in the decoding loop, with three stages per round and a drafter with random weights."""
    target = targets[name]
    drafter = make_drafter("dflash-shifted", target)
    for seed in range(6):
        prompt = random_tokens(3 + seed, seed)[0].tolist()
        emitted = [
            token
            for emission in decode(target, drafter, Always(max_stages=3), prompt, max_new_tokens=32)
            for token in emission.tokens
        ]
        assert emitted == decode_plain(target, prompt, max_new_tokens=32)


def test_batched_greedy_answers_equal_plain_decoding(target, exact):
    """Prompts of different lengths, some longer than the window, padded on the left; they finish at different times."""
    prompts = [random_tokens(length, length)[0].tolist() for length in (2, 5, 9, 17)]
    plain = [decode_plain(target, prompt, max_new_tokens=24) for prompt in prompts]
    assert respond(target, prompts, list("abcd"), SamplingConfig(), max_new_tokens=24, seed=0) == plain
    spec = target.spec
    target.spec = replace(spec, stop_ids=(plain[0][3], plain[2][7]))
    try:
        cut = [decode_plain(target, prompt, max_new_tokens=24) for prompt in prompts]
        assert len({len(answer) for answer in cut}) > 1
        assert respond(target, prompts, list("abcd"), SamplingConfig(), max_new_tokens=24, seed=0) == cut
    finally:
        target.spec = spec


def test_cached_samples_do_not_depend_on_their_batch(target, exact):
    """The cache phase pads on the right; the rows of every text equal those of the text read alone."""
    ids = [random_tokens(length, length)[0].tolist() for length in (4, 11, 23)]
    texts = [
        text_of(
            Response(
                id=str(len(row)), category="chat", prompt_ids=row[:2], response_ids=row[2:], finished=True, text=""
            ),
            99,
        )
        for row in ids
    ]
    for sample, row in zip(read_batch(target, texts, all_states(target), torch.float64), ids, strict=True):
        alone = target.read(torch.tensor([row]), feature_spec=replace(all_states(target), last_hidden=False))
        close(sample.features, alone.features[0])
        close(sample.last_hidden, alone.last_hidden[0])


@pytest.mark.parametrize("name", TINY)
def test_a_targets_memory_goes_with_its_last_reference(name):
    """The hooks form no reference cycle, so a phase that loads a second target does not keep the first in memory."""
    target = load_target(config_of(name), device="cpu")
    cache = target.new_cache()
    target.read(random_tokens(4, 0), cache=cache, feature_spec=FeatureSpec(taps=(0,)))
    target.read(random_tokens(4, 0), cache=cache)
    model = weakref.ref(target.model)
    gc.disable()
    try:
        del target
        assert model() is None
    finally:
        gc.enable()


def test_shared_keys_and_values_are_those_that_gemma_attends_to(targets):
    target, text = targets["tiny_gemma4"], random_tokens(30, 0)
    states = target.backbone(input_ids=text, return_shared_kv_states=True, use_cache=False).shared_kv_states
    expected = [
        rows.transpose(1, 2).flatten(2) for kind in ("sliding_attention", "full_attention") for rows in states[kind]
    ]
    for cache in (None, target.new_cache()):
        close(
            target.read(text, cache=cache, feature_spec=FeatureSpec(shared_kv=True)).features,
            torch.cat(expected, dim=-1),
        )


@pytest.mark.parametrize("name", TINY)
def test_a_head_alone_is_the_models_own(targets, name):
    """Embeddings with scale and logits with softcap are equal, for a head from the files or from the loaded target."""
    target, text = targets[name], random_tokens(12, 0)
    own = target.model(input_ids=text)
    hidden = target.read(text).last_hidden
    assert torch.equal(target.head(hidden), own.logits)
    for head in (TargetHead.of(target), load_head(config_of(name), dtype="float64")):
        assert torch.equal(head.embed(text), target.backbone.embed_tokens(text))
        assert torch.equal(head.logits(hidden), own.logits)
        assert torch.equal(head.norm_weight, target.backbone.norm.weight)


def multimodal(name: str):
    """A tiny random model in the shape of the released checkpoint, with a vision tower around the text model."""
    text = config_of(name).config
    vision = {
        "tiny_qwen35": {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
        },
        "tiny_gemma4": {
            "mm_embed_dim": 32,
            "output_proj_dims": 32,
            "patch_size": 4,
            "pooling_kernel_size": 1,
            "mm_posemb_size": 8,
        },
    }[name]
    config = AutoConfig.for_model(
        text["model_type"].removesuffix("_text"), text_config=text, vision_config=vision, tie_word_embeddings=True
    )
    torch.manual_seed(1)
    return AutoModelForImageTextToText.from_config(config)


@pytest.mark.parametrize("name", ["tiny_qwen35", "tiny_gemma4"])
def test_the_text_model_of_a_multimodal_checkpoint(name, tmp_path, monkeypatch):
    """The text model and its head alone are loaded from shards with the longer tensor names."""
    monkeypatch.setattr(sources, "load_tokenizer", lambda config: None)
    model = multimodal(name).eval()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (
        "model.language_model.norm.weight"
        in json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    )
    config, text = config_of(name, source="folder", path=str(tmp_path)), random_tokens(20, 0)
    target, head = load_target(config, device="cpu"), load_head(config)
    output = target.read(text, feature_spec=all_states(target), logits=slice(None))
    close(output.logits, model(input_ids=text).logits, atol=1e-5)
    assert output.features.shape[-1] == all_states(target).width(load_spec(config))
    close(head.logits(output.last_hidden), output.logits, atol=1e-5)
    assert torch.equal(head.embed(text), target.backbone.embed_tokens(text))
    read_in_rounds(target, text, prefill=9, seed=0, atol=1e-3)


@pytest.mark.parametrize("name", sorted(REAL))
def test_real_targets_have_their_published_size(name):
    """The models are built from the sizes in the YAML on the meta device, without memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config_of(name).config))
    model.tie_weights()
    assert sum(parameter.numel() for parameter in model.parameters()) == REAL[name]


def golden(folder: str, files: str, monkeypatch):
    """A golden target and the recorded inputs and outputs of the public implementation."""
    if not (GOLDEN / folder / "io.json").is_file():
        pytest.skip(f"no {folder} in {GOLDEN}; set DLOOP_GOLDEN")
    monkeypatch.setattr(sources, "load_tokenizer", lambda config: None)
    config = TargetConfig(
        name="golden",
        source="folder",
        path=str(GOLDEN / folder / files),
        mask_token_id=3,
        stop_ids=[2],
        dtype="float32",
    )
    return load_target(config, device="cpu"), load_file(GOLDEN / folder / "io.safetensors")


@pytest.mark.parametrize("folder, files", [("hf_mtp_qwen3_5", "."), ("hf_mtp_gemma4_assistant", "target")])
def test_golden_target(folder, files, monkeypatch):
    target, io = golden(folder, files, monkeypatch)
    output = target.read(io["input_ids"], feature_spec=FeatureSpec(shared_kv=True), logits=slice(None))
    close(output.logits, io["target_logits"], atol=1e-5)
    close(output.last_hidden, io["target_final_hidden"], atol=1e-5)
    if "full_attention_keys" in io:
        names = [f"{kind}_{rows}" for kind in ("sliding_attention", "full_attention") for rows in ("keys", "values")]
        close(output.features, torch.cat([io[name].transpose(1, 2).flatten(2) for name in names], dim=-1), atol=1e-5)


def test_unknown_architectures_are_refused():
    config = config_of(
        "tiny_llama", config={"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 260}
    )
    for load in (load_spec, load_target):
        with pytest.raises(
            ValueError,
            match=r"is a gpt2.*supported are \['gemma4_text', 'gemma4_unified_text', 'llama', 'qwen3', "
            r"'qwen3_5_text'\]",
        ):
            load(config)


def test_quantised_targets_are_refused(tmp_path):
    settings = config_of("tiny_llama").config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="is quantised.*use these weights"):
        load_target(config_of("tiny_llama", source="folder", path=str(tmp_path)))


def test_targets_split_over_devices_are_refused(targets):
    model = sources.random_model(config_of("tiny_llama"))
    model.model.layers[4].to("meta")
    with pytest.raises(ValueError, match=r"is split over \['cpu', 'meta'\]"):
        type(targets["tiny_llama"])(model, None, targets["tiny_llama"].spec)


def test_gemmas_with_shared_layers_or_layer_embeddings_are_refused():
    text = config_of("tiny_gemma4").config | {"model_type": "gemma4_text"}
    for more in (
        {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 260},
        {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 2},
    ):
        layers = {
            "num_hidden_layers": 12,
            "per_layer_config": {5: text["per_layer_config"][5], 11: text["per_layer_config"][5]},
        }
        with pytest.raises(ValueError, match="E2B and E4B"):
            load_target(config_of("tiny_gemma4", config=text | layers | more), device="cpu")


def test_gemma4_without_them_is_not(exact):
    """Dense models of the first Gemma 4 generation (model type gemma4_text) are accepted."""
    text = config_of("tiny_gemma4").config | {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0}
    target = load_target(config_of("tiny_gemma4", config=text), dtype="float64", device="cpu")
    read_in_rounds(target, random_tokens(40, 0), prefill=9, seed=0, atol=1e-10)
