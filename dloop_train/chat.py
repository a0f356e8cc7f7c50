"""Chat in the terminal: answers are streamed, each token in the colour of the stage that drafted it.

python -m dloop_train.chat <export> <target>
"""

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TextIO

from dloop_train.checkpoints.files import locate_drafter
from dloop_train.data.chat import pieces
from dloop_train.decoding.loop import Emission
from dloop_train.decoding.partings import parting_gap
from dloop_train.serving import LoopedModel, load
from dloop_train.types import Round

COLOURS = (36, 32, 33, 35, 31)
"""Terminal colours of stages 1, 2, ...; all deeper stages have the last one."""


@dataclass(frozen=True)
class Answer:
    """A decoded answer."""

    tokens: list[int]
    rounds: list[Round]
    seconds: float

    def summary(self) -> str:
        if not self.rounds:
            return f"{len(self.tokens)} token in {self.seconds:.2f} s"
        tau = sum(one.accepted + 1 for one in self.rounds) / len(self.rounds)
        stages = sum(one.stages for one in self.rounds) / len(self.rounds)
        return (
            f"tau {tau:.2f}, {stages:.2f} stages a round, {len(self.tokens)} tokens in {self.seconds:.2f} s, "
            f"{len(self.tokens) / self.seconds:.1f} tokens/s"
        )


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    try:
        model = load(locate_drafter(options.export), options.target, threshold=options.threshold)
    except (ValueError, OSError) as error:
        sys.exit(f"chat: {error}")
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    if coloured:
        print(legend())
    # If the output is piped, prompts go to stderr, so that the pipe gets only the answers.
    asked = questions(sys.stdin, sys.stdout if sys.stdout.isatty() else sys.stderr)
    try:
        converse(model, asked, options, sys.stdout, coloured=coloured)
    except KeyboardInterrupt:
        sys.exit(130)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dloop_train.chat",
        description="Chat through the gated drafting loop. /new begins a new conversation, /quit ends.",
    )
    parser.add_argument("export", help="an exported drafter's folder, or starter:<name>")
    parser.add_argument("target", help="a target by its name in conf/target/, such as smollm2_135m")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="decode each answer once more without the drafter, and say how long that takes",
    )
    parser.add_argument("--max-new-tokens", type=positive, default=256)
    parser.add_argument("--temperature", type=not_negative, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="of the sampling above temperature 0")
    parser.add_argument("--threshold", type=float, default=None, help="the gate's; the export's own if it is not given")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be positive, got {number}")
    return number


def not_negative(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a finite number, zero or more, got {text}")
    return number


def questions(lines: TextIO, out: TextIO) -> Iterator[str]:
    """Yield the user's lines until /quit or the end of the input. Prints a prompt on a terminal."""
    asking = lines.isatty()
    while True:
        if asking:
            print("> ", end="", file=out, flush=True)
        line = lines.readline()
        if not line or line.strip() == "/quit":
            return
        if line.strip():
            yield line.strip()


def converse(
    model: LoopedModel, asked: Iterable[str], options: argparse.Namespace, out: TextIO, *, coloured: bool
) -> None:
    """Answer every question, with the conversation before it as context."""
    messages: list[dict[str, str]] = []
    settings = {"max_new_tokens": options.max_new_tokens, "temperature": options.temperature, "seed": options.seed}
    for question in asked:
        if question == "/new":
            messages = []
            continue
        messages.append({"role": "user", "content": question})
        ids = model.prompt_ids(messages)
        answer = shown(model.emissions(ids, **settings), model.target.tokenizer, out, coloured=coloured)
        print(f"\n[{answer.summary()}]", file=out)
        if options.compare:
            plain = gathered(model.emissions(ids, plain=True, **settings))
            print(
                f"[plain decoding: {plain.seconds:.2f} s, {plain.seconds / answer.seconds:.2f} times as long"
                f"{differing(model, ids, plain, answer, options)}]",
                file=out,
            )
        print(file=out, flush=True)
        messages.append(
            {"role": "assistant", "content": model.target.tokenizer.decode(answer.tokens, skip_special_tokens=True)}
        )


def shown(emissions: Iterator[Emission], tokenizer, out: TextIO, *, coloured: bool) -> Answer:
    """Print an answer as it is decoded."""
    started, found, stages = time.perf_counter(), [], []

    def tokens() -> Iterator[int]:
        for emission in emissions:
            found.append(emission)
            for token, stage in zip(emission.tokens, emission.drafted_by, strict=True):
                stages.append(stage)
                yield token

    for text in pieces(tokenizer, tokens()):
        print(painted(text, stages[-1]) if coloured else text, end="", file=out, flush=True)
    return answer_of(found, time.perf_counter() - started)


def gathered(emissions: Iterator[Emission]) -> Answer:
    started = time.perf_counter()
    return answer_of(list(emissions), time.perf_counter() - started)


def answer_of(emissions: list[Emission], seconds: float) -> Answer:
    return Answer(
        [token for one in emissions for token in one.tokens],
        [one.round for one in emissions if one.round is not None],
        seconds,
    )


def differing(model: LoopedModel, prompt: list[int], plain: Answer, answer: Answer, options: argparse.Namespace) -> str:
    """A note on how close the target's two logits are where greedy texts first differ; empty for equal texts.

    Greedy texts differ by rounding only, so a few roundings are expected. Sampled texts differ anyway and get no note.
    """
    if options.temperature or plain.tokens == answer.tokens:
        return ""
    gap = parting_gap(model.target, prompt, plain.tokens, answer.tokens)
    return (
        f"; the texts differ from where the target's logits of two tokens are {gap:.1f} roundings of "
        f"{str(model.target.dtype).removeprefix('torch.')} apart"
    )


def painted(text: str, stage: int) -> str:
    return f"\033[{COLOURS[min(stage, len(COLOURS)) - 1]}m{text}\033[0m" if stage and text else text


def legend() -> str:
    names = [
        painted(f"stage {number}{'+' if number == len(COLOURS) else ''}", number)
        for number in range(1, len(COLOURS) + 1)
    ]
    return f"drafted in {' '.join(names)}; plain: the target's own. /new begins a new conversation, /quit ends."


if __name__ == "__main__":
    main()
