"""Write a prompt file of the first user turns of benchmark files, for replay on other prompts.

    python tests/speed/foreign_prompts.py benchmarks.jsonl --count 64 \\
        gsm8k.jsonl alpaca.jsonl humaneval.jsonl mt-bench.jsonl

Rows of the benchmark files are {"turns": [...]}; a file's name becomes the category of its prompts. All prompts are in
the test split, except for one training prompt, which every run needs.
"""

import argparse
import json
from pathlib import Path

from dloop_train.runs import read_jsonl, write_atomic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--count", type=int, default=64, help="first rows of each file")
    wanted = parser.parse_args()
    rows = [row for path in wanted.files for row in prompts_of(path, wanted.count)]
    rows.append({"id": "training", "turns": ["Say hello."], "category": "training", "split": "train"})
    write_atomic(wanted.out, "".join(json.dumps(row) + "\n" for row in rows))


def prompts_of(path: Path, count: int) -> list[dict]:
    return [
        {"id": f"{path.stem}-{number}", "turns": row["turns"][:1], "category": path.stem, "split": "test"}
        for number, row in enumerate(read_jsonl(path)[:count])
    ]


if __name__ == "__main__":
    main()
