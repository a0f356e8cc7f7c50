"""Tests of the dry run: it writes nothing, uses no network, and its numbers match the artifacts."""

import json
import socket

import huggingface_hub.constants
import pytest
import torch
from conftest import PAIRS, composed, pair_of
from safetensors.torch import load_file

from dloop_train.checkpoints import gemma4_assistant, zlab_dflash
from dloop_train.drafters.mtp_assistant import AssistantConfig
from dloop_train.phases import artifacts, cache, generate, plan
from dloop_train.phases.plan import measure_rate  # the function itself, which the fixture below replaces in the module

TINY = (
    "+target=tiny_llama",
    "prompts.limit=6",
    "generate.max_new_tokens=12",
    "generate.greedy_prompts=1",
    "generate.greedy_max_new_tokens=4",
)


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """An empty hub cache, and an error on every attempt to connect."""

    def refuse(*_, **__):
        raise AssertionError("a dry run must not reach the network")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(plan, "measure_rate", lambda dtype: 1e12)


def planned(tmp_path, *overrides: str):
    config = composed(f"root={tmp_path / 'root'}", *overrides)
    return config, plan.estimate(config)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_dry_run_prints_the_keys_and_leaves_no_trace(pair, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DLOOP_CACHE", str(tmp_path / "cache"))
    config = composed(f"root={tmp_path / 'root'}", *pair_of(pair))
    plan.run(config)
    printed = capsys.readouterr().out
    for name, artifact in (
        ("generate", artifacts.responses(config)),
        ("generate (greedy)", artifacts.greedy(config)),
        ("cache", artifacts.features(config)),
    ):
        assert [*name.split(), "absent", "runs", artifact.key, str(artifact.folder)] in [
            line.split() for line in printed.splitlines()
        ]
    assert list(tmp_path.iterdir()) == []


def test_a_hub_prompt_set_is_not_counted_by_downloading(tmp_path):
    config, estimated = planned(tmp_path, "+drafter=dflash", "+target=qwen3_8b")
    assert estimated.prompts == "unknown until downloaded, about 1.4 M"
    assert not estimated.fits and "WARNING: the feature store does not fit" in plan.as_text(config, estimated)
    assert "z-lab/Qwen3-8B-DFlash-b16 is not on this machine" in plan.as_text(config, estimated)
    _, limited = planned(tmp_path, "+drafter=dflash", "+target=qwen3_8b", "++prompts.limit=50")
    assert limited.counts.samples == 50 and limited.steps == 2 and not limited.counts.measured


@pytest.mark.parametrize("pair", PAIRS)
def test_a_step_is_reckoned_before_any_weights_are_here(pair, tmp_path):
    """The YAML of every pair has the sizes of the released weights. A size that the user sets takes precedence."""
    config, estimated = planned(tmp_path, *pair_of(pair))
    assert estimated.drafter.step.flops > 0
    if config.drafter.released.get("width"):
        assert estimated.drafter.k + (config.drafter.alignment == "fill_in") == config.drafter.released["width"]
        assert planned(tmp_path, *pair_of(pair), "++drafter.width=3")[1].drafter.k == 3 - (
            config.drafter.alignment == "fill_in"
        )


@pytest.mark.parametrize(
    "pair, parameters", [("mtp_qwen35_9b", 243_290_624), ("mtp_assistant_gemma4_12b", 154_421_504 + 262_144 * 1024)]
)
def test_released_sizes_are_those_of_the_files(pair, parameters, tmp_path):
    """Parameters as counted in the published files. The assistant's include its own embedding."""
    assert planned(tmp_path, *pair_of(pair))[1].drafter.parameters == parameters


def test_weights_of_unknown_size_leave_a_step_unknown(tmp_path):
    config, estimated = planned(
        tmp_path,
        "+drafter=domino",
        "+target=llama31_8b",
        "++drafter.alignment=shifted",
        "++drafter.init=somebody/Llama-Domino",
    )
    assert estimated.drafter is None and "unknown until somebody/Llama-Domino" in plan.as_text(config, estimated)


@pytest.mark.parametrize(
    "name, parameters",
    [
        ("qwen3_4b", 4_022_468_096),
        ("qwen3_8b", 8_190_735_360),
        ("llama31_8b", 8_030_261_248),
        ("smollm2_135m", 134_515_008),
    ],
)
def test_sizes_in_the_yaml_are_the_models(name, parameters, tmp_path, monkeypatch):
    monkeypatch.setenv("DLOOP_CACHE", str(tmp_path / "cache"))
    assert planned(tmp_path, "+drafter=eagle3", f"+target={name}")[1].target_parameters == parameters


def test_bytes_of_a_store_are_exact(tmp_path):
    config, before = planned(tmp_path, "+drafter=dflash", *TINY)
    generate.run(config)
    artifacts.features(config).begin()
    assert [line.state for line in plan.phase_lines(config)[:4]] == ["complete", "complete", "partial", "absent"]
    cache.run(config)
    after = plan.estimate(config)
    tensors = [
        tensor
        for file in artifacts.features(config).folder.glob("*.safetensors")
        for tensor in load_file(file).values()
    ]
    assert after.counts.measured and after.store_bytes == sum(
        tensor.numel() * tensor.element_size() for tensor in tensors
    )
    assert after.store_bytes <= before.store_bytes and after.present_bytes >= after.store_bytes
    assert after.counts.samples == artifacts.responses(config).facts()["prompts"] == 6 and after.steps == 1
    assert [line.action for line in after.phases] == ["skipped", "skipped", "skipped", "runs", "runs", "runs", "runs"]


def test_target_flops_by_hand(tmp_path):
    """tiny_llama has 5 layers with D = 32, 4 heads and 2 groups of size 8, and a gated MLP of 64; V = 260."""
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64
    _, estimated = planned(tmp_path, "+drafter=dflash", *TINY)
    assert estimated.generate_flops == 2 * 5 * layer * 6 * (512 + 12) + 2 * 32 * 260 * 6 * 12
    assert estimated.cache_flops == 2 * 5 * layer * 6 * (512 + 12)


def times_of(config):
    """Row of the printed times -> [work, how long it takes]."""
    return {name: rest for name, *rest in plan.time_rows(config, plan.estimate(config))}


def test_work_that_others_do_or_nobody_is_no_work_of_this_run(tmp_path):
    """features=online stores nothing, and with responder=openai servers answer the training prompts."""
    config, estimated = planned(
        tmp_path, "+drafter=dflash", *TINY, "features=online", "responder=openai", "responder.urls=[http://host:1/v1]"
    )
    times = times_of(config)
    assert times["generate"] == ["servers answer the training prompts", ""] and times["cache"] == [
        "nothing: the target runs in the training step",
        "",
    ]
    assert [(line.state, line.action) for line in estimated.phases if line.name == "cache"] == [("-", "nothing to do")]
    usual, _ = planned(tmp_path, "+drafter=dflash", *TINY)
    assert all(
        times_of(usual)[name][0].endswith("FLOPs") and "about" in times_of(usual)[name][1]
        for name in ("generate", "cache", "train")
    )


def test_all_phases_are_divided_by_the_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "duration", str)
    monkeypatch.setattr(plan, "default_device", lambda: torch.device("cuda"))
    one, eight = (
        {
            name: rest[1].removeprefix("up to about ")
            for name, rest in times_of(
                planned(tmp_path, "+drafter=dflash", *TINY, f"++launch.processes={ranks}")[0]
            ).items()
            if rest[1]
        }
        for ranks in (1, 8)
    )
    assert float(eight["generate"]) == pytest.approx(float(one["generate"]) / 8) and float(
        eight["cache"]
    ) == pytest.approx(float(one["cache"]) / 8)
    monkeypatch.setattr(plan, "default_device", lambda: torch.device("cpu"))
    # Ranks on a CPU share its cores, so that more of them are not faster.
    assert (
        times_of(planned(tmp_path, "+drafter=dflash", *TINY, "++launch.processes=8")[0])["cache"][1]
        == f"up to about {one['cache']}"
    )


def held(tmp_path, *overrides):
    """Bytes of a step's terms, parameters of the target, the printed row of memory, and the peak in bytes."""
    config, estimated = planned(tmp_path, "+drafter=dflash", *TINY, *overrides)
    terms = {term.name: term.held for term in estimated.drafter.step.terms}
    return (
        terms,
        estimated.target_parameters,
        dict(plan.training_rows(config, estimated))["memory per rank"],
        estimated.drafter.step.peak,
    )


def test_the_target_is_counted_as_often_as_it_is_there(tmp_path):
    """All copies of the target's weights are counted.

    With features from disk these are its head, and the whole target for validations. Online it is the whole target;
    head and whole target count again only if drafter and validations compute in another dtype.
    """
    terms, parameters, row, peak = held(tmp_path, "++train.precision=bfloat16")
    # Embedding and head are tied, hence one table.
    assert terms["validation's target"] == 2 * parameters and terms["target's embedding and head"] == 2 * 260 * 32
    assert (
        row
        == f"about {plan.size(peak)} at most, term by term below; {plan.size(2 * parameters)} of it are the target, "
        "there while it validates"
    )
    silent, *_, row, without = held(
        tmp_path, "++train.precision=bfloat16", "++train.validate_prompts=0", "++gate.threshold=-0.5"
    )
    assert (
        "validation's target" not in silent
        and "validates" not in row
        and peak - without == pytest.approx(2 * parameters)
    )
    online, *_ = held(tmp_path, "features=online", "++train.precision=float32", "++target.dtype=float32")
    assert (
        online["target's embedding and head"] == 0
        and "validation's target" not in online
        and online["target features"] > 4 * parameters
    )
    mixed, *_ = held(tmp_path, "features=online", "++train.precision=float32", "++target.dtype=bfloat16")
    assert mixed["target's embedding and head"] == 4 * 260 * 32 and mixed["validation's target"] == 4 * parameters


def test_thousands_of_origins_can_be_planned(tmp_path):
    _, estimated = planned(tmp_path, "+drafter=dflash", *TINY, "++train.origins=4096")
    assert (
        estimated.drafter.step.flops
        > planned(tmp_path, "+drafter=dflash", *TINY, "++train.origins=512")[1].drafter.step.flops
    )


def test_a_checkpoint_is_known_from_its_config_alone(tmp_path):
    fill_in = ("+drafter=dflash", "+target=tiny_llama", "drafter.alignment=fill_in", "drafter.layers=1")
    config, _ = planned(tmp_path, *fill_in)
    model = plan.target_on_meta(config.target)
    shape = config.drafter.shape(plan.spec_of(config.target, model.config), artifacts.taps(config))
    (tmp_path / "released").mkdir()
    (tmp_path / "released" / "config.json").write_text(json.dumps(zlab_dflash.write_config(shape)))
    _, scratch = planned(tmp_path, *fill_in)
    _, released = planned(tmp_path, *fill_in, f"++drafter.init={tmp_path / 'released'}")
    assert released.drafter == scratch.drafter


@pytest.mark.parametrize(
    "override, says",
    [
        ("++drafter.layers=2", "set drafter.layers=3"),
        ("++drafter.alignment=fill_in", "alignment: it has shifted, the drafter has fill_in"),
    ],
)
def test_a_backbone_that_does_not_fit_is_refused_before_anything_runs(override, says, tmp_path, monkeypatch):
    monkeypatch.setenv("DLOOP_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=says):
        planned(tmp_path, "+drafter=domino", "+target=smollm2_135m", override)


def test_what_would_stop_the_run_is_said(tmp_path):
    config, _ = planned(tmp_path, "+drafter=dflash", *TINY)
    folder = artifacts.run_folder(config)
    folder.mkdir(parents=True)
    (folder / "training.json").write_text(json.dumps({"features": "another"}))
    assert any("features: found 'another'" in warning for warning in plan.estimate(config).warnings)


def test_the_rate_is_measured():
    assert 1e8 < measure_rate("float32", seconds=0.05) < 1e17


@pytest.mark.parametrize(
    "choices, parameters",
    [
        (("dspark", "qwen3_8b", "drafter.layers=5", "drafter.width=7"), 1126.4e6),
        (("dflash", "qwen3_8b", "drafter.layers=5", "drafter.alignment=shifted"), 1048.6e6),
        (("dspark", "gemma4_12b", "drafter.layers=5"), 1417.2e6),
        (("dflash", "gemma4_12b", "drafter.layers=5", "drafter.alignment=shifted"), 1283.0e6),
        (("eagle3", "qwen3_8b"), 302.0e6),
        (("eagle3", "gemma4_12b", "drafter.format=deepspec_eagle3"), 349.0e6),
        (("dspark", "qwen3_14b", "drafter.layers=5"), 1860.4e6),
        (("mtp", "qwen35_9b"), 243_290_624),
    ],
    ids=str,
)
def test_drafters_from_scratch_have_the_released_sizes(choices, parameters, tmp_path):
    """Trainable parameters, as published or as counted from the files."""
    drafter, target, *overrides = choices
    _, estimated = planned(
        tmp_path,
        f"+drafter={drafter}",
        f"+target={target}",
        "++drafter.init=scratch",
        "++prompts.limit=9",
        *(f"++{one}" for one in overrides),
    )
    assert estimated.drafter.parameters == pytest.approx(parameters, abs=0.05e6 if isinstance(parameters, float) else 0)


def test_a_dspark_file_has_the_released_bytes(tmp_path):
    """deepseek-ai's file for Qwen3-8B has the parameters and copies of embedding and lm_head in bf16, and a header."""
    _, estimated = planned(
        tmp_path,
        "+drafter=dspark",
        "+target=qwen3_8b",
        "++drafter.init=scratch",
        "++drafter.layers=5",
        "++drafter.width=7",
        "++prompts.limit=9",
    )
    header = 4_742_170_330 - 2 * (estimated.drafter.parameters + 2 * 151936 * 4096)
    assert 6_000 < header < 8_000


def test_gemmas_assistant_has_the_released_size():
    text = {
        "hidden_size": 1024,
        "intermediate_size": 8192,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "per_layer_config": {"3": {"head_dim": 512, "num_key_value_heads": 1}},
        "attention_k_eq_v": True,
        "rms_norm_eps": 1e-6,
        "sliding_window": 1024,
        "hidden_activation": "gelu_pytorch_tanh",
        "vocab_size": 262144,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_theta": 1e4},
        },
    }
    shape = gemma4_assistant.read_shape(
        {"architectures": ["Gemma4UnifiedAssistantForCausalLM"], "backbone_hidden_size": 3840, "text_config": text}
    )
    with torch.device("meta"):
        drafter = AssistantConfig().build(shape, None)
    assert sum(parameter.numel() for parameter in drafter.parameters()) == 422_856_960
