"""Tests of checkpoint files: errors name what does not fit, and nothing is loaded in part."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import TAPS, VARIANTS, make_drafter, settings_of, shape_of
from safetensors.torch import load_file, save_file

from dloop_train.checkpoints.files import (
    create_drafter,
    fill_backbone,
    load_drafter,
    read_shape,
    require_fit,
    save_drafter,
)
from dloop_train.drafters.dflash import DFlashConfig
from dloop_train.drafters.dspark import DSparkConfig
from dloop_train.drafters.eagle3 import Eagle3Config
from dloop_train.drafters.mtp_assistant import AssistantConfig
from dloop_train.drafters.sizes import Rope, read_rope
from dloop_train.targets.head import TargetHead


@pytest.fixture
def folder(tiny_target, tmp_path):
    save_drafter(
        make_drafter("dflash-shifted", tiny_target), tmp_path, section={}, target=tiny_target.spec, dtype=torch.float64
    )
    return tmp_path


def load(folder, tiny_target, settings=None):
    return load_drafter(
        folder, settings or DFlashConfig(alignment="shifted"), TargetHead.of(tiny_target), dtype=torch.float64
    )


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("norm.weight"), "missing norm.weight"),
        (lambda t: t.update(extra=torch.zeros(1)), "unknown extra"),
        (lambda t: t.update({"fc.weight": torch.zeros(2, 2)}), r"fc.weight is \(2, 2\), expected"),
        (lambda t: t["fc.weight"].view(-1)[3:4].fill_(float("nan")), "fc.weight has NaN"),
        (lambda t: t["embed_tokens.weight"].add_(1), "made for another target"),
    ],
)
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
    with pytest.raises(ValueError, match="is shifted, but drafter.alignment is fill_in"):
        load(folder, tiny_target, DFlashConfig(alignment="fill_in"))


def test_unknown_architecture_lists_the_known(folder, tiny_target):
    change_config(folder, architectures=["Mystery"])
    with pytest.raises(ValueError, match="Known: .*zlab_dflash"):
        load(folder, tiny_target)


def test_drafter_of_another_target_is_refused(folder, tiny_target):
    settings = DFlashConfig(alignment="shifted", init=str(folder))
    create_drafter(settings, tiny_target.spec, TargetHead.of(tiny_target), TAPS)
    change_config(folder, target_layer_ids=[0, 1, 2], mask_token_id=7)
    with pytest.raises(
        ValueError, match=r"taps: the checkpoint has \(0, 1, 2\)[\s\S]*|mask_token_id: the checkpoint has 7"
    ):
        create_drafter(settings, tiny_target.spec, TargetHead.of(tiny_target), TAPS)


def test_drafters_from_scratch_that_cannot_work_are_refused(tiny_target):
    """The errors name the setting that cannot work.

    A target with linear attention only has no keys and values for an assistant to read. Each of DFlash's two layouts
    fixes the alignment with which it is read back.
    """
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
    assert read_rope(
        {"partial_rotary_factor": 0.25, "rope_parameters": {"rope_theta": 7.0, "partial_rotary_factor": 0.5}}
    ) == Rope(7.0, part=0.5)
    by_kind = {
        "full_attention": {"rope_theta": 9.0, "rope_type": "proportional", "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_theta": 3.0},
    }
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

    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=1, head_dim=128, rope_parameters=scaling | {"rope_theta": 500000.0}
    )
    theirs = LlamaRotaryEmbedding(config).inv_freq
    ours = Rotary(128, read_rope({"rope_parameters": scaling | {"rope_theta": 500000.0}}))
    torch.testing.assert_close(ours.frequencies.float(), theirs, rtol=1e-5, atol=0)


def test_a_block_is_looped_with_the_width_that_the_settings_name(folder, tiny_target):
    assert load(folder, tiny_target).k == 4
    assert load(folder, tiny_target, DFlashConfig(alignment="shifted", width=7)).k == 7
    # Width 0 is the file's own: an evaluation compares exports, each with its own k.
    assert DFlashConfig(alignment="shifted", width=7).as_exported({}).width == 0


def test_own_states_of_a_loop_aware_export_are_fixed_and_of_a_base_trained_one_free(folder, tiny_target):
    raw = DFlashConfig(alignment="shifted", state="raw")
    change_config(folder, dloop={"trained_depth_exposure": 0, "state": "context_norm", "slot": "own"})
    assert load(folder, tiny_target, raw).shape.state == "raw"
    change_config(folder, dloop={"trained_depth_exposure": 3, "state": "context_norm", "slot": "own"})
    with pytest.raises(ValueError, match="trained with state=context_norm, but drafter.state is raw"):
        load(folder, tiny_target, raw)


def test_official_eagle3_files_may_leave_out_rope_theta_and_hold_empty_maps(tiny_target, tmp_path):
    """Without rope_theta, as in the authors' config.json, Llama's default is used.

    Maps of the whole vocabulary are ignored.
    """
    settings = Eagle3Config(tokens_per_stage=3)
    drafter = settings.build(settings.shape(tiny_target.spec, TAPS), TargetHead.of(tiny_target)).double()
    save_drafter(drafter, tmp_path, section={}, target=tiny_target.spec, dtype=torch.float64)
    config = json.loads((tmp_path / "config.json").read_text())
    kept = {key: value for key, value in config.items() if not key.startswith("rope")} | {"draft_vocab_size": None}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    change_tensors(
        tmp_path, lambda t: t.update(d2t=torch.zeros(260, dtype=torch.int64), t2d=torch.ones(260, dtype=torch.bool))
    )
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


# Variants and errors of config.json in public files


def written(variant, target, folder, change=None):
    """Save a random drafter of the variant, pass its config.json through `change`, and return the drafter."""
    drafter = make_drafter(variant, target)
    save_drafter(drafter, folder, section={}, target=None, dtype=torch.float64)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(change(config) if change else config))
    return drafter


def flat(config, section="dflash_config"):
    """The config with the keys of a section moved to the top level."""
    return {key: value for key, value in config.items() if key != section} | config.get(section, {})


def nested(section, *keys):
    """A change that moves top-level keys into a section."""
    return lambda config: (
        {key: value for key, value in config.items() if key not in keys} | {section: {key: config[key] for key in keys}}
    )


def with_keys(**values):
    return lambda config: config | values


def within(section, **values):
    return lambda config: config | {section: config.get(section, {}) | values}


def without(*keys):
    return lambda config: {key: value for key, value in config.items() if key not in keys}


def composite(*top):
    """A change to the layout of a multimodal target: all keys move to text_config, except those in `top`."""
    return lambda config: (
        {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "text_config": without(*top)(config),
        }
        | {key: config[key] for key in top}
    )


def own_keys_of_full_layers(config):
    """Sizes of an assistant's full-attention layers in global_ keys, as older versions of transformers write them."""
    text = config["text_config"]
    full = text["per_layer_config"].get(str(len(text["layer_types"]) - 1), text)
    return config | {
        "text_config": text
        | {
            "per_layer_config": None,
            "global_head_dim": full["head_dim"],
            "num_global_key_value_heads": full["num_key_value_heads"],
        }
    }


HEAD_KEYS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
AUX = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    "variant, change",
    [
        ("dflash-fill_in", flat),
        ("dflash-fill_in", lambda c: flat(c) | {"dflash_config": None}),
        ("dflash-fill_in", within("dflash_config", block_size=4)),
        ("dflash-fill_in", with_keys(projector_type=None, rope_theta=None)),
        ("dflash-fill_in", without("rope_parameters", "head_dim", "layer_types", "num_target_layers")),
        ("dflash-fill_in", without("rope_theta", "rope_scaling")),
        ("dflash-fill_in", with_keys(rope_parameters={"rope_theta": None, "rope_type": "default"})),
        ("dflash-fill_in", with_keys(rope_scaling={"type": "default"})),
        ("dflash-sliding", within("dflash_config", is_causal=None)),
        ("dflash-shifted", nested("dspark_config", "target_layer_ids", "block_size", "mask_token_id")),
        ("dflash-window", with_keys(causal=False)),
        ("dflash-gemma4", with_keys(head_dim=None, num_key_value_heads=None)),
        ("domino-shifted", flat),
        ("domino-fill_in", within("dflash_config", projector_type="causal_v5")),
        ("domino-shifted", with_keys(architectures=["DominoDraftModel"], emb_dim=12, shift_label=True)),
        ("dspark-gated", nested("dspark_config", *HEAD_KEYS)),
        ("dspark-gated", nested("dflash_config", *HEAD_KEYS, "target_layer_ids", "mask_token_id")),
        ("dspark-vanilla", with_keys(model_type="qwen3_5_text")),
        ("dspark-vanilla", lambda c: nested("dflash_config", "mask_token_id")(nested("dspark_config", *HEAD_KEYS)(c))),
        ("eagle3-fc_norm", without("target_layer_ids", "eagle_config")),
        ("eagle3-fc_norm", without("target_layer_ids", AUX)),
        ("eagle3-deepspec", without("layer_types")),
        ("mtp", composite()),
        ("mtp", composite("mtp_num_hidden_layers")),
        ("mtp", with_keys(text_config=None)),
        ("mtp_assistant", own_keys_of_full_layers),
        ("mtp_assistant", lambda c: without("backbone_hidden_size")(within("text_config", backbone_hidden_size=32)(c))),
    ],
)
def test_a_config_that_says_it_otherwise_reads_the_same(variant, change, tiny_target, tmp_path):
    drafter = written(variant, tiny_target, tmp_path, change)
    again = load_drafter(tmp_path, settings_of(variant), drafter.head, dtype=torch.float64)
    assert replace(again.shape, num_target_layers=drafter.shape.num_target_layers) == drafter.shape
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in drafter.state_dict().items())


@pytest.mark.parametrize(
    "variant, change, message",
    [
        ("dflash-fill_in", within("dflash_config", block_size=8), "block_size twice with different values"),
        (
            "dflash-fill_in",
            lambda c: within("dflash_config", is_causal=True)(c | {"is_causal": False}),
            "is_causal or causal twice",
        ),
        (
            "dflash-fill_in",
            within("dflash_config", target_layer_ids=None),
            "no target_layer_ids, at the top level or nested",
        ),
        (
            "dflash-fill_in",
            with_keys(rope_scaling={"type": "llama3"}),
            "rope_scaling and rope_parameters of different types",
        ),
        (
            "dflash-fill_in",
            with_keys(rope_parameters=None, rope_scaling={"type": "llama3", "factor": 8}),
            "no low_freq_factor",
        ),
        (
            "dflash-fill_in",
            with_keys(num_key_value_heads=3),
            "num_attention_heads 4 is not a multiple of num_key_value_heads 3",
        ),
        ("dflash-fill_in", with_keys(head_dim=7), "of head_dim 7 they would turn 7"),
        ("dflash-fill_in", with_keys(block_size=1), "no token to draft"),
        ("dflash-fill_in", within("dflash_config", mask_token_id=260), "mask_token_id 260 is not in the vocabulary"),
        ("dflash-fill_in", with_keys(num_hidden_layers=3), "num_hidden_layers 3 and 2 layer_types"),
        ("dflash-fill_in", with_keys(projector_type="mystery"), "of 0 known layouts"),
        ("dflash-sliding", with_keys(sliding_window=0), "sliding_window must be positive"),
        ("dflash-sliding", with_keys(sliding_window=None), "no sliding_window"),
        ("dflash-shifted", with_keys(sample_from_anchor=False), "is fill_in, but drafter.alignment is shifted"),
        ("dflash-shifted", with_keys(architectures=None), "of 0 known layouts"),
        *(
            (variant, without(key), f"config.json has no .*{key}")
            for variant, keys in (
                (
                    "dflash-shifted",
                    (
                        "hidden_size",
                        "vocab_size",
                        "num_hidden_layers",
                        "num_attention_heads",
                        "intermediate_size",
                        "rms_norm_eps",
                        "block_size",
                        "mask_token_id",
                    ),
                ),
                ("eagle3-deepspec", ("target_layer_ids", "vocab_size", "hidden_size")),
                ("eagle3-fc_norm", ("vocab_size", "hidden_size", "rms_norm_eps")),
                ("mtp", ("num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size")),
                ("mtp_assistant", ("text_config", "backbone_hidden_size")),
            )
            for key in keys
        ),
        ("domino-shifted", within("dflash_config", emb_dim=None), "no emb_dim"),
        ("domino-shifted", with_keys(emb_dim=24), "emb_dim twice"),
        ("domino-shifted", with_keys(num_draft_tokens=2), "num_draft_tokens twice"),
        ("domino-shifted", within("dflash_config", shift_label=None), "no shift_label"),
        ("domino-shifted", within("dflash_config", shift_label=False), "is fill_in, but drafter.alignment is shifted"),
        ("domino-fill_in", with_keys(use_bias_gate=True), "use_bias_gate"),
        ("dspark-vanilla", with_keys(sample_from_anchor=False), "is fill_in, but drafter.alignment is shifted"),
        ("dspark-vanilla", with_keys(markov_head_type="mystery"), "'mystery' is not supported"),
        ("dspark-vanilla", with_keys(dspark_config={"markov_rank": 7}), "markov_rank twice"),
        ("dspark-vanilla", with_keys(markov_rank=0), "of 0 known layouts"),
        ("dspark-vanilla", with_keys(markov_rank=7), r"markov_w1.weight is \(260, 6\), expected \(260, 7\)"),
        ("dspark-vanilla", with_keys(markov_head_type="gated"), "missing .*gate_proj"),
        ("dspark-gated", with_keys(enable_confidence_head=False), "unknown confidence_head.proj"),
        ("dspark-gemma4", with_keys(final_logit_softcapping=30.0), "logit softcap .*30.0.*another target"),
        ("dspark-gemma4", with_keys(attention_k_eq_v=False), "missing layers.0.self_attn.v_proj"),
        ("dspark-gemma4", with_keys(hidden_activation="silu"), "'silu' is not supported"),
        ("eagle3-fc_norm", with_keys(eagle_config={AUX: [1, 2, 4]}), "twice with different values"),
        ("eagle3-reduced", with_keys(draft_vocab_size=300), "larger than the target's"),
        ("mtp", with_keys(mtp_num_hidden_layers=2), "mtp_num_hidden_layers: 2; one layer"),
        ("mtp", without("mtp_num_hidden_layers"), "mtp_num_hidden_layers: None"),
        ("mtp", lambda c: composite()(c) | {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers twice"),
        ("mtp", with_keys(mtp_use_dedicated_embeddings=True), "dedicated"),
        ("mtp_assistant", with_keys(use_ordered_embeddings=True), "use_ordered_embeddings: true"),
        ("mtp_assistant", within("text_config", use_ordered_embeddings=True), "use_ordered_embeddings: true"),
        ("mtp_assistant", within("text_config", final_logit_softcapping=30.0), "final_logit_softcapping"),
        ("mtp_assistant", within("text_config", vocab_size=None), "no vocab_size"),
    ],
)
def test_a_config_that_is_wrong_is_refused(variant, change, message, tiny_target, tmp_path):
    drafter = written(variant, tiny_target, tmp_path, change)
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path, settings_of(variant), drafter.head, dtype=torch.float64)


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b'{"architectures": ["DFlash'])
def test_a_broken_config_is_named(content, tiny_target, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match="config.json .*(fetch it again|object of keys)"):
        load(tmp_path, tiny_target)


def test_a_block_that_does_not_sample_from_its_anchor_is_fill_in(tiny_target, tmp_path):
    """For DSpark and DeepSpec's DFlash, slot 0 predicts nothing and the key survives loading and saving."""
    for variant, settings in (
        ("dspark-gated", DSparkConfig(alignment="fill_in")),
        ("dflash-shifted", DFlashConfig(alignment="fill_in")),
    ):
        drafter = written(variant, tiny_target, tmp_path, with_keys(sample_from_anchor=False))
        again = load_drafter(tmp_path, settings, drafter.head, dtype=torch.float64)
        assert (again.k, again.predicts, again.shape.format) == (3, slice(1, 4), drafter.shape.format)
        save_drafter(again, tmp_path, section={}, target=None, dtype=torch.float64)
        assert read_shape(tmp_path) == again.shape


def test_gemmas_scale_and_softcap_must_be_the_targets(tiny_target, tmp_path):
    """The target's scale is rounded to fp32.

    A width whose square root is not exact must not look like another target.
    """
    shape = shape_of("dspark-gemma4", tiny_target)
    gemma = replace(tiny_target.spec, embed_scale=torch.tensor(32**0.5).item(), softcap=3.0)
    written("dspark-gemma4", tiny_target, tmp_path)
    assert read_shape(tmp_path).head_scales == shape.head_scales != (32**0.5, 3.0)
    require_fit(read_shape(tmp_path), gemma, TAPS, tmp_path)
    with pytest.raises(ValueError, match="head_scales: the checkpoint has"):
        require_fit(shape, replace(gemma, softcap=30.0), TAPS, tmp_path)


# Weights


def rename(folder, name_of):
    change_tensors(
        folder, lambda tensors: [tensors.update({name_of(name): tensors.pop(name)}) for name in list(tensors)]
    )


def as_pickle(folder, content=None):
    """Replace model.safetensors by a pytorch_model.bin with its tensors, or with what `content` makes of them."""
    tensors = load_file(folder / "model.safetensors")
    torch.save(content(tensors) if content else tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def split(folder):
    """Split the weights into two files with an index. Returns the names of the files."""
    tensors = load_file(folder / "model.safetensors")
    names = {"a.safetensors": sorted(tensors)[::2], "b.safetensors": sorted(tensors)[1::2]}
    for file, held in names.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {name: file for file, held in names.items() for name in held}})
    )
    (folder / "model.safetensors").unlink()
    return list(names)


@pytest.mark.parametrize(
    "variant, rearrange",
    [
        (
            "domino-shifted",
            lambda f: rename(f, lambda n: f"logit_head.{n}" if n.startswith(("prefix_gru", "embed_proj")) else n),
        ),
        ("domino-fill_in", lambda f: rename(f, lambda n: f"_orig_mod.model.{n}")),
        ("eagle3-reduced", lambda f: rename(f, lambda n: n.replace("midlayer", "layers.0"))),
        ("dspark-rnn", as_pickle),
        ("mtp_assistant", as_pickle),
        ("mtp", as_pickle),
        ("dspark-gemma4", split),
        ("mtp", split),
        ("eagle3-reduced", split),
    ],
)
def test_weights_arranged_otherwise_load_the_same(variant, rearrange, tiny_target, tmp_path):
    drafter = written(variant, tiny_target, tmp_path)
    rearrange(tmp_path)
    again = load_drafter(tmp_path, settings_of(variant), drafter.head, dtype=torch.float64)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in drafter.state_dict().items())


class Code:
    """An object that would run code when it is unpickled."""

    def __reduce__(self):
        return (print, ("a pickle ran code",))


def garbage(folder, file, content=b"version https://git-lfs.github.com/spec/v1"):
    (folder / file).write_bytes(content)


def cut(folder, file):
    (folder / file).write_bytes((folder / file).read_bytes()[:-50])


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda f: as_pickle(f, lambda t: t | {"more": Code()}), "holds code, which is not run"),
        (lambda f: as_pickle(f, lambda t: {"state_dict": t}), "more than named tensors"),
        (lambda f: as_pickle(f, lambda t: list(t.values())), "more than named tensors"),
        (lambda f: (as_pickle(f), cut(f, "pytorch_model.bin")), "pytorch_model.bin .* truncated"),
        (lambda f: (as_pickle(f), garbage(f, "pytorch_model.bin")), "pytorch_model.bin .*fetch it again"),
        (lambda f: (as_pickle(f), garbage(f, "pytorch_model.bin", b"")), "fetch it again"),
        (lambda f: garbage(f, "model.safetensors"), "cannot be read as safetensors"),
        (lambda f: garbage(f, "model.safetensors", b""), "cannot be read as safetensors"),
        (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors, index or pytorch_model.bin"),
        (lambda f: cut(f, split(f)[1]), "b.safetensors .*truncated"),
        (lambda f: (f / split(f)[1]).unlink(), "names .*b.safetensors.*incomplete"),
        (lambda f: (split(f), garbage(f, "model.safetensors.index.json")), "index.json .*cannot be read as JSON"),
        (lambda f: (split(f), garbage(f, "model.safetensors.index.json", b"{}")), "no weight_map"),
        (
            lambda f: change_tensors(f, lambda t: t.update({"model.norm.weight": t["norm.weight"].clone()})),
            r"\['norm.weight'\] twice",
        ),
        (
            lambda f: change_tensors(f, lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.int8)})),
            "fc.weight is torch.int8",
        ),
        (
            lambda f: change_tensors(f, lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.float8_e4m3fn)})),
            "fc.weight is torch.float8",
        ),
    ],
)
def test_damaged_weights_are_named(damage, message, folder, tiny_target, capsys):
    damage(folder)
    with pytest.raises(ValueError, match=message):
        load(folder, tiny_target)
    assert "ran code" not in capsys.readouterr().out


def test_maps_of_a_draft_vocabulary_must_agree(tiny_target, tmp_path):
    """With maps that contradict each other, training and verification would use wrong tokens without an error."""
    drafter = written("eagle3-reduced", tiny_target, tmp_path)
    change_tensors(tmp_path, lambda t: t["d2t"][-1:].add_(1))
    with pytest.raises(ValueError, match="d2t and t2d keep different tokens"):
        load_drafter(tmp_path, settings_of("eagle3-reduced"), drafter.head)


def test_copies_that_are_not_finite_are_refused_without_a_target_too(folder):
    change_tensors(folder, lambda t: t["lm_head.weight"].view(-1)[:1].fill_(float("nan")))
    with pytest.raises(ValueError, match="copies of the target's .*lm_head.* NaN"):
        load_drafter(folder, DFlashConfig(alignment="shifted"), None)


def test_a_module_is_read_from_the_shard_that_holds_it(tiny_target, tmp_path):
    """The target's other shards are not opened, and a target without an MTP module is refused."""
    drafter = written("mtp", tiny_target, tmp_path)
    names = list(load_file(tmp_path / "model.safetensors"))
    (tmp_path / "model.safetensors").rename(tmp_path / "2.safetensors")
    (tmp_path / "1.safetensors").write_bytes(b"a gigabyte that nobody reads")
    places = {"model.language_model.embed_tokens.weight": "1.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": places | dict.fromkeys(names, "2.safetensors")})
    )
    again = load_drafter(tmp_path, settings_of("mtp"), drafter.head, dtype=torch.float64)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in drafter.state_dict().items())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ValueError, match="hold no mtp.* tensor"):
        load_drafter(tmp_path, settings_of("mtp"), drafter.head)


# Checkpoints that do not fit the run


@pytest.mark.parametrize(
    "variant", ["dflash-fill_in", "domino-shifted", "dspark-rnn", "eagle3-reduced", "mtp", "mtp_assistant"]
)
def test_every_other_family_is_refused(variant, tiny_target, tmp_path):
    written(variant, tiny_target, tmp_path)
    for other in {family: name for name, (family, *_) in VARIANTS.items() if family != VARIANTS[variant][0]}.values():
        settings = replace(settings_of(other), init=str(tmp_path))
        with pytest.raises(ValueError, match=f"is of family {VARIANTS[variant][0]}"):
            create_drafter(settings, tiny_target.spec, TargetHead.of(tiny_target), TAPS)


def test_an_assistants_keys_are_its_targets(tiny_target, tmp_path):
    """The target's keys and values must have the sizes, window and rotary settings of the assistant's training."""
    written("mtp_assistant", tiny_target, tmp_path)
    spec, shape = tiny_target.spec, read_shape(tmp_path)
    assert spec.shared_kv
    require_fit(shape, spec, (), tmp_path)
    sliding, full = spec.shared_kv
    others = [
        replace(spec, shared_kv=(replace(sliding, window=9), full)),
        replace(spec, shared_kv=(sliding, replace(full, groups=full.groups + 1))),
        replace(spec, shared_kv=(sliding, replace(full, size=2 * full.size))),
        replace(spec, shared_kv=()),
    ]
    for other in others:
        with pytest.raises(ValueError, match="shared_kv: the checkpoint has"):
            require_fit(shape, other, (), tmp_path)
    with pytest.raises(ValueError, match="ropes: the checkpoint has .*theta=10000.0"):
        turned = {"rope_theta": 5.0, "rope_type": "default"}
        require_fit(
            shape,
            replace(spec, text_config=spec.text_config | {"rope_theta": None, "rope_parameters": turned}),
            (),
            tmp_path,
        )


def test_a_backbone_is_taken_whole_or_not_at_all(folder, tiny_target):
    drafter = make_drafter("dspark-vanilla", tiny_target, seed=3)
    head = {name: tensor.clone() for name, tensor in drafter.state_dict().items() if "head" in name}
    rename(folder, lambda name: f"model.{name}")
    fill_backbone(drafter, folder)
    theirs = load(folder, tiny_target).state_dict()
    assert all(
        torch.equal(tensor, head[name] if name in head else theirs[name])
        for name, tensor in drafter.state_dict().items()
    )
    for change, message in (
        (lambda t: t.pop("model.fc.weight"), "missing fc.weight"),
        (lambda t: t["model.norm.weight"].fill_(float("inf")), "norm.weight has NaN"),
    ):
        written("dflash-shifted", tiny_target, folder)
        rename(folder, lambda name: f"model.{name}")
        change_tensors(folder, change)
        with pytest.raises(ValueError, match=message):
            fill_backbone(drafter, folder)
