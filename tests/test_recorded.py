"""Tests of recorded answers: equal to the sampled ones, missing ones counted, faulty files refused."""

import gzip
import json

import pytest
from conftest import composed

from dloop_train.phases import artifacts, generate
from dloop_train.runs import read_jsonl
from dloop_train.targets.recorded import prompt_digest, read_recorded

TINY = ("+drafter=dflash", "+target=tiny_llama", "++prompts.limit=12", "++generate.greedy_prompts=1")


def answered(tmp_path, *overrides):
    config = composed(*TINY, f"root={tmp_path}", *overrides)
    generate.run(config)
    artifact = artifacts.responses(config)
    return read_jsonl(artifact.folder / "train.jsonl"), artifact


@pytest.mark.parametrize("packed", [False, True])
def test_answers_come_back_as_they_were_sampled(tmp_path, packed):
    rows, artifact = answered(tmp_path / "first")
    file = artifact.folder / "train.jsonl"
    if packed:
        file = tmp_path / "answers.jsonl.gz"
        with gzip.open(file, "wt") as out:
            out.writelines(
                json.dumps(
                    {
                        "id": row["id"],
                        "prompt_sha256": prompt_digest(row["prompt_ids"]),
                        "response_ids": row["response_ids"],
                    }
                )
                + "\n"
                for row in rows
            )
    again, other = answered(tmp_path / "second", "responder=recorded", f"++responder.path={file}")
    assert again == rows and other.key != artifact.key
    short, _ = answered(
        tmp_path / "third", "responder=recorded", f"++responder.path={file}", "++generate.max_new_tokens=5"
    )
    assert [row["response_ids"] for row in short] == [row["response_ids"][:5] for row in rows] and not any(
        row["finished"] for row, whole in zip(short, rows, strict=True) if len(whole["response_ids"]) > 5
    )


def test_prompts_without_an_answer_are_left_out_and_counted(tmp_path):
    rows, _artifact = answered(tmp_path / "first")
    file = tmp_path / "answers.jsonl"
    rows[1]["prompt_ids"][0] += 1
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:5]))
    again, other = answered(tmp_path / "second", "responder=recorded", f"++responder.path={file}")
    assert [row["id"] for row in again] == [row["id"] for row in rows[:1] + rows[2:5]]
    left_out = other.facts()["left_out_for"]
    assert sorted(left_out.values()) == [1, 7] and any("other tokens under its id" in reason for reason in left_out)
    with pytest.raises(ValueError, match="more than responder.max_refused=0.05"):
        answered(tmp_path / "third", "responder=recorded", f"++responder.path={file}", "++responder.max_refused=0.05")


@pytest.mark.parametrize(
    "text, says",
    [
        ("{", "answers.jsonl:1 is not a JSON object"),
        ("[1]\n", "got list"),
        ('{"id": "a", "response_ids": [1]}\n', "prompt_ids or prompt_sha256"),
        ("", "holds no answer"),
        ('{"id": "a", "prompt_ids": [1], "response_ids": []}\n', "expected id, response_ids"),
        ('{"id": "a", "prompt_ids": [1], "response_ids": [1]}\n' * 2, "answers.jsonl:2: id 'a' appears twice"),
    ],
)
def test_faults_of_a_file_are_named(tmp_path, text, says):
    file = tmp_path / "answers.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=says):
        read_recorded(file)


def test_a_file_that_is_not_there_is_named_before_anything_runs(tmp_path):
    with pytest.raises(ValueError, match="responder.path .* is not a file"):
        answered(tmp_path, "responder=recorded", f"++responder.path={tmp_path / 'none'}")
