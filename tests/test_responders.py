"""Tests of responders over HTTP, with a server on the tiny target that injects faults.

One test uses a real server, such as vLLM's, if DLOOP_OPENAI_URL is set.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from conftest import composed
from test_pipeline import environment, wait_for

from dloop_train.config import SamplingConfig
from dloop_train.data.responses import Question, Response, read_responses
from dloop_train.phases import artifacts, generate
from dloop_train.runs import read_jsonl
from dloop_train.targets import openai
from dloop_train.targets.responders import Refusal, decode_plain, respond
from dloop_train.targets.sources import load_target


class Server(ThreadingHTTPServer):
    """Serves completions of the tiny target over OpenAI's protocol, in vLLM's format.

    Each sampling request is recorded in `asked` and takes one entry of `faults`. Greedy requests, with which the
    server's model is checked, are recorded in `judged` and take none.
    """

    daemon_threads = True

    def __init__(self, target, *, model="tiny", gives_ids=True):
        super().__init__(("127.0.0.1", 0), Handler)
        self.target, self.model, self.gives_ids = target, model, gives_ids
        self.faults, self.asked, self.judged, self.lock = [], [], [], threading.Lock()
        self.running = self.most = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"

    def complete(self, body):
        sampling = SamplingConfig(temperature=body["temperature"], top_p=body["top_p"], top_k=body["top_k"])
        with torch.inference_mode():
            ids = respond(
                self.target, [body["prompt"]], [str(body["seed"])], sampling, max_new_tokens=body["max_tokens"], seed=0
            )[0]
        finished = ids[-1] in body["stop_token_ids"]
        choice = {
            "text": self.target.tokenizer.decode(ids[:-1] if finished else ids),
            "finish_reason": "stop" if finished else "length",
            "stop_reason": ids[-1] if finished else None,
        }
        return {
            "choices": [choice | ({"token_ids": ids, "prompt_token_ids": body["prompt"]} if self.gives_ids else {})]
        }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def send(self, status, content):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        self.send(200, json.dumps({"data": [{"id": self.server.model}]}).encode())

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["temperature"] == 0:
            server.judged.append(body)
            return self.answer(None, body)
        with server.lock:
            fault = server.faults.pop(0) if server.faults else None
            server.asked.append(body | {"key": self.headers["Authorization"]})
            server.running += 1
            server.most = max(server.most, server.running)
        try:
            self.answer(fault, body)
        finally:
            with server.lock:
                server.running -= 1

    def answer(self, fault, body):
        if fault == "drop":
            self.close_connection = True
        elif fault == "torn":
            self.send(200, b'{"choices": [{"text": "a')
        elif fault == "short":  # the header announces more bytes than follow
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
            self.close_connection = True
        elif fault == "slow":
            time.sleep(1.0)
            self.send(200, b"{}")
        elif isinstance(fault, int):
            self.send(
                fault, json.dumps({"message": f"this model's maximum context length is {len(body['prompt'])}"}).encode()
            )
        else:
            self.send(200, json.dumps(self.server.complete(body)).encode())


@pytest.fixture(scope="module")
def tiny():
    return load_target(composed("+drafter=dflash", "+target=tiny_llama").target, dtype="float64", device="cpu")


@pytest.fixture
def server(tiny, monkeypatch):
    monkeypatch.setattr(openai, "LONGEST_PAUSE", 0.01)
    made = Server(tiny)
    yield made
    made.shutdown()


def config_for(root, *urls, **changes):
    prompts = root / "prompts.jsonl"
    if not prompts.is_file():
        prompts.parent.mkdir(parents=True, exist_ok=True)
        splits = ["train"] * 12 + ["validation", "test"]
        prompts.write_text(
            "".join(
                json.dumps({"id": f"p{number}", "prompt": "say" + " it" * number, "split": split}) + "\n"
                for number, split in enumerate(splits)
            )
        )
    settings = {
        "generate.max_new_tokens": 8,
        "generate.greedy_max_new_tokens": 2,
        "generate.greedy_prompts": 1,
        "responder.concurrency": 4,
        "responder.timeout": 0.5,
        "evaluate.dtype": "float32",
    } | changes
    return composed(
        "+drafter=dflash",
        "+target=tiny_llama",
        "responder=openai",
        "prompts=jsonl",
        f"prompts.path={prompts}",
        f"root={root}",
        f"responder.urls=[{','.join(urls)}]",
        *(f"++{name}={value}" for name, value in settings.items()),
    )


def texts(config) -> dict[str, Response]:
    return {response.id: response for response in read_responses(artifacts.responses(config).folder, "train")}


def asked_once(server) -> bool:
    return max(Counter(str(body["prompt"]) for body in server.asked).values()) == 1


def test_answers_are_the_servers_own_ids(server, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    config = config_for(tmp_path, server.url)
    generate.run(config)
    found = texts(config)
    questions = {str(body["prompt"]): body for body in server.asked}
    assert len(found) == 12 == len(questions) and list(found) == [
        p.id for p in config.prompts.read() if p.split == "train"
    ]
    for response in found.values():
        body = questions[str(response.prompt_ids)]
        assert (
            response.response_ids == server.complete(body)["choices"][0]["token_ids"] and body["key"] == "Bearer secret"
        )
        assert (
            response.finished == (response.response_ids[-1] == 2)
            and body["stop_token_ids"] == [2]
            and body["temperature"] == 1.0
        )
    assert len({body["seed"] for body in server.asked}) == 12 and 1 < server.most <= 4
    again = config_for(tmp_path / "again", server.url, **{"responder.concurrency": 1})
    generate.run(again)
    assert texts(again) == found  # a seed depends on the prompt, not on the order of requests


def test_faults_are_tried_again(server, tmp_path):
    """After server errors, and lost, incomplete and slow answers, every prompt is still answered exactly once."""
    server.faults = [500, "drop", "torn", "short", "slow", 429, 503, 408] * 2
    config = config_for(tmp_path, server.url)
    generate.run(config)
    assert len(texts(config)) == 12 and len(server.asked) == 12 + 16


def test_a_server_without_ids_is_read_by_its_text(server, tmp_path, capfd):
    """Answers whose text survives tokenisation are the same as with ids; the others are left out and counted."""
    config = config_for(tmp_path / "ids", server.url, **{"generate.max_new_tokens": 2})
    generate.run(config)
    server.gives_ids = False
    plain = config_for(tmp_path / "text", server.url, **{"generate.max_new_tokens": 2, "responder.max_refused": 1.0})
    generate.run(plain)
    found, facts = texts(plain), artifacts.responses(plain).facts()
    assert 0 < len(found) < 12  # some answers of random bytes are not valid UTF-8
    own = texts(config)
    assert all(response == own[identity] for identity, response in found.items())
    assert all("\ufffd" in response.text for identity, response in own.items() if identity not in found)
    assert facts["left_out_for"] == {"its text encodes to other ids than were sampled": 12 - len(found)} and facts[
        "left_out"
    ] == 12 - len(found)
    assert "returns no token ids" in capfd.readouterr().err


@pytest.mark.parametrize(
    "choice, ids",
    [
        ({"text": "ab", "finish_reason": "stop", "stop_reason": None}, [68, 69, 2]),
        ({"text": "ab", "finish_reason": "length"}, [68, 69]),
        ({"token_ids": [9, 2], "finish_reason": "stop"}, [9, 2]),
        ({"token_ids": [9], "finish_reason": "stop", "stop_reason": 2}, [9, 2]),
    ],
)
def test_an_answer_that_ended_ends_with_its_stop_id(choice, ids, tiny):
    reader = openai.Reader(composed("+drafter=dflash", "+target=tiny_llama").target, tiny.tokenizer)
    read = reader.read(Question("q", "all", [5]), {"choices": [choice]})
    assert read.response_ids == ids and read.finished == (ids[-1] == 2)


def test_a_dead_server_is_named_and_nothing_is_lost(server, tiny, tmp_path):
    config = config_for(tmp_path, server.url, **{"responder.retries": 2, "responder.concurrency": 1})
    server.faults = [None] * 5 + [500] * 3
    with pytest.raises(ConnectionError, match=rf"{server.url}/completions gave no answer in 3 tries.*status 500.*kept"):
        generate.run(config)
    kept = read_jsonl(artifacts.responses(config).partial / generate.ANSWERS)
    assert len(kept) == 5
    with pytest.raises(ConnectionError, match=r"127.0.0.1:9/v1/models gave no answer.*ConnectionRefusedError"):
        generate.run(config_for(tmp_path, "http://127.0.0.1:9/v1", **{"responder.retries": 1}))
    server.asked.clear()
    generate.run(config)
    assert len(server.asked) == 7 and len(texts(config)) == 12
    assert all(texts(config)[row["id"]].row() == row for row in kept)


def test_what_is_in_flight_when_another_fails_is_kept(server, tmp_path):
    """Other requests are in flight when one fails for good; their answers are kept."""
    config = config_for(tmp_path, server.url, **{"responder.retries": 0})
    server.faults = [500]
    with pytest.raises(ConnectionError):
        generate.run(config)
    assert len(read_jsonl(artifacts.responses(config).partial / generate.ANSWERS)) == len(server.asked) - 1


def test_a_refused_prompt_is_left_out_with_its_reason(server, tmp_path, capfd):
    server.faults = [400]
    config = config_for(tmp_path, server.url, **{"responder.max_refused": 0.1})
    generate.run(config)
    assert len(texts(config)) == 11 == len(server.asked) - 1
    refused = read_jsonl(artifacts.responses(config).folder / "refused.jsonl")
    assert (
        len(refused) == 1
        and "400" in refused[0]["reason"]
        and "maximum context length" in refused[0]["reason"]
        and refused[0]["id"] not in texts(config)
    )
    assert "1 of 12 prompts are left out" in capfd.readouterr().err


def test_many_refusals_end_the_phase(server, tmp_path):
    server.faults = [400] * 12
    with pytest.raises(ValueError, match=r"prompts were refused.*max_refused=0.05.*\n.* x N: .*maximum context length"):
        generate.run(config_for(tmp_path, server.url))
    refused = [Refusal(str(number), "400: too long") for number in range(11)]
    generate.require_few(refused[:10], 200, config_for(tmp_path, server.url).responder)
    with pytest.raises(ValueError, match="11 prompts were refused"):
        generate.require_few(refused, 200, config_for(tmp_path, server.url).responder)


@pytest.mark.parametrize("status", [401, 404])
def test_a_wrong_address_is_no_prompts_fault(server, status, tmp_path):
    server.faults = [status]
    with pytest.raises(ValueError, match=f"answered {status}.*responder.urls"):
        generate.run(config_for(tmp_path, server.url))


def test_servers_take_turns_and_stand_in_for_each_other(server, tiny, tmp_path):
    second = Server(tiny)
    config = config_for(tmp_path, server.url, second.url)
    generate.run(config)
    assert len(server.asked) == len(second.asked) == 6
    second.faults = [500] * 100
    generate.run(config_for(tmp_path / "half", server.url, second.url))
    assert len(server.asked) == 6 + 12
    second.shutdown()


@pytest.fixture(scope="module")
def sibling():
    """Another model with the same tokenizer.

    Its head is untied, because with a tied head all random models repeat the last token.
    """
    return load_target(
        composed("+drafter=dflash", "+target=tiny_llama", "target.config.tie_word_embeddings=false").target,
        dtype="float64",
        device="cpu",
    )


def test_a_server_is_known_by_the_targets_greedy_text(server, tmp_path, capfd):
    """Two greedy requests are enough to check the server's model."""
    config = config_for(tmp_path, server.url, **{"generate.greedy_max_new_tokens": 6})
    generate.run(config)
    assert "chooses 12 of 12 tokens of the target's own greedy text" in capfd.readouterr().err
    assert len(server.judged) == 2 and artifacts.responses(config).facts()["model"] == "tiny"


def test_a_server_of_another_model_is_refused(server, sibling, tmp_path):
    """One wrong server of several stops the phase before any training prompt is sent, and the error names it.

    Its ids are valid, because the tokenizer is the same. The target's greedy answers are kept.
    """
    other = Server(sibling)
    config = config_for(tmp_path, server.url, other.url, **{"generate.greedy_max_new_tokens": 6})
    with pytest.raises(
        ValueError,
        match=rf"tiny at {other.url} is not the target tiny_llama .*chooses the target's token 0 times of 12, "
        r"responder.agreement=0.95 is asked. Serve the target",
    ):
        generate.run(config)
    other.shutdown()
    assert (
        server.asked == other.asked == [] and read_jsonl(artifacts.responses(config).partial / generate.ANSWERS) == []
    )
    assert artifacts.greedy(config).complete and not artifacts.responses(config).complete
    generate.run(config_for(tmp_path, server.url, **{"generate.greedy_max_new_tokens": 6}))
    assert len(texts(config)) == 12


def test_without_greedy_answers_nobody_knows_the_server(server, tmp_path, capfd):
    generate.run(config_for(tmp_path, server.url, **{"generate.greedy_prompts": 0}))
    assert "WARNING: nothing shows that tiny at" in capfd.readouterr().err and server.judged == []


def said_but(text: Response, *others: int, asked: list):
    """A greedy server that chooses the text's tokens before the first of the places `others`, and -1 from there on.

    `asked` collects how many tokens each request asks for.
    """

    def said(ids, count):
        asked.append(count)
        at = len(ids) - len(text.prompt_ids)
        own = text.response_ids[at : at + count]
        first = next((number for number in range(len(own)) if at + number in others), len(own))
        return own[:first] + [-1] * (len(own) - first)

    return said


@pytest.mark.parametrize(
    "others, found, requests",
    [
        ((), (20, 20), 1),
        ((5, 13), (20, 18), 3),
        ((0, 19), (20, 18), 2),
        (range(20), (8, 0), 8),
        (range(10, 20), (18, 10), 8),
    ],
)
def test_every_token_is_judged_after_the_texts_own(others, found, requests):
    """A differing token does not count against later ones; after STRANGE differing tokens the text is abandoned."""
    text, asked = Response("t", "all", [1, 2], list(range(3, 23)), False, ""), []
    assert (
        openai.agreement(said_but(text, *others, asked=asked), text) == openai.Agreement(*found)
        and len(asked) == requests
    )


def test_what_a_server_refuses_says_nothing_of_its_model():
    text = Response("t", "all", [1, 2], [3, 4, 5], False, "")

    def refuse(ids, count):
        raise openai.Refused("too long")

    assert openai.agreement(refuse, text) == openai.Agreement(0, 0)
    assert openai.agreement(lambda ids, count: [3], text) == openai.Agreement(3, 1)  # it ended before the text did


@pytest.mark.parametrize(
    "judged, same, right",
    [(100, 95, True), (100, 94, False), (4, 3, True), (4, 2, False), (1000, 979, True), (905, 720, False)],
)
def test_the_share_that_must_agree(judged, same, right):
    """Other kernels may decide a few near ties differently; in a short text one differing token is allowed."""
    target = composed("+drafter=dflash", "+target=tiny_llama").target
    with contextlib.nullcontext() if right else pytest.raises(ValueError, match="is not the target tiny_llama"):
        openai.require_agreement(openai.Agreement(judged, same), 0.95, "m at u", target)


def test_answers_of_two_models_do_not_mix(server, tmp_path):
    """Generating stops if the servers have another model than the stored answers came from.

    With responder.model, the answers of the other model have a key of their own.
    """
    stop = {"responder.retries": 0, "responder.concurrency": 1}
    config = config_for(tmp_path, server.url, **stop)
    server.faults = [None] * 5 + [500]
    with pytest.raises(ConnectionError):
        generate.run(config)
    server.model = "tiny-fp8"
    with pytest.raises(
        ValueError,
        match=r"answers.jsonl holds 5 answers of tiny, and the servers have tiny-fp8 now: serve tiny again, "
        r"or set responder.model=tiny-fp8",
    ):
        generate.run(config)
    server.asked.clear()
    named = config_for(tmp_path, server.url, **stop, **{"responder.model": "tiny-fp8"})
    generate.run(named)
    assert len(server.asked) == 12 == len(texts(named)) and not artifacts.responses(config).complete
    server.model = "tiny"
    generate.run(config)
    assert len(server.asked) == 12 + 7 and len(texts(config)) == 12


def test_models_names_are_checked(server, tiny, tmp_path):
    other = Server(tiny, model="other")
    with pytest.raises(ValueError, match=r"serves \['tiny'\], not responder.model=wanted"):
        generate.run(config_for(tmp_path, server.url, **{"responder.model": "wanted"}))
    with pytest.raises(ValueError, match="different models"):
        generate.run(config_for(tmp_path, server.url, other.url))
    other.shutdown()


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"urls": "[]"}, "name at least one"),
        ({"urls": "[localhost:8000]"}, "looks like http"),
        ({"concurrency": 0}, "positive"),
        ({"max_refused": 5}, "share of 1"),
        ({"agreement": 95}, "share of 1"),
    ],
)
def test_wrong_settings_are_named(changes, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        config_for(
            tmp_path, "http://localhost:8000/v1", **{f"responder.{name}": value for name, value in changes.items()}
        )


def test_responses_of_servers_have_a_key_of_their_own(tmp_path):
    local = composed("+drafter=dflash", "+target=tiny_llama", f"root={tmp_path}")
    remote = [
        composed("+drafter=dflash", "+target=tiny_llama", f"root={tmp_path}", "responder=openai", *more)
        for more in ([], ["responder.urls=[http://a:1/v1,http://b:1/v1]"], ["generate.batch_size=3"])
    ]
    assert len({artifacts.responses(config).key for config in remote}) == 1
    named = [
        composed(
            "+drafter=dflash",
            "+target=tiny_llama",
            f"root={tmp_path}",
            "responder=openai",
            f"++responder.model={model}",
        )
        for model in ("a", "b")
    ]
    assert len({artifacts.responses(config).key for config in [remote[0], *named]}) == 3
    assert artifacts.responses(local).key != artifacts.responses(remote[0]).key


@pytest.mark.slow
@pytest.mark.skipif(
    "DLOOP_OPENAI_URL" not in os.environ,
    reason="set DLOOP_OPENAI_URL to a server of smollm2_135m in float32: python -m "
    "vllm.entrypoints.openai.api_server --model <folder of the converted target> --dtype float32",
)
def test_a_real_servers_greedy_text_is_the_targets_own(tmp_path):
    """At least 22 of 24 texts equal plain decoding in float32.

    The others differ only at near ties: every token's logit is within 1e-3 of the largest one.
    """
    config = composed(
        "+drafter=dflash",
        "+target=smollm2_135m",
        "responder=openai",
        f"root={tmp_path}",
        f"responder.urls=[{os.environ['DLOOP_OPENAI_URL']}]",
        "++prompts.limit=24",
        "++target.sampling.temperature=0",
        "++generate.max_new_tokens=48",
        "++generate.greedy_max_new_tokens=1",
        "++generate.greedy_prompts=1",
    )
    generate.run(config)
    target = load_target(config.target, dtype="float32", device="cpu")
    responses, equal = texts(config).values(), 0
    assert len(responses) == 24 and artifacts.responses(config).facts()["left_out_for"] == {}
    for response in responses:
        assert response.finished == (response.response_ids[-1] == 2) and (
            response.finished or len(response.response_ids) == 48
        )
        equal += decode_plain(target, response.prompt_ids, max_new_tokens=48) == response.response_ids
        ids = torch.tensor([response.prompt_ids + response.response_ids])
        logits = target.read(ids[:, :-1], logits=slice(len(response.prompt_ids) - 1, None)).logits[0]
        said = logits.gather(1, ids[0, len(response.prompt_ids) :, None])[:, 0]
        assert (logits.max(-1).values - said).max() < 1e-3
    print(f"{equal} of {len(responses)} texts are equal")
    assert equal >= 22


@pytest.mark.slow
def test_kill_and_rerun_asks_for_what_is_missing(server, tmp_path):
    """After kill -9 during generate, stored answers are neither lost nor requested again."""
    config = config_for(tmp_path, server.url)
    command = [
        sys.executable,
        "-m",
        "dloop_train",
        "+drafter=dflash",
        "+target=tiny_llama",
        "responder=openai",
        "prompts=jsonl",
        f"prompts.path={tmp_path / 'prompts.jsonl'}",
        f"responder.urls=[{server.url}]",
        "responder.concurrency=2",
        "generate.max_new_tokens=8",
        "generate.greedy_max_new_tokens=2",
        "generate.greedy_prompts=1",
        "evaluate.dtype=float32",
        "name=test",
        "phases=[generate]",
    ]
    answers = artifacts.responses(config).partial / generate.ANSWERS
    server.faults = [None] * 5 + ["slow"] * 1000
    started = subprocess.Popen(
        command,
        env=environment(tmp_path),
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_for(lambda: answers.is_file() and answers.read_bytes().count(b"\n") == 5, "no answers")
    os.killpg(started.pid, signal.SIGKILL)
    started.wait()
    kept = read_jsonl(answers)
    with open(answers, "a") as file:
        file.write(json.dumps(kept[0])[:30])  # a kill can leave an incomplete last line
    server.faults, server.asked = [], []
    done = subprocess.run(command, env=environment(tmp_path), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (
        len(server.asked) == 7
        and asked_once(server)
        and not {str(row["prompt_ids"]) for row in kept} & {str(body["prompt"]) for body in server.asked}
    )
    assert len(texts(config)) == 12 and all(texts(config)[row["id"]].row() == row for row in kept)
