"""Compare drafters by replay, each at its own best k, threshold and cap, by set and category.

    python tests/speed/compare_drafters.py artifacts/runs/gain \\
        --drafters base=artifacts/runs/eagle3-base/drafter loop=starter:eagle3_smollm2_135m_loop \\
        --sets benchmarks=artifacts/runs/benchmarks

Speeds are relative to plain decoding, to the best single stage and to the first drafter. The first run gives the
target and the settings. k, threshold and cap are chosen on its validation answers; all speeds are computed on its
validation and test answers and on the test answers of the other runs. The best single stage is the best of all
drafters and k.

Intervals are 95 %, from a bootstrap over prompts with the same draws for both sides of a ratio. Cost tables are
measured together and can be kept (--costs), so that results of a second start are comparable.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf
from tqdm import tqdm

from dloop_train.checkpoints.files import locate_drafter
from dloop_train.config import Config, from_hydra
from dloop_train.data.responses import Response
from dloop_train.decoding import statistics
from dloop_train.decoding.costs import Costs, measure_all
from dloop_train.decoding.gates import DLoop, Gate, Never
from dloop_train.decoding.replay import Replay, continuation, regroup, replay, walk_oracle
from dloop_train.drafters.base import Drafter
from dloop_train.drafters.chain import OwnKeysChain
from dloop_train.phases import artifacts
from dloop_train.phases.evaluate import load_for, plain_rows, record_of, simulated_rows
from dloop_train.phases.replaying import replayable, simulated
from dloop_train.phases.report import table
from dloop_train.targets.sources import load_target
from dloop_train.targets.target import Target

THRESHOLDS = (-0.1, -0.25, -0.5, -0.75, -1.0, -1.5, -2.0, -3.0)
MOST_TOKENS = 16
"""Largest number of drafted tokens in a round; gates are capped at the number of stages that fit."""
DRAWS = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument(
        "--drafters",
        nargs="+",
        required=True,
        help="label=folder or label=starter:<name>; later ones are compared with the first",
    )
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 7, 8])
    parser.add_argument("--sets", nargs="*", default=[], help="label=run folder: test answers of other prompts")
    parser.add_argument("--most", type=int, default=0, help="answers of each set; 0 is all")
    parser.add_argument(
        "--costs", type=Path, help="file of the cost tables; measured and written where it is not there"
    )
    wanted = parser.parse_args()
    config = read_run(wanted.run)
    target = load_target(config.target, dtype=config.evaluate.dtype)
    sets = {"validation": answers(config, "validation", wanted.most), "test": answers(config, "test", wanted.most)}
    sets |= {label: answers(read_run(Path(folder)), "test", wanted.most) for label, folder in map(named, wanted.sets)}
    drafters = {
        label: Compared(target, config, label, locate_drafter(place), wanted.k)
        for label, place in map(named, wanted.drafters)
    }
    measure(target, drafters, sets["validation"], wanted.costs)
    for drafter in drafters.values():
        drafter.choose(drafter.replays(sets["validation"]))
    best = max(drafters.values(), key=lambda drafter: drafter.single_speed)
    for label, responses in sets.items():
        print(
            f"\n{label}: {len(responses)} answers, {sum(len(one.response_ids) for one in responses)} tokens; "
            f"the best single stage is {best.label}'s, k = {best.single}"
        )
        print(table(compare(list(drafters.values()), best, responses)), flush=True)
    for drafter in drafters.values():
        print("\n" + described(drafter))


def named(word: str) -> tuple[str, str]:
    label, _, place = word.partition("=")
    return label, place


def read_run(folder: Path) -> Config:
    return from_hydra(OmegaConf.load(folder / "config.yaml"))


def answers(config: Config, split: str, most: int) -> list[Response]:
    return replayable(artifacts.greedy_responses(config, split)[: most or None])


@dataclass(frozen=True)
class Choice:
    """A gate and k, the number of tokens per stage."""

    k: int
    gate: Gate

    def __str__(self) -> str:
        return f"k = {self.k}, g = {self.gate.threshold:g}, at most {self.gate.max_stages} stages"


class Compared:
    """One drafter: its replays at every k, and the k, threshold and cap chosen on validation answers."""

    def __init__(self, target: Target, config: Config, label: str, folder: Path, ks: Sequence[int]):
        self.target, self.config, self.label, self.ks = target, config, label, sorted(ks)
        chain = isinstance(load_for(target, folder, config), OwnKeysChain)
        self.loaded = {k: load_for(target, folder, config, k) for k in ({*ks, 1} if chain else ks)}
        self.chain = chain
        self.costs: dict[int, Costs] = {}
        self.single, self.single_speed, self.choice = 0, 0.0, Choice(0, Never())
        self.known: dict[tuple, dict[int, list[Replay]]] = {}

    def shape(self, k: int) -> str:
        return repr((self.loaded[k].shape, k))

    def replays(self, responses: list[Response]) -> dict[int, list[Replay]]:
        """Replays of every response, by k; a chain drafter is replayed once for all k."""
        key = tuple(map(text_of, responses))
        if key not in self.known:
            found: dict[int, list[Replay]] = {k: [] for k in self.ks}
            for response in tqdm(responses, desc=self.label, unit="answer"):
                for k, record in self.replayed(response).items():
                    found[k].append(record)
            self.known[key] = found
        return self.known[key]

    def replayed(self, response: Response) -> dict[int, Replay]:
        beyond, most = beyond_of(self.target, response, max(self.ks)), self.config.generate.greedy_max_new_tokens

        def one(drafter: Drafter, **how) -> Replay:
            return replay(
                self.target,
                drafter,
                response.prompt_ids,
                response.response_ids,
                max_new_tokens=most,
                beyond=beyond,
                **how,
            )

        if self.chain:
            single = one(self.loaded[1], stages=MOST_TOKENS, ahead=max(self.ks))
            return {k: regroup(single, k) for k in self.ks}
        return {
            k: one(self.loaded[k], stages=min(2, MOST_TOKENS // k), deepest=MOST_TOKENS // k, floor=min(THRESHOLDS))
            for k in self.ks
        }

    def choose(self, records: dict[int, list[Replay]]) -> None:
        """Choose the k of the best single stage, and k, threshold and cap of the best gate, by predicted speed."""
        singles = {k: simulated(records[k], Never(), self.costs[k])["tokens_per_second"] for k in self.ks}
        self.single = max(singles, key=singles.__getitem__)
        self.single_speed = singles[self.single]
        tried = [Choice(k, DLoop(threshold=g, max_stages=cap)) for k in self.ks for g in THRESHOLDS for cap in caps(k)]
        self.choice = max(
            tried,
            key=lambda choice: simulated(records[choice.k], choice.gate, self.costs[choice.k])["tokens_per_second"],
        )

    def rows(self, responses: list[Response], choice: Choice) -> list[dict]:
        return simulated_rows(responses, self.replays(responses)[choice.k], choice.gate, self.costs[choice.k])

    def oracle_rows(self, responses: list[Response]) -> list[dict]:
        k, costs = self.choice.k, self.costs[self.choice.k]
        walks = [
            walk_oracle(record, lambda one: costs.seconds(one, gated=False), MOST_TOKENS // k)
            for record in self.replays(responses)[k]
        ]
        return [
            record_of(
                response,
                len(response.response_ids),
                [vars(one) | {"seconds": costs.parts(one, gated=False)} for one in walk],
            )
            for response, walk in zip(responses, walks, strict=True)
        ]


def caps(k: int) -> list[int]:
    """Caps on the stages per round that are tried: 2 and more, with at most MOST_TOKENS drafted tokens."""
    return [cap for cap in (2, 3, 4, 6, 8, 12, 16) if cap * k <= MOST_TOKENS]


BEYOND: dict[tuple, list[int]] = {}


def text_of(response: Response) -> tuple:
    """Key of an answer; it includes the tokens, since two sets may have answers of different length to one prompt."""
    return response.id, *response.response_ids


def beyond_of(target: Target, response: Response, count: int) -> list[int]:
    """The next `count` tokens of the target after a response, decoded once for all drafters."""
    text = text_of(response)
    if text not in BEYOND:
        BEYOND[text] = continuation(target, response.prompt_ids, response.response_ids, count)
    return BEYOND[text]


def measure(target: Target, drafters: dict[str, Compared], responses: list[Response], path: Path | None) -> None:
    """Measure the cost tables of all drafters and k together, so that they are comparable, or read them from `path`.

    Drafters that differ only in weights share a table.
    """
    shapes = {
        drafter.shape(k): (drafter.loaded[k], min(3, MOST_TOKENS // k))
        for drafter in drafters.values()
        for k in drafter.ks
    }
    kept = json.loads(path.read_text()) if path is not None and path.is_file() else {}
    if not kept.keys() >= shapes.keys():
        prompts = [one.prompt_ids for one in sorted(responses, key=lambda one: -len(one.response_ids))]
        kept = {
            shape: found.row()
            for shape, found in zip(shapes, measure_all(target, list(shapes.values()), prompts), strict=True)
        }
        if path is not None:
            path.write_text(json.dumps(kept))
    for drafter in drafters.values():
        drafter.costs = {k: Costs.of(kept[drafter.shape(k)]) for k in drafter.ks}


def compare(drafters: list[Compared], best: Compared, responses: list[Response]) -> list[dict[str, str]]:
    """Rows of the table: for every drafter one for all answers, one per category, and one per interval of tau.

    The tau of an answer is that of the best single stage.
    """
    first, rows = drafters[0], []
    single, plain = best.rows(responses, Choice(best.single, Never())), plain_rows(responses, first.costs[first.ks[0]])
    gated = {drafter.label: drafter.rows(responses, drafter.choice) for drafter in drafters}
    groups = groups_of(responses, single)
    for drafter in drafters:
        mine, own, oracle = (
            gated[drafter.label],
            drafter.rows(responses, Choice(drafter.single, Never())),
            drafter.oracle_rows(responses),
        )
        for group, members in groups.items():

            def ratio(fast: list[dict], slow: list[dict], members=members) -> str:
                found = statistics.speedup_estimate(
                    *([side[number] for number in members] for side in (fast, slow)), draws=DRAWS
                )
                return f"{found.value:.2f}x [{found.low:.2f}, {found.high:.2f}]"

            rows.append(
                {
                    "drafter": f"{drafter.label}, {group} ({len(members)})",
                    f"{best.label} S = 1": ratio(single, plain),
                    "own S = 1": ratio(own, plain),
                    "gate": ratio(mine, plain),
                    "gate over best S = 1": ratio(mine, single),
                    f"over {first.label}'s gate": "-" if drafter is first else ratio(mine, gated[first.label]),
                    "oracle": ratio(oracle, plain),
                    "tau": f"{statistics.tau([mine[number] for number in members]):.2f}",
                }
            )
    return rows


TAUS = (0.0, 2.0, 2.5, 3.0, 99.0)


def groups_of(responses: list[Response], single: list[dict]) -> dict[str, list[int]]:
    """Indices of all answers, of those of each category, and of those with single-stage tau in each interval."""
    taus, everyone = statistics.tau_by_response(single), list(range(len(responses)))
    categories = {
        name: [n for n in everyone if responses[n].category == name]
        for name in sorted({one.category for one in responses})
    }
    bands = {
        f"tau {low:g} to {high:g}" if high < 99 else f"tau over {low:g}": [n for n in everyone if low <= taus[n] < high]
        for low, high in itertools.pairwise(TAUS)
    }
    return (
        {"all": everyone}
        | (categories if len(categories) > 1 else {})
        | {name: members for name, members in bands.items() if members}
    )


def described(drafter: Compared) -> str:
    """Text with the chosen settings and the costs of the parts of a round."""
    costs = drafter.costs[drafter.choice.k]
    verified = ", ".join(f"{tokens} {seconds / costs.plain:.2f}" for tokens, seconds in sorted(costs.verify.items()))
    return (
        f"{drafter.label}: single stage k = {drafter.single}; gate {drafter.choice}. "
        f"Costs in plain steps of {1000 * costs.plain:.1f} ms: a stage "
        f"{costs.draft_first / costs.plain:.3f}, a further one {costs.draft_more / costs.plain:.3f}, "
        f"a gate {costs.gate / costs.plain:.3f}, "
        f"the rest {costs.overhead / costs.plain:.3f}, verifying {verified}"
    )


if __name__ == "__main__":
    main()
