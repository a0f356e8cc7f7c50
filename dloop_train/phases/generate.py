"""generate: prompts -> the target's own responses, sampled for training, greedy for validation and test."""

import json
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
from jinja2 import TemplateError
from tqdm import tqdm

from dloop_train.config import Config, check
from dloop_train.data.chat import prompt_ids
from dloop_train.data.prompts import Prompt
from dloop_train.data.responses import AnswerLog, Question, Response, Rows, merge, write_rows
from dloop_train.launch import apart, start_ranks
from dloop_train.phases import artifacts
from dloop_train.phases.sharing import here, make_files, missing
from dloop_train.ranks import initialise_distributed, say
from dloop_train.runs import write_atomic, write_jsonl
from dloop_train.targets.prepack import prepack
from dloop_train.targets.responders import Refusal, Remote, decode_plain, respond
from dloop_train.targets.sources import load_target, load_tokenizer
from dloop_train.targets.target import Target

GREEDY = ("validation", "test")
UNMERGED = "unmerged"
"""Folder of what is merged in the end."""
ANSWERS = f"{UNMERGED}/answers.jsonl"
FEW = 10
"""Refusals that are no high share yet, whatever they are a share of."""


def run(config: Config) -> None:
    artifact = artifacts.responses(config)
    if artifact.complete:
        say(f"generate: done before, {artifact.folder}")
        return
    folder = artifact.begin()
    write_questions(config, folder)
    refused = ask(config, folder) if isinstance(config.responder, Remote) else []
    if apart(config) and any(missing(files) for files in all_files(config, folder)):
        start_ranks(config, "generate")
    answer(config, folder)
    training = merge([folder / ANSWERS] if isinstance(config.responder, Remote) else batch_files(config, folder), ids_of(folder, "train"), folder / "train.jsonl")
    for split in GREEDY:
        merge(greedy_files(folder, split), ids_of(folder, split), folder / f"{split}.jsonl")
    left_out = json.loads((folder / LEFT_OUT).read_text())
    artifact.finish(prompts=training.rows, left_out=sum(left_out.values()) + len(refused), left_out_for=left_out | Counter(shortened(r.reason) for r in refused),
                    response_tokens=training.response_tokens, tokens=training.prompt_tokens + training.response_tokens, unfinished=training.unfinished)
    shutil.rmtree(artifact.folder / UNMERGED)
    say(f"generate: {training.unfinished} of {training.rows} answers were cut by generate.max_new_tokens={config.generate.max_new_tokens}")
    say(f"generate: {artifact.folder}")


def rank_main(config: Config) -> None:
    """One rank of the phase."""
    initialise_distributed(config.launch.threads)
    answer(config, artifacts.responses(config).partial)


def answer(config: Config, folder: Path) -> None:
    """What this machine's own target answers."""
    if not isinstance(config.responder, Remote):
        answer_training(config, folder)
    for split in GREEDY:
        answer_greedily(config, folder, split)


# Questions


QUESTIONS, LEFT_OUT, ORDER = f"{UNMERGED}/questions", f"{UNMERGED}/questions/left_out.json", f"{UNMERGED}/questions/order.npy"


def write_questions(config: Config, folder: Path) -> None:
    """Every prompt as ids, once, for all ranks; last of all what was left out and why."""
    if (folder / LEFT_OUT).is_file():
        return
    prompts, lengths, others, left_out = config.prompts.read(), [], defaultdict(list), Counter()

    def training() -> Iterator[Question]:
        for prompt, ids in encoded(config, prompts):
            if isinstance(ids, str):
                left_out[ids] += 1
            elif prompt.split == "train":
                lengths.append((len(ids), prompt.id))
                yield Question(prompt.id, prompt.category, ids)
            else:
                others[prompt.split].append(Question(prompt.id, prompt.category, ids))
    write_rows(folder / QUESTIONS / "train.jsonl", training(), Question)
    for split in GREEDY:
        write_rows(folder / QUESTIONS / f"{split}.jsonl", spread(others[split], config.generate.greedy_prompts), Question)
    for reason, count in left_out.items():
        say(f"generate: {count} of {len(prompts)} prompts are left out: {reason}")
    check(bool(lengths), f"no training prompt is left of {len(prompts)}: {dict(left_out)}")
    np.save(folder / ORDER, sorted(range(len(lengths)), key=lengths.__getitem__))
    write_atomic(folder / LEFT_OUT, json.dumps(left_out))


def encoded(config: Config, prompts: list[Prompt]) -> Iterator[tuple[Prompt, list[int] | str]]:
    """Each prompt's ids, or why it is left out."""
    tokenizer, most = load_tokenizer(config.target), config.generate.max_prompt_tokens
    for prompt in tqdm(prompts, unit="prompt", desc="tokenise"):
        try:
            ids = prompt_ids(tokenizer, list(prompt.messages), config.target)
        except TemplateError as error:  # Gemma's has no system turns, for example
            ids = f"the chat template refused it: {error}"
        yield prompt, ids if isinstance(ids, str) or len(ids) <= most else f"longer than generate.max_prompt_tokens={most}"


def spread(questions: list[Question], count: int) -> list[Question]:
    """The first `count` questions taken in turn from the categories, so that each is heard."""
    queues = defaultdict(list)
    for question in questions:
        queues[question.category].append(question)
    taken = [queue[turn] for turn in range(max(map(len, queues.values()), default=0)) for _, queue in sorted(queues.items()) if turn < len(queue)]
    return taken[:count]


def questions_of(folder: Path, split: str) -> Rows[Question]:
    return Rows(folder / QUESTIONS / f"{split}.jsonl", Question)


def ids_of(folder: Path, split: str) -> Iterator[str]:
    return (question.id for question in questions_of(folder, split))


# Answers of the target on this machine


def answer_training(config: Config, folder: Path) -> None:
    """Batches planned from the full list, a file each."""
    questions, batches, files = questions_of(folder, "train"), batches_of(config, folder), batch_files(config, folder)
    target = prepack(load_target(config.target)) if here(missing(files)) else None

    def make(number: int) -> int:
        batch = [questions[index] for index in batches[number]]
        answers = respond(target, [question.prompt_ids for question in batch], [question.id for question in batch], config.target.sampling,
                          max_new_tokens=config.generate.max_new_tokens, seed=config.generate.seed)
        write_jsonl(files[number], [answered(question, ids, target).row() for question, ids in zip(batch, answers, strict=True)])
        return sum(map(len, answers))
    make_files(files, [len(batch) for batch in batches], make, unit="prompt", desc="generate")


def batches_of(config: Config, folder: Path) -> list[list[int]]:
    """Questions of like length together."""
    ordered, size = np.load(folder / ORDER).tolist(), config.generate.batch_size
    return [ordered[start:start + size] for start in range(0, len(ordered), size)]


def batch_files(config: Config, folder: Path) -> list[Path]:
    return [folder / UNMERGED / "batches" / f"{number:06d}.jsonl" for number in range(len(batches_of(config, folder)))]


def answer_greedily(config: Config, folder: Path, split: str) -> None:
    """Plain batch-1 decoding by the model that is evaluated, since replay needs its text."""
    questions, files = questions_of(folder, split), greedy_files(folder, split)
    target = load_target(config.target, dtype=config.evaluate.dtype) if here(missing(files)) else None

    def make(number: int) -> int:
        ids = decode_plain(target, questions[number].prompt_ids, max_new_tokens=config.generate.greedy_max_new_tokens)
        write_jsonl(files[number], [answered(questions[number], ids, target).row()])
        return len(ids)
    make_files(files, [1] * len(files), make, unit="prompt", desc=f"greedy {split}")


def greedy_files(folder: Path, split: str) -> list[Path]:
    return [folder / UNMERGED / "greedy" / f"{split}-{number:06d}.jsonl" for number in range(len(questions_of(folder, split)))]


def all_files(config: Config, folder: Path) -> list[list[Path]]:
    """What the ranks make."""
    training = [] if isinstance(config.responder, Remote) else [batch_files(config, folder)]
    return training + [greedy_files(folder, split) for split in GREEDY]


def answered(question: Question, ids: list[int], target: Target) -> Response:
    return question.answered(ids, target.spec.stop_ids, target.tokenizer)


# Answers of servers


def ask(config: Config, folder: Path) -> list[Refusal]:
    """The training prompts that are not answered yet; returns those that were refused, which a later run asks again."""
    questions, log = questions_of(folder, "train"), AnswerLog(folder / ANSWERS)
    waiting = [number for number, question in enumerate(questions) if question.id not in log.ids]
    if not waiting:
        return []
    config.responder.connect()
    refused, tokens = [], 0
    answers = config.responder.answers((questions[number] for number in waiting), config.target, config.generate, load_tokenizer(config.target))
    with tqdm(total=len(questions), initial=len(log.ids), unit="prompt", desc="generate") as bar:
        for found in answers:
            if isinstance(found, Refusal):
                refused.append(found)
                require_few(refused, max(bar.n + 1, FEW / max(config.responder.max_refused, 1e-9)), config.responder)
            else:
                log.append(found)
                tokens += len(found.response_ids)
            bar.update()
            bar.set_postfix_str(f"{tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tokens/s", refresh=False)
    require_few(refused, len(questions), config.responder)
    write_jsonl(folder / "refused.jsonl", map(asdict, refused))
    for reason, count in Counter(shortened(refusal.reason) for refusal in refused).most_common():
        say(f"generate: {count} of {len(questions)} prompts are left out: {reason}")
    return refused


def require_few(refused: list[Refusal], of: float, responder: Remote) -> None:
    """Stop where more than responder.max_refused of so many prompts were refused: then something else is wrong."""
    if len(refused) > responder.max_refused * of:
        reasons = Counter(shortened(refusal.reason) for refusal in refused).most_common(3)
        raise ValueError(f"{len(refused)} prompts were refused, which is more than responder.max_refused={responder.max_refused} allows:\n  "
                         + "\n  ".join(f"{count} x {reason}" for reason, count in reasons)
                         + "\nWhat was answered is kept. Mend the cause and run the same command again, or raise responder.max_refused")


def shortened(reason: str) -> str:
    """Reasons that differ in their numbers alone are one."""
    return re.sub(r"\d+", "N", reason)
