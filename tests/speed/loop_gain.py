"""Predicted speed by replay with one stage, the gate and the oracle, for several k, by category.

    python tests/speed/loop_gain.py artifacts/runs/quickstart-eagle3 --drafters starter:eagle3_smollm2_135m --k 2 3 4

Speeds are relative to plain decoding; the gate is simulated at several thresholds. The folder may be that of any run:
its target, its greedy answers (validation and test) and its drafter's settings are used. Drafters that differ only in
weights share a cost table, which is measured here, so that only their drafts make a difference.
"""

import argparse
from pathlib import Path

from omegaconf import OmegaConf

from dloop_train.checkpoints.files import locate_drafter
from dloop_train.config import from_hydra
from dloop_train.data.responses import Response
from dloop_train.decoding.costs import Costs, measure_all
from dloop_train.decoding.replay import Replay
from dloop_train.phases import artifacts
from dloop_train.phases.evaluate import load_for
from dloop_train.phases.replaying import replay_all, replayable, sweep
from dloop_train.phases.report import table
from dloop_train.targets.sources import load_target

THRESHOLDS = (-0.25, -0.5, -1.0, -1.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--drafters", nargs="+", default=[])
    parser.add_argument("--k", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--most", type=int, default=0, help="responses of each split; 0 is all")
    wanted = parser.parse_args()
    config = from_hydra(OmegaConf.load(wanted.run / "config.yaml"))
    target = load_target(config.target, dtype=config.evaluate.dtype)
    responses = [
        one
        for split in ("validation", "test")
        for one in replayable(artifacts.greedy_responses(config, split)[: wanted.most or None])
    ]
    folders = [locate_drafter(name) for name in wanted.drafters] or [wanted.run / "drafter"]
    prompts, beyond, rows = [one.prompt_ids for one in sorted(responses, key=lambda r: -len(r.response_ids))], {}, []
    loaded = {
        (k, folder): load_for(target, folder, config, k) for k in sorted(wanted.k, reverse=True) for folder in folders
    }
    shapes = {f"k = {drafter.k}, {drafter.shape.draft_vocab_size} tokens": (drafter, 3) for drafter in loaded.values()}
    costs = dict(zip(shapes, measure_all(target, list(shapes.values()), prompts), strict=True))
    for k in sorted(wanted.k, reverse=True):
        for folder in folders:
            drafter = loaded[k, folder]
            shape = f"k = {k}, {drafter.shape.draft_vocab_size} tokens"
            records = replay_all(
                target,
                drafter,
                responses,
                config.gate,
                THRESHOLDS,
                beyond,
                stages=2,
                max_new_tokens=config.generate.greedy_max_new_tokens,
            )
            rows += rows_of(folder.name, k, responses, records, costs[shape], config.gate.max_stages)
    print(
        f"{len(responses)} responses, {sum(len(one.response_ids) for one in responses)} tokens; "
        "speed over plain decoding, tau in brackets"
    )
    print(table(rows))
    for shape, found in costs.items():
        verified = ", ".join(
            f"{tokens} tokens {seconds / found.plain:.3f}" for tokens, seconds in sorted(found.verify.items())
        )
        print(
            f"{shape}: in plain decoding's steps of {1000 * found.plain:.1f} ms "
            f"a first stage {found.draft_first / found.plain:.3f}, a further one "
            f"{found.draft_more / found.plain:.3f}, a gate {found.gate / found.plain:.3f}, "
            f"verifying {verified}, the rest {found.overhead / found.plain:.3f}"
        )


def rows_of(
    name: str, k: int, responses: list[Response], records: list[Replay], costs: Costs, max_stages: int
) -> list[dict[str, str]]:
    """One row for all responses, and one per category."""
    categories = sorted({one.category for one in responses})
    groups = {"all": records} | {
        category: [record for one, record in zip(responses, records, strict=True) if one.category == category]
        for category in categories
    }
    return [
        row_of(f"{name}, k = {k}, {group}", sweep(found, THRESHOLDS, costs, k, max_stages), costs)
        for group, found in groups.items()
    ]


def row_of(label: str, swept: dict, costs: Costs) -> dict[str, str]:
    def cell(point: dict) -> str:
        return f"{point['tokens_per_second'] * costs.plain:.2f} ({point['tau']:.2f})"

    whole = "/".join(f"{rate:.0%}" for rate in swept["full_acceptance_by_stage"])
    return {
        "drafter": label,
        "S = 1": cell(swept["S1"]),
        **{f"g {point['threshold']:g}": cell(point) for point in swept["sweep"]},
        "oracle": cell(swept["oracle"]),
        "whole blocks": whole,
    }


if __name__ == "__main__":
    main()
