"""cache: responses -> the target's hidden states, in safetensors shards."""

import json

import torch
from tqdm import tqdm

from dloop_train.config import Config
from dloop_train.data.responses import Response, read_responses
from dloop_train.data.store import index_of, plan_shards, shard_file, stored, write_shard
from dloop_train.phases import artifacts
from dloop_train.ranks import say
from dloop_train.runs import require_same, write_atomic
from dloop_train.targets.sources import as_dtype, load_spec, load_target
from dloop_train.targets.target import Target, require_taps
from dloop_train.types import Reads, Sample, TargetSpec


def run(config: Config) -> None:
    artifact = artifacts.features(config)
    if artifact.complete:
        say(f"cache: done before, {artifact.folder}")
        return
    reads = artifacts.reads(config)
    spec = load_spec(config.target)
    require_taps(reads.taps, spec)
    source = artifacts.responses(config)
    source.facts()
    responses = read_responses(source.folder, "train")
    folder = artifact.begin()
    lengths = [(response.id, min(len(response.prompt_ids) + len(response.response_ids), config.train.max_length)) for response in responses]
    shards = plan_shards(lengths, row_bytes(spec, reads, config.cache.dtype), config.cache.shard_bytes)
    plan, planned = folder / "plan.json", {"shard_bytes": config.cache.shard_bytes}
    if plan.is_file():  # shards of another plan would be taken for this one's
        require_same(json.loads(plan.read_text()), planned, plan)
    write_atomic(plan, json.dumps(planned))
    by_id = {response.id: response for response in responses}
    missing = [number for number in range(len(shards)) if not shard_file(folder, number).is_file()]
    target = load_target(config.target) if missing else None
    with tqdm(total=sum(length for _, length in lengths), unit="token", unit_scale=True, desc="cache") as bar:
        for number, shard in enumerate(shards):
            if number in missing:
                read = {}
                for batch in batches([by_id[place.id] for place in shard], config.cache.batch_tokens):
                    read |= {sample.id: sample for sample in read_samples(target, batch, reads, config)}
                    bar.update(sum(len(read[response.id].tokens) for response in batch))
                write_shard(folder, number, [read[place.id] for place in shard])
            else:
                bar.update(sum(place.length for place in shard))
    artifact.finish(tokens=sum(length for _, length in lengths), **index_of(folder, shards))
    say(f"cache: {artifact.folder}")


def row_bytes(spec: TargetSpec, reads: Reads, dtype: str) -> int:
    """Bytes of one token in the store: features, last hidden state (once), id and mask."""
    return (stored(reads).width(spec) + spec.hidden_size) * as_dtype(dtype).itemsize + 5


def batches(responses: list[Response], batch_tokens: int) -> list[list[Response]]:
    """Batches of like length, padded size within `batch_tokens`."""
    grouped: list[list[Response]] = [[]]
    for response in sorted(responses, key=lambda r: (length_of(r), r.id)):
        if grouped[-1] and length_of(response) * (len(grouped[-1]) + 1) > batch_tokens:
            grouped.append([])
        grouped[-1].append(response)
    return [batch for batch in grouped if batch]


def length_of(response: Response) -> int:
    return len(response.prompt_ids) + len(response.response_ids)


def read_samples(target: Target, batch: list[Response], reads: Reads, config: Config) -> list[Sample]:
    """One pass of the target over a batch padded on the right."""
    dtype, limit = as_dtype(config.cache.dtype), config.train.max_length
    ids = [(response.prompt_ids + response.response_ids)[:limit] for response in batch]
    longest = max(map(len, ids))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in ids], device=target.device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids], device=target.device)
    output = target.read(tokens, mask=mask, reads=stored(reads))
    samples = []
    for number, (response, row) in enumerate(zip(batch, ids, strict=True)):
        loss_mask = torch.arange(len(row)) >= len(response.prompt_ids)  # the answer and its end token
        features = output.last_hidden.new_empty(len(row), 0) if output.features is None else output.features[number, :len(row)]
        samples.append(Sample(response.id, torch.tensor(row), loss_mask, features.to(dtype).cpu(),
                              output.last_hidden[number, :len(row)].to(dtype).cpu()))
    return samples

