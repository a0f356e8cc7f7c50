"""Record the sampled answers of a responses folder in a file that responder=recorded can read.

    python data/record_responses.py artifacts/responses/<key> data/responses/smollm2_135m.jsonl.gz

The folder may be unfinished. Answers that are already in the file stay, and those of another folder can be added.
"""

import gzip
import json
import sys
from pathlib import Path

from dloop_train.runs import read_jsonl
from dloop_train.targets.recorded import prompt_digest


def main(folder: Path, out: Path) -> None:
    rows = {row["id"]: row for row in lines(out)} if out.is_file() else {}
    for file in [*folder.glob("train.jsonl"), *folder.glob("unmerged/batches/*.jsonl")]:
        for row in read_jsonl(file):
            rows.setdefault(
                row["id"],
                {
                    "id": row["id"],
                    "prompt_sha256": prompt_digest(row["prompt_ids"]),
                    "response_ids": row["response_ids"],
                },
            )
    out.parent.mkdir(parents=True, exist_ok=True)
    # Without time and file name in the header the same rows give the same bytes.
    with (
        open(out, "wb") as raw,
        gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as file,
    ):
        for _, row in sorted(rows.items()):
            file.write((json.dumps(row, separators=(",", ":")) + "\n").encode())
    print(
        f"{len(rows)} answers, {sum(len(row['response_ids']) for row in rows.values())} tokens, "
        f"{out.stat().st_size / 1e6:.1f} MB"
    )


def lines(path: Path) -> list[dict]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
