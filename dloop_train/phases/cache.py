"""cache: responses -> the target's hidden states, in safetensors shards.

With features=online nothing is stored: the source of a training then runs the target itself.
"""

import json
from dataclasses import replace
from pathlib import Path

from dloop_train.config import Config
from dloop_train.data.batches import Source
from dloop_train.data.online import OnlineSource, read_samples, text_of
from dloop_train.data.responses import Response, Rows, read_responses
from dloop_train.data.store import FeatureStore, Index, plan_shards, shard_file, stored, write_index, write_shard
from dloop_train.launch import in_separate_ranks, start_ranks
from dloop_train.phases import artifacts
from dloop_train.phases.sharing import here, make_files, missing
from dloop_train.ranks import initialise_distributed, say
from dloop_train.runs import require_same, write_atomic
from dloop_train.targets.sources import as_dtype, load_spec, load_target
from dloop_train.targets.target import require_taps
from dloop_train.types import FeatureSpec, TargetSpec


def run(config: Config) -> None:
    if config.features.source == "online":
        say("cache: features=online, so the target runs in the training step and nothing is stored")
        return
    artifact = artifacts.features(config)
    if artifact.complete:
        say(f"cache: done before, {artifact.folder}")
        return
    require_taps(artifacts.feature_spec(config).taps, load_spec(config.target))
    artifacts.responses(config).facts()
    folder = artifact.begin()
    plan, planned = folder / "plan.json", {"shard_bytes": config.cache.shard_bytes}
    if plan.is_file():  # shards of an interrupted run with another plan would be mistaken for this plan's
        require_same(json.loads(plan.read_text()), planned, plan)
    write_atomic(plan, json.dumps(planned))
    index = index_of(config, responses_of(config))
    if in_separate_ranks(config) and missing(shard_files(folder, index)):
        start_ranks(config, "cache")
    make_shards(config, folder)
    artifact.finish(tokens=int(index.length.sum()), **write_index(folder, index))
    say(f"cache: {artifact.folder}")


def rank_main(config: Config) -> None:
    """One rank of the phase."""
    initialise_distributed(config.launch.threads)
    make_shards(config, artifacts.features(config).partial)


def make_shards(config: Config, folder: Path) -> None:
    responses = responses_of(config)
    index, feature_spec, cache = index_of(config, responses), artifacts.feature_spec(config), config.cache
    files = shard_files(folder, index)
    target = load_target(config.target) if here(missing(files)) else None

    def make(number: int) -> int:
        texts = [text_of(responses[place], config.train.max_length) for place in index.of_shard(number)]
        read = {
            sample.id: replace(sample, features=sample.features.cpu(), last_hidden=sample.last_hidden.cpu())
            for sample in read_samples(
                target, texts, feature_spec, dtype=as_dtype(cache.dtype), batch_tokens=cache.batch_tokens
            )
        }
        write_shard(folder, number, [read[text.id] for text in texts])
        return sum(len(text.tokens) for text in texts)

    make_files(
        files,
        [int(index.length[index.of_shard(number)].sum()) for number in range(len(files))],
        make,
        unit="token",
        desc="cache",
    )


def responses_of(config: Config) -> Rows[Response]:
    return read_responses(artifacts.responses(config).folder, "train")


def index_of(config: Config, responses: Rows[Response]) -> Index:
    bytes_of_row = row_bytes(load_spec(config.target), artifacts.feature_spec(config), config.cache.dtype)
    return plan_shards(
        responses.lengths.clip(max=config.train.max_length).tolist(), bytes_of_row, config.cache.shard_bytes
    )


def shard_files(folder: Path, index: Index) -> list[Path]:
    return [shard_file(folder, number) for number in range(index.num_shards)]


def row_bytes(spec: TargetSpec, feature_spec: FeatureSpec, dtype: str) -> int:
    """Bytes of one token in the store: features, last hidden state (once), id (4 bytes) and mask (1 byte)."""
    return (stored(feature_spec).width(spec) + spec.hidden_size) * as_dtype(dtype).itemsize + 5


# What a training reads


def require_source(config: Config) -> None:
    """Raise FileNotFoundError if earlier phases have not made the data that a training reads."""
    artifact = artifacts.responses(config) if config.features.source == "online" else artifacts.features(config)
    for needed in (artifact, artifacts.greedy(config)):  # validation reads the greedy answers
        needed.facts()


def training_source(config: Config) -> Source:
    """The features of a training: the store, or with features=online a target loaded on this rank."""
    require_source(config)
    feature_spec = artifacts.feature_spec(config)
    if config.features.source == "online":
        return OnlineSource(
            responses_of(config),
            load_target(config.target),
            feature_spec,
            dtype=as_dtype(config.cache.dtype),
            max_length=config.train.max_length,
            batch_tokens=config.cache.batch_tokens,
        )
    artifact = artifacts.features(config)
    return FeatureStore(
        artifact.folder, artifact.facts(), max_length=config.train.max_length, feature_spec=feature_spec
    )
