"""generate: prompts -> the target's own responses, sampled for training, greedy for validation and test."""

from collections import defaultdict
from pathlib import Path

from tqdm import tqdm

from dloop_train.config import Config
from dloop_train.data.chat import prompt_ids
from dloop_train.data.prompts import Prompt
from dloop_train.data.responses import Response
from dloop_train.phases import artifacts
from dloop_train.ranks import say
from dloop_train.runs import read_jsonl, write_jsonl
from dloop_train.targets.prepack import prepack
from dloop_train.targets.responders import decode_plain, respond
from dloop_train.targets.sources import load_target, load_tokenizer


def run(config: Config) -> None:
    artifact = artifacts.responses(config)
    if artifact.complete:
        say(f"generate: done before, {artifact.folder}")
        return
    folder = artifact.begin()
    tokenizer = load_tokenizer(config.target)
    prompts = config.prompts.read()
    encoded = {prompt.id: prompt_ids(tokenizer, list(prompt.messages), config.target) for prompt in prompts}
    kept = [prompt for prompt in prompts if len(encoded[prompt.id]) <= config.generate.max_prompt_tokens]
    if len(kept) < len(prompts):
        say(f"generate: {len(prompts) - len(kept)} of {len(prompts)} prompts are longer than {config.generate.max_prompt_tokens} tokens and left out")
    answer_training(config, [p for p in kept if p.split == "train"], encoded, folder)
    answer_greedily(config, kept, encoded, folder)
    rows = read_jsonl(folder / "train.jsonl")
    artifact.finish(prompts=len(rows), left_out=len(prompts) - len(kept), response_tokens=sum(len(row["response_ids"]) for row in rows),
                    tokens=sum(len(row["response_ids"]) + len(row["prompt_ids"]) for row in rows))
    say(f"generate: {artifact.folder}")


def spread(prompts: list[Prompt], count: int) -> list[Prompt]:
    """The first `count` prompts taken in turn from the categories, so that each is heard."""
    queues = defaultdict(list)
    for prompt in prompts:
        queues[prompt.category].append(prompt)
    taken = [queue[turn] for turn in range(max(map(len, queues.values()), default=0)) for _, queue in sorted(queues.items()) if turn < len(queue)]
    return taken[:count]


def answer_training(config: Config, prompts: list[Prompt], encoded: dict[str, list[int]], folder: Path) -> None:
    """Batches planned from the full list; each is one file, so a killed phase goes on where it was."""
    target = None
    ordered = sorted(prompts, key=lambda prompt: (len(encoded[prompt.id]), prompt.id))
    size = config.generate.batch_size
    batches = [ordered[start:start + size] for start in range(0, len(ordered), size)]
    files = [folder / "batches" / f"{number:06d}.jsonl" for number in range(len(batches))]
    tokens = 0
    with tqdm(total=len(prompts), unit="prompt", desc="generate") as bar:
        for batch, file in zip(batches, files, strict=True):
            if not file.is_file():
                target = target or prepack(load_target(config.target))
                rows = answer_batch(config, target, batch, encoded)
                write_jsonl(file, [row.row() for row in rows])
                tokens += sum(len(row.response_ids) for row in rows)
            bar.update(len(batch))
            bar.set_postfix_str(f"{tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tokens/s", refresh=False)
    order = {prompt.id: number for number, prompt in enumerate(prompts)}
    rows = [row for file in files for row in read_jsonl(file)]
    write_jsonl(folder / "train.jsonl", sorted(rows, key=lambda row: order[row["id"]]))


def answer_batch(config: Config, target, batch: list[Prompt], encoded: dict[str, list[int]]) -> list[Response]:
    ids = [encoded[prompt.id] for prompt in batch]
    answers = respond(target, ids, [prompt.id for prompt in batch], config.target.sampling,
                      max_new_tokens=config.generate.max_new_tokens, seed=config.generate.seed)
    return [as_response(target, prompt, prompt_tokens, answer) for prompt, prompt_tokens, answer in zip(batch, ids, answers, strict=True)]


def answer_greedily(config: Config, prompts: list[Prompt], encoded: dict[str, list[int]], folder: Path) -> None:
    """The validation and test responses, by the model that is evaluated: replay needs its text."""
    missing = [split for split in ("validation", "test") if not (folder / f"{split}.jsonl").is_file()]
    target = load_target(config.target, dtype=config.evaluate.dtype) if missing else None
    for split in missing:
        chosen = spread([prompt for prompt in prompts if prompt.split == split], config.generate.greedy_prompts)
        answer_split(config, target, chosen, encoded, folder / f"{split}.jsonl")


def answer_split(config: Config, target, prompts: list[Prompt], encoded: dict[str, list[int]], file: Path) -> None:
    """Plain batch-1 decoding; appended row by row."""
    partial = file.with_suffix(".part.jsonl")
    rows = read_jsonl(partial) if partial.is_file() else []
    for prompt in tqdm(prompts[len(rows):], unit="prompt", desc=f"greedy {file.stem}"):
        answer = decode_plain(target, encoded[prompt.id], max_new_tokens=config.generate.greedy_max_new_tokens)
        rows.append(as_response(target, prompt, encoded[prompt.id], answer).row())
        write_jsonl(partial, rows)
    write_jsonl(file, rows)
    partial.unlink(missing_ok=True)


def as_response(target, prompt: Prompt, ids: list[int], answer: list[int]) -> Response:
    finished = bool(answer) and answer[-1] in target.spec.stop_ids
    return Response(prompt.id, prompt.category, ids, answer, finished, target.tokenizer.decode(answer, skip_special_tokens=True))
