"""Responses on disk: one JSON line an answered prompt, a file a split."""

from dataclasses import asdict, dataclass
from pathlib import Path

from dloop_train.runs import read_jsonl


@dataclass(frozen=True)
class Response:
    """A prompt and the target's own answer, as ids."""

    id: str
    category: str
    prompt_ids: list[int]
    response_ids: list[int]
    """The end token included when it was reached."""
    finished: bool
    """False where max_new_tokens cut the answer."""
    text: str

    def row(self) -> dict:
        return asdict(self)


def read_responses(folder: Path, split: str) -> list[Response]:
    return [Response(**row) for row in read_jsonl(folder / f"{split}.jsonl")]
