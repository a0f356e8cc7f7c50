"""Sample user turns: SmolLM2 continues a user header and an opener; plausible requests are kept.

    python data/sample_turns.py [turns]

Appends to prompts/sampled.jsonl, which make_prompts.py mixes in. A second start continues after the turns in the file.
"""

import json
import re
import sys
from pathlib import Path

from dloop_train.config import SamplingConfig, TargetConfig, build, option
from dloop_train.runs import read_jsonl
from dloop_train.targets.prepack import prepack
from dloop_train.targets.responders import respond
from dloop_train.targets.sources import load_target

OUT = Path(__file__).parent / "prompts" / "sampled.jsonl"
TURNS, BATCH, SEED = 11520, 192, 0
SAMPLING = SamplingConfig(temperature=1.0, top_p=0.95, top_k=256)
LONGEST = 64
"""Most sampled tokens of a turn; longer turns are left out."""
PLACEHOLDER = re.compile(r"\[[^\]]*\]|<[^>]*>|\{[^}]*\}|\.\.\.$|_{3,}")

OPENERS = {
    "chat": [
        "",
        "I",
        "Can you",
        "What",
        "Why",
        "How",
        "Tell me",
        "Hi",
        "My",
        "Do you think",
        "What's the difference between",
        "I'm",
        "Is it",
        "Who",
        "When",
        "Where",
        "What are some",
        "Explain",
        "How does",
        "Could you explain",
        "I've been",
        "What is the",
        "Should I",
        "Please help me",
        "I want to",
        "What happens",
    ],
    "code": [
        "Write a Python function",
        "Write a function",
        "Create a Python",
        "Implement",
        "Write a program",
        "How do I use",
        "Write a SQL query",
        "Create a class",
        "Write a JavaScript",
        "Fix the following",
        "Write a C++ program",
        "Given a list",
        "Given a string",
        "def",
        "Write a Java",
        "Build a simple",
        "Design a",
        "Write code",
        "Explain how the following code",
        "Write a regular expression",
        "Create an HTML",
        "How can I sort",
        "Write a Python script that",
        "Complete the following function",
        "Write unit tests",
        "Return the",
        "Write a recursive",
        "Convert the following Python",
    ],
    "math": [
        "A",
        "If",
        "Solve",
        "Calculate",
        "What is the value of",
        "Find the",
        "There are",
        "John has",
        "Simplify",
        "How many",
        "A rectangle",
        "The sum of",
        "Let",
        "A train",
        "Compute",
        "Sarah bought",
        "A store",
        "Evaluate",
        "The average",
        "In a class of",
        "What is the probability",
        "Mary",
        "A company",
        "Tom",
        "Each",
        "Determine",
        "A farmer",
        "Prove that",
        "The price of",
        "What percentage",
    ],
    "instruction": [
        "Write a",
        "Create a",
        "List",
        "Give me",
        "Generate",
        "Rewrite",
        "Make a",
        "Describe",
        "Compose",
        "Design a",
        "Suggest",
        "Compare",
        "Write an essay",
        "Write a short story",
        "Provide",
        "Draft an email",
        "Come up with",
        "Write a poem",
        "Outline",
        "Name",
        "Imagine",
        "Plan a",
        "Develop a",
        "Act as",
        "Pretend",
        "Write a letter",
        "Write a product description",
        "Write a blog post",
        "Propose",
        "Brainstorm",
    ],
    "extraction": [
        "Extract",
        "Summarize the following",
        "Classify",
        "Translate",
        "Convert",
        "Identify",
        "Sort",
        "Read the following passage",
        "Find all",
        "Correct the grammar",
        "Given the following text",
        "Rank",
        "Which of the following",
        "Paraphrase",
        "Edit the following",
        "Categorize",
        "Fill in",
        "Arrange",
        "Rewrite the sentence",
        "Summarise",
        "Determine whether",
        "Answer the question based on",
        "Name the",
        "Turn the following",
        "Replace",
        "Choose the",
        "Reorder",
        "Count the",
    ],
}


def main(wanted: int) -> None:
    found = read_jsonl(OUT) if OUT.is_file() else []
    seen = {normalised(row["content"]) for row in found}
    start = next_number(found)
    target = prepack(load_target(build(option("target", "smollm2_135m"), TargetConfig, "target")))
    header = header_ids(target.tokenizer)
    for first in range(start, wanted, BATCH):
        asked = [
            (f"{category}-turn-{number:05d}", category, opener)
            for number in range(first, first + BATCH)
            for category, opener in [opener_of(number)]
        ]
        opened = [target.tokenizer(opener, add_special_tokens=False)["input_ids"] for _, _, opener in asked]
        answers = respond(
            target,
            [header + ids for ids in opened],
            [name for name, _, _ in asked],
            SAMPLING,
            max_new_tokens=LONGEST,
            seed=SEED,
        )
        with open(OUT, "a", encoding="utf-8", newline="\n") as file:
            for (name, category, _), begun, ids in zip(asked, opened, answers, strict=True):
                text = target.tokenizer.decode(begun + ids, skip_special_tokens=True).strip()
                if ids[-1] in target.spec.stop_ids and reads_like_a_request(text) and normalised(text) not in seen:
                    seen.add(normalised(text))
                    found.append({"name": name, "category": category, "content": text})
                    file.write(json.dumps(found[-1], ensure_ascii=False) + "\n")
        print(f"{first + BATCH} of {wanted} sampled, {len(found)} kept", flush=True)


def opener_of(number: int) -> tuple[str, str]:
    """Category and opener of a turn: the categories take turns, and so do the openers of each category."""
    category = list(OPENERS)[number % len(OPENERS)]
    openers = OPENERS[category]
    return category, openers[number // len(OPENERS) % len(openers)]


def next_number(found: list[dict]) -> int:
    """Number of the first turn after the batches that are done."""
    last = max((int(row["name"].rpartition("-")[2]) for row in found), default=-1)
    return (last // BATCH + 1) * BATCH


def header_ids(tokenizer) -> list[int]:
    """Ids of the text before the user's words in a rendered conversation."""
    marker = "USER-TURN"
    text = tokenizer.apply_chat_template([{"role": "user", "content": marker}], tokenize=False)
    return tokenizer(text.split(marker)[0], add_special_tokens=False)["input_ids"]


def reads_like_a_request(text: str) -> bool:
    """Whether a text has at least five words, only printable ASCII, no placeholder, and closing punctuation."""
    plain = text.replace("\n", " ")
    return bool(
        len(text.split()) >= 5
        and plain.isascii()
        and plain.isprintable()
        and text[-1] in '.?!:`")'
        and not PLACEHOLDER.search(text)
    )


def normalised(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else TURNS)
