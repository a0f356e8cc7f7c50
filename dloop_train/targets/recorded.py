"""Recorded: a responder that reads the target's answers from a file.

Selected with responder=recorded responder.path=<jsonl or jsonl.gz>.
"""

import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dloop_train.config import DATA, GenerateConfig, TargetConfig, check
from dloop_train.data.responses import Question, Response
from dloop_train.targets.responders import Refusal, Remote


@dataclass(kw_only=True)
class Recorded(Remote):
    """A file of {"id", "response_ids", and "prompt_ids" or their "prompt_sha256"} rows.

    An example is the train.jsonl of a responses folder. An answer is used if its prompt has the same id and the same
    tokens. Prompts without an answer are left out and counted. The file is held in memory, at four bytes per token.
    """

    path: str
    """Path of the file; builtin:<name> is one that comes with this package."""
    max_refused: float = 1.0

    def __post_init__(self):
        check(0 <= self.max_refused <= 1, f"responder.max_refused is a share of 1, got {self.max_refused}")

    def file(self) -> Path:
        path = Path(self.path.replace("builtin:", f"{DATA}/")).expanduser()
        check(path.is_file(), f"responder.path {path} is not a file")
        return path

    def settings(self) -> dict:
        return {"responder": "recorded", "sha256": hashlib.sha256(self.file().read_bytes()).hexdigest()[:16]}

    def connect(self) -> str:
        return f"recorded {self.settings()['sha256']}"

    def require_target(
        self, model: str, known: Sequence[Response], target: TargetConfig, generate: GenerateConfig, tokenizer
    ) -> None:
        """No check here: `answers` compares the tokens of every prompt with those of the file."""

    def answers(
        self, model: str, questions: Iterable[Question], target: TargetConfig, generate: GenerateConfig, tokenizer
    ) -> Iterator[Response | Refusal]:
        found = read_recorded(self.file())
        for question in questions:
            digest, ids = found.get(question.id, ("", None))
            if ids is None:
                yield Refusal(question.id, f"{self.path} has no answer to it")
            elif digest != prompt_digest(question.prompt_ids):
                yield Refusal(
                    question.id, f"{self.path} answers other tokens under its id: another text, template or tokenizer"
                )
            else:
                yield question.answered(ids[: generate.max_new_tokens].tolist(), target.stop_ids, tokenizer)


def read_recorded(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    """Digest of the prompt's tokens, and the answer's ids [n] int32, for every id of the file."""
    found = {}
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            row = parsed(line, where)
            check(row["id"] not in found, f"{where}: id {row['id']!r} appears twice")
            digest = row["prompt_sha256"] if "prompt_sha256" in row else prompt_digest(row["prompt_ids"])
            found[row["id"]] = digest, np.array(row["response_ids"], dtype=np.int32)
    check(bool(found), f"{path} holds no answer")
    return found


def parsed(line: str, where: str) -> dict:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not a JSON object: {error.msg}") from None
    good = (
        isinstance(row, dict)
        and row.keys() >= {"id", "response_ids"}
        and (row.keys() & {"prompt_ids", "prompt_sha256"})
        and bool(row["response_ids"])
    )
    check(
        bool(good),
        f"{where}: expected id, response_ids and prompt_ids or prompt_sha256, "
        f"got {sorted(row) if isinstance(row, dict) else type(row).__name__}",
    )
    return row


def prompt_digest(ids: Sequence[int]) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of a prompt's tokens."""
    return hashlib.sha256(np.array(ids, dtype="<i4").tobytes()).hexdigest()[:16]
