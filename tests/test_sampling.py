"""Tests of sampling: texts have exactly the probabilities that they have under the target alone.

All random outcomes are enumerated, on a vocabulary of three tokens.
"""

import dataclasses
from collections import defaultdict

import pytest
import torch
from conftest import TAPS, VARIANTS, make_drafter, settings_of, tiny_config

from dloop_train.config import CONF, TargetConfig, build, option
from dloop_train.decoding import loop, rules
from dloop_train.decoding.gates import Always, DLoop, Never
from dloop_train.decoding.loop import decode, draft_stage
from dloop_train.decoding.rules import AcceptanceRule, Match, Rejection, SampleRng, distribution
from dloop_train.serving import LoopedModel
from dloop_train.targets.head import TargetHead
from dloop_train.targets.responders import decode_plain
from dloop_train.targets.sources import load_target
from dloop_train.targets.target import Target, TargetOutput
from dloop_train.types import Context, Round

VOCABULARY, STOP, PROMPT = 3, 2, (1, 0, 1)
EXACT = 1e-12
RULES = {
    "rejection": Rejection(temperature=1.0),
    "rejection, likeliest drafts": Rejection(temperature=0.8, draft_temperature=0.0),
    "rejection, sharper drafts": Rejection(temperature=1.3, draft_temperature=0.6),
    "match": Match(temperature=1.0),
    "match, likeliest drafts": Match(temperature=0.8, draft_temperature=0.0),
}


# Small models


@pytest.fixture(scope="module")
def target() -> Target:
    """A target of three tokens, with weights large enough that their probabilities differ."""
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "vocab_size": VOCABULARY,
        "initializer_range": 0.6,
        "tie_word_embeddings": False,
    }
    values = option("target", "tiny_llama")
    return load_target(
        build(values | {"mask_token_id": 0, "stop_ids": [STOP], "config": values["config"] | sizes}, TargetConfig),
        dtype="float64",
        device="cpu",
    )


def small_drafter(variant: str, target: Target):
    """A random drafter of a variant with few tokens per stage; a reduced draft vocabulary has two of the three."""
    config = settings_of(variant)
    reduced = {"draft_vocab_size": 2} if getattr(config, "draft_vocab_size", 0) else {}
    few = (
        {"width": 2}
        if hasattr(config, "width")
        else {"tokens_per_stage": 2 if getattr(config, "fc_norm", False) else 1}
    )
    config = dataclasses.replace(config, **few, **reduced)
    shape = config.shape(target.spec, TAPS)
    for change in VARIANTS[variant][2:]:
        shape = change(shape)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        drafter = config.build(shape, TargetHead.of(target))
        if reduced:
            drafter.keep_tokens(torch.tensor([0, 2]))
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            else:
                torch.nn.init.normal_(parameter, std=0.6)
    return drafter.double().eval()


# Memoised models: each pass is computed once for the same inputs


def contents(value):
    """A hashable key for a value that may contain tensors."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.numpy().tobytes()
    if dataclasses.is_dataclass(value):
        return tuple(contents(getattr(value, field.name)) for field in dataclasses.fields(value))
    return tuple(map(contents, value)) if isinstance(value, tuple) else value


class LookedUpTarget:
    """A memoised target. Its cache is the list of previous tokens; each text is read as a whole, once."""

    def __init__(self, target: Target):
        self.target, self.spec, self.device, self.seen = target, target.spec, target.device, {}

    def new_cache(self) -> list[int]:
        return []

    def read(self, tokens, *, cache, feature_spec, logits):
        past, text = len(cache), (*cache, *tokens[0].tolist())
        if text not in self.seen:
            self.seen[text] = self.target.read(torch.tensor([text]), feature_spec=feature_spec, logits=slice(None))
        cache[:] = text
        whole = self.seen[text]
        return TargetOutput(whole.logits[:, past:][:, logits], whole.features[:, past:], whole.last_hidden[:, past:])

    def commit(self, cache, past, path) -> None:
        cache[:] = [*cache[:past], *(cache[past + offset] for offset in path)]


def look_up(drafter):
    """Memoise a drafter's passes, in place. The choices of tokens within a stage are made again each time."""
    seen: dict = {}

    def once(function):
        def answer(*arguments):
            key = (function.__name__, contents(arguments))
            if key not in seen:
                seen[key] = function(*arguments)
            return seen[key]

        return answer

    def stage(state, anchors, choose, live=drafter.stage):
        key, chosen = contents((state, anchors)), []

        def said():
            return seen.get((key, contents(tuple(chosen))))

        def choose_anew(step, hidden):
            if step == len(chosen):
                seen[key, contents(tuple(chosen))] = hidden
                chosen.append(choose(step, hidden))
            return chosen[step]

        while isinstance(said(), torch.Tensor):
            chosen.append(choose(len(chosen), said()))
        if said() is None:
            whole = live(state, anchors, choose_anew)
            seen[key, contents(tuple(chosen))] = whole
        return said()

    drafter.begin, drafter.commit, drafter.stage = once(drafter.begin), once(drafter.commit), stage
    return drafter


# All outcomes


class Walk(SampleRng):
    """An rng that follows a path through the tree of decisions, then takes the first branch with a weight above 0."""

    def __init__(self, path: list[int]):
        self.path, self.taken, self.weights = path, [], []

    def branch(self, weights: list[float]) -> int:
        step = len(self.taken)
        taken = (
            self.path[step]
            if step < len(self.path)
            else next(number for number, weight in enumerate(weights) if weight)
        )
        self.taken.append(taken)
        self.weights.append(weights)
        return taken

    def draw(self, probabilities):
        assert probabilities.dtype == torch.float64
        rows = probabilities.reshape(-1, probabilities.shape[-1]).tolist()
        return torch.tensor([self.branch(row) for row in rows]).reshape(probabilities.shape[:-1])

    def flip(self, probability):
        return self.branch([probability, 1 - probability]) == 0

    def probability(self, start: int) -> float:
        """Probability of the decisions from step `start` on."""
        product = 1.0
        for taken, weights in zip(self.taken[start:], self.weights[start:], strict=True):
            product *= weights[taken]
        return product

    def after(self, start: int) -> list[int] | None:
        """The next path in depth-first order that agrees with this one before `start`."""
        for step in reversed(range(start, len(self.taken))):
            for other in range(self.taken[step] + 1, len(self.weights[step])):
                if self.weights[step][other]:
                    return [*self.taken[:step], other]
        return None


def law_of_decoding(target, drafter, gate, rule, length, rounds: list[Round] | None = None) -> dict[tuple, float]:
    """Text -> probability, over all outcomes of `decode`, whose rounds are appended to `rounds`.

    A round's outcomes are enumerated once for each text that it starts from. This is enough, because a round depends on
    earlier ones through the text only.
    """
    paths, mass, final = {(): []}, defaultdict(float, {(): 1.0}), defaultdict(float)
    while paths:
        # Every round emits at least one token, so all rounds that lead to the shortest text have been enumerated.
        text = min(paths, key=len)
        path = known = paths.pop(text)
        while path is not None:
            rng = Walk(path)
            emissions = decode(target, drafter, gate, PROMPT, max_new_tokens=length, rule=rule, rng=rng)
            said = []
            while len(said) <= len(text):
                emission = next(emissions)
                said += emission.tokens
            if rounds is not None and emission.round is not None:
                rounds.append(emission.round)
            probability = mass[text] * rng.probability(len(known))
            if said[-1] == STOP or len(said) == length:
                assert next(emissions, None) is None
                final[tuple(said)] += probability
            else:
                paths.setdefault(tuple(said), rng.taken)
                mass[tuple(said)] += probability
            path = rng.after(len(known))
    return final


def law_of_the_target(target, temperature, length) -> dict[tuple, float]:
    """Text -> probability, from the model's own softmax."""
    final, open_texts = {}, {(): 1.0}
    while open_texts:
        text, probability = open_texts.popitem()
        logits = target.model(input_ids=torch.tensor([[*PROMPT, *text]])).logits[0, -1] / temperature
        for token, share in enumerate((logits - logits.logsumexp(-1)).exp().tolist()):
            longer = (*text, token)
            (final if token == STOP or len(longer) == length else open_texts)[longer] = probability * share
    return final


def variation(one: dict, other: dict) -> float:
    return sum(abs(one.get(text, 0.0) - other.get(text, 0.0)) for text in one.keys() | other.keys()) / 2


def law_of_whole_texts(target, drafter, gate, rule, length) -> dict[tuple, float]:
    """The same as law_of_decoding, but enumerates the outcomes of all rounds of a text jointly."""
    final, path = defaultdict(float), []
    while path is not None:
        rng = Walk(path)
        said = [
            token
            for e in decode(target, drafter, gate, PROMPT, max_new_tokens=length, rule=rule, rng=rng)
            for token in e.tokens
        ]
        final[tuple(said)] += rng.probability(0)
        path = rng.after(0)
    return final


# Exact probabilities of texts


CASES = [("rejection", variant) for variant in VARIANTS] + [
    (rule, variant)
    for rule in RULES
    if rule != "rejection"
    for variant in ("dflash-fill_in", "domino-shifted", "dspark-rnn", "eagle3-reduced", "mtp_assistant")
]
"""Every drafter by the default rule, and every rule with a drafter of each kind."""


@pytest.mark.parametrize("named, variant", CASES)
def test_texts_are_as_likely_as_the_targets_own(named, variant, target):
    """This also holds if the gate's threshold separates the outcomes of one stage."""
    rule = RULES[named]
    drafter, read = look_up(small_drafter(variant, target)), LookedUpTarget(target)
    loops = drafter.k == 1 or rule is RULES["rejection"]
    length = 3 + drafter.k if loops else 4  # room for a second stage after the prefill's token
    expected = law_of_the_target(target, rule.temperature, length)

    def rounds_under(gate) -> list[Round]:
        rounds: list[Round] = []
        assert variation(law_of_decoding(read, drafter, gate, rule, length, rounds), expected) < EXACT, gate
        return rounds

    rounds = rounds_under(DLoop(threshold=-1e9, max_stages=3))
    if loops and rule.drafts_at:
        scores = sorted(round.scores[0] for round in rounds if round.stages > 1)
        line = scores[len(scores) // 2]
        assert scores[0] < line
        assert {
            round.scores[0] < line for round in rounds_under(DLoop(threshold=line, max_stages=3)) if round.stages > 1
        } == {False}
    if drafter.k == 1 and rule is RULES["rejection"]:
        rounds_under(Never())
        rounds_under(Always(max_stages=3))


@pytest.mark.parametrize("rule", [RULES["rejection"], RULES["match, likeliest drafts"]], ids=repr)
def test_whole_texts_with_the_targets_own_cache(rule, target):
    drafter = small_drafter("dflash-fill_in", target)
    assert (
        variation(
            law_of_whole_texts(target, drafter, DLoop(threshold=-1.0), rule, 3),
            law_of_the_target(target, rule.temperature, 3),
        )
        < EXACT
    )


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_plain_decoding_samples(temperature, target):
    expected = law_of_the_target(target, temperature, 3)
    for rule in (Rejection(temperature=temperature), Match(temperature=temperature)):
        assert variation(law_of_whole_texts(target, None, Never(), rule, 3), expected) < EXACT


class DrawnElsewhere(Rejection):
    """Draws drafts at another temperature than that of the distribution it returns for verification."""

    def propose(self, logits, rng):
        return rng.draw(distribution(logits, 0.5)), distribution(logits, self.drafts_at)


class DrawnInLowPrecision(Rejection):
    """Draws drafts from a softmax in bf16, and returns the exact distribution for verification."""

    def propose(self, logits, rng):
        rounded = torch.softmax(logits.bfloat16(), dim=-1).double()
        return rng.draw(rounded / rounded.sum(-1, keepdim=True)), distribution(logits, self.drafts_at)


class BonusFromTheWrongPlace(Rejection):
    """Samples the token after a fully accepted draft from the distribution one position too early."""

    def verify_sampled(self, drafted, proposed, target, rng):
        return super().verify_sampled(
            drafted, proposed, torch.cat([target[:-1], target[-2:-1]]) if drafted else target, rng
        )


class JudgedElsewhere(Rejection):
    """Verifies at another temperature than rule.temperature."""

    def verify_sampled(self, drafted, proposed, target, rng):
        return super().verify_sampled(drafted, proposed, distribution(target.log(), 0.8), rng)


MUTANTS = {
    "the residual is p": (Rejection, "residual", lambda p, q: p, 1e-2),
    "the residual is not cut at zero": (Rejection, "residual", lambda p, q: (p - q).abs() / (p - q).abs().sum(), 1e-2),
    "accepted with q / p": (
        Rejection,
        "acceptance",
        lambda p, q, drafted: rules_as_they_are["acceptance"](q, p, drafted),
        1e-2,
    ),
    "always accepted": (Rejection, "acceptance", lambda p, q, drafted: [1.0] * len(drafted), 1e-2),
    "drawn at another temperature": (DrawnElsewhere, None, None, 1e-2),
    "drawn in low precision": (DrawnInLowPrecision, None, None, 1e-5),
    "the bonus of another place": (BonusFromTheWrongPlace, None, None, 1e-3),
    "judged at another temperature": (JudgedElsewhere, None, None, 1e-2),
}
rules_as_they_are = {"acceptance": rules.acceptance}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_rule_is_noticed(mutant, target, monkeypatch):
    rule, name, instead, margin = MUTANTS[mutant]
    if name:
        monkeypatch.setattr(rules, name, instead)
    drafter = look_up(small_drafter("eagle3-reduced", target))
    law = law_of_decoding(
        LookedUpTarget(target), drafter, DLoop(threshold=-1.0, max_stages=3), rule(temperature=1.0), 4
    )
    assert sum(law.values()) == pytest.approx(1)
    assert variation(law, law_of_the_target(target, 1.0, 4)) > margin


def test_a_reduced_vocabulary_is_judged_by_the_targets_ids(target, monkeypatch):
    monkeypatch.setattr(
        loop,
        "over_target",
        lambda proposed, drafter, vocab_size: torch.nn.functional.pad(proposed, (0, vocab_size - proposed.shape[-1])),
    )
    drafter = look_up(small_drafter("eagle3-reduced", target))
    law = law_of_decoding(LookedUpTarget(target), drafter, Never(), Rejection(temperature=1.0), 4)
    assert variation(law, law_of_the_target(target, 1.0, 4)) > 1e-2


# Random numbers, and the settings of rules


def text_of(target, drafter, rule, identity="one", gate=None, length=30):
    emissions = decode(
        target,
        drafter,
        gate or Always(max_stages=2),
        [60, 61, 62],
        max_new_tokens=length,
        rule=rule,
        rng=SampleRng(rule.seed, identity),
    )
    return [token for emission in emissions for token in emission.tokens]


@pytest.mark.parametrize("kind", [Rejection, Match])
def test_chance_belongs_to_the_seed_and_the_response(kind, tiny_target):
    drafter = make_drafter("dflash-shifted", tiny_target)
    text = text_of(tiny_target, drafter, kind(temperature=1.0))
    torch.rand(5)  # random numbers drawn elsewhere have no influence
    assert text_of(tiny_target, drafter, kind(temperature=1.0)) == text
    assert text_of(tiny_target, drafter, kind(temperature=1.0, seed=1)) != text
    assert text_of(tiny_target, drafter, kind(temperature=1.0), identity="two") != text


def test_serving_samples(tiny_target):
    model = LoopedModel(tiny_target, make_drafter("eagle3-reduced", tiny_target), Always(max_stages=2), tiny_config())

    def said(**settings):
        return list(model.tokens([60, 61, 62], max_new_tokens=20, **settings))

    assert said() == decode_plain(tiny_target, [60, 61, 62], max_new_tokens=20)
    assert said(temperature=1.0, seed=4) == said(temperature=1.0, seed=4) != said(temperature=1.0, seed=5)


def test_matching_likeliest_drafts_gives_the_text_of_plain_sampling(variant, tiny_target):
    """There is one draw per token, in the order of the text, so the text does not depend on the drafts."""
    rule = RULES["match, likeliest drafts"]
    plain = text_of(tiny_target, None, rule)
    for gate in (Never(), Always(max_stages=3), DLoop(threshold=-9.0)):
        assert text_of(tiny_target, make_drafter(variant, tiny_target), rule, gate=gate) == plain


@pytest.mark.parametrize("variant", ["dflash-fill_in", "eagle3-reduced"])
@pytest.mark.parametrize("kind", [Rejection, Match])
def test_temperature_zero_is_greedy(kind, variant, tiny_target):
    assert text_of(tiny_target, make_drafter(variant, tiny_target), kind(), length=12) == decode_plain(
        tiny_target, [60, 61, 62], max_new_tokens=12
    )


def test_chance_draws_as_often_as_it_should():
    rng, probabilities = SampleRng(), torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])
    drawn = rng.draw(probabilities.expand(4, 5000, 6))
    assert drawn.shape == (4, 5000)
    torch.testing.assert_close(torch.bincount(drawn.flatten(), minlength=6) / 20000, probabilities, atol=0.02, rtol=0)
    assert not {0, 2, 5} & set(drawn.flatten().tolist())
    assert sum(rng.flip(0.3) for _ in range(5000)) / 5000 == pytest.approx(0.3, abs=0.03)
    assert all(rng.flip(1.0) and not rng.flip(0.0) for _ in range(1000))


@torch.inference_mode()
def test_a_stage_remembers_what_it_chose_and_from_what(variant, tiny_target):
    """A stage keeps the ids of the chosen tokens, and q is the softmax of the logits that it keeps."""
    drafter, rule, likeliest = make_drafter(variant, tiny_target), Rejection(temperature=0.9), []
    output = tiny_target.read(torch.tensor([[60, 61, 62]]), feature_spec=drafter.shape.feature_spec)
    state = drafter.begin(Context(torch.tensor([[60, 61, 62, 63]]), output.features), torch.tensor([[3]]))
    for seed in range(5):
        stage = draft_stage(drafter, rule, SampleRng(seed), state, 63)
        assert drafter.token_ids(stage.ids).tolist() == stage.tokens
        assert torch.equal(torch.cat(stage.proposed), distribution(stage.logits, 0.9))
        likeliest += (stage.ids == stage.logits.argmax(-1)).tolist()
    assert not all(likeliest)


def test_probabilities_are_at_least_fp32():
    for given, exact in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        assert distribution(torch.randn(2, 5).to(given), 0.5).dtype == exact


def test_every_rule_yaml_builds_and_says_what_it_refuses():
    for path in (CONF / "rule").glob("*.yaml"):
        assert isinstance(
            build(option("rule", path.stem) | {"temperature": 1, "draft_temperature": 0}, AcceptanceRule, "rule"),
            AcceptanceRule,
        )
    for settings, words in (
        ({"temperature": -1.0}, "rule.temperature must not be negative"),
        ({"temperature": 1.0, "draft_temperature": -1.0}, "rule.draft_temperature must not"),
        ({"draft_temperature": 0.5}, "raise rule.temperature"),
    ):
        with pytest.raises(ValueError, match=words):
            Rejection(**settings)
