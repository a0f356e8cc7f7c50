"""evaluate: exported drafter -> test prompts decoded live under each setting, and replayed.

Replay covers more prompts than live decoding and takes its times from a measured cost table.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from tqdm import tqdm

from dloop_train.checkpoints.files import SECTION, load_drafter, locate_drafter, read_config, weights_digest
from dloop_train.config import Config, check
from dloop_train.data.responses import Response
from dloop_train.decoding.costs import MEASURED_DEPTH, Costs, measure_all, warm_up
from dloop_train.decoding.gates import DLoop, Gate, Never
from dloop_train.decoding.loop import decode
from dloop_train.decoding.partings import parting_gap
from dloop_train.decoding.replay import Replay, walk_gate
from dloop_train.decoding.rules import AcceptanceRule, SampleRng
from dloop_train.decoding.timing import disturbed
from dloop_train.drafters.base import Drafter
from dloop_train.launch import outside_allocation, start_ranks
from dloop_train.phases import artifacts
from dloop_train.phases.replaying import Beyond, candidates, fastest, replay_all, replayable, simulated, sweep
from dloop_train.phases.validation import chosen_threshold
from dloop_train.ranks import say
from dloop_train.runs import key_of, read_jsonl, write_atomic, write_jsonl
from dloop_train.targets.head import TargetHead
from dloop_train.targets.sources import as_dtype, load_target
from dloop_train.targets.target import Target
from dloop_train.types import Round

PLAIN = "plain decoding"
UNTOUCHED = "untouched"
TRAINED = "trained"
THRESHOLDS = "extra_thresholds.json"
"""File in the evaluation folder: thresholds of evaluate.extra's drafters, by label, chosen on validation responses."""
SINGLE = "single_stage.json"
"""File in the evaluation folder: the numbers that replay on validation responses predicts for a single stage.

It has an entry for each number of tokens that was tried, and the number that is predicted to be fastest.
"""


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    label: str
    drafter: str | None
    """Label of the drafter; None for plain decoding."""
    gate: Gate
    k: int = 0
    """Tokens per stage; 0 means the drafter's own number."""

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.label.lower()).strip("-")

    @property
    def loaded_as(self) -> tuple[str | None, int]:
        """Key of the loaded drafter: it is loaded once for each number of tokens per stage."""
        return self.drafter, self.k

    def row(self, k: int, rule: AcceptanceRule) -> dict:
        gated = not isinstance(self.gate, Never)
        return {
            "label": self.label,
            "drafter": self.drafter,
            "gated": gated,
            "threshold": self.gate.threshold,
            "k": k,
            "rounds": f"rounds/{self.slug}.jsonl",
            "replayed": f"replayed/{self.slug}.jsonl",
            "gate_temperature": self.gate.temperature if self.gate.needs_scores else None,
            **rule.row(),
        }


def run(config: Config) -> None:
    folder = artifacts.run_folder(config) / "evaluation"
    folders = drafter_folders(config)
    check(
        all((path / "config.json").is_file() for path in folders.values()),
        f"not every drafter of {list(map(str, folders.values()))} is there; run phases=[export] first",
    )
    require_same_evaluation(config, folder, folders)
    if (folder / "settings.json").is_file():
        say(f"evaluate: done before, {folder}")
        return
    if outside_allocation(config.launch):
        start_ranks(config, "evaluate", alone=True)
        return
    Evaluation(config, folder, folders, greedy_test_responses(config)).run()
    say(f"evaluate: {folder}")


def rank_main(config: Config) -> None:
    """Run the phase on a node of a Slurm allocation, for a command that was started outside of it."""
    run(config)


# What is compared


def drafter_folders(config: Config) -> dict[str, Path]:
    """Label -> folder of every drafter in the table."""
    folders = {}
    if config.drafter.init != "scratch":
        folders[UNTOUCHED] = locate_drafter(config.drafter.init, config.drafter.revision)
    extra = {
        label: locate_drafter(place, "main") if place.startswith("starter:") else Path(place)
        for label, place in config.evaluate.extra.items()
    }
    return folders | extra | {TRAINED: artifacts.run_folder(config) / "drafter"}


def greedy_test_responses(config: Config) -> list[Response]:
    """The greedy test answers, of which the first evaluate.prompts are decoded live."""
    responses = list(artifacts.greedy_responses(config, "test"))
    if len(responses) < config.evaluate.prompts:
        say(
            f"evaluate: {config.evaluate.prompts} prompts were asked for, {len(responses)} test responses exist "
            f"(generate.greedy_prompts={config.generate.greedy_prompts})"
        )
    check(
        bool(responses), "there are no test responses; raise generate.greedy_prompts, or give the prompts a test split"
    )
    return responses


def validation_responses(config: Config) -> list[Response]:
    """The greedy validation answers on which thresholds and tokens per stage are chosen."""
    return artifacts.greedy_responses(config, "validation")[: config.train.validate_prompts]


def settings_of(config: Config, gates: dict[str, Gate], single: int) -> list[Setting]:
    """The rows of the table: plain decoding, the best single stage, and each drafter with its gate.

    `gates` has the gate of each drafter by label. `single` is the number of tokens of the best single stage.
    If it is 0, none was searched for, and the first drafter's own single stage takes its place.

    With evaluate.rows=all each drafter's own single stage is added, and the trained drafter at the paper's threshold
    if another one was chosen. The trained drafter at evaluate.live_thresholds is always added.
    """
    whole, reference = config.evaluate.rows == "all", next(iter(gates))
    settings = [Setting(PLAIN, None, Never())]
    if single:
        settings.append(Setting(f"best single stage, k = {single}", reference, Never(), single))
    for label, gate in gates.items():
        if whole or (not single and label == reference):
            settings.append(Setting(f"{label} S=1", label, Never()))
        settings.append(Setting(f"{label} + gate" + (" (DLoop)" if label == TRAINED else ""), label, gate))
    chosen = gates[TRAINED]
    papers = [chosen.paper_threshold] if config.gate.by_replay and whole else []
    settings.extend(
        Setting(
            f"{TRAINED} + gate {threshold:g}",
            TRAINED,
            DLoop(threshold=threshold, max_stages=config.gate.max_stages, temperature=config.gate.temperature),
        )
        for threshold in dict.fromkeys([*papers, *config.evaluate.live_thresholds])
        if threshold != chosen.threshold
    )
    return settings


def gate_for(config: Config, label: str, folder: Path) -> Gate:
    """The gate of one drafter, as known before the evaluation.

    With gate.threshold=replay each drafter has its own threshold. For the untouched drafter it is the one chosen by the
    validation at step 0, for others the one in their config.json. If there is none, it is the paper's.
    """
    if not config.gate.by_replay:
        return config.gate
    if label == UNTOUCHED:
        threshold = chosen_threshold(artifacts.run_folder(config), 0)
    else:
        threshold = read_config(folder).get(SECTION, {}).get("threshold")
    return config.gate.with_threshold(config.gate.paper_threshold if threshold is None else threshold)


def require_same_evaluation(config: Config, folder: Path, folders: dict[str, Path]) -> None:
    """Delete the results in `folder` if the drafters or settings have changed since they were made."""
    weights = {label: weights_digest(path) for label, path in folders.items()}
    gates = {label: repr(gate_for(config, label, path)) for label, path in folders.items()}
    # At temperature 0 all rules and seeds give the same text.
    sampled = {"rule": repr(config.rule)} if config.rule.temperature else {}
    made_from = {
        "key": key_of(
            {
                "weights": weights,
                "evaluate": asdict(config.evaluate),
                "validation": config.train.validate_prompts,
                "drafter": asdict(config.drafter),
                "greedy": artifacts.greedy(config).key,
                "gates": gates,
                **sampled,
            }
        )
    }
    path = folder / "made_from.json"
    if path.is_file() and json.loads(path.read_text()) != made_from:
        say("evaluate: drafters or settings have changed since the last evaluation; starting anew")
        # settings.json marks the phase as done, so it is deleted first.
        for old in [
            folder / "settings.json",
            folder / SINGLE,
            folder / THRESHOLDS,
            *folder.glob("rounds/*.jsonl"),
            *folder.glob("replayed/*.jsonl"),
        ]:
            old.unlink(missing_ok=True)
    write_atomic(path, json.dumps(made_from))


def load_for(target: Target, folder: Path, config: Config, k: int = 0) -> Drafter:
    """Load a drafter with its own number of tokens per stage, or with k if that is not 0."""
    settings = config.drafter.as_exported(read_config(folder).get(SECTION, {}))
    settings = settings.drafting(k) if k else settings
    drafter = load_drafter(
        folder,
        settings,
        TargetHead.of(target),
        dtype=as_dtype(config.evaluate.dtype),
        target=target.spec,
        taps=artifacts.taps(config),
    )
    return drafter.to(target.device).eval()


class Evaluation:
    """The phase's work on one device: the choice of the single stage, live decoding, replay."""

    def __init__(self, config: Config, folder: Path, folders: dict[str, Path], responses: list[Response]):
        self.config, self.folder, self.folders, self.responses = config, folder, folders, responses
        self.target = load_target(config.target, dtype=config.evaluate.dtype)
        self.drafters: dict[tuple[str | None, int], Drafter] = {}
        self.beyond: Beyond = {}
        self.tables: dict[str, Costs] = {}
        """Cost tables by `time_shape`: drafters that differ only in their weights share one."""

    def run(self) -> None:
        settings = settings_of(self.config, self.gates(), self.single_stage())
        self.decode_live(settings, self.responses[: self.config.evaluate.prompts])
        self.replay(settings)
        rows = [
            setting.row(self.drafter(*setting.loaded_as).k if setting.drafter else 0, self.config.rule)
            for setting in settings
        ]
        write_atomic(self.folder / "settings.json", json.dumps(rows, indent=1))

    def drafter(self, label: str | None, k: int = 0) -> Drafter | None:
        if label is not None and (label, k) not in self.drafters:
            self.drafters[label, k] = load_for(self.target, self.folders[label], self.config, k)
        return self.drafters.get((label, k))

    def costs(self, drafter: Drafter) -> Costs:
        """The cost table of a drafter.

        All tables are measured together at the first call, so that a change of the machine's speed affects all of them.
        """
        if not self.tables:
            self.tables = self.measured_tables()
        return self.tables[time_shape(drafter)]

    def measured_tables(self) -> dict[str, Costs]:
        stages = min(MEASURED_DEPTH, self.config.evaluate.replay_stages)
        wanted = {time_shape(drafter): (drafter, stages) for drafter in map(self.drafter, self.folders)}
        first = next(iter(self.folders))
        for k in self.config.evaluate.single_stages:
            drafter = load_for(self.target, self.folders[first], self.config, k)
            wanted.setdefault(time_shape(drafter), (drafter, 1))
        prompts = [response.prompt_ids for response in sorted(self.responses, key=lambda r: -len(r.response_ids))]
        return dict(zip(wanted, measure_all(self.target, list(wanted.values()), prompts), strict=True))

    def records(
        self, drafter: Drafter, responses: list[Response], gate: Gate, stages: int, thresholds: Sequence[float] = ()
    ) -> list[Replay]:
        """Replays from which the gate can be simulated at all of evaluate.thresholds and `thresholds`."""
        return replay_all(
            self.target,
            drafter,
            responses,
            gate,
            [*self.config.evaluate.thresholds, *thresholds],
            self.beyond,
            stages=stages,
            max_new_tokens=self.config.generate.greedy_max_new_tokens,
        )

    # The best single stage

    def single_stage(self) -> int:
        """Number of tokens of the first drafter's fastest single stage, predicted by replay on validation responses.

        0 if evaluate.single_stages is empty or there are no validation responses.
        """
        path, responses = self.folder / SINGLE, validation_responses(self.config)
        if not self.config.evaluate.single_stages or not responses:
            return 0
        if not path.is_file():
            label = next(iter(self.folders))
            tried = sorted({*self.config.evaluate.single_stages, self.drafter(label).k})
            found = [
                {"k": k, **self.predicted_single(label, k, responses)}
                for k in tqdm(tried, desc="single stages", unit="k")
            ]
            write_atomic(
                path,
                json.dumps(
                    {"best": max(found, key=lambda one: one["tokens_per_second"])["k"], "found": found}, indent=1
                ),
            )
        return json.loads(path.read_text())["best"]

    def predicted_single(self, label: str, k: int, responses: list[Response]) -> dict:
        drafter = load_for(self.target, self.folders[label], self.config, k)
        return simulated(self.records(drafter, responses, Never(max_stages=1), 1), Never(), self.costs(drafter))

    # Thresholds

    def gates(self) -> dict[str, Gate]:
        """The gate of every drafter, by label.

        The run's own drafters were validated in training; those of evaluate.extra are validated here.
        """
        found = {label: gate_for(self.config, label, folder) for label, folder in self.folders.items()}
        return found | {
            label: self.config.gate.with_threshold(threshold) for label, threshold in self.extra_thresholds().items()
        }

    def extra_thresholds(self) -> dict[str, float]:
        """The threshold that replay on validation responses predicts to be fastest for each drafter of evaluate.extra.

        Empty unless gate.threshold=replay and there are validation responses to replay.
        """
        path, responses, gate = self.folder / THRESHOLDS, validation_responses(self.config), self.config.gate
        if not (gate.by_replay and replayable(responses)):
            return {}
        if not path.is_file():
            found = {
                label: self.fastest_threshold(self.drafter(label), responses)
                for label in tqdm(self.config.evaluate.extra, desc="thresholds", unit="drafter")
            }
            write_atomic(path, json.dumps(found, indent=1))
        return json.loads(path.read_text())

    def fastest_threshold(self, drafter: Drafter, responses: list[Response]) -> float:
        gate, stages = self.config.gate, self.config.evaluate.replay_stages
        points = sweep(
            self.records(drafter, responses, gate, stages),
            candidates(gate, self.config.evaluate.thresholds),
            self.costs(drafter),
            drafter.k,
            gate.max_stages,
        )
        return fastest(points["sweep"], gate.paper_threshold)["threshold"]

    # Live

    def decode_live(self, settings: list[Setting], responses: list[Response]) -> None:
        """Decode every prompt under every setting.

        All settings of a prompt are decoded before the next prompt, so that a change of the machine's speed affects all
        settings alike. An interrupted evaluation continues after the last prompt that has all settings.

        Prompts during which the machine was busy are decoded once more, and the faster time of each setting is kept.
        """
        rows = {setting.label: read_partial(self.folder, setting) for setting in settings}
        done = min(map(len, rows.values()))
        for setting in settings:
            warm_up(self.target, self.drafter(*setting.loaded_as), responses[0].prompt_ids, self.config.rule)
        for response in tqdm(responses[done:], desc="evaluate", unit="prompt"):
            decoded = self.decode_prompt(settings, response)
            for setting in settings:
                rows[setting.label] = [*rows[setting.label][:done], decoded[setting.label]]
                write_jsonl(self.folder / "rounds" / f"{setting.slug}.jsonl", rows[setting.label])
            done += 1
        self.decode_again(settings, rows, responses)

    def decode_again(self, settings: list[Setting], rows: dict[str, list[dict]], responses: list[Response]) -> None:
        whole = [number for number in range(len(responses)) if all(found[number]["rounds"] for found in rows.values())]
        busy = disturbed([[found[number] for number in whole] for found in rows.values()]) if whole else []
        again = [whole[place] for place in busy if "again" not in rows[PLAIN][whole[place]]]
        if again:
            say(
                f"evaluate: the machine was busy during {len(again)} of {len(responses)} prompts; "
                f"they are decoded once more"
            )
        for number in tqdm(again, desc="evaluate again", unit="prompt", disable=not again):
            decoded = self.decode_prompt(settings, responses[number])
            for setting in settings:
                both = (rows[setting.label][number], decoded[setting.label])
                rows[setting.label][number] = min(both, key=lambda row: row["seconds"]) | {"again": True}
                write_jsonl(self.folder / "rounds" / f"{setting.slug}.jsonl", rows[setting.label])

    def decode_prompt(self, settings: list[Setting], response: Response) -> dict[str, dict]:
        """Decode a prompt under every setting. Returns rows by label."""
        found, texts = {}, {}
        for setting in settings:
            row, texts[setting.label] = decode_one(
                self.config, self.target, self.drafter(*setting.loaded_as), setting, response
            )
            found[setting.label] = row | compared(
                self.config.rule, self.target, response, texts[PLAIN], texts[setting.label]
            )
        return found

    # Replay

    def replay(self, settings: list[Setting]) -> None:
        """Write the drafters' cost tables and threshold sweeps, and all settings' simulated test rounds."""
        swept, costs, records = {}, {}, {}
        deployed = [setting.gate.threshold for setting in settings if setting.gate.threshold is not None]
        for setting in tqdm(settings[1:], desc="replay", unit="setting"):
            drafter = self.drafter(*setting.loaded_as)
            if setting.loaded_as not in records:
                gate, stages = (
                    (Never(max_stages=1), 1) if setting.k else (self.config.gate, self.config.evaluate.replay_stages)
                )
                records[setting.loaded_as] = self.records(drafter, self.responses, gate, stages, deployed)
                costs[setting.loaded_as] = self.costs(drafter)
                if not setting.k:
                    swept[setting.drafter] = self.sweep(drafter, records[setting.loaded_as], costs[setting.loaded_as])
            write_jsonl(
                self.folder / "replayed" / f"{setting.slug}.jsonl",
                simulated_rows(
                    replayable(self.responses), records[setting.loaded_as], setting.gate, costs[setting.loaded_as]
                ),
            )
        write_jsonl(
            self.folder / "replayed" / f"{settings[0].slug}.jsonl",
            plain_rows(replayable(self.responses), next(iter(costs.values()))),
        )
        write_atomic(self.folder / "replay.json", json.dumps(swept, indent=1))
        write_atomic(
            self.folder / "costs.json",
            json.dumps({label: table.row() for (label, k), table in costs.items() if not k}, indent=1),
        )

    def sweep(self, drafter: Drafter, records: list[Replay], costs: Costs) -> dict:
        return sweep(records, self.config.evaluate.thresholds, costs, drafter.k, self.config.gate.max_stages)


def time_shape(drafter: Drafter) -> str:
    """A key for everything in a drafter that its speed depends on."""
    return repr((drafter.shape, drafter.k))


def read_partial(folder: Path, setting: Setting) -> list[dict]:
    path = folder / "rounds" / f"{setting.slug}.jsonl"
    return read_jsonl(path) if path.is_file() else []


def decode_one(
    config: Config, target: Target, drafter: Drafter | None, setting: Setting, response: Response
) -> tuple[dict, list[int]]:
    """Decode one response. Returns its row and its tokens.

    Time starts at the end of the first draft, as in z-lab's protocol.
    """
    emissions = list(
        decode(
            target,
            drafter,
            setting.gate,
            response.prompt_ids,
            max_new_tokens=config.evaluate.max_new_tokens,
            rule=config.rule,
            rng=SampleRng(config.rule.seed, response.id),
        )
    )
    text = [token for emission in emissions for token in emission.tokens]
    rounds = [
        asdict(emission.round) | {"tokens": emission.tokens} for emission in emissions if emission.round is not None
    ]
    return record_of(response, len(text), rounds) | {"first_token": text[0]}, text


def record_of(response: Response, tokens: int, rounds: list[dict]) -> dict:
    """The row of a response. `seconds` starts at the end of the first draft."""
    seconds = sum(sum(one["seconds"].values()) for one in rounds) - (
        rounds[0]["seconds"].get("draft_first", 0.0) if rounds else 0.0
    )
    return {
        "id": response.id,
        "category": response.category,
        "prompt_tokens": len(response.prompt_ids),
        "tokens": tokens,
        "seconds": seconds,
        "rounds": rounds,
    }


def simulated_rows(responses: list[Response], records: list[Replay], gate: Gate, costs: Costs) -> list[dict]:
    """Rows of simulated rounds, in the same form as decoded ones, with times from the cost table."""
    parts = partial(costs.parts, gated=gate.needs_scores)
    return [
        record_of(response, record.length, [asdict(one) | {"seconds": parts(one)} for one in walk_gate(record, gate)])
        for response, record in zip(responses, records, strict=True)
    ]


def plain_rows(responses: list[Response], costs: Costs) -> list[dict]:
    step = asdict(Round(0, 0, 0, 1, (), {"verify": costs.plain}))
    return [
        record_of(response, len(response.response_ids), [step] * (len(response.response_ids) - 1))
        for response in responses
    ]


def compared(rule: AcceptanceRule, target: Target, response: Response, plain: list[int], text: list[int]) -> dict:
    """Compare a text with plain decoding's.

    Sampled texts are expected to differ, so both values are None above temperature 0.
    """
    if rule.temperature:
        return {"same_text": None, "parting_gap": None}
    gap = parting_gap(target, response.prompt_ids, plain, text)
    return {"same_text": gap is None, "parting_gap": gap}
