"""report: rounds, replay and training curves -> report.json, report.html and tables on the terminal.

The phase takes little time, so it is always rebuilt.
"""

import base64
import html
import io
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from dloop_train.checkpoints.files import SECTION, read_config
from dloop_train.config import Config, check
from dloop_train.data.chat import pieces
from dloop_train.decoding import statistics
from dloop_train.decoding.rules import GREEDY
from dloop_train.decoding.statistics import Estimate
from dloop_train.decoding.timing import BUSY, SPREAD, Timing, steadied
from dloop_train.phases import artifacts, figures
from dloop_train.phases.evaluate import SINGLE, TRAINED
from dloop_train.ranks import say
from dloop_train.runs import read_jsonl, write_atomic
from dloop_train.targets.sources import load_tokenizer
from dloop_train.training.metrics import log_report
from dloop_train.types import Round

PACKAGES = ("dloop_train", "torch", "transformers", "deepspeed", "numpy")
CALIBRATED_STAGES = 3
TABLED_STAGES = 4
"""Later stages are in report.json only."""


@dataclass(frozen=True)
class Results:
    """The results of evaluation and training.

    Rows are by setting, on the same prompts, all with at least one round.
    """

    settings: list[dict]
    clocked: dict[str, list[dict]]
    """Rows with measured times; `rows` has usual times instead (decoding/timing.py)."""
    rows: dict[str, list[dict]]
    replayed: dict[str, list[dict]]
    """Simulated rounds on all greedy test responses, timed by the cost table."""
    single: dict
    """Predictions for single stages by their number of tokens; empty if no best one was searched for."""
    replay: dict[str, dict]
    costs: dict[str, dict]
    metrics: list[dict]
    validation: list[dict]
    exported: dict
    """The dloop section of the export's config.json."""
    left_out: int
    """Number of prompts that some setting answered without a single round."""

    @property
    def plain(self) -> dict:
        return self.settings[0]

    @property
    def reference(self) -> dict:
        """The first setting that drafts: a single stage, the best one if the evaluation searched for it."""
        return self.settings[1]

    @property
    def gated(self) -> list[dict]:
        return [setting for setting in self.settings if setting["gated"]]

    @property
    def headline(self) -> dict:
        """The first gated setting of the trained drafter, else of another drafter, else the last setting."""
        trained = [setting for setting in self.gated if setting["drafter"] == TRAINED]
        return (trained or self.gated or [self.settings[-1]])[0]


@dataclass(frozen=True)
class Exhibit:
    """A figure of the html, or the reason why it is left out."""

    title: str
    caption: str
    image: bytes | None
    """PNG."""
    missing: str = ""


def run(config: Config) -> None:
    folder = artifacts.run_folder(config)
    results = read_results(folder)
    report = summarise(config, results)
    text, path = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False), folder / "report.json"
    changed = not path.is_file() or path.read_text(encoding="utf-8") != text
    shown = exhibits(results, report)
    whole = page(report, shown, example_sections(config, results))
    write_atomic(folder / "report.html", whole)
    if changed:
        log_report(
            folder,
            config.wandb,
            name=config.name,
            config=artifacts.described(config),
            rows=table_rows(report),
            summary=wandb_summary(report),
            figures={one.title: one.image for one in shown if one.image is not None},
            files={"report.html": whole, "report.json": text},
        )
    write_atomic(path, text)  # written last: this content also means that the table was logged
    print(table(table_rows(report)))
    print()
    print(replayed_title(report))
    print(table(replayed_rows(report)))
    print()
    print(*conclusions(report), sep="\n")
    say(f"report: {folder / 'report.html'}")


def wandb_summary(report: dict) -> dict[str, float]:
    """Tau, speedup and stages per round, by setting."""
    return {
        f"{one['label']}/{name}": value
        for one in report["settings"]
        for name, value in (
            ("tau", one["tau"]["value"]),
            ("speedup", one["speedup"]["value"]),
            ("stages per round", one["stages_per_round"]),
        )
    }


# Reading


def read_results(folder: Path) -> Results:
    evaluation = folder / "evaluation"
    settings = json.loads(required(evaluation / "settings.json").read_text(encoding="utf-8"))
    check(
        len(settings) >= 2 and settings[0]["drafter"] is None and settings[1]["drafter"] is not None,
        f"{evaluation / 'settings.json'} must begin with plain decoding and then name a drafter's setting; "
        f"rerun phases=[evaluate]",
    )
    rows = {setting["label"]: read_jsonl(required(evaluation / setting["rounds"])) for setting in settings}
    for label, found in rows.items():
        check(bool(found), f"{evaluation} holds no responses for setting {label!r}; rerun phases=[evaluate]")
        check(
            "parting_gap" in found[0],
            f"{evaluation} was written by an earlier version; delete it and rerun phases=[evaluate,report]",
        )
        statistics.require_same_prompts(found, rows[settings[0]["label"]])
    without_round = {row["id"] for found in rows.values() for row in found if not row["rounds"]}
    rows = {label: [row for row in found if row["id"] not in without_round] for label, found in rows.items()}
    single = evaluation / SINGLE
    check(
        bool(rows[settings[0]["label"]]),
        f"{evaluation} holds no prompt that every setting answered in a round; "
        f"raise evaluate.prompts and rerun phases=[evaluate]",
    )
    return Results(
        settings=settings,
        clocked=rows,
        rows={label: steadied(found) for label, found in rows.items()},
        replayed={setting["label"]: read_jsonl(required(evaluation / setting["replayed"])) for setting in settings},
        single=json.loads(single.read_text(encoding="utf-8")) if single.is_file() else {},
        left_out=len(without_round),
        replay=json.loads(required(evaluation / "replay.json").read_text(encoding="utf-8")),
        costs=json.loads(required(evaluation / "costs.json").read_text(encoding="utf-8")),
        metrics=optional(folder / "metrics.jsonl"),
        validation=[row for row in optional(folder / "validation.jsonl") if "tokens_per_second_gated" in row],
        exported=read_config(folder / "drafter").get(SECTION, {}),
    )


def required(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; the report needs it: run phases=[evaluate,report]")
    return path


def optional(path: Path) -> list[dict]:
    return read_jsonl(path) if path.is_file() else []


# Numbers


def summarise(config: Config, results: Results) -> dict:
    """The contents of report.json."""
    return {
        "run": describe_run(config, results),
        "reference": results.reference["label"],
        "headline": results.headline["label"],
        "settings": [summarise_setting(config, results, setting) for setting in results.settings],
        "replay": results.replay,
        "costs": results.costs,
        "single_stages": results.single,
    }


def describe_run(config: Config, results: Results) -> dict:
    return {
        "name": config.name,
        "drafter": f"{config.drafter.family or type(config.drafter).__name__} from {config.drafter.init}",
        "target": config.target.name,
        "target_source": f"{config.target.path} at {config.target.revision}",
        "g": sorted(
            {setting["threshold"] for setting in results.gated if setting["threshold"] is not None}, reverse=True
        ),
        "k": sorted({setting["k"] for setting in results.settings if setting["drafter"] is not None}),
        **{name: results.plain[name] for name in GREEDY.row()},
        "dtype": config.evaluate.dtype,
        "prompts": len({row["id"] for row in results.rows[results.plain["label"]]}),
        "step": results.exported.get("provenance", {}).get("step"),
        "checkpoint": results.exported.get("provenance", {}).get("checkpoint"),
        "paper_threshold": results.exported.get("paper_threshold"),
        "prompts_left_out": results.left_out,
        "bootstrap_draws": config.evaluate.bootstrap,
        "versions": versions(),
    }


def summarise_setting(config: Config, results: Results, setting: dict) -> dict:
    rows, plain, k = results.rows[setting["label"]], results.rows[results.plain["label"]], setting["k"]
    resample = {"draws": config.evaluate.bootstrap, "seed": config.evaluate.seed}
    rounds = statistics.rounds_of(rows)
    summary = {
        **{key: setting[key] for key in ("label", "drafter", "gated", "threshold", "gate_temperature", "k")},
        "tau": asdict(statistics.tau_estimate(rows, **resample)),
        "tau_micro": statistics.tau_micro(rows),
        "speedup": asdict(
            statistics.usual_speedup_estimate(
                results.clocked[setting["label"]], results.clocked[results.plain["label"]], **resample
            )
        ),
        "clock": clock_of(config, results, setting),
        "replayed": replayed_of(config, results, setting),
        "speedup_micro": statistics.speedup_micro(rows, plain),
        "seconds_per_token": float(statistics.seconds_per_token(rows).mean()),
        "stages_per_round": sum(one["stages"] for one in rounds) / len(rounds),
        "same_text": None if setting["temperature"] else sum(row["same_text"] for row in rows) / len(rows),
        "parting_gap": max((row["parting_gap"] for row in rows if row["parting_gap"] is not None), default=None),
        "tau_by_category": statistics.by_category(rows),
        "by_depth": statistics.by_depth(rows),
        "time": statistics.time_shares(rows),
    }
    if setting["drafter"] is not None:
        summary["over_reference"] = asdict(
            statistics.usual_speedup_estimate(
                results.clocked[setting["label"]], results.clocked[results.reference["label"]], **resample
            )
        )
        summary["full_acceptance"] = statistics.full_acceptance(rows, k)
    if setting["gated"]:
        summary["break_even"] = statistics.break_even(rows, costs_of(results, setting), k)
    if setting["gated"] and setting["threshold"] is not None:
        summary["calibration"] = [
            statistics.calibration(rows, k=k, stage=stage, threshold=setting["threshold"])
            for stage in range(1, min(CALIBRATED_STAGES, max(one["stages"] for one in rounds)) + 1)
        ]
    return summary


def clock_of(config: Config, results: Results, setting: dict) -> dict:
    """Numbers of the measured times, without usual times.

    The speedup, measured over usual time, the spread of rounds of one kind, and how many prompts were decoded twice.
    """
    rows, plain = results.clocked[setting["label"]], results.clocked[results.plain["label"]]
    return {
        "speedup": asdict(
            statistics.speedup_estimate(rows, plain, draws=config.evaluate.bootstrap, seed=config.evaluate.seed)
        ),
        "over_usual": Timing.of(rows).busy(),
        "spread": Timing.of(rows).spread(),
        "decoded_again": sum(row.get("again", False) for row in rows),
    }


def replayed_of(config: Config, results: Results, setting: dict) -> dict:
    """A setting's numbers by replay."""
    rows, plain, reference = (results.replayed[one["label"]] for one in (setting, results.plain, results.reference))
    resample = {"draws": config.evaluate.bootstrap, "seed": config.evaluate.seed}
    found = {
        "prompts": len(rows),
        "tau": asdict(statistics.tau_estimate(rows, **resample)),
        "speedup": asdict(statistics.usual_speedup_estimate(rows, plain, **resample)),
        "stages_per_round": float(np.mean([one["stages"] for one in statistics.rounds_of(rows)])),
    }
    if setting["drafter"] is not None:
        found["over_reference"] = asdict(statistics.usual_speedup_estimate(rows, reference, **resample))
        found["over_reference_by_category"] = {
            category: asdict(
                statistics.usual_speedup_estimate(
                    of_category(rows, category), of_category(reference, category), **resample
                )
            )
            for category in sorted({row["category"] for row in rows})
        }
    return found


def of_category(rows: list[dict], category: str) -> list[dict]:
    return [row for row in rows if row["category"] == category]


def costs_of(results: Results, setting: dict) -> dict:
    check(
        setting["drafter"] in results.costs,
        f"costs.json has no drafter {setting['drafter']!r} (it has {sorted(results.costs)}); rerun phases=[evaluate]",
    )
    return results.costs[setting["drafter"]]


def versions() -> dict[str, str]:
    installed = {name: version_of(name) for name in PACKAGES}
    return {"python": platform.python_version()} | {name: version for name, version in installed.items() if version}


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a checkout that was never installed
        return None


# The table


def table(rows: list[dict[str, str]]) -> str:
    """Rows with the same keys as aligned text under a heading: the first column to the left, numbers to the right."""
    heading = list(rows[0])
    widths = {key: max(len(key), *(len(row[key]) for row in rows)) for key in heading}

    def line(cells: dict[str, str]) -> str:
        return "  ".join(
            cells[key].ljust(widths[key]) if key == heading[0] else cells[key].rjust(widths[key]) for key in heading
        ).rstrip()

    return "\n".join(
        [
            line(dict(zip(heading, heading, strict=True))),
            "  ".join("-" * widths[key] for key in heading),
            *map(line, rows),
        ]
    )


def table_rows(report: dict) -> list[dict[str, str]]:
    return [
        {
            "setting": one["label"],
            "k": str(one["k"]) if one["drafter"] else "-",
            "g": "-" if one["threshold"] is None else f"{one['threshold']:g}",
            "speedup [95 %]": interval(one["speedup"], "x"),
            "tau [95 %]": interval(one["tau"]),
            f"over {report['reference']}": interval(one["over_reference"], "x") if compared(one, report) else "-",
            "clock": f"{one['clock']['speedup']['value']:.2f}x",
            "ms/token": f"{1000 * one['seconds_per_token']:.1f}",
            "S": f"{one['stages_per_round']:.2f}",
            "full": percent(one["full_acceptance"][0]["full"]) if one["drafter"] else "-",
            "same text": percent(one["same_text"]),
        }
        for one in report["settings"]
    ]


def compared(one: dict, report: dict) -> bool:
    """Whether the ratio to the reference is printed: not for plain decoding and the reference itself."""
    return one["drafter"] is not None and one["label"] != report["reference"]


def interval(estimate: dict, unit: str = "") -> str:
    """For example: 2.31x [2.20, 2.43]"""
    known = Estimate(**estimate)
    return f"{known.value:.2f}{unit} [{known.low:.2f}, {known.high:.2f}]"


def losslessness(report: dict) -> str:
    """A line on texts that differ from plain decoding's: how close the target's logits were at the first difference.

    Sampled texts are expected to differ and are not compared.
    """
    if report["run"]["temperature"]:
        return (
            f"texts are sampled ({decoding(report)}) and not compared with plain decoding's; "
            f"the thresholds' replay is greedy"
        )
    gaps = [one["parting_gap"] for one in report["settings"] if one["parting_gap"] is not None]
    if not gaps:
        return "every text is plain decoding's"
    return (
        f"where a text parts from plain decoding's, the target's logits of the two tokens are at most "
        f"{max(gaps):.1f} {report['run']['dtype']} roundings apart"
    )


def decoding(report: dict) -> str:
    """For example: rule rejection, temperature 1, draft temperature 1, gate temperature 1"""
    run = report["run"]
    gates = sorted({one["gate_temperature"] for one in report["settings"] if one["gate_temperature"] is not None})
    gate = ", gate temperature " + " and ".join(f"{temperature:g}" for temperature in gates) if gates else ""
    return (
        f"rule {run['rule']}, temperature {run['temperature']:g}, draft temperature {run['draft_temperature']:g}{gate}"
    )


def headline_setting(report: dict) -> dict:
    return next(one for one in report["settings"] if one["label"] == report["headline"])


def headline(report: dict) -> str:
    one = headline_setting(report)
    against = f", {interval(one['over_reference'], 'x')} over {report['reference']}" if compared(one, report) else ""
    return f"{one['label']}: {interval(one['speedup'], 'x')} over plain decoding{against}; tau {interval(one['tau'])}"


def by_replay(report: dict) -> str:
    one = headline_setting(report)
    found = one["replayed"]
    against = f", {interval(found['over_reference'], 'x')} over {report['reference']}" if compared(one, report) else ""
    return (
        f"by replay on {found['prompts']} prompts: {interval(found['speedup'], 'x')} over plain decoding{against}; "
        f"tau {interval(found['tau'])}"
    )


def conclusions(report: dict) -> list[str]:
    """The lines below the tables: their main results, and what a reader must know to interpret them."""
    return [
        line
        for line in (headline(report), by_replay(report), start_kept(report), busyness(report), losslessness(report))
        if line
    ]


def start_kept(report: dict) -> str:
    """A line if no checkpoint was better than the start, which was then exported; else empty."""
    if report["run"]["step"] != 0:
        return ""
    return (
        f"on the validation responses no checkpoint of this training was predicted to be faster than "
        f"the drafter that it started from: "
        f"that drafter was exported, and the rows of {TRAINED} are its own"
    )


def busyness(report: dict) -> str:
    """A line on signs of other work on the machine during decoding, and what was done about it; empty without signs."""
    clocks = {one["label"]: one["clock"] for one in report["settings"]}
    off = max(clocks, key=lambda label: abs(clocks[label]["over_usual"] - 1))
    unsteady = max(clocks, key=lambda label: clocks[label]["spread"])
    again = clocks[off]["decoded_again"]
    signs = []
    if abs(clocks[off]["over_usual"] - 1) > BUSY or again:
        signs.append(
            f"in {off} the clock showed {clocks[off]['over_usual']:.2f} times what rounds of their kinds usually take"
        )
    if clocks[unsteady]["spread"] > SPREAD:
        signs.append(
            f"in {unsteady} a round of one kind took {clocks[unsteady]['spread']:.0%} longer "
            f"in the slower quarter of the prompts than in the faster"
        )
    if again:
        signs.append(f"{again} of {report['run']['prompts']} prompts were decoded twice")
    return (
        f"the machine was busy: {'; '.join(signs)}. Speeds are of usual times; the column clock has measured times"
        if signs
        else ""
    )


def replayed_title(report: dict) -> str:
    one = headline_setting(report)
    return f"by replay on {one['replayed']['prompts']} prompts, at the cost table's times (greedy):"


def replayed_rows(report: dict) -> list[dict[str, str]]:
    return [
        {
            "setting": one["label"],
            "speedup [95 %]": interval(one["replayed"]["speedup"], "x"),
            "tau [95 %]": interval(one["replayed"]["tau"]),
            f"over {report['reference']}": interval(one["replayed"]["over_reference"], "x")
            if compared(one, report)
            else "-",
            "S": f"{one['replayed']['stages_per_round']:.2f}",
            **{
                category: f"{value['value']:.2f}x" if compared(one, report) else "-"
                for category, value in categories_of(report, one).items()
            },
        }
        for one in report["settings"]
    ]


def categories_of(report: dict, one: dict) -> dict[str, dict]:
    """Speed over the reference by category; for settings without any the headline's, since rows need equal keys."""
    return (
        one["replayed"].get("over_reference_by_category")
        or headline_setting(report)["replayed"]["over_reference_by_category"]
    )


# Figures


def exhibits(results: Results, report: dict) -> list[Exhibit]:
    colour = figures.colours(results.settings)
    summaries = {one["label"]: one for one in report["settings"]}
    gated = {setting["label"]: summaries[setting["label"]] for setting in results.gated}
    drafted = {
        setting["label"]: summaries[setting["label"]] for setting in results.settings if setting["drafter"] is not None
    }
    calibrated = {label: one for label, one in gated.items() if one.get("calibration")}
    swept = {drafter: one for drafter, one in results.replay.items() if one and one["sweep"]}
    by_drafter = {setting["drafter"]: colour[setting["label"]] for setting in reversed(results.settings)}
    by_drafter |= {setting["drafter"]: colour[setting["label"]] for setting in reversed(results.gated)}
    losses = any(row.get("loss_first") is not None for row in results.metrics)
    unvalidated = (
        ""
        if results.validation
        else (
            " Validation points are left out: validation.jsonl has none. "
            "A training validates where neither train.validate_prompts nor "
            "generate.greedy_prompts is 0 and the prompts have a validation split."
        )
    )
    return [
        exhibit(
            "Speedup and tau",
            "Bars are means over responses, black lines 95 % intervals from a bootstrap by prompt.",
            True,
            "",
            lambda: figures.settings_figure(report["settings"], colour),
        ),
        exhibit(
            "Tokens and time by depth",
            "Each pair of bars is a depth: its share of the emitted tokens (full colour) and of the time "
            "(pale). A depth earns its keep where the full bar is the taller one.",
            bool(gated),
            "no setting has a gate, so every round has one stage",
            lambda: figures.depth_figure({label: one["by_depth"] for label, one in gated.items()}, colour),
        ),
        exhibit(
            "Threshold sweep",
            "Predicted by replay under the measured cost table. "
            "The oracle gate knows what will be accepted and drafts as deep as takes the least time; "
            "no gate is faster.",
            bool(swept),
            "replay.json holds no sweep (replay needs temperature 0)",
            lambda: figures.sweep_figure(swept, {drafter: by_drafter.get(drafter, figures.INK) for drafter in swept}),
        ),
        exhibit(
            "Calibration of the gate's score",
            "On the grey diagonal the drafter's probability for its own block is the chance that "
            "the target accepts all of it. Dots grow with the share of rounds; "
            "only rounds whose earlier stages were accepted test a "
            f"later one. Points of fewer than {figures.FEWEST} rounds are not drawn.",
            bool(calibrated),
            "no setting has a gate with a threshold",
            lambda: figures.calibration_figure(
                {label: one["calibration"] for label, one in calibrated.items()},
                {label: one["threshold"] for label, one in calibrated.items()},
                colour,
            ),
        ),
        exhibit(
            "Training",
            "Thin lines are single steps, thick lines running means; "
            "dots are validation responses, on which replay predicts speed and tau under the "
            "run's own cost table. The dashed line is the exported checkpoint." + unvalidated,
            losses,
            "metrics.jsonl is absent or names no loss: this run has not been trained (run phases=[train])",
            lambda: figures.training_figure(results.metrics, results.validation, report["run"]["step"]),
        ),
        exhibit(
            "Tau by category",
            f"Numbers: {report['headline']}. Prompts in each category: {category_counts(results)}.",
            any(len(one["tau_by_category"]) > 1 for one in drafted.values()),
            "all prompts are of one category",
            lambda: figures.category_figure(
                {label: one["tau_by_category"] for label, one in drafted.items()}, report["headline"], colour
            ),
        ),
    ]


def exhibit(title: str, caption: str, known: bool, missing: str, draw: Callable[[], Figure]) -> Exhibit:
    return Exhibit(title, caption, png(draw()) if known else None, missing)


def category_counts(results: Results) -> str:
    found = [row["category"] for row in results.rows[results.plain["label"]]]
    return ", ".join(f"{name} {found.count(name)}" for name in sorted(set(found)))


# Example rounds


EXAMPLES = 3
"""Number of responses whose rounds are shown, each of a different category."""
STAGE_COLOURS = ("#cfe3ff", "#c9efd0", "#ffe6b3", "#f6cfe0", "#ddd3f7")


def example_sections(config: Config, results: Results) -> list[str]:
    """The headline's rounds on a few prompts, token by token, as in the DLoop paper's Figure A1.

    Empty for evaluations that recorded no tokens.
    """
    rows = [row for row in results.clocked[results.headline["label"]] if all("tokens" in one for one in row["rounds"])]
    chosen = list({row["category"]: row for row in reversed(rows)}.values())[:EXAMPLES]
    if not chosen:
        return []
    tokenizer = load_tokenizer(config.target)
    legend = " ".join(
        f'<span style="background:{colour}">stage {number}{"+" if number == len(STAGE_COLOURS) else ""}</span>'
        for number, colour in enumerate(STAGE_COLOURS, 1)
    )
    note = (
        f"Rounds of {results.headline['label']} end with a bar. "
        f"{legend}; plain: the target's own, a correction or a bonus."
    )
    return [
        f'<h2>Example rounds</h2>\n<p class="note">{note}</p>',
        *(f'<p class="text">{coloured(row, tokenizer)}</p>' for row in chosen),
    ]


def coloured(row: dict, tokenizer) -> str:
    """A response as HTML. The colour of a token shows the stage that drafted it."""
    tokens, stages, ends = [row["first_token"]], [0], [True]
    for one in row["rounds"]:
        tokens += one["tokens"]
        stages += Round(one["stages"], one["drafted"], one["accepted"], one["emitted"], ()).drafted_by(
            len(one["tokens"])
        )
        ends += [*[False] * (len(one["tokens"]) - 1), True]
    parts = []
    for text, stage, end in zip(pieces(tokenizer, tokens), stages, ends, strict=True):
        shown = escape(text).replace("\n", "&#9166;<br>")
        colour = STAGE_COLOURS[min(stage, len(STAGE_COLOURS)) - 1]
        parts.append(
            (f'<span style="background:{colour}">{shown}</span>' if stage else shown)
            + ('<span class="end">|</span>' if end else "")
        )
    return "".join(parts)


# The page


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #22262b; max-width: 940px; margin: 2.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .4rem; }
p.lead { font-size: 1.1rem; }
figure { margin: 0; }
figure img { width: 100%; max-width: 900px; }
p.note, figcaption, footer { color: #5b626b; font-size: .9rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: .92rem; }
dt { color: #5b626b; }
dd { margin: 0; }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #e4e7eb; }
th { font-weight: 600; border-bottom: 2px solid #8a8f98; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
p.text { white-space: pre-wrap; border-left: 3px solid #e4e7eb; padding-left: .8rem; }
span.end { color: #b0b6bd; }
"""
CONVENTIONS = """\
Tau is the mean over responses of the mean over rounds of accepted + 1; the prefill's token is not counted and the last
round counts whole.
Speedup is the ratio of mean seconds per token, from the end of the first draft on. \
Every part of a round is charged the median of its
kind in the run (a verification by its tokens), which other work on the machine does not move; \
clock is the same by the clock. Micro values pool all rounds or tokens.
Intervals are 95 %, from a bootstrap that draws prompts, the same for both sides of a ratio. \
S is the mean number of stages in a round.
Full: rounds whose first stage was accepted whole. Same text: responses equal to plain decoding's; \
in low precision two nearly equal
logits of the target may change places, and the line under the table says how nearly. \
Above temperature 0 texts are not compared."""


def page(report: dict, shown: list[Exhibit], examples: list[str]) -> str:
    """The whole HTML page. It loads nothing from elsewhere."""
    body = [
        f"<h1>{escape(report['run']['name'])}</h1>",
        f'<p class="lead">{escape(headline(report))}.</p>',
        facts(report),
        html_table(table_rows(report)),
        *(f'<p class="note">{escape(line)}.</p>' for line in conclusions(report)[1:]),
        "<h2>By replay</h2>",
        html_table(replayed_rows(report)),
        f'<p class="note">{escape(replayed_title(report))} '
        f"speed over {escape(report['reference'])} by category in the last columns.</p>",
        *examples,
    ]
    body += [*map(section, shown[:2]), *stage_tables(report), *map(section, shown[2:])]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width">'
        f"<title>{escape(report['run']['name'])}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + f"\n<footer><h2>Conventions</h2><p>{escape(CONVENTIONS)}</p></footer>\n</body></html>\n"
    )


def facts(report: dict) -> str:
    run = report["run"]
    left_out = (
        f", {run['prompts_left_out']} left out that were answered without a round" if run["prompts_left_out"] else ""
    )
    listed = {
        "Drafter": run["drafter"],
        "Target": f"{run['target']} ({run['target_source']})",
        "Checkpoint": f"{run['checkpoint']}, step {run['step']}",
        "Gate threshold g": ", ".join(f"{g:g}" for g in run["g"]) or "none",
        "Tokens per stage k": ", ".join(map(str, run["k"])),
        "Decoding": decoding(report),
        "Evaluation": f"{run['prompts']} test prompts in {run['dtype']}{left_out}",
        "Intervals": f"95 %, {run['bootstrap_draws']} bootstrap draws of prompts",
        "Versions": ", ".join(f"{name} {version}" for name, version in run["versions"].items()),
    }
    return (
        "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in listed.items()) + "</dl>"
    )


def section(one: Exhibit) -> str:
    if one.image is None:
        return f'<h2>{escape(one.title)}</h2>\n<p class="note">Left out: {escape(one.missing)}.</p>'
    return (
        f'<h2>{escape(one.title)}</h2>\n<figure><img alt="{escape(one.title)}" '
        f'src="data:image/png;base64,{base64.b64encode(one.image).decode()}">'
        f"<figcaption>{escape(one.caption)}</figcaption></figure>"
    )


def stage_tables(report: dict) -> list[str]:
    drafted = [one for one in report["settings"] if one["drafter"] is not None]
    parts = [
        (
            "Where the time goes",
            "Shares of a whole round; whatever is not a forward of drafter or target is outside.",
            [time_row(one) for one in drafted],
        ),
        (
            "Full acceptance by stage",
            "Rounds that drafted the stage, and how often the target accepted everything up to its end. "
            f"Stages after the {TABLED_STAGES}th are in report.json.",
            [acceptance_row(one["label"], row) for one in drafted for row in one["full_acceptance"][:TABLED_STAGES]],
        ),
        (
            "Break-even of one more stage",
            "Another stage pays above this full-acceptance rate of the stages before it: its cost over "
            "the tokens it adds times the setting's seconds per token.",
            [break_even_row(one["label"], row) for one in drafted for row in one.get("break_even", [])[:TABLED_STAGES]],
        ),
    ]
    return [
        f'<h2>{title}</h2>\n{html_table(rows)}<p class="note">{escape(note)}</p>' for title, note, rows in parts if rows
    ]


def time_row(one: dict) -> dict[str, str]:
    time = one["time"]
    return {
        "setting": one["label"],
        "ms/round": f"{1000 * time['seconds_per_round']:.1f}",
        "draft / verify": f"{time['draft_to_verify']:.2f}",
        "gate": f"{time['gate']:.1%}",
        "outside model forwards": f"{time['outside_forwards']:.1%}",
        "tau, micro": f"{one['tau_micro']:.2f}",
        "speedup, micro": f"{one['speedup_micro']:.2f}x",
    }


def acceptance_row(label: str, row: dict) -> dict[str, str]:
    return {
        "setting": label,
        "stage": str(row["stage"]),
        "rounds that drafted it": str(row["rounds"]),
        "all accepted so far": percent(row["full"]),
        "given the stages before": percent(row["full_given_previous"]),
    }


def break_even_row(label: str, row: dict) -> dict[str, str]:
    return {
        "setting": label,
        "one more stage after": str(row["depth"]),
        "cost (ms)": f"{1000 * row['cost_seconds']:.1f}",
        "tokens it adds": f"{row['extra_tokens']:.2f}",
        "pays above": percent(row["needed"]),
        "observed": percent(row["observed"]),
    }


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def html_table(rows: list[dict[str, str]]) -> str:
    heading = "".join(f"<th>{escape(key)}</th>" for key in rows[0])
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row.values()) + "</tr>\n" for row in rows)
    return f'<div class="wide"><table>\n<tr>{heading}</tr>\n{lines}</table></div>'


def png(figure: Figure) -> bytes:
    """A figure as PNG, at twice the displayed size so that it is sharp on high-density screens."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=200)
    return data.getvalue()


def escape(text: str) -> str:
    return html.escape(text)
