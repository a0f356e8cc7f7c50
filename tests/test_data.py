"""Tests of prompts and splits, chat rendering, sampling noise, feature stores and their checks."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from conftest import composed, tiny_config
from datasets.exceptions import DatasetsError
from huggingface_hub.errors import HTTPError
from jinja2 import TemplateError
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import processors

from dloop_train.config import CONF, FeaturesConfig, SamplingConfig, TargetConfig, build, option
from dloop_train.data import store as data_store
from dloop_train.data.chat import prompt_ids
from dloop_train.data.prompts import JsonLines, PerfectBlend, split_of
from dloop_train.data.responses import (
    AnswerLog,
    Merged,
    Response,
    as_line,
    index_file,
    merge,
    read_responses,
    write_rows,
)
from dloop_train.data.store import FeatureStore, plan_shards, shard_file, write_index, write_shard
from dloop_train.phases import artifacts, cache, generate
from dloop_train.runs import Artifact, require_same, write_atomic
from dloop_train.targets.bytes_tokenizer import byte_tokenizer
from dloop_train.targets.responders import choose, decode_plain, noise_of, respond, shared_prefix
from dloop_train.targets.sources import download
from dloop_train.targets.target import require_taps
from dloop_train.types import FeatureSpec, Sample


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_builtin_prompts_hold_every_category_and_split():
    prompts = build(option("prompts", "builtin"), object).read()
    assert len(prompts) >= 5000
    for split in ("train", "validation", "test"):
        assert {p.category for p in prompts if p.split == split} == {
            "math",
            "code",
            "chat",
            "instruction",
            "extraction",
        }
    texts = {
        split: {p.messages[-1]["content"] for p in prompts if p.split == split}
        for split in ("train", "validation", "test")
    }
    assert not texts["train"] & (texts["validation"] | texts["test"])


def test_jsonl_prompts(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "old answer"}]},
        {"prompt": "b", "id": "x", "split": "test"},
    ]
    prompts = JsonLines(name="own", path=str(lines(tmp_path / "p.jsonl", rows)), validation=0.0, test=0.0).read()
    assert [p.messages[-1]["content"] for p in prompts] == ["a", "b"]  # the old answer is not kept
    assert [p.split for p in prompts] == ["train", "test"]


def test_tool_calls_reach_the_chat_template(tmp_path):
    """No field of a message is dropped."""
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    }
    rows = [
        {
            "messages": [
                {"role": "user", "content": "add"},
                call,
                {"role": "tool", "content": "2"},
                {"role": "user", "content": "and?"},
            ]
        }
    ]
    (prompt,) = JsonLines(name="own", path=str(lines(tmp_path / "p.jsonl", rows)), validation=0.0, test=0.0).read()
    tokenizer = byte_tokenizer(stop_id=2)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<{{ c.function.name }}>{% endfor %}{% endfor %}"
    )
    assert tokenizer.decode(prompt_ids(tokenizer, list(prompt.messages), tiny_config())) == "add<add>2and?"


@pytest.mark.parametrize(
    "row, message",
    [
        ({"text": "a"}, 'expected "messages", "prompt" or "turns"'),
        ({"turns": []}, 'expected "messages"'),
        ({"messages": [{"role": "robot", "content": "a"}]}, "unknown role"),
        ({"prompt": "a", "split": "dev"}, "split must be one of"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "no user turn"),
        ({"prompt": "a", "tools": [{"name": "search"}]}, "a row with tools"),
    ],
)
def test_bad_prompt_rows_are_named(tmp_path, row, message):
    with pytest.raises(ValueError, match=message) as error:
        JsonLines(name="own", path=str(lines(tmp_path / "p.jsonl", [row]))).read()
    assert "p.jsonl:1" in str(error.value)


def test_of_a_benchmarks_turns_the_first_is_asked(tmp_path):
    rows = [
        {"turns": ["first?", "second?"], "category": "chat", "split": "test"},
        {"prompt": "train", "split": "train"},
    ]
    asked, _ = JsonLines(name="own", path=str(lines(tmp_path / "p.jsonl", rows))).read()
    assert asked.messages == ({"role": "user", "content": "first?"},) and (asked.category, asked.split) == (
        "chat",
        "test",
    )


def test_perfectblend_from_a_local_file(tmp_path):
    rows = [
        {
            "conversations": [{"from": "human", "value": f"question {n}"}, {"from": "gpt", "value": "answer"}],
            "source": "s",
        }
        for n in range(40)
    ]
    rows += [rows[0], {"conversations": [{"from": "gpt", "value": "starts wrong"}], "source": "s"}]
    prompts = PerfectBlend(
        name="perfectblend", path=str(lines(tmp_path / "p.jsonl", rows)), validation=0.1, test=0.1
    ).read()
    assert len(prompts) == 40 and all(len(p.messages) == 1 for p in prompts)


def load_prompts():
    PerfectBlend(path="somebody/prompts").load()


def load_model():
    download("somebody/model", "main")


@pytest.mark.parametrize(
    "load, way_out, errors",
    [
        (load_prompts, "prompts=jsonl", (OSError, HTTPError, DatasetsError)),
        (load_model, "target.source=folder", (OSError, HTTPError)),
    ],
)
def test_what_the_hub_says_is_passed_on_with_the_way_out(load, way_out, errors, monkeypatch):
    """Also for errors without text, such as a read timeout; errors not raised by the hub are passed on unchanged."""

    def fail(*_, **__):
        raise error

    monkeypatch.setattr("datasets.load_dataset", fail)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    for kind, (text, shown) in itertools.product(errors, (("no such thing\nand more", "no such thing"), ("", ""))):
        error = kind(text)
        with pytest.raises(
            ConnectionError, match=rf"could not be loaded from the hub \({kind.__name__}: {shown}\).*{way_out}"
        ):
            load()
    error = KeyError("ours")
    with pytest.raises(KeyError, match="ours"):
        load()


def test_split_depends_on_the_id_alone():
    splits = [split_of(str(n), 0.1, 0.2) for n in range(5000)]
    assert abs(splits.count("test") / 5000 - 0.2) < 0.02 and abs(splits.count("validation") / 5000 - 0.1) < 0.02


def test_chat_renders_once_and_doubles_no_bos():
    """The template writes the special tokens. A tokenizer that adds BOS to every text, as Llama's does, adds none."""
    tokenizer = byte_tokenizer(2)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", 1)]
    )
    assert tokenizer("x")["input_ids"][0] == 1
    ids = prompt_ids(tokenizer, [{"role": "user", "content": "hi"}], tiny_config())
    assert tokenizer.decode(ids) == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert ids.count(1) == 2


def test_thinking_mode_reaches_the_template():
    tokenizer = byte_tokenizer(2)
    tokenizer.chat_template = (
        "{{ messages[0]['content'] }}{% if enable_thinking is defined and not enable_thinking %}|none{% endif %}"
    )
    message = [{"role": "user", "content": "q"}]
    assert tokenizer.decode(prompt_ids(tokenizer, message, tiny_config(thinking=False))) == "q|none"
    assert tokenizer.decode(prompt_ids(tokenizer, message, tiny_config(thinking=None))) == "q"


def test_every_target_yaml_has_taps_that_its_layers_allow():
    for path in (CONF / "target").glob("*.yaml"):
        config = build(option("target", path.stem), TargetConfig, "target")
        layers = config.config["num_hidden_layers"]
        for taps in config.taps.values():
            assert max(taps) < layers - 1 and sorted(taps) == taps, path.stem
        assert config.mask_token_id < config.config["vocab_size"] and set(config.taps) == {"block", "chain"}


def test_last_layer_is_refused_as_a_tap(tiny_target):
    with pytest.raises(ValueError, match="after the final norm"):
        require_taps([4], tiny_target.spec)
    with pytest.raises(ValueError, match="no such layer"):
        tiny_target.read(torch.tensor([[5]]), feature_spec=FeatureSpec(taps=(7,)))


def test_taps_are_hidden_states_of_the_layer_above(tiny_target):
    tokens = torch.arange(60, 72)[None]
    output = tiny_target.read(tokens, feature_spec=FeatureSpec(taps=(0, 3)))
    hidden = tiny_target.model(input_ids=tokens, output_hidden_states=True).hidden_states
    assert torch.equal(output.features, torch.cat([hidden[1], hidden[4]], dim=-1))
    assert torch.equal(output.last_hidden, hidden[-1])


SHORT = [
    "+drafter=dflash",
    "+target=tiny_llama",
    "prompts.limit=3",
    "generate.max_new_tokens=2",
    "generate.greedy_max_new_tokens=2",
    "generate.greedy_prompts=2",
]


def test_what_is_answered_is_not_answered_again(tmp_path, monkeypatch):
    """A rerun after a kill does not even load the target if every file exists."""
    config = composed(*SHORT, f"root={tmp_path}")
    generate.write_questions(config)
    generate.answer(config)
    monkeypatch.setattr(generate, "load_target", lambda *_, **__: pytest.fail("the target was loaded for nothing"))
    monkeypatch.setattr(generate, "encoded", lambda *_: pytest.fail("the prompts were tokenised again"))
    generate.run(config)
    assert artifacts.responses(config).facts()["prompts"] == 3 and artifacts.greedy(config).facts()["test"] == 2


@pytest.mark.parametrize(
    "change", ["generate.greedy_prompts=3", "generate.greedy_max_new_tokens=3", "++evaluate.dtype=float32"]
)
def test_other_greedy_answers_leave_the_training_as_it_is(change, tmp_path, monkeypatch):
    """Training answers and the features made from them are not made again, and their keys stay equal."""
    before, after = (composed(*SHORT, f"root={tmp_path}", *more) for more in ([], [change]))
    assert (
        artifacts.responses(before).key == artifacts.responses(after).key
        and artifacts.features(before).key == artifacts.features(after).key
    )
    assert artifacts.greedy(before).key != artifacts.greedy(after).key
    generate.run(before)
    monkeypatch.setattr(generate, "respond", lambda *_, **__: pytest.fail("a training prompt was answered again"))
    monkeypatch.setattr(generate, "write_training", lambda *_: pytest.fail("a training prompt was tokenised again"))
    with pytest.raises(FileNotFoundError, match=f"greedy/{artifacts.greedy(after).key} does not exist yet"):
        # This check runs before any rank is started.
        cache.require_source(replace(after, features=FeaturesConfig(source="online")))
    generate.write_questions(after)
    assert generate.all_files(after) == [
        generate.greedy_files(after, artifacts.greedy(after).partial, split) for split in generate.GREEDY
    ]
    generate.run(after)
    assert len(artifacts.greedy_responses(after, "test")) == after.generate.greedy_prompts
    assert len(artifacts.greedy_responses(before, "test")) == 2  # the earlier answers still exist
    for one, more in zip(
        artifacts.greedy_responses(before, "test"), artifacts.greedy_responses(after, "test"), strict=False
    ):
        assert one.id == more.id


def test_validation_may_have_prompts_of_its_own_number(tmp_path):
    config = composed(*SHORT, f"root={tmp_path}", "++generate.greedy_validation=1")
    generate.write_questions(config)
    assert [len(generate.questions_of(artifacts.greedy(config).partial, split)) for split in generate.GREEDY] == [1, 2]


def test_greedy_answers_of_a_batch_are_those_of_one_at_a_time(tmp_path):
    """In float32 batches of 1 and 2 give the same answers; the last batch has one prompt."""
    settings = [
        *SHORT,
        "generate.greedy_max_new_tokens=9",
        "generate.greedy_prompts=3",
        "++evaluate.dtype=float32",
        f"root={tmp_path}",
    ]
    one, two = (composed(*settings, f"++generate.greedy_batch={size}") for size in (1, 2))
    for config in (one, two):
        generate.run(config)
    for split in generate.GREEDY:
        assert list(artifacts.greedy_responses(one, split)) == list(artifacts.greedy_responses(two, split))
        assert len(artifacts.greedy_responses(two, split)) == 3


@pytest.mark.parametrize(
    "change",
    ["generate.max_new_tokens=3", "++generate.seed=1", "++target.sampling.temperature=0.5", "++target.dtype=bfloat16"],
)
def test_what_shapes_training_answers_shapes_no_greedy_ones(change, tmp_path):
    before, after = (composed(*SHORT, f"root={tmp_path}", *more) for more in ([], [change]))
    assert (
        artifacts.responses(before).key != artifacts.responses(after).key
        and artifacts.greedy(before).key == artifacts.greedy(after).key
    )


def test_fewer_training_prompts_leave_the_greedy_answers_as_they_are(tmp_path, monkeypatch):
    before, after = (composed(*SHORT, f"root={tmp_path}", f"++prompts.limit={limit}") for limit in (3, 2))
    generate.run(before)
    monkeypatch.setattr(generate, "decode_plain", lambda *_, **__: pytest.fail("a greedy answer was made again"))
    generate.write_questions(after)
    assert generate.all_files(after) == [generate.batch_files(after, artifacts.responses(after).partial)]
    generate.run(after)
    assert artifacts.responses(after).facts()["prompts"] == 2


def test_greedy_answers_that_are_not_there_are_named(tmp_path):
    config = composed(*SHORT, f"root={tmp_path}")
    with pytest.raises(FileNotFoundError, match=f"greedy/{artifacts.greedy(config).key} does not exist yet"):
        artifacts.greedy_responses(config, "test")


def test_batched_answers_do_not_depend_on_the_batch(tiny_target):
    """Sampling noise depends on the prompt: its sampled answer is the same alone and padded in a batch."""
    prompts, names = [[60, 61, 62], [70] * 9, [80, 90]], ["a", "b", "c"]
    sampling = SamplingConfig(temperature=1.0, top_p=0.9, top_k=50)
    together = respond(tiny_target, prompts, names, sampling, max_new_tokens=12, seed=3)
    for prompt, name, answer in zip(prompts, names, together, strict=True):
        assert respond(tiny_target, [prompt], [name], sampling, max_new_tokens=12, seed=3) == [answer]
    assert together != respond(tiny_target, prompts, names, sampling, max_new_tokens=12, seed=4)


def test_batched_greedy_answers_equal_plain_decoding(tiny_target):
    spec = tiny_target.spec
    prompts = [[60, 61, 62], [70] * 9, [80, 90]]
    plain = [decode_plain(tiny_target, prompt, max_new_tokens=10) for prompt in prompts]
    assert respond(tiny_target, prompts, ["a", "b", "c"], SamplingConfig(), max_new_tokens=10, seed=0) == plain
    tiny_target.spec = replace(spec, stop_ids=(plain[0][3],))  # now sequences end at different times
    try:
        cut = [decode_plain(tiny_target, prompt, max_new_tokens=10) for prompt in prompts]
        assert respond(tiny_target, prompts, ["a", "b", "c"], SamplingConfig(), max_new_tokens=10, seed=0) == cut
        assert len(cut[0]) <= 4
    finally:
        tiny_target.spec = spec


def test_a_beginning_that_prompts_share_is_read_once_and_changes_no_answer(tiny_target):
    """A shared prefix is read once; the rest of each prompt is padded on the left, between prefix and text.

    Positions and the mask skip that padding. Long answers outgrow the first buffer of the cache.
    """
    shared = list(range(60, 72))
    prompts = [shared + rest for rest in ([80], [90, 91, 92, 93, 94], [100, 101])]
    assert (
        shared_prefix(prompts) == 12
        and shared_prefix(prompts[:1]) == 0
        and shared_prefix([shared, [*shared[:9], 7]]) == 9
    )
    assert (
        shared_prefix([shared, shared]) == 11 and shared_prefix([[1, 2], [1, 3]]) == 0
    )  # each keeps a token of its own; short prefixes are not read separately
    plain = [decode_plain(tiny_target, prompt, max_new_tokens=80) for prompt in prompts]
    feature_spec, read = [], tiny_target.read
    tiny_target.read = lambda tokens, **more: feature_spec.append(tuple(tokens.shape)) or read(tokens, **more)
    try:
        assert respond(tiny_target, prompts, ["a", "b", "c"], SamplingConfig(), max_new_tokens=80, seed=0) == plain
    finally:
        del tiny_target.read
    assert feature_spec[:2] == [(1, 12), (3, 5)]
    drawn = SamplingConfig(
        temperature=2.0, top_k=200
    )  # here a small change of any logit changes some token; a single prompt has no shared prefix
    together = respond(tiny_target, prompts, ["a", "b", "c"], drawn, max_new_tokens=80, seed=0)
    assert together == [
        respond(tiny_target, [prompt], [name], drawn, max_new_tokens=80, seed=0)[0]
        for prompt, name in zip(prompts, "abc", strict=True)
    ]


def test_sampling_follows_the_truncated_distribution():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64)).expand(20_000, -1)
    uniform = torch.rand(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = choose(logits, uniform, SamplingConfig(temperature=1.0, top_p=0.8, top_k=3))
    shares = torch.bincount(drawn, minlength=4) / 20_000
    torch.testing.assert_close(shares, torch.tensor([0.625, 0.375, 0.0, 0.0]), atol=0.015, rtol=0)
    assert torch.equal(noise_of("x", 0, 5), noise_of("x", 0, 9)[:5])


def samples(count=5):
    generator = torch.Generator().manual_seed(0)
    return [
        Sample(
            f"s{n}",
            torch.arange(n + 3),
            torch.arange(n + 3) > 1,
            torch.randn(n + 3, 6, generator=generator),
            torch.randn(n + 3, 2, generator=generator),
        )
        for n in range(count)
    ]


@pytest.fixture
def store(tmp_path):
    every = samples()
    index = plan_shards([len(s.tokens) for s in every], row_bytes=10, shard_bytes=100)
    assert index.num_shards > 1
    for number in range(index.num_shards):
        write_shard(tmp_path, number, [every[place] for place in index.of_shard(number)])
    return tmp_path, write_index(tmp_path, index), every


def test_store_returns_what_was_written(store):
    folder, facts, every = store
    reader = FeatureStore(folder, facts, max_length=5)
    for number, sample in enumerate(every):
        got = reader[number]
        assert got.id == sample.id and reader.lengths[number] == min(5, len(sample.tokens))
        for name in ("tokens", "loss_mask", "features", "last_hidden"):
            assert torch.equal(getattr(got, name), getattr(sample, name)[:5])


def test_truncated_shard_is_refused(store):
    folder, facts, _ = store
    file = shard_file(folder, 1)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match="truncated or missing"):
        FeatureStore(folder, facts, max_length=99)


def test_nan_features_are_refused_at_writing(store):
    folder, _, every = store
    bad = Sample("bad", every[0].tokens, every[0].loss_mask, every[0].features * float("nan"), every[0].last_hidden)
    with pytest.raises(ValueError, match="sample bad"):
        write_shard(folder, 0, [bad])


def rewrite(path, change):
    """Change the tensors of a shard; its size and its checksums stay the same."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata=metadata)


def set_to(name, value):
    def change(tensors):
        tensors[name].view(-1)[1] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        set_to("features", float("nan")),
        set_to("features", 0.25),
        set_to("last_hidden", 0.25),
        set_to("tokens", 7),
        set_to("loss_mask", True),
    ],
    ids=["nan", "features", "last_hidden", "tokens", "loss_mask"],
)
def test_a_poisoned_shard_is_refused_at_reading(store, change):
    """Also if every number stays finite. The other samples can still be read."""
    folder, facts, every = store
    rewrite(shard_file(folder, 0), change)
    reader = FeatureStore(folder, facts, max_length=99)
    with pytest.raises(ValueError, match="sample s0 .* damaged.*rerun phases"):
        reader[0]
    assert torch.equal(reader[1].tokens, every[1].tokens)


def test_a_bit_of_any_sample_counts(store):
    """A flipped bit anywhere after the header is detected."""
    folder, facts, _every = store
    file = shard_file(folder, 1)
    whole = bytearray(file.read_bytes())
    for at in range(8 + int.from_bytes(whole[:8], "little"), len(whole), 7):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        file.write_bytes(flipped)
        reader = FeatureStore(folder, facts, max_length=99)
        with pytest.raises(ValueError, match="damaged"):
            [reader[index] for index in reader.index.of_shard(1)]


def test_a_shard_of_other_samples_is_refused(store):
    """The same rows under another sample id, as in a store assembled from two."""
    folder, facts, _every = store
    with safe_open(shard_file(folder, 0), "pt") as file:
        metadata = file.metadata()
    save_file(
        load_file(shard_file(folder, 0)),
        shard_file(folder, 0),
        metadata={"samples": metadata["samples"].replace("s0", "z0")},
    )
    with pytest.raises(ValueError, match="sample z0 .* damaged"):
        FeatureStore(folder, facts, max_length=99)[0]


def test_a_store_without_index_says_what_to_do(store):
    folder, facts, _ = store
    (folder / "index.npz").unlink()
    with pytest.raises(ValueError, match="older version.*rerun phases"):
        FeatureStore(folder, facts, max_length=99)


def test_few_shards_stay_open(store, monkeypatch):
    folder, facts, every = store
    monkeypatch.setattr(data_store, "OPEN_SHARDS", 1)
    reader = FeatureStore(folder, facts, max_length=99)
    for index in [0, len(every) - 1, 0]:
        assert torch.equal(reader[index].features, every[index].features)
    assert reader.open.cache_info().currsize == 1


def test_overwritten_header_is_refused(store):
    folder, facts, _ = store
    content = bytearray(shard_file(folder, 0).read_bytes())
    content[100:200] = b"\xff" * 100
    shard_file(folder, 0).write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        FeatureStore(folder, facts, max_length=99)[0]


def test_artifact_exists_only_when_finished(tmp_path):
    artifact = Artifact(tmp_path, {"a": 1})
    write_atomic(artifact.begin() / "data", "x")
    assert not artifact.complete
    with pytest.raises(FileNotFoundError, match="run the phase"):
        artifact.facts()
    artifact.finish(count=3)
    assert artifact.complete and artifact.facts()["count"] == 3 and artifact.key != Artifact(tmp_path, {"a": 2}).key


def test_differing_settings_are_named(tmp_path):
    with pytest.raises(ValueError, match="lr: found 1, wanted 2"):
        require_same({"lr": 1, "same": [1]}, {"lr": 2, "same": (1,)}, tmp_path)


def response(name, text="t"):
    return Response(name, "all", [1, 2], [3, 4, 5][: len(name)], len(name) == 3, text)


def test_rows_are_read_one_at_a_time_with_and_without_an_index(tmp_path):
    rows = [response("a"), response("bbb", "löng\u2028line"), response("cc")]
    write_rows(tmp_path / "train.jsonl", rows, Response)
    for _ in range(2):
        read = read_responses(tmp_path, "train")
        assert list(read) == rows and [read[0], read[-1]] == [rows[0], rows[2]] and read[1:] == rows[1:]
        assert read.lengths.tolist() == [3, 5, 4]
        index_file(tmp_path / "train.jsonl").unlink(missing_ok=True)


def test_merged_responses_stand_in_the_prompts_order(tmp_path):
    for number, names in enumerate([["cc", "a"], ["bbb"]]):
        write_rows(tmp_path / f"{number}.jsonl", [response(name) for name in names], Response)
    merged = merge(
        [tmp_path / "0.jsonl", tmp_path / "1.jsonl"], ["a", "refused", "bbb", "cc"], tmp_path / "train.jsonl"
    )
    assert [row.id for row in read_responses(tmp_path, "train")] == ["a", "bbb", "cc"]
    assert merged == Merged(rows=3, prompt_tokens=6, response_tokens=6, unfinished=2)


def test_a_torn_answer_is_forgotten(tmp_path):
    """After a kill in the middle of a line the earlier answers are kept, and the next answer replaces the torn line."""
    path = tmp_path / "answers.jsonl"
    log = AnswerLog(path)
    for name in ("a", "bbb"):
        log.append(response(name))
    whole = path.read_bytes()
    for cut in range(len(as_line(response("a"))), len(whole)):
        path.write_bytes(whole[:cut])
        again = AnswerLog(path)
        assert again.ids == {"a"}
        again.append(response("bbb"))
        assert path.read_bytes() == whole
    path.write_bytes(whole.replace(b'"id"', b'"ip"', 1))
    with pytest.raises(ValueError, match="answers.jsonl:1 is no response"):
        AnswerLog(path)


def test_a_prompt_that_the_template_refuses_is_left_out(tmp_path, monkeypatch):
    """It is counted, and the other prompts are answered."""

    def refuse(tokenizer, messages, target):
        if len(messages[-1]["content"]) % 2:
            raise TemplateError("no system turns")
        return prompt_ids(tokenizer, messages, target)

    monkeypatch.setattr(generate, "prompt_ids", refuse)
    config = composed(
        "+drafter=dflash",
        "+target=tiny_llama",
        f"root={tmp_path}",
        "prompts.limit=12",
        "generate.max_new_tokens=2",
        "generate.greedy_max_new_tokens=2",
        "generate.greedy_prompts=2",
    )
    generate.run(config)
    facts = artifacts.responses(config).facts()
    assert (
        0 < facts["prompts"] < 12
        and 12 - facts["prompts"]
        == facts["left_out"]
        == facts["left_out_for"]["the chat template refused it: no system turns"]
    )
    assert artifacts.greedy(config).facts()["left_out"] > 0 and artifacts.greedy(config).facts()["validation"] == 2
