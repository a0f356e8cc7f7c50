"""evaluate: exported drafter -> live decoding of test prompts under each setting, and replay under a measured cost table."""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from dloop_train.checkpoints.files import SECTION, load_drafter, locate_drafter, read_config, weights_digest
from dloop_train.config import Config, check
from dloop_train.data.responses import Response, read_responses
from dloop_train.decoding.costs import MEASURED_DEPTH, Costs, measure_costs, warm_up
from dloop_train.decoding.gates import DLoop, Gate, Never
from dloop_train.decoding.loop import decode
from dloop_train.decoding.rules import Chance, Rule
from dloop_train.drafters.base import Drafter
from dloop_train.phases import artifacts
from dloop_train.phases.replaying import replay_all, sweep
from dloop_train.phases.validation import chosen_threshold
from dloop_train.ranks import say
from dloop_train.runs import key_of, read_jsonl, write_atomic, write_jsonl
from dloop_train.targets.head import TargetHead
from dloop_train.targets.sources import as_dtype, load_target
from dloop_train.targets.target import Target

PLAIN = "plain decoding"
UNTOUCHED = "untouched"


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    label: str
    drafter: str | None
    gate: Gate

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.label.lower()).strip("-")

    def row(self, k: int, rule: Rule) -> dict:
        gated = not isinstance(self.gate, Never)
        return {"label": self.label, "drafter": self.drafter, "gated": gated, "threshold": self.gate.threshold, "k": k,
                "rounds": f"rounds/{self.slug}.jsonl", "gate_temperature": self.gate.temperature if self.gate.needs_scores else None, **rule.row()}


def run(config: Config) -> None:
    folder = artifacts.run_folder(config) / "evaluation"
    folders = drafter_folders(config)
    check(all((path / "config.json").is_file() for path in folders.values()), f"not every drafter of {list(map(str, folders.values()))} is there; run phases=[export] first")
    settings = settings_of(config, folders)
    require_same_evaluation(config, folder, folders, settings)
    if (folder / "settings.json").is_file():
        say(f"evaluate: done before, {folder}")
        return
    target = load_target(config.target, dtype=config.evaluate.dtype)
    drafters = {label: load_for(target, path, config) for label, path in folders.items()}
    responses = read_responses(artifacts.responses(config).folder, "test")
    if len(responses) < config.evaluate.prompts:
        say(f"evaluate: {config.evaluate.prompts} prompts were asked for, {len(responses)} test responses exist (generate.greedy_prompts={config.generate.greedy_prompts})")
    responses = responses[:config.evaluate.prompts]
    check(bool(responses), "there are no test responses; raise generate.greedy_prompts, or give the prompts a test split")
    decode_live(config, folder, target, drafters, settings, responses)
    replay_settings(config, folder, target, drafters, responses)
    write_atomic(folder / "settings.json", json.dumps([s.row(drafters[s.drafter].k if s.drafter else 0, config.rule) for s in settings], indent=1))
    say(f"evaluate: {folder}")


def drafter_folders(config: Config) -> dict[str, Path]:
    """Label -> folder of every drafter in the table."""
    folders = {}
    if config.drafter.init != "scratch":
        folders[UNTOUCHED] = locate_drafter(config.drafter.init, config.drafter.revision)
    folders["trained"] = artifacts.run_folder(config) / "drafter"
    return folders | {label: Path(path) for label, path in config.evaluate.extra.items()}


def settings_of(config: Config, folders: dict[str, Path]) -> list[Setting]:
    """Each drafter without and with its gate; the trained one also at the paper's threshold, where another was chosen, and at those asked for."""
    gates = {label: gate_for(config, label, folder) for label, folder in folders.items()}
    settings = [Setting(PLAIN, None, Never())]
    for label, gate in gates.items():
        settings += [Setting(f"{label} S=1", label, Never()), Setting(f"{label} + gate" + (" (DLoop)" if label == "trained" else ""), label, gate)]
    chosen = gates["trained"]
    for threshold in dict.fromkeys([*([chosen.paper_threshold] if config.gate.by_replay else []), *config.evaluate.live_thresholds]):
        if threshold != chosen.threshold:
            settings.append(Setting(f"trained + gate {threshold:g}", "trained", DLoop(threshold=threshold, max_stages=config.gate.max_stages, temperature=config.gate.temperature)))
    return settings


def gate_for(config: Config, label: str, folder: Path) -> Gate:
    """The gate of one drafter. Where validation chooses thresholds, each drafter has its own: an export names it, the released one was validated before the first step."""
    if not config.gate.by_replay:
        return config.gate
    if label == UNTOUCHED:
        threshold = chosen_threshold(artifacts.run_folder(config), 0)
    else:
        threshold = read_config(folder).get(SECTION, {}).get("threshold")
    return config.gate.at(config.gate.paper_threshold if threshold is None else threshold)


def require_same_evaluation(config: Config, folder: Path, folders: dict[str, Path], settings: list[Setting]) -> None:
    """Start anew when what is evaluated has changed."""
    weights = {label: weights_digest(path) for label, path in folders.items()}
    sampled = {"rule": repr(config.rule)} if config.rule.temperature else {}  # greedily all rules and seeds are one
    made_from = {"key": key_of({"weights": weights, "evaluate": asdict(config.evaluate), "validation": config.train.validate_prompts, "drafter": asdict(config.drafter), "responses": artifacts.responses(config).key,
                                "settings": [[s.label, repr(s.gate)] for s in settings], **sampled})}
    path = folder / "made_from.json"
    if path.is_file() and json.loads(path.read_text()) != made_from:
        say("evaluate: drafters or settings have changed since the last evaluation; starting anew")
        for old in [folder / "settings.json", *folder.glob("rounds/*.jsonl")]:  # settings.json says "done", so it goes first
            old.unlink(missing_ok=True)
    write_atomic(path, json.dumps(made_from))


def load_for(target: Target, folder: Path, config: Config) -> Drafter:
    settings = config.drafter.as_exported(read_config(folder).get(SECTION, {}))  # each row of the table with its own k
    drafter = load_drafter(folder, settings, TargetHead.of(target), dtype=as_dtype(config.evaluate.dtype), target=target.spec, taps=artifacts.taps(config))
    return drafter.to(target.device).eval()


def decode_live(config: Config, folder: Path, target: Target, drafters: dict[str, Drafter], settings: list[Setting], responses: list[Response]) -> None:
    """Every setting on every prompt, prompt by prompt, so that the machine's moods meet all settings alike. Resumes by prompt."""
    rows = {setting.label: read_partial(folder, setting) for setting in settings}
    done = min(map(len, rows.values()))
    for setting in settings:
        warm_up(target, drafters.get(setting.drafter), responses[0].prompt_ids, config.rule)
    for response in tqdm(responses[done:], desc="evaluate", unit="prompt"):
        texts = {}
        for setting in settings:
            row, texts[setting.label] = decode_one(config, target, drafters.get(setting.drafter), setting, response)
            row |= compared(config.rule, target, response, texts[PLAIN], texts[setting.label])
            rows[setting.label] = rows[setting.label][:done] + [row]
            write_jsonl(folder / "rounds" / f"{setting.slug}.jsonl", rows[setting.label])
        done += 1


def compared(rule: Rule, target: Target, response: Response, plain: list[int], text: list[int]) -> dict:
    """A text beside plain decoding's. Sampled ones differ by right, so they are not compared."""
    if rule.temperature:
        return {"same_text": None, "parting_gap": None}
    gap = parting_gap(target, response.prompt_ids, plain, text)
    return {"same_text": gap is None, "parting_gap": gap}


def parting_gap(target: Target, prompt: list[int], plain: list[int], text: list[int]) -> float | None:
    """How far apart the target's logits of the two tokens are where a text parts from plain decoding's; None for equal texts.

    In roundings of the dtype at that size: a few are a tie, which one more row in a product may turn over; many would be a fault.
    """
    where = next((at for at, (one, other) in enumerate(zip(plain, text, strict=False)) if one != other), None)
    if where is None:
        assert len(plain) == len(text), "one text ends within the other: decoding lost something"
        return None
    logits = target.read(torch.tensor([[*prompt, *plain[:where]]], device=target.device), logits=slice(-1, None)).logits[0, -1]
    two = logits[[plain[where], text[where]]].double()
    return float((two[0] - two[1]).abs() / (torch.finfo(logits.dtype).eps * two.abs().max()))


def read_partial(folder: Path, setting: Setting) -> list[dict]:
    path = folder / "rounds" / f"{setting.slug}.jsonl"
    return read_jsonl(path) if path.is_file() else []


def decode_one(config: Config, target: Target, drafter: Drafter | None, setting: Setting, response: Response) -> tuple[dict, list[int]]:
    """One response as a record. The clock starts at the end of the first draft, as in z-lab's protocol."""
    emissions = list(decode(target, drafter, setting.gate, response.prompt_ids, max_new_tokens=config.evaluate.max_new_tokens, rule=config.rule,
                            chance=Chance(config.rule.seed, response.id)))
    rounds = [emission.round for emission in emissions if emission.round is not None]
    text = [token for emission in emissions for token in emission.tokens]
    seconds = sum(sum(round.seconds.values()) for round in rounds) - (rounds[0].seconds.get("draft_first", 0.0) if rounds else 0.0)
    return {"id": response.id, "category": response.category, "prompt_tokens": len(response.prompt_ids), "tokens": len(text), "seconds": seconds,
            "rounds": [asdict(round) for round in rounds]}, text


def replay_settings(config: Config, folder: Path, target: Target, drafters: dict[str, Drafter], responses: list[Response]) -> None:
    """Costs and threshold sweeps per drafter, on test responses and, for choosing, on validation responses."""
    validation = read_responses(artifacts.responses(config).folder, "validation")[:config.train.validate_prompts]
    prompts = [response.prompt_ids for response in sorted(responses, key=lambda r: -len(r.response_ids))]
    swept, costs, by_shape = {}, {}, {}
    for label, drafter in tqdm(drafters.items(), desc="replay", unit="drafter"):
        shape = repr((drafter.shape, drafter.k))  # what time depends on: drafters that differ in weights alone share a table, and the machine's mood with it
        if shape not in by_shape:
            by_shape[shape] = measure_costs(target, drafter, prompts, stages=min(MEASURED_DEPTH, config.evaluate.replay_stages))
        costs[label] = by_shape[shape]
        swept[label] = sweep_on(config, target, drafter, costs[label], responses) | {
            "validation": sweep_on(config, target, drafter, costs[label], validation) if validation else None}
    write_atomic(folder / "replay.json", json.dumps(swept, indent=1))
    write_atomic(folder / "costs.json", json.dumps({label: cost.row() for label, cost in costs.items()}, indent=1))


def sweep_on(config: Config, target: Target, drafter: Drafter, costs: Costs, responses: list[Response]) -> dict:
    """Thresholds simulated on what the drafter would draft from every position of these responses."""
    records = replay_all(target, drafter, responses, config.gate, config.evaluate.thresholds, stages=config.evaluate.replay_stages, max_new_tokens=config.generate.greedy_max_new_tokens)
    return sweep(records, config.evaluate.thresholds, costs, drafter.k, config.gate.max_stages)
