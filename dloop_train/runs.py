"""Artifacts on disk: their keys and manifests, whether they are complete, and atomic writes."""

import hashlib
import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

MANIFEST = "manifest.json"


def key_of(settings: dict) -> str:
    """Hash of the settings that determine an artifact: 12 hexadecimal digits."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def write_atomic(path: Path, text: str) -> None:
    """Write a temporary file in the same folder and rename it: a reader sees the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(beside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def write_jsonl(path: Path, rows: Iterable[dict]) -> None:
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_jsonl(path: Path) -> list[dict]:
    """Rows of a JSON-lines file. Raises ValueError with the number of a line that is not JSON."""
    rows = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    rows.append(json.loads(line))
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}:{number} is not a JSON object: {error.msg}") from None
    return rows


def drop_torn_line(path: Path) -> None:
    """Remove the last line of an append-only file if it is incomplete, after a kill or on a full disk."""
    with open(path, "r+b") as file:
        if file.seek(0, os.SEEK_END):
            with mmap.mmap(file.fileno(), 0) as held:
                whole = held.rfind(b"\n") + 1
            file.truncate(whole)


def keep_rows(path: Path, kept: Callable[[dict], bool]) -> None:
    """Rewrite an append-only file with only the rows for which `kept` is true."""
    drop_torn_line(path)
    write_jsonl(path, [row for row in read_jsonl(path) if kept(row)])


@dataclass(frozen=True)
class Artifact:
    """A folder made once by one phase. Its name is the key of `settings`; it exists only when complete."""

    parent: Path
    settings: dict

    @property
    def key(self) -> str:
        return key_of(self.settings)

    @property
    def folder(self) -> Path:
        return self.parent / self.key

    @property
    def partial(self) -> Path:
        return self.parent / f"{self.key}.partial"

    @property
    def complete(self) -> bool:
        return (self.folder / MANIFEST).is_file()

    def begin(self) -> Path:
        """The folder to write into. Files that an interrupted phase wrote there are kept."""
        self.partial.mkdir(parents=True, exist_ok=True)
        return self.partial

    def finish(self, **facts) -> None:
        """Write the manifest and give the folder its name."""
        write_atomic(
            self.partial / MANIFEST, json.dumps({"settings": self.settings, **facts}, indent=1, sort_keys=True)
        )
        if self.folder.exists():
            shutil.rmtree(self.folder)
        os.replace(self.partial, self.folder)

    def facts(self) -> dict:
        """The manifest of a complete artifact.

        Raises FileNotFoundError if the artifact is not complete, and ValueError if its manifest has other settings.
        """
        if not self.complete:
            raise FileNotFoundError(f"{self.folder} does not exist yet; run the phase that makes it first")
        facts = json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))
        require_same(facts["settings"], self.settings, self.folder)
        return facts


def require_same(found: dict, wanted: dict, where: Path) -> None:
    """Raise ValueError that lists the settings that differ."""
    found, wanted = json.loads(json.dumps(found)), json.loads(json.dumps(wanted))
    differ = [
        f"{key}: found {found.get(key)!r}, wanted {wanted.get(key)!r}"
        for key in sorted(found.keys() | wanted.keys())
        if found.get(key) != wanted.get(key)
    ]
    if differ:
        raise ValueError(
            f"{where} was made with other settings:\n  "
            + "\n  ".join(differ)
            + "\nchoose another name= (or root=), or delete that folder"
        )
