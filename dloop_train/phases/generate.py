"""generate: prompts -> responses of the target, sampled for training, greedy for validation and test."""

import json
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from jinja2 import TemplateError
from tqdm import tqdm

from dloop_train.config import Config, SamplingConfig, check
from dloop_train.data.chat import prompt_ids
from dloop_train.data.prompts import Prompt
from dloop_train.data.responses import AnswerLog, Question, Response, Rows, merge, write_rows
from dloop_train.launch import in_separate_ranks, start_ranks
from dloop_train.phases import artifacts
from dloop_train.phases.sharing import here, make_files, missing
from dloop_train.ranks import initialise_distributed, say
from dloop_train.runs import Artifact, write_atomic, write_jsonl
from dloop_train.targets.prepack import prepack
from dloop_train.targets.responders import Refusal, Remote, decode_plain, respond
from dloop_train.targets.sources import load_target, load_tokenizer
from dloop_train.targets.target import Target

GREEDY = ("validation", "test")
GREEDILY = SamplingConfig(temperature=0.0)
UNMERGED = "unmerged"
"""Folder of questions and answers that is deleted after the answers are merged."""
ANSWERS, SERVED = f"{UNMERGED}/answers.jsonl", f"{UNMERGED}/served.json"
KNOWN = 8
"""Number of greedy answers of each split by which a server's model is checked."""
FEW = 10
"""Number of refusals that never stop a running phase, even if they are a large share of the prompts so far."""


def run(config: Config) -> None:
    training, greedy = artifacts.responses(config), artifacts.greedy(config)
    if training.complete and greedy.complete:
        say(f"generate: done before, {training.folder} and {greedy.folder}")
        return
    write_questions(config)
    asked = unanswered(config) if isinstance(config.responder, Remote) and not training.complete else None
    # Connect before the work on this machine, which takes long, so that connection errors come early.
    model = config.responder.connect() if asked and asked.waiting else ""
    if in_separate_ranks(config) and any(missing(files) for files in all_files(config)):
        start_ranks(config, "generate")
    answer(config)
    if not greedy.complete:
        finish(
            greedy,
            {
                split: merge(
                    greedy_files(config, greedy.partial, split),
                    ids_of(greedy.partial, split),
                    greedy.partial / f"{split}.jsonl",
                ).rows
                for split in GREEDY
            },
        )
    if not training.complete:
        refused = ask(config, asked, model) if asked and asked.waiting else []
        finish_training(config, refused)


def rank_main(config: Config) -> None:
    """One rank of the phase."""
    initialise_distributed(config.launch.threads)
    answer(config)


def answer(config: Config) -> None:
    """Make the answers of the target on this machine: greedy ones, and the training's unless servers give them."""
    training, greedy = artifacts.responses(config), artifacts.greedy(config)
    if not training.complete and not isinstance(config.responder, Remote):
        answer_training(config, training.partial)
    for split in GREEDY if not greedy.complete else ():
        answer_greedily(config, greedy.partial, split)


def finish_training(config: Config, refused: list[Refusal]) -> None:
    artifact, remote = artifacts.responses(config), isinstance(config.responder, Remote)
    folder = artifact.partial
    files = [folder / ANSWERS] if remote else batch_files(config, folder)
    merged = merge(files, ids_of(folder, "train"), folder / "train.jsonl")
    finish(
        artifact,
        {
            "prompts": merged.rows,
            "response_tokens": merged.response_tokens,
            "tokens": merged.prompt_tokens + merged.response_tokens,
            "unfinished": merged.unfinished,
            **(served(folder) if remote else {}),
        },
        refused,
    )
    say(
        f"generate: {merged.unfinished} of {merged.rows} answers were cut by "
        f"generate.max_new_tokens={config.generate.max_new_tokens}"
    )


def finish(artifact: Artifact, facts: dict, refused: Sequence[Refusal] = ()) -> None:
    """Complete an artifact whose answers are merged: write the manifest and delete the unmerged files."""
    left_out = Counter(json.loads((artifact.partial / LEFT_OUT).read_text())) + Counter(
        shortened(refusal.reason) for refusal in refused
    )
    artifact.finish(**facts, left_out=left_out.total(), left_out_for=left_out)
    shutil.rmtree(artifact.folder / UNMERGED)
    say(f"generate: {artifact.folder}")


# Questions


QUESTIONS, LEFT_OUT, ORDER = (
    f"{UNMERGED}/questions",
    f"{UNMERGED}/questions/left_out.json",
    f"{UNMERGED}/questions/order.npy",
)


def write_questions(config: Config) -> None:
    """Tokenise every prompt, once for all ranks.

    In each folder the counts of left-out prompts by reason are written last, so that this file marks the questions
    as complete.
    """
    training, greedy = artifacts.responses(config), artifacts.greedy(config)
    wanted = [
        artifact
        for artifact in (training, greedy)
        if not artifact.complete and not (artifact.begin() / LEFT_OUT).is_file()
    ]
    prompts = config.prompts.read() if wanted else []
    if training in wanted:
        write_training(config, training.partial, [prompt for prompt in prompts if prompt.split == "train"])
    if greedy in wanted:
        write_greedy(config, greedy.partial, [prompt for prompt in prompts if prompt.split in GREEDY])


def write_training(config: Config, folder: Path, prompts: list[Prompt]) -> None:
    lengths, left_out = [], Counter()

    def questions() -> Iterator[Question]:
        for question in encoded(config, prompts, left_out):
            lengths.append((len(question.prompt_ids), question.id))
            yield question

    write_rows(folder / QUESTIONS / "train.jsonl", questions(), Question)
    check(bool(lengths), f"no training prompt is left of {len(prompts)}: {dict(left_out)}")
    np.save(folder / ORDER, sorted(range(len(lengths)), key=lengths.__getitem__))
    write_left_out(folder, left_out, f"{len(prompts)} training prompts")


def write_greedy(config: Config, folder: Path, prompts: list[Prompt]) -> None:
    left_out = Counter()
    for split in GREEDY:
        questions = list(encoded(config, [prompt for prompt in prompts if prompt.split == split], left_out))
        count = config.generate.greedy_validation if split == "validation" else 0
        write_rows(
            folder / QUESTIONS / f"{split}.jsonl", spread(questions, count or config.generate.greedy_prompts), Question
        )
    write_left_out(folder, left_out, f"{len(prompts)} validation and test prompts")


def write_left_out(folder: Path, left_out: Counter[str], of: str) -> None:
    for reason, count in left_out.items():
        say(f"generate: {count} of {of} are left out: {reason}")
    write_atomic(folder / LEFT_OUT, json.dumps(left_out))


def encoded(config: Config, prompts: list[Prompt], left_out: Counter[str]) -> Iterator[Question]:
    """Tokenised prompts. Prompts that cannot be used are counted in `left_out` by reason."""
    tokenizer, most = load_tokenizer(config.target), config.generate.max_prompt_tokens
    for prompt in tqdm(prompts, unit="prompt", desc="tokenise"):
        try:
            ids = prompt_ids(tokenizer, list(prompt.messages), config.target)
        except TemplateError as error:  # for example, Gemma's template has no system turns
            left_out[f"the chat template refused it: {error}"] += 1
            continue
        if len(ids) <= most:
            yield Question(prompt.id, prompt.category, ids)
        else:
            left_out[f"longer than generate.max_prompt_tokens={most}"] += 1


def spread(questions: list[Question], count: int) -> list[Question]:
    """The first `count` questions, taken from the categories in turn so that every category is represented."""
    queues = defaultdict(list)
    for question in questions:
        queues[question.category].append(question)
    taken = [
        queue[turn]
        for turn in range(max(map(len, queues.values()), default=0))
        for _, queue in sorted(queues.items())
        if turn < len(queue)
    ]
    return taken[:count]


def questions_of(folder: Path, split: str) -> Rows[Question]:
    return Rows(folder / QUESTIONS / f"{split}.jsonl", Question)


def ids_of(folder: Path, split: str) -> Iterator[str]:
    return (question.id for question in questions_of(folder, split))


# Answers of the target on this machine


def answer_training(config: Config, folder: Path) -> None:
    """Answer this rank's batches of training prompts, one file per batch.

    Batches are planned from the full list of questions, so that they are the same after an interruption.
    """
    questions, batches, files = questions_of(folder, "train"), batches_of(config, folder), batch_files(config, folder)
    target = prepack(load_target(config.target)) if here(missing(files)) else None

    def make(number: int) -> int:
        batch = [questions[index] for index in batches[number]]
        answers = respond(
            target,
            [question.prompt_ids for question in batch],
            [question.id for question in batch],
            config.target.sampling,
            max_new_tokens=config.generate.max_new_tokens,
            seed=config.generate.seed,
        )
        write_jsonl(
            files[number], [answered(question, ids, target).row() for question, ids in zip(batch, answers, strict=True)]
        )
        return sum(map(len, answers))

    make_files(files, [len(batch) for batch in batches], make, unit="prompt", desc="generate")


def batches_of(config: Config, folder: Path) -> list[list[int]]:
    """Batches of questions of similar length, as numbers of the questions."""
    ordered, size = np.load(folder / ORDER).tolist(), config.generate.batch_size
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def batch_files(config: Config, folder: Path) -> list[Path]:
    return [folder / UNMERGED / "batches" / f"{number:06d}.jsonl" for number in range(len(batches_of(config, folder)))]


def answer_greedily(config: Config, folder: Path, split: str) -> None:
    """Greedy answers of the model that is evaluated, since replay needs its text. One file per batch."""
    questions, files, size = (
        questions_of(folder, split),
        greedy_files(config, folder, split),
        config.generate.greedy_batch,
    )
    target = load_target(config.target, dtype=config.evaluate.dtype) if here(missing(files)) else None
    target = prepack(target) if target is not None and size > 1 else target

    def make(number: int) -> int:
        batch = questions[number * size : (number + 1) * size]
        answers = greedy_answers(
            target, [question.prompt_ids for question in batch], config.generate.greedy_max_new_tokens
        )
        write_jsonl(
            files[number], [answered(question, ids, target).row() for question, ids in zip(batch, answers, strict=True)]
        )
        return sum(map(len, answers))

    make_files(
        files,
        [len(questions[number * size : (number + 1) * size]) for number in range(len(files))],
        make,
        unit="prompt",
        desc=f"greedy {split}",
    )


def greedy_answers(target: Target, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Greedy answers: one prompt is decoded by plain decoding, several are decoded as a batch."""
    if len(prompts) == 1:
        return [decode_plain(target, prompts[0], max_new_tokens=max_new_tokens)]
    return respond(target, prompts, [""] * len(prompts), GREEDILY, max_new_tokens=max_new_tokens, seed=0)


def greedy_files(config: Config, folder: Path, split: str) -> list[Path]:
    batches = -(-len(questions_of(folder, split)) // config.generate.greedy_batch)
    return [folder / UNMERGED / "greedy" / f"{split}-{number:06d}.jsonl" for number in range(batches)]


def all_files(config: Config) -> list[list[Path]]:
    """The files that the ranks make, by kind and split."""
    training, greedy = artifacts.responses(config), artifacts.greedy(config)
    batches = (
        [] if training.complete or isinstance(config.responder, Remote) else [batch_files(config, training.partial)]
    )
    return batches + [greedy_files(config, greedy.partial, split) for split in GREEDY if not greedy.complete]


def answered(question: Question, ids: list[int], target: Target) -> Response:
    return question.answered(ids, target.spec.stop_ids, target.tokenizer)


# Answers of servers


@dataclass(frozen=True)
class Asked:
    """The training prompts, the log of the answers of servers, and the numbers of prompts without an answer."""

    questions: Rows[Question]
    log: AnswerLog
    waiting: list[int]


def unanswered(config: Config) -> Asked:
    folder = artifacts.responses(config).partial
    questions, log = questions_of(folder, "train"), AnswerLog(folder / ANSWERS)
    return Asked(
        questions, log, [number for number, identity in enumerate(ids_of(folder, "train")) if identity not in log.ids]
    )


def ask(config: Config, asked: Asked, model: str) -> list[Refusal]:
    """Send the training prompts that have no answer yet to the servers.

    Returns the refused ones, which a later run sends again. ValueError if too many are refused.
    """
    folder, responder, tokenizer = artifacts.responses(config).partial, config.responder, load_tokenizer(config.target)
    require_same_model(folder, model, asked.log)
    responder.require_target(model, known_texts(config), config.target, config.generate, tokenizer)
    refused, tokens = [], 0
    answers = responder.answers(
        model, (asked.questions[number] for number in asked.waiting), config.target, config.generate, tokenizer
    )
    with tqdm(total=len(asked.questions), initial=len(asked.log.ids), unit="prompt", desc="generate") as bar:
        for found in answers:
            if isinstance(found, Refusal):
                refused.append(found)
                require_few(refused, max(bar.n + 1, FEW / max(responder.max_refused, 1e-9)), responder)
            else:
                asked.log.append(found)
                tokens += len(found.response_ids)
            bar.update()
            bar.set_postfix_str(f"{tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tokens/s", refresh=False)
    require_few(refused, len(asked.questions), responder)
    write_jsonl(folder / "refused.jsonl", map(asdict, refused))
    for reason, count in Counter(shortened(refusal.reason) for refusal in refused).most_common():
        say(f"generate: {count} of {len(asked.questions)} prompts are left out: {reason}")
    return refused


def require_same_model(folder: Path, model: str, log: AnswerLog) -> None:
    """Raise ValueError if the answers so far are from another model than the servers have; else record the model."""
    before = served(folder).get("model", model) if log.ids else model
    check(
        before == model,
        f"{log.path} holds {len(log.ids)} answers of {before}, and the servers have {model} now: serve {before} again, "
        f"or set responder.model={model}, whose answers have a key of their own",
    )
    write_atomic(folder / SERVED, json.dumps({"model": model}))


def served(folder: Path) -> dict:
    return json.loads((folder / SERVED).read_text()) if (folder / SERVED).is_file() else {}


def known_texts(config: Config) -> list[Response]:
    """Some of the target's own greedy answers, by which a server's model can be checked."""
    return [response for split in GREEDY for response in artifacts.greedy_responses(config, split)[:KNOWN]]


def require_few(refused: list[Refusal], of: float, responder: Remote) -> None:
    """Raise ValueError if more than the share responder.max_refused of `of` prompts were refused.

    So many refusals have another cause than the single prompts.
    """
    if len(refused) > responder.max_refused * of:
        reasons = Counter(shortened(refusal.reason) for refusal in refused).most_common(3)
        raise ValueError(
            f"{len(refused)} prompts were refused, "
            f"which is more than responder.max_refused={responder.max_refused} allows:\n  "
            + "\n  ".join(f"{count} x {reason}" for reason, count in reasons)
            + "\nThe answers so far are kept. Remove the cause and run the same command again, "
            "or raise responder.max_refused"
        )


def shortened(reason: str) -> str:
    """A reason without its numbers, so that reasons that differ only in numbers are counted together."""
    return re.sub(r"\d+", "N", reason)
