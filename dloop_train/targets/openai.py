"""OpenAI: a responder for servers with OpenAI's completions API (vLLM, SGLang and others).

Prompts are sent as token ids.
"""

import http.client
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import SimpleQueue
from urllib.parse import urlsplit

from dloop_train.config import GenerateConfig, SamplingConfig, TargetConfig, check
from dloop_train.data.responses import Question, Response
from dloop_train.ranks import say
from dloop_train.targets.responders import Refusal, Remote, key_of_noise

REFUSED = (400, 413, 422)
"""HTTP statuses that concern a single prompt: it is refused and not retried."""
PASSING = (408, 425, 429)
"""HTTP statuses of temporary errors, which are retried, as are all from 500 on."""
LONGEST_PAUSE = 30.0
"""Longest pause between two tries, in seconds."""
JUDGED = 64
"""Largest number of tokens of a greedy answer that a server's choices are compared with."""
STRANGE = 8
"""Number of different tokens after which the comparison with a text ends."""
UNREADABLE = "\N{REPLACEMENT CHARACTER}"
"""Decoders write this character for bytes that are not valid text. It does not tokenise to the original ids."""


@dataclass(kw_only=True)
class OpenAI(Remote):
    """Completions over HTTP, with a bounded number of requests in flight, retries and a seed for each prompt."""

    urls: list[str]
    """Base addresses, /v1 included. Requests are sent to them in turn."""
    model: str = ""
    """The model's name on the servers. If empty, the servers must have exactly one model, which is used."""
    concurrency: int = 256
    """Requests in flight, over all servers."""
    retries: int = 8
    """Tries after the first one. The pause before them starts at half a second and doubles up to half a minute."""
    timeout: float = 600.0
    """Socket timeout in seconds."""
    agreement: float = 0.95
    """Smallest share of the tokens of the target's own greedy answers that each server must choose too.

    Each token is predicted after the target's own text before it. Other kernels change only near ties (SmolLM2-135M's
    bf16 text in fp32: 2 tokens of 100 differ). With one layer of 30 missing, 20 of 100 differ.
    """
    api_key: str = "OPENAI_API_KEY"
    """Environment variable with the API key, for servers that require one."""

    def __post_init__(self):
        check(bool(self.urls), "responder.urls is empty; name at least one server, such as http://localhost:8000/v1")
        strange = [
            url for url in self.urls if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname
        ]
        check(not strange, f"responder.urls has {strange}; an address looks like http://localhost:8000/v1")
        check(self.concurrency >= 1, f"responder.concurrency must be positive, got {self.concurrency}")
        check(self.retries >= 0, f"responder.retries must not be negative, got {self.retries}")
        check(0 <= self.max_refused <= 1, f"responder.max_refused is a share of 1, got {self.max_refused}")
        check(0 <= self.agreement <= 1, f"responder.agreement is a share of 1, got {self.agreement}")

    def settings(self) -> dict:
        return {"responder": "openai", "model": self.model}

    def connect(self) -> str:
        client = Client(self)
        names = {url: [model["id"] for model in client.ask(f"{url}/models")["data"]] for url in client.urls}
        for url, found in names.items():
            check(not self.model or self.model in found, f"{url} serves {found}, not responder.model={self.model}")
            check(bool(self.model) or len(found) == 1, f"{url} serves {found}; choose one with responder.model=...")
        different = {self.model or found[0] for found in names.values()}
        check(
            len(different) == 1,
            f"the servers have different models: {names}; name one that all have with responder.model=...",
        )
        model = different.pop()
        say(f"generate: {len(names)} server(s) with {model}")
        return model

    def require_target(
        self, model: str, known: Sequence[Response], target: TargetConfig, generate: GenerateConfig, tokenizer
    ) -> None:
        """Check each server separately by its greedy tokens.

        Names and token ids are not enough: a smaller model of the same family has the same vocabulary.
        """
        client, reader = Client(self), Reader(target, tokenizer)
        greedy = replace(target, sampling=SamplingConfig(temperature=0.0))

        def check_server(url: str, text: Response) -> tuple[str, Agreement]:
            def next_tokens(ids: list[int], count: int) -> list[int]:
                question = Question(text.id, text.category, ids)
                return reader.read(
                    question,
                    client.ask(
                        f"{url}/completions",
                        request_for(question, model, greedy, replace(generate, max_new_tokens=count)),
                    ),
                ).response_ids

            return url, agreement(next_tokens, text)

        found = list(
            as_completed(
                lambda pair: check_server(*pair),
                [(url, text) for url in client.urls for text in known],
                self.concurrency,
                client.stop,
            )
        )
        for url in client.urls:
            require_agreement(
                sum((judged for where, judged in found if where == url), Agreement(0, 0)),
                self.agreement,
                f"{model} at {url}",
                target,
            )

    def answers(
        self, model: str, questions: Iterable[Question], target: TargetConfig, generate: GenerateConfig, tokenizer
    ) -> Iterator[Response | Refusal]:
        client, reader = Client(self), Reader(target, tokenizer)

        def answer(question: Question) -> Response | Refusal:
            try:
                return reader.read(question, client.complete(request_for(question, model, target, generate)))
            except Refused as refused:
                return Refusal(question.id, str(refused))

        yield from as_completed(answer, questions, self.concurrency, client.stop)


def request_for(question: Question, model: str, target: TargetConfig, generate: GenerateConfig) -> dict:
    """The body of a completion request; greedy if the temperature is 0. Servers ignore fields they do not support."""
    sampling = target.sampling
    return {
        "model": model,
        "prompt": question.prompt_ids,
        "max_tokens": generate.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": key_of_noise(question.id, generate.seed) >> 33,
        "stop_token_ids": list(target.stop_ids),
        "return_token_ids": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }


class Refused(ValueError):
    """A prompt has no usable answer. The message is the reason."""


@dataclass(frozen=True)
class Agreement:
    """Number of compared tokens of the target's own greedy answers, and how many of them a server chooses too."""

    judged: int
    same: int

    def __add__(self, other: "Agreement") -> "Agreement":
        return Agreement(self.judged + other.judged, self.same + other.same)


def agreement(next_tokens: Callable[[list[int], int], list[int]], text: Response) -> Agreement:
    """Compare a server's greedy tokens with one of the target's greedy answers.

    next_tokens(ids so far, number of further tokens) returns the server's tokens. After a difference it is called again
    with the text's own token appended. So every token is compared after the same preceding tokens, and one difference
    does not affect the tokens after it.
    """
    own, at, strange = text.response_ids[:JUDGED], 0, 0
    while at < len(own) and strange < STRANGE:
        try:
            chosen = next_tokens(text.prompt_ids + own[:at], len(own) - at)
        except Refused:  # too long for the server, or not valid text: no evidence about its model
            break
        same = next(
            (number for number, token in enumerate(own[at:]) if chosen[number : number + 1] != [token]), len(own) - at
        )
        at += same
        if at < len(own):
            at, strange = at + 1, strange + 1
    return Agreement(at, at - strange)


def require_agreement(found: Agreement, least: float, server: str, target: TargetConfig) -> None:
    """Raise ValueError if the server chooses too few of the target's tokens; only warn if none were compared."""
    if not found.judged:
        say(
            f"generate: WARNING: nothing shows that {server} is the target {target.name}: "
            f"no greedy answer of validation or test could be compared; "
            f"generate.greedy_prompts, and prompts with a validation or test split, give some"
        )
        return
    other = found.judged - found.same
    # One different token is always allowed: among few tokens, a single near tie is a large share.
    check(
        other <= max(1.0, (1 - least) * found.judged),
        f"{server} is not the target {target.name} ({target.path}): "
        f"after the target's own greedy text it chooses the target's token {found.same} times of {found.judged}, "
        f"responder.agreement={least} is asked. "
        f"Serve the target itself, or lower responder.agreement where the server's copy is only rounded more coarsely",
    )
    say(f"generate: {server} chooses {found.same} of {found.judged} tokens of the target's own greedy text")


class Reader:
    """Converts completions of a server into responses."""

    def __init__(self, target: TargetConfig, tokenizer):
        self.stop_ids, self.tokenizer, self.warned = tuple(target.stop_ids), tokenizer, False

    def read(self, question: Question, answer: dict) -> Response:
        check(bool(answer.get("choices")), f"a completion should have choices, the server sent {sorted(answer)}")
        choice = answer["choices"][0]
        if choice.get("finish_reason") not in ("stop", "length"):
            raise Refused(f"finish_reason {choice.get('finish_reason')!r}")
        prompt = choice.get("prompt_token_ids")
        check(
            prompt is None or prompt == question.prompt_ids,
            f"the server read prompt {question.id} as {prompt}, we sent {question.prompt_ids}; "
            f"it must not add or remove tokens",
        )
        ids = self.tokens_of(choice)
        if choice["finish_reason"] == "stop" and (not ids or ids[-1] not in self.stop_ids):
            ids.append(choice["stop_reason"] if choice.get("stop_reason") in self.stop_ids else self.stop_ids[0])
        if not ids:
            raise Refused("an empty answer")
        return question.answered(ids, self.stop_ids, self.tokenizer)

    def tokens_of(self, choice: dict) -> list[int]:
        """The server's token ids. If it returns none, its text is tokenised again.

        Raises Refused if these ids do not decode to the same text.
        """
        if choice.get("token_ids") is not None:
            return list(choice["token_ids"])
        if not self.warned:
            self.warned = True
            say(
                "generate: the server returns no token ids (vLLM does, with return_token_ids): "
                "its texts are tokenised again, and answers that change by it are left out"
            )
        ids = self.tokenizer(choice["text"], add_special_tokens=False)["input_ids"]
        if self.tokenizer.decode(ids, skip_special_tokens=False) != choice["text"] or UNREADABLE in choice["text"]:
            raise Refused("its text encodes to other ids than were sampled")
        return ids


class Client:
    """HTTP client that uses the servers in turn. Each thread keeps one connection per server open."""

    def __init__(self, settings: OpenAI):
        self.settings = settings
        self.urls = [
            url.rstrip("/") if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1" for url in settings.urls
        ]
        self.turn = itertools.count()
        self.stop = threading.Event()
        self.local = threading.local()
        key = os.environ.get(settings.api_key)
        self.headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def complete(self, body: dict) -> dict:
        """A completion from the next server in turn. Each retry is sent to the server after it."""
        start = next(self.turn)
        return self.retry(lambda attempt: f"{self.urls[(start + attempt) % len(self.urls)]}/completions", body)

    def ask(self, url: str, body: dict | None = None) -> dict:
        return self.retry(lambda attempt: url, body)

    def retry(self, url_of: Callable[[int], str], body: dict | None) -> dict:
        """Send a request until it succeeds.

        Raises ConnectionError after the last try, or after a failed try if another request has failed for good.
        """
        for attempt in range(self.settings.retries + 1):
            url = url_of(attempt)
            try:
                return self.once(url, body)
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
                self.forget(url)
                came = f"{type(error).__name__}: {error}"
            if self.stop.wait(min(0.5 * 2**attempt, LONGEST_PAUSE) if attempt < self.settings.retries else 0):
                break
        raise ConnectionError(
            f"{url} gave no answer in {attempt + 1} tries; the last time it was {came}. "
            f"What was answered is kept: see that the server runs and run the same command again"
        )

    def once(self, url: str, body: dict | None) -> dict:
        connection, path = self.connection(url), urlsplit(url).path
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, self.headers)
        response = connection.getresponse()
        text = response.read()
        if response.status in REFUSED and body:
            raise Refused(f"{response.status}: {message_of(text)}")
        if response.status in PASSING or response.status >= 500:
            raise ConnectionError(f"status {response.status}: {message_of(text)}")
        check(
            response.status == 200,
            f"{url} answered {response.status}: {message_of(text)}; "
            f"look at responder.urls, responder.model and the key in ${self.settings.api_key}",
        )
        return json.loads(text)

    def connection(self, url: str) -> http.client.HTTPConnection:
        parts = urlsplit(url)
        opened = vars(self.local)
        if parts.netloc not in opened:
            kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
            opened[parts.netloc] = kind(parts.hostname, parts.port, timeout=self.settings.timeout)
        return opened[parts.netloc]

    def forget(self, url: str) -> None:
        opened = vars(self.local).pop(urlsplit(url).netloc, None)
        if opened is not None:
            opened.close()


def message_of(text: bytes) -> str:
    """The start of a server's error message, in one line."""
    return " ".join(text.decode(errors="replace").split())[:300]


def as_completed(work: Callable, items: Iterable, most: int, stop: threading.Event) -> Iterator:
    """Yield work(item) for every item as each one finishes, with at most `most` running at once.

    After a failure no further item is started. Items that are running are still yielded, then the failure is raised.
    """
    done: SimpleQueue[Future] = SimpleQueue()
    waiting, running, failure = iter(items), 0, None
    with ThreadPoolExecutor(most) as pool:
        try:
            while True:
                for item in itertools.islice(waiting, 0 if failure else most - running):
                    pool.submit(work, item).add_done_callback(done.put)
                    running += 1
                if not running:
                    break
                finished = done.get()
                running -= 1
                if finished.exception() is None:
                    yield finished.result()
                else:
                    failure = failure or finished.exception()
                    stop.set()
        finally:
            stop.set()  # also if the consumer of the results failed or was interrupted
    if failure:
        raise failure
