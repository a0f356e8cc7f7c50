"""Prompts: conversations for the target to answer, each with an id, a category and a split."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dloop_train.config import DATA, check
from dloop_train.runs import read_jsonl

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Prompt:
    """A conversation that ends with a user turn."""

    id: str
    messages: tuple[dict, ...]
    """Messages as input of the chat template: role, content and further keys such as tool calls."""
    category: str
    split: str


def split_of(identity: str, validation: float, test: float) -> str:
    """The split of a prompt. It depends only on the id, so that adding prompts moves no other. Shares are in [0, 1]."""
    share = int(hashlib.sha256(identity.encode()).hexdigest()[:8], 16) / 2**32
    return "test" if share < test else "validation" if share < test + validation else "train"


def content_id(messages: list[dict]) -> str:
    return hashlib.sha256(json.dumps(messages, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


def up_to_last_user_turn(messages: list[dict], where: str) -> tuple[dict, ...]:
    """The conversation up to its last user turn, since the target generates the answer. Checks the messages."""
    for message in messages:
        check(
            isinstance(message, dict) and message.keys() >= {"role", "content"},
            f"{where}: a message needs role and content, got {message!r}",
        )
        check(message["role"] in ("system", "user", "assistant", "tool"), f"{where}: unknown role {message['role']!r}")
    while messages and messages[-1]["role"] != "user":
        messages = messages[:-1]
    check(bool(messages), f"{where}: no user turn")
    return tuple(messages)


@dataclass(kw_only=True)
class Prompts:
    """A prompt set."""

    name: str = ""
    limit: int = 0
    """Maximum number of training prompts; 0 is all. Validation and test prompts are not limited."""
    validation: float = 0.02
    """Share of prompts for validation, chosen by id."""
    test: float = 0.02
    """Share of prompts for testing, chosen by id."""

    def rows(self) -> Iterator[Prompt]:
        raise NotImplementedError

    def settings(self) -> dict:
        """Settings that determine this set. They are part of the keys of artifacts made from it."""
        raise NotImplementedError

    def read(self) -> list[Prompt]:
        """All prompts up to the limit. Ids are checked to be unique."""
        prompts, seen, trained = [], set(), 0
        for prompt in self.rows():
            check(prompt.id not in seen, f"prompts {self.name}: id {prompt.id!r} appears twice")
            seen.add(prompt.id)
            if prompt.split == "train":
                if self.limit and trained >= self.limit:
                    continue
                trained += 1
            prompts.append(prompt)
        check(trained > 0, f"prompts {self.name} has no training prompt")
        return prompts


def messages_of(row: dict) -> list[dict]:
    """A row's conversation; empty if it has none."""
    asked = row.get("prompt") or next(iter(row.get("turns") or ()), None)
    return row.get("messages") or ([{"role": "user", "content": asked}] if asked else [])


@dataclass(kw_only=True)
class JsonLines(Prompts):
    """A JSON Lines file. A row has "messages" (a list), "prompt" (a string) or "turns" (a list of strings).

    Keys id, category and split are optional.
    `turns` are a benchmark's user turns. Only the first one is used, since the others follow answers that do not exist.
    """

    path: str

    def file(self) -> Path:
        path = Path(self.path.replace("builtin:", f"{DATA}/")).expanduser()
        check(path.is_file(), f"prompts.path {path} is not a file")
        return path

    def settings(self) -> dict:
        digest = hashlib.sha256(self.file().read_bytes()).hexdigest()[:16]
        return {
            "name": self.name,
            "sha256": digest,
            "limit": self.limit,
            "validation": self.validation,
            "test": self.test,
        }

    def rows(self) -> Iterator[Prompt]:
        path = self.file()
        for number, row in enumerate(read_jsonl(path), 1):
            where = f"{path}:{number}"
            messages = messages_of(row)
            check(bool(messages), f'{where}: expected "messages", "prompt" or "turns", got {sorted(row)}')
            check(
                not row.get("tools"),
                f"{where}: a row with tools cannot be rendered, since only messages reach the chat template; "
                f"write them into the system message",
            )
            messages = up_to_last_user_turn(messages, where)
            identity = str(row.get("id") or content_id(list(messages)))
            split = row.get("split") or split_of(identity, self.validation, self.test)
            check(split in SPLITS, f"{where}: split must be one of {SPLITS}, got {split!r}")
            yield Prompt(identity, messages, row.get("category", "all"), split)


@dataclass(kw_only=True)
class PerfectBlend(Prompts):
    """mlabonne/open-perfectblend: conversations of from/value turns, from the hub or local parquet or jsonl files."""

    path: str = "mlabonne/open-perfectblend"
    """Hub id, a local parquet or jsonl file, or a folder of them."""
    revision: str = "main"

    ROLES: ClassVar = {
        "human": "user",
        "user": "user",
        "gpt": "assistant",
        "assistant": "assistant",
        "system": "system",
    }

    def settings(self) -> dict:
        return {
            "name": self.name,
            "path": self.path,
            "revision": self.revision,
            "limit": self.limit,
            "validation": self.validation,
            "test": self.test,
        }

    def load(self):
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
        from huggingface_hub.errors import HTTPError

        path = Path(self.path).expanduser()
        if path.exists():
            files = sorted(
                str(file)
                for file in (path.rglob("*") if path.is_dir() else [path])
                if file.suffix in (".parquet", ".jsonl", ".json")
            )
            check(bool(files), f"{path} holds no parquet or jsonl file")
            kind = "parquet" if files[0].endswith(".parquet") else "json"
            return load_dataset(kind, data_files=files, split="train")
        try:
            return load_dataset(self.path, revision=self.revision, split="train")
        # The set does not exist, the hub cannot be reached, the connection broke, or files cannot be read.
        except (OSError, HTTPError, DatasetsError) as error:
            cause = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ConnectionError(
                f"prompts {self.path} could not be loaded from the hub ({cause}). Download its parquet files and pass "
                f"prompts.path=<folder>, use prompts=jsonl prompts.path=<file>, or prompts=builtin"
            ) from error

    def rows(self) -> Iterator[Prompt]:
        seen = set()
        for number, row in enumerate(self.load()):
            turns = row.get("conversations") or row.get("messages")
            check(bool(turns), f"row {number} of {self.path} has neither conversations nor messages: {sorted(row)}")
            messages = [
                {
                    "role": self.ROLES.get(turn.get("from") or turn.get("role"), "?"),
                    "content": turn.get("value") or turn.get("content"),
                }
                for turn in turns
            ]
            if messages[0]["role"] not in ("system", "user") or any(
                m["role"] == "?" or not m["content"] for m in messages
            ):
                continue  # a few rows start with an answer or have empty turns
            messages = up_to_last_user_turn(messages, f"row {number} of {self.path}")
            identity = content_id(list(messages))
            if identity not in seen:  # some conversations occur twice
                seen.add(identity)
                yield Prompt(
                    identity, messages, row.get("source") or "all", split_of(identity, self.validation, self.test)
                )
