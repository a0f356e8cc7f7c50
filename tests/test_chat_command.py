"""Tests of the terminal chat: the target's own text, coloured by stage on a terminal, and its summary."""

import io
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import make_drafter, settings_of
from teaching import COUNTING, taught_drafter

from dloop_train import chat
from dloop_train.checkpoints.files import save_drafter
from dloop_train.decoding.gates import DLoop
from dloop_train.decoding.loop import Emission
from dloop_train.serving import LoopedModel
from dloop_train.targets.bytes_tokenizer import byte_tokenizer
from dloop_train.types import Round

COLOUR = re.compile(r"\033\[\d+m")


@pytest.fixture(scope="module")
def export(tiny_target, tmp_path_factory):
    drafter, folder = make_drafter("dflash-shifted", tiny_target), tmp_path_factory.mktemp("export")
    section = {
        "threshold": -60.0,
        "tokens_per_stage": drafter.k,
        "max_stages": 4,
        "state": drafter.shape.state,
        "slot": drafter.shape.slot,
    }
    save_drafter(
        drafter,
        folder,
        section=section | settings_of("dflash-shifted").section(),
        target=tiny_target.spec,
        dtype=torch.float32,
    )
    return folder


def asked(export, *more, lines="hello\n/new\n\nhow are you?\n", **process):
    command = [sys.executable, "-m", "dloop_train.chat", str(export), "tiny_llama", "--max-new-tokens", "24", *more]
    return subprocess.run(
        command,
        input=lines,
        text=True,
        capture_output=True,
        cwd=Path(__file__).parents[1],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        **process,
    )


def test_a_pipe_gets_plain_text(export):
    result = asked(export, "--compare")
    assert result.returncode == 0, result.stderr
    assert not COLOUR.search(result.stdout) and "> " not in result.stdout
    assert len(re.findall(r"\[tau \d\.\d\d, \d\.\d\d stages a round, \d+ tokens? in .* tokens/s\]", result.stdout)) == 2
    assert result.stdout.count("[plain decoding:") == 2


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--max-new-tokens", "0"], "must be positive"),
        (["--threshold", "1"], "cannot be positive"),
        (["--temperature", "-1"], "zero or more"),
        (["--temperature", "nan"], "zero or more"),
    ],
)
def test_wrong_arguments_are_named(export, arguments, says, capsys):
    with pytest.raises(SystemExit) as left:
        chat.main([str(export), "tiny_llama", *arguments])
    assert left.value.code and says in f"{left.value.code} {capsys.readouterr().err}"


def test_a_folder_that_is_no_export_is_named(tmp_path):
    with pytest.raises(SystemExit, match="chat: .*config.json"):
        chat.main([str(tmp_path), "tiny_llama"])


def test_a_terminal_gets_colours(export):
    """On a pseudo-terminal the chat prints a prompt, a legend and coloured text."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "dloop_train.chat", str(export), "tiny_llama", "--max-new-tokens", "24"]
    process = subprocess.Popen(
        command,
        stdin=follower,
        stdout=follower,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[1],
        env={name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"OMP_NUM_THREADS": "1"},
    )
    os.close(follower)
    os.write(leader, b"hello\n/quit\n")
    seen = b""
    while process.poll() is None:
        try:
            seen += os.read(leader, 4096)
        except OSError:  # the other side has closed
            break
    process.wait(60)
    text = seen.decode(errors="replace")
    assert "> " in text and "stage 1" in text and COLOUR.search(text.split("hello", 1)[1])
    assert process.returncode == 0


def test_tokens_have_the_colour_of_the_stage_that_drafted_them():
    emissions = [
        Emission([65], None),
        Emission([66, 67, 68, 69], Round(2, 4, 3, 4, ())),
        Emission([70], Round(1, 2, 0, 1, ())),
    ]
    assert [one.drafted_by for one in emissions] == [[0], [1, 1, 2, 0], [0]]
    out, tokenizer = io.StringIO(), byte_tokenizer(2)
    answer = chat.shown(iter(emissions), tokenizer, out, coloured=True)
    letters = [tokenizer.decode([token]) for token in answer.tokens]
    assert (
        out.getvalue()
        == letters[0]
        + "".join(f"\033[{colour}m{letter}\033[0m" for colour, letter in zip((36, 36, 32), letters[1:4], strict=True))
        + letters[4]
        + letters[5]
    )
    assert answer.summary().startswith("tau 2.50, 1.50 stages a round, 6 tokens in")


def test_the_loops_answers_are_plain_decodings(taught_target, monkeypatch):
    """With a drafter that is often right, the text is the target's own and --compare finds no difference."""
    drafter = taught_drafter("dflash-shifted", taught_target)
    model = LoopedModel(taught_target, drafter, DLoop(threshold=-3.0, max_stages=4), None)
    monkeypatch.setattr(model, "prompt_ids", lambda messages: [COUNTING + n for n in range(4)])
    out = io.StringIO()
    chat.converse(
        model, ["count"], chat.parsed(["export", "target", "--compare", "--max-new-tokens", "20"]), out, coloured=False
    )
    assert "the texts differ" not in out.getvalue() and "[plain decoding:" in out.getvalue()
    plain = chat.gathered(model.emissions([COUNTING + n for n in range(4)], plain=True, max_new_tokens=20))
    assert out.getvalue().startswith(taught_target.tokenizer.decode(plain.tokens, skip_special_tokens=True)[:5])
    ids, other = [COUNTING + n for n in range(4)], replace(plain, tokens=[*plain.tokens[:5], 3, *plain.tokens[6:]])
    options = chat.parsed(["export", "target"])
    gap = float(
        re.search(
            r"the texts differ from where .* are ([\d.]+) roundings of float64 apart",
            chat.differing(model, ids, other, plain, options),
        ).group(1)
    )
    assert gap > 1e6  # far from a tie, so that a real fault is distinguishable from one
    assert (
        chat.differing(model, ids, plain, plain, options) == ""
        and chat.differing(model, ids, other, plain, chat.parsed(["export", "target", "--temperature", "1"])) == ""
    )
