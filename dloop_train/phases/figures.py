"""Figures of the report: functions from plain values to a matplotlib Figure.

A setting has the same colour in all figures.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

WIDTH = 9.0
"""Inches; 900 pixels at 100 dots per inch."""
PLAIN = "#8a8f98"
HUES = ("#1f6fb4", "#d1495b", "#2a8c5a", "#8a5cb8", "#c98a1b", "#2b9aa0")
INK, FAINT = "#22262b", "#d9dce1"
DEEPEST = 7
"""Depths from this one on share a bar."""
FEWEST = 5
"""Smallest number of rounds of a point in the calibration figure."""


def colours(settings: list[dict]) -> dict[str, str]:
    """Colours by label: one hue per drafter, full with a gate and pale without; grey for plain decoding."""
    drafters = list(dict.fromkeys(setting["drafter"] for setting in settings if setting["drafter"] is not None))
    chosen, seen = {}, {}
    for setting in settings:
        key = (setting["drafter"], setting["gated"])
        paleness = (0.0 if setting["gated"] or setting["drafter"] is None else 0.45) + 0.2 * seen.get(key, 0)
        seen[key] = seen.get(key, 0) + 1
        hue = PLAIN if setting["drafter"] is None else HUES[drafters.index(setting["drafter"]) % len(HUES)]
        chosen[setting["label"]] = pale(hue, min(paleness, 0.7))
    return chosen


def settings_figure(rows: list[dict], colour: dict[str, str]) -> Figure:
    """Speedup and tau of every setting. Rows: {"label", "speedup": {"value", "low", "high"}, "tau": the same}."""
    figure, (left, right) = panels(1, 2, height=0.9 + 0.5 * len(rows), sharey=True)
    sides = (
        (left, "speedup", "speedup over plain decoding (times)", "{:.2f}x"),
        (right, "tau", "tau (tokens per verification)", "{:.2f}"),
    )
    places = np.arange(len(rows))
    for axes, key, name, pattern in sides:
        furthest = max(row[key]["high"] for row in rows)
        for place, row in zip(places, rows, strict=True):
            value, low, high = (row[key][part] for part in ("value", "low", "high"))
            axes.barh(place, value, height=0.62, color=colour[row["label"]])
            if high > low:
                axes.plot([low, high], [place, place], color=INK, linewidth=1.6, solid_capstyle="butt")
            axes.text(high + 0.025 * furthest, place, pattern.format(value), va="center", fontweight="bold")
        axes.set_xlim(0, furthest * 1.2)
        axes.set_xlabel(name)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    left.axvline(1, color=INK, linewidth=0.8, linestyle=(0, (2, 2)))
    left.set_yticks(places, [row["label"] for row in rows])
    left.invert_yaxis()
    return figure


def depth_figure(depths: dict[str, list[dict]], colour: dict[str, str]) -> Figure:
    """Share of tokens and of time by S. Values: rows of statistics.by_depth for each gated setting."""
    columns = min(len(depths), 3)
    lines = -(-len(depths) // columns)
    figure, grid = panels(lines, columns, height=0.5 + 2.7 * lines, sharey=True)
    shown = sorted({min(row["stages"], DEEPEST) for rows in depths.values() for row in rows})
    for axes, (label, rows) in zip(flat(grid), depths.items(), strict=False):
        shares = {key: depth_shares(rows, key, shown) for key in ("tokens", "seconds")}
        tallest = int(np.argmax(np.minimum(shares["tokens"], shares["seconds"])))
        pairs = (
            (-0.2, "tokens", "tokens", colour[label], "white"),
            (0.2, "seconds", "time", pale(colour[label], 0.6), INK),
        )
        for side, key, name, shade, ink in pairs:
            heights = shares[key]
            bars = axes.bar(np.arange(len(shown)) + side, heights, width=0.38, color=shade)
            axes.bar_label(bars, [f"{height:.0f}" if height else "" for height in heights], fontsize=8.5, padding=1)
            axes.annotate(
                name,
                (tallest + side, heights[tallest] / 2),
                rotation=90,
                ha="center",
                va="center",
                color=ink,
                fontsize=8.5,
            )
        axes.set_xticks(range(len(shown)), [f"{depth}+" if depth == DEEPEST else str(depth) for depth in shown])
        axes.set_title(label, color=colour[label])
        axes.set_xlabel("S (stages in a round)")
        axes.margins(y=0.12)
    for axes in flat(grid)[len(depths) :]:
        axes.set_visible(False)
    for axes in flat(grid)[::columns]:
        axes.set_ylabel("share of tokens, of time (%)")
    return figure


def sweep_figure(replay: dict[str, dict], colour: dict[str, str]) -> Figure:
    """Tokens/s and tau predicted by replay against the threshold, one column per drafter. `colour` is by drafter."""
    figure, grid = panels(2, len(replay), height=5.2, sharex=True, sharey="row")
    for number, (drafter, replayed) in enumerate(replay.items()):
        sweep = sorted(replayed["sweep"], key=lambda point: point["threshold"])
        thresholds = [point["threshold"] for point in sweep]
        best = max(sweep, key=lambda point: point["tokens_per_second"])
        for axes, key, pattern in (
            (grid[0, number], "tokens_per_second", "{:.1f}"),
            (grid[1, number], "tau", "{:.2f}"),
        ):
            axes.plot(
                thresholds,
                [point[key] for point in sweep],
                color=colour[drafter],
                marker="o",
                markersize=5,
                linewidth=2,
            )
            # One label is below its line and one above, so that both are legible if the values are equal.
            for name, line, side in (
                ("S1", "S = 1", -1),
                ("oracle", "oracle gate", 1),
            ):
                axes.axhline(
                    replayed[name][key], color=INK, linewidth=1, linestyle=(0, (4, 3)) if name == "S1" else (0, (1, 2))
                )
                axes.annotate(
                    f"{line}: {pattern.format(replayed[name][key])}",
                    (0.02, replayed[name][key]),
                    fontsize=9,
                    xycoords=axes.get_yaxis_transform(),
                    xytext=(0, 3 * side),
                    textcoords="offset points",
                    va="bottom" if side > 0 else "top",
                )
            axes.annotate(
                pattern.format(best[key]),
                (best["threshold"], best[key]),
                xytext=(0, 7),
                textcoords="offset points",
                ha="center",
                fontweight="bold",
                color=colour[drafter],
            )
            axes.margins(x=0.12, y=0.25)
        grid[0, number].set_title(drafter, color=colour[drafter])
        ticks = spaced_out(thresholds, 0.08 * len(replay))
        grid[1, number].set_xticks(ticks, [f"{threshold:g}" for threshold in ticks])
    figure.supxlabel("gate threshold g (log-probability)", fontsize=10)
    grid[0, 0].set_ylabel("predicted tokens/s")
    grid[1, 0].set_ylabel("tau (tokens per verification)")
    return figure


def calibration_figure(
    calibrations: dict[str, list[dict]], thresholds: dict[str, float], colour: dict[str, str]
) -> Figure:
    """Observed full acceptance against exp(score), one panel per stage. Values: statistics.calibration by stage."""
    stages = sorted(
        {one["stage"] for rows in calibrations.values() for one in rows if one["stage"] == 1 or tested(one)}
    )[:3]
    figure, grid = panels(1, len(stages), height=4.2, sharey=True)
    for axes, stage in zip(flat(grid), stages, strict=True):
        axes.plot([0, 1], [0, 1], color=FAINT, linewidth=1.2, zorder=0)
        for threshold in sorted(set(thresholds.values())):
            axes.axvline(np.exp(threshold), color=INK, linewidth=0.8, linestyle=(0, (2, 2)))
            axes.annotate(
                f"g = {threshold:g}",
                (np.exp(threshold), 1.03),
                ha="right",
                fontsize=9,
                xytext=(-3, 0),
                textcoords="offset points",
            )
        listed = [
            (label, one)
            for label, rows in calibrations.items()
            for one in rows
            if one["stage"] == stage and tested(one)
        ]
        for line, (label, one) in enumerate(reversed(listed)):
            points = [point for point in one["bins"] if point["rounds"] >= FEWEST]
            at, observed = [point["probability"] for point in points], [point["full"] for point in points]
            axes.plot(at, observed, color=colour[label], linewidth=1.6)
            axes.scatter(
                at,
                observed,
                color=colour[label],
                zorder=3,
                s=[12 + 120 * point["rounds"] / one["rounds"] for point in points],
            )
            axes.annotate(
                f"{label}: AUROC {one['auroc']:.2f}",
                (0, 1),
                xycoords="axes fraction",
                xytext=(4, 4 + 13 * line),
                textcoords="offset points",
                fontsize=9,
                color=colour[label],
            )
        axes.set_xlim(0, 1.03)
        axes.set_ylim(0, 1.12)
        axes.set_yticks(np.linspace(0, 1, 6))
        axes.set_title(f"stage {stage}", pad=8 + 13 * len(calibrations))
    figure.supxlabel("exp(score): the probability that the drafter gives to its own block", fontsize=10)
    flat(grid)[0].set_ylabel("share of blocks fully accepted")
    return figure


def tested(calibration: dict) -> bool:
    """Whether enough rounds tested this stage to plot its score, with both accepted and rejected blocks among them."""
    return calibration["rounds"] >= FEWEST and calibration["auroc"] is not None


def training_figure(metrics: list[dict], validation: list[dict], exported: int | None = None) -> Figure:
    """First- and last-stage loss, predictions of the validations, and learning rate, by step.

    Dots are losses on validation responses; a dashed line marks the exported step.
    """
    heights = [3.0, *([2.0, 2.0] if validation else []), 0.9]
    figure, grid = panels(len(heights), 1, height=sum(heights) + 0.9, sharex=True, height_ratios=heights)
    stack = flat(grid)
    steps = [row["step"] for row in metrics]
    for key, name, shade in (("loss_first", "first stage", HUES[0]), ("loss_last", "last stage", HUES[1])):
        known = [(row["step"], row[key]) for row in metrics if row.get(key) is not None]
        if known:
            at, values = zip(*known, strict=True)
            stack[0].plot(at, values, color=pale(shade, 0.65), linewidth=0.8)
            labelled_line(stack[0], at, smoothed(values), name, shade)
        judged = [(row["step"], row[key]) for row in validation if row.get(key) is not None]
        if judged:
            stack[0].scatter(*zip(*judged, strict=True), color=shade, edgecolor="white", s=45, zorder=4)
    stack[0].set_ylabel("training loss")
    if validation:
        at = [row["step"] for row in validation]
        for axes, key, label in (
            (stack[1], "tokens_per_second", "predicted tokens/s"),
            (stack[2], "tau", "validation tau"),
        ):
            for walk, name, shade in (
                ("gated", "with gate", HUES[1]),
                ("s1", "S = 1", HUES[0]),
                ("oracle", "oracle gate", PLAIN),
            ):
                labelled_line(
                    axes, at, [row[f"{key}_{walk}"] for row in validation], name, shade, marker="o", markersize=4
                )
            axes.set_ylabel(label)
            axes.margins(y=0.15)
    if exported is not None:
        for axes in stack:
            axes.axvline(exported, color=INK, linewidth=0.9, linestyle=(0, (2, 2)), zorder=0)
        stack[0].annotate(
            "exported",
            (exported, 1),
            xycoords=stack[0].get_xaxis_transform(),
            xytext=(-4, -3),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=9,
        )
    stack[-1].plot(steps, [row["lr"] for row in metrics], color=PLAIN, linewidth=1.5)
    stack[-1].set_ylabel("learning rate")
    stack[-1].set_ylim(bottom=0)
    stack[-1].locator_params(axis="y", nbins=2)
    stack[-1].ticklabel_format(axis="y", style="sci", scilimits=(-3, 3))
    stack[-1].set_xlabel("optimiser step")
    return figure


def category_figure(categories: dict[str, dict[str, float]], marked: str, colour: dict[str, str]) -> Figure:
    """Tau by category: one line per category, one dot per setting.

    Categories are sorted by the tau of the marked setting, whose values are printed.
    """
    order = sorted(categories[marked], key=lambda name: categories[marked][name])
    figure, axes = panels(1, 1, height=1.5 + 0.42 * len(order))
    for place, name in enumerate(order):
        values = [taus[name] for taus in categories.values()]
        axes.plot([min(values), max(values)], [place, place], color=FAINT, linewidth=3, zorder=1)
        axes.annotate(
            f"{categories[marked][name]:.2f}",
            (max(values), place),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            fontweight="bold",
            color=colour[marked],
        )
    for label, taus in categories.items():
        axes.scatter(
            [taus[name] for name in order],
            range(len(order)),
            s=70,
            color=colour[label],
            edgecolor="white",
            label=label,
            zorder=4 if label == marked else 3,
        )
    axes.set_yticks(range(len(order)), order)
    axes.set_ylim(-0.6, len(order) - 0.4)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("tau (tokens per verification)")
    axes.margins(x=0.1)
    figure.legend(loc="outside upper left", ncols=3, frameon=False, handletextpad=0.1, columnspacing=1.4)
    return figure


def panels(lines: int, columns: int, *, height: float, **options):
    """A figure in the report's style, and its axes: one, a row of them, or a 2-d array."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    ratios = options.pop("height_ratios", None)
    grid = figure.subplots(
        lines, columns, squeeze=False, gridspec_kw={"height_ratios": ratios} if ratios else None, **options
    )
    for axes in grid.flat:
        plain_axes(axes)
    if lines == columns == 1:
        return figure, grid[0, 0]
    return figure, grid[0] if lines == 1 else grid


def plain_axes(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(PLAIN)
    axes.tick_params(colors=INK, labelsize=9.5)
    axes.xaxis.label.set_fontsize(10)
    axes.yaxis.label.set_fontsize(10)
    axes.title.set_fontsize(10.5)
    axes.title.set_fontweight("bold")


def labelled_line(axes: Axes, x: Sequence[float], y: Sequence[float], name: str, shade: str, **options) -> None:
    """A line with its name at its end."""
    axes.plot(x, y, color=shade, linewidth=2, **options)
    axes.annotate(
        name,
        (x[-1], y[-1]),
        xytext=(7, 0),
        textcoords="offset points",
        va="center",
        color=shade,
        fontweight="bold",
        annotation_clip=False,
    )


def flat(grid) -> list[Axes]:
    return list(np.atleast_1d(grid).flat)


def depth_shares(rows: list[dict], key: str, shown: list[int]) -> list[float]:
    """Percentage of the key's total at each shown depth; depths from DEEPEST on are added up."""
    total = sum(row[key] for row in rows)
    return [100 * sum(row[key] for row in rows if min(row["stages"], DEEPEST) == depth) / total for depth in shown]


def spaced_out(ticks: Sequence[float], share: float = 0.12) -> list[float]:
    """The ticks without those whose labels would overlap.

    `share` is the smallest distance of two ticks as a share of the whole range.
    """
    kept = list(ticks[:1])
    for tick in ticks[1:]:
        if tick - kept[-1] >= share * (ticks[-1] - ticks[0]):
            kept.append(tick)
    return kept


def smoothed(values: Sequence[float]) -> np.ndarray:
    """Running mean over a twentieth of the points, shorter at the ends."""
    reach = max(len(values) // 40, 0)
    total = np.concatenate([[0.0], np.cumsum(values)])
    low = np.maximum(np.arange(len(values)) - reach, 0)
    high = np.minimum(np.arange(len(values)) + reach + 1, len(values))
    return (total[high] - total[low]) / (high - low)


def pale(colour: str, amount: float) -> str:
    """The colour mixed with white; `amount` is the share of white, 0 to 1."""
    mixed = [round(255 * (part + (1 - part) * amount)) for part in to_rgb(colour)]
    return "#{:02x}{:02x}{:02x}".format(*mixed)
