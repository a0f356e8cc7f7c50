"""Responses: questions and responses on disk, one JSON line per prompt, with an index of the lines.

Rows are parsed when they are accessed, since the ids of a million prompts do not fit into memory.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TypeVar

import numpy as np

from dloop_train.runs import drop_torn_line

T = TypeVar("T")


@dataclass(frozen=True)
class Question:
    """A prompt as token ids, including the assistant's header."""

    id: str
    category: str
    prompt_ids: list[int]

    def row(self) -> dict:
        return asdict(self)

    def answered(self, ids: list[int], stop_ids: Sequence[int], tokenizer) -> "Response":
        finished = bool(ids) and ids[-1] in stop_ids
        return Response(
            self.id, self.category, self.prompt_ids, ids, finished, tokenizer.decode(ids, skip_special_tokens=True)
        )


@dataclass(frozen=True)
class Response:
    """A prompt and the target's own answer, as token ids."""

    id: str
    category: str
    prompt_ids: list[int]
    response_ids: list[int]
    """Includes the end token if it was generated."""
    finished: bool
    """False if max_new_tokens cut the answer."""
    text: str

    def row(self) -> dict:
        return asdict(self)


class Rows(Sequence[T]):
    """Questions or responses of a file, parsed when they are accessed."""

    def __init__(self, path: Path, kind: type[T]):
        self.path, self.kind = path, kind
        beside = index_file(path)
        # [n, 2 or 3] int64: offset of the line in bytes, and the number of ids in each list
        self.offsets = np.load(beside) if beside.is_file() else scan(path, kind)
        assert self.offsets.shape[1] == 1 + len(id_lists(kind))

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each row, prompt plus response. [n]"""
        return self.offsets[:, 1:].sum(1)

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, at):
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(len(self)))]
        with open(self.path, "rb") as file:
            file.seek(self.offsets[at, 0])
            return self.kind(**json.loads(file.readline()))

    def __iter__(self) -> Iterator[T]:
        with open(self.path, "rb") as file:
            for line in file:
                yield self.kind(**json.loads(line))


def read_responses(folder: Path, split: str) -> Rows[Response]:
    return Rows(folder / f"{split}.jsonl", Response)


def index_file(path: Path) -> Path:
    return path.with_suffix(".index.npy")


def id_lists(kind: type) -> list[str]:
    return [field.name for field in fields(kind) if field.name.endswith("_ids")]


def scan(path: Path, kind: type) -> np.ndarray:
    """The index of a file without an index file."""
    found, at = [], 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            found.append((at, *sizes_of(parse(line, kind, f"{path}:{number}"), kind)))
            at += len(line)
    return as_index(found, kind)


def as_index(found: list[tuple], kind: type) -> np.ndarray:
    return np.array(found, dtype=np.int64).reshape(-1, 1 + len(id_lists(kind)))


def parse(line: bytes, kind: type, where: str) -> dict:
    """A line as a dictionary. ValueError, with the line's location, if it is not JSON or has other fields."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not a JSON object: {error.msg}") from None
    wanted = {field.name for field in fields(kind)}
    if not isinstance(row, dict) or row.keys() != wanted:
        raise ValueError(
            f"{where} is no {kind.__name__.lower()}: it should have {sorted(wanted)}, it has {sorted(row)}"
        )
    return row


def sizes_of(row: dict, kind: type) -> tuple[int, ...]:
    """Number of ids in each list of a row."""
    return tuple(len(row[name]) for name in id_lists(kind))


def as_line(row: Question | Response) -> bytes:
    return (json.dumps(row.row(), ensure_ascii=False) + "\n").encode()


def write_rows(path: Path, rows: Iterable[Question | Response], kind: type) -> None:
    """Write rows and their index, to a temporary file that is then renamed."""
    write_lines(path, ((as_line(row), sizes_of(row.row(), kind)) for row in rows), kind)


def write_lines(path: Path, lines: Iterable[tuple[bytes, tuple[int, ...]]], kind: type) -> None:
    """Write encoded lines, each with the sizes of its lists, and their index."""
    beside, found, at = path.with_name(f".{path.name}.{os.getpid()}"), [], 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(beside, "wb") as file:
        for line, sizes in lines:
            found.append((at, *sizes))
            at += file.write(line)
        file.flush()
        os.fsync(file.fileno())
    np.save(index_file(path), as_index(found, kind))
    os.replace(beside, path)


@dataclass(frozen=True)
class Merged:
    """Counts of a merged file of responses."""

    rows: int
    prompt_tokens: int
    response_tokens: int
    unfinished: int
    """Responses that max_new_tokens cut."""


def merge(files: Iterable[Path], order: Iterable[str], path: Path) -> Merged:
    """Write the responses of `files` to one file, in the order of the prompt ids `order`.

    Prompts without a response are left out.
    All lines are in memory as bytes, about six bytes per token.
    """
    place = {identity: number for number, identity in enumerate(order)}
    lines: list[tuple | None] = [None] * len(place)
    unfinished = 0
    for file in files:
        with open(file, "rb") as opened:
            for number, line in enumerate(opened, 1):
                row = parse(line, Response, f"{file}:{number}")
                lines[place[row["id"]]] = line, sizes_of(row, Response)
                unfinished += not row["finished"]
    there = [line for line in lines if line is not None]
    write_lines(path, there, Response)
    return Merged(len(there), sum(sizes[0] for _, sizes in there), sum(sizes[1] for _, sizes in there), unfinished)


class AnswerLog:
    """A file to which responses are appended. A line cut off by a kill is dropped, and its prompt is answered again."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.ids: set[str] = set()
        path.touch()
        drop_torn_line(path)
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                self.ids.add(parse(line, Response, f"{path}:{number}")["id"])

    def append(self, response: Response) -> None:
        assert response.id not in self.ids
        with open(self.path, "ab") as file:
            file.write(as_line(response))
        self.ids.add(response.id)
