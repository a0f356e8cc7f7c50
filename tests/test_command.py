"""Tests of the command's own answers: its version, its help and what it asks for."""

import sys

import pytest

from dloop_train import __main__ as command
from dloop_train import __version__


def answered(monkeypatch, capsys, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["dloop_train", *arguments])
    monkeypatch.setattr(command, "compose_and_run", lambda: print("composed", *sys.argv[1:]))
    command.main()
    return capsys.readouterr().out


def test_version(monkeypatch, capsys):
    assert answered(monkeypatch, capsys, "--version") == f"dloop_train {__version__}\n"


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_without_choices_lists_them(flag, monkeypatch, capsys):
    """Hydra cannot compose without a drafter and a target, so its own help would end in an error."""
    text = answered(monkeypatch, capsys, flag)
    assert "+drafter=<dflash|" in text and "+target=<" in text and "+experiment=<" in text and "tiny_" not in text
    assert "choose a drafter" not in answered(monkeypatch, capsys, flag, "+drafter=eagle3")
    chosen = answered(monkeypatch, capsys, flag, "+drafter=eagle3", "+target=tiny_llama")
    assert chosen == f"composed {flag} +drafter=eagle3 +target=tiny_llama\n"


def test_what_is_missing_is_asked_for(monkeypatch, capsys):
    with pytest.raises(SystemExit, match=r"choose a target: \+target=<gemma4_12b\|"):
        answered(monkeypatch, capsys, "+drafter=eagle3")
    assert answered(monkeypatch, capsys, "+experiment=quickstart") == "composed +experiment=quickstart\n"
    assert (
        answered(monkeypatch, capsys, "experiment=starter", "train.lr=1")
        == "composed experiment=starter ++train.lr=1\n"
    )
