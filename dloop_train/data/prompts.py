"""Prompts: conversations to be answered, each with an id, a category and a split."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dloop_train.config import DATA, check
from dloop_train.runs import read_jsonl

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Prompt:
    """A conversation that ends with a user's turn."""

    id: str
    messages: tuple[dict, ...]
    """As the chat template takes them: role and content, and what else a message has, such as tool calls."""
    category: str
    split: str


def split_of(identity: str, validation: float, test: float) -> str:
    """A split decided by the id alone, so that adding prompts moves none. Shares are of 1."""
    share = int(hashlib.sha256(identity.encode()).hexdigest()[:8], 16) / 2**32
    return "test" if share < test else "validation" if share < test + validation else "train"


def content_id(messages: list[dict]) -> str:
    return hashlib.sha256(json.dumps(messages, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


def up_to_last_user_turn(messages: list[dict], where: str) -> tuple[dict, ...]:
    """The conversation without the assistant's final answer: the target gives its own."""
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
    """A prompt set. `limit` counts the training prompts; validation and test prompts are never cut."""

    name: str = ""
    limit: int = 0
    """Most training prompts; 0 is all."""
    validation: float = 0.02
    """Share of prompts for validation, by id."""
    test: float = 0.02

    def rows(self) -> Iterator[Prompt]:
        raise NotImplementedError

    def settings(self) -> dict:
        """What shapes this set, for the keys of what is made from it."""
        raise NotImplementedError

    def read(self) -> list[Prompt]:
        """All prompts up to the limit, ids checked."""
        prompts, seen, trained = [], set(), 0
        for prompt in self.rows():
            check(prompt.id not in seen, f"prompts {self.name}: id {prompt.id!r} stands twice")
            seen.add(prompt.id)
            if prompt.split == "train":
                if self.limit and trained >= self.limit:
                    continue
                trained += 1
            prompts.append(prompt)
        check(trained > 0, f"prompts {self.name} has no training prompt")
        return prompts


def messages_of(row: dict) -> list[dict]:
    """A row's conversation; empty where it has none."""
    asked = row.get("prompt") or next(iter(row.get("turns") or ()), None)
    return row.get("messages") or ([{"role": "user", "content": asked}] if asked else [])


@dataclass(kw_only=True)
class JsonLines(Prompts):
    """A file of {"messages": [...]}, {"prompt": "..."} or {"turns": ["...", ...]} rows; id, category and split are optional.

    Of `turns`, a benchmark's user turns, the first is asked: the others stand behind answers that nobody has given yet.
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
                f"{where}: a row with tools cannot be rendered, since only messages reach the chat template; write them into the system message",
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

    ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}

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
        except (
            OSError,
            HTTPError,
            DatasetsError,
        ) as error:  # no such set, no way to the hub, a connection that broke, files that cannot be read
            cause = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ConnectionError(
                f"prompts {self.path} could not be had from the hub ({cause}). Download its parquet files and pass "
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
                continue  # a few rows of the set start with an answer or hold empty turns
            messages = up_to_last_user_turn(messages, f"row {number} of {self.path}")
            identity = content_id(list(messages))
            if identity not in seen:  # the set holds some conversations twice
                seen.add(identity)
                yield Prompt(
                    identity, messages, row.get("source") or "all", split_of(identity, self.validation, self.test)
                )
