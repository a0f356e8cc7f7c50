"""Sample user turns from the target: what SmolLM2 itself writes after the header of a user's turn, kept where it reads like a request.

    python data/sample_turns.py          # writes prompts/sampled.jsonl, which make_prompts.py appends
"""

import json
import re
from pathlib import Path

from dloop_train.config import SamplingConfig, TargetConfig, build, option
from dloop_train.targets.prepack import prepack
from dloop_train.targets.responders import respond
from dloop_train.targets.sources import load_target

OUT = Path(__file__).parent / "prompts" / "sampled.jsonl"
BATCH, BATCHES, SEED = 192, 4, 0
SAMPLING = SamplingConfig(temperature=1.0, top_p=0.95, top_k=256)
LONGEST = 64
"""Tokens of a turn; longer ones are left out."""


def main():
    target = prepack(load_target(build(option("target", "smollm2_135m"), TargetConfig, "target")))
    header = header_ids(target.tokenizer)
    turns = {}
    for batch in range(BATCHES):
        names = [f"turn-{batch * BATCH + row:05d}" for row in range(BATCH)]
        for name, ids in zip(names, respond(target, [header] * BATCH, names, SAMPLING, max_new_tokens=LONGEST, seed=SEED), strict=True):
            text = target.tokenizer.decode(ids, skip_special_tokens=True).strip()
            if ids[-1] in target.spec.stop_ids and reads_like_a_request(text):
                turns.setdefault(normalised(text), {"name": name, "content": text})
        print(f"batch {batch + 1} of {BATCHES}: {len(turns)} turns")
    OUT.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in turns.values()), encoding="utf-8")


def header_ids(tokenizer) -> list[int]:
    """Everything that stands before the user's words in a rendered conversation."""
    marker = "THE-USER-SPEAKS"
    text = tokenizer.apply_chat_template([{"role": "user", "content": marker}], tokenize=False)
    return tokenizer(text.split(marker)[0], add_special_tokens=False)["input_ids"]


def reads_like_a_request(text: str) -> bool:
    """Five words or more of plain English without placeholders, whole to its last character."""
    return bool(len(text.split()) >= 5 and text.isascii() and text.isprintable() and text[0].isupper() and text[-1] in ".?!" and not re.search(r"[\[\]{}<>|]", text))


def normalised(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


if __name__ == "__main__":
    main()
