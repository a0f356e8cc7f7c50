"""Validation: predicted decoding speed, tau and loss of a checkpoint on validation responses.

Speed and tau are predicted by replay under the run's own cost table.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from dloop_train.config import Config
from dloop_train.data.batches import TextBatch, collate
from dloop_train.data.online import read_batch, text_of
from dloop_train.data.responses import Response
from dloop_train.data.store import drafters_row
from dloop_train.decoding.costs import MEASURED_DEPTH, Costs, measure_costs
from dloop_train.decoding.gates import Gate
from dloop_train.decoding.replay import Replay
from dloop_train.drafters.base import Drafter
from dloop_train.phases import artifacts
from dloop_train.phases.replaying import Beyond, candidates, fastest, replay_all, simulated, sweep
from dloop_train.ranks import gather_over_ranks, rank, world_size
from dloop_train.runs import read_jsonl, require_same, write_atomic
from dloop_train.targets.sources import as_dtype, load_target
from dloop_train.targets.target import Target
from dloop_train.training.anchors import Origins, draw_origins
from dloop_train.training.engine import Validation
from dloop_train.training.metrics import add_sums, reduce_sums
from dloop_train.training.unroll import Terms, Unroll

LOG = "validation.jsonl"
COSTS = "costs.json"
VALIDATED_BY = "validated_by.json"
BINS = 20
"""Number of bins of the gate's score, as the probability exp(score) in [0, 1]."""


class Validator:
    """Validates a drafter. Called by every rank with the same drafter.

    The responses are divided among the ranks; the result is the same on all ranks.
    """

    def __init__(self, config: Config, target: Target | None = None):
        """`target` is one that this rank has loaded already. It is used if its dtype is train.precision."""
        self.config, self.folder = config, artifacts.run_folder(config)
        answered = artifacts.greedy_responses(config, "validation")[: config.train.validate_prompts]
        # After a response of one token, the prefill's, there is nothing to draft.
        self.responses = [response for response in answered if len(response.response_ids) > 1]
        if config.gate.by_replay and not self.responses:
            raise ValueError(
                f"gate.threshold=replay chooses on validation responses, and there are none: "
                f"set gate.threshold={config.gate.paper_threshold:g}, "
                f"or raise train.validate_prompts and generate.greedy_prompts"
            )
        self.stages = max(config.train.depth_exposure + 1, 2)
        self.beyond: Beyond = {}
        self.shares_target = target is not None and target.dtype == as_dtype(config.train.precision)
        self.target = target if self.shares_target else None

    def __call__(self, step: int, drafter: Drafter) -> Validation:
        if not self.responses:
            return Validation({})
        training = drafter.training
        drafter.eval()
        self.fetch_target(next(drafter.parameters()).device)
        costs = self.costs(drafter)
        started = time.perf_counter()
        records = self.replay(drafter)
        row, score = predictions(records, self.config.gate, self.config.evaluate.thresholds, costs, k=drafter.k)
        row |= self.losses(drafter) | gate_scores(records)
        drafter.train(training)
        seconds = time.perf_counter() - started
        if not self.shares_target:
            self.target.model.to("cpu")  # between validations training needs the memory
        untrained = step == 0 and self.config.drafter.init == "scratch"  # no candidate for the best checkpoint
        return Validation(row | {"seconds": seconds}, None if untrained else score, seconds)

    def fetch_target(self, device: torch.device) -> None:
        """Load the target if necessary and move it to the device. It stays there only if training uses it too."""
        if self.target is None:
            self.target = load_target(self.config.target, dtype=self.config.train.precision, device=device)
        if not self.shares_target:
            self.target.model.to(device)

    def costs(self, drafter: Drafter) -> Costs:
        """The run's cost table.

        It is measured once, by the first rank, so that all checkpoints are compared under the same costs.
        """
        path = self.folder / COSTS
        if rank() == 0 and not path.is_file():
            prompts = [response.prompt_ids for response in sorted(self.responses, key=lambda r: -len(r.response_ids))]
            measured = measure_costs(self.target, drafter, prompts, stages=min(MEASURED_DEPTH, self.stages))
            write_atomic(path, json.dumps(measured.row(), indent=1))
        # The first rank sends the table, since the file may not be visible on another node yet.
        table, *_ = gather_over_ranks(json.loads(path.read_text()) if rank() == 0 else None)
        return Costs.of(table)

    def replay(self, drafter: Drafter) -> list[Replay]:
        """Replays of all responses, in their order; each rank makes its share."""
        longest = max(len(response.response_ids) for response in self.responses)
        gate = self.config.gate
        mine = replay_all(
            self.target,
            drafter,
            self.responses[rank() :: world_size()],
            gate,
            candidates(gate, self.config.evaluate.thresholds),
            self.beyond,
            stages=self.stages,
            max_new_tokens=longest,
        )
        shares = gather_over_ranks(mine)  # rank r has responses r, r + world_size, ...
        return [shares[at % len(shares)][at // len(shares)] for at in range(sum(map(len, shares)))]

    @torch.no_grad()
    def losses(self, drafter: Drafter) -> dict[str, float | list[float]]:
        """The training's loss and accuracies on the validation responses, from the same origins in every validation."""
        settings, parameter = self.config.train, next(drafter.parameters())
        unroll = Unroll(drafter, Terms(settings.depth_exposure, settings.stages), max_rows=settings.loss_rows)
        sums: dict = {}
        # Every rank makes the same number of passes, so that all reduce the same sums; surplus passes have depth 0.
        for start in range(0, len(self.responses), world_size()):
            at = start + rank()
            response = self.responses[at % len(self.responses)]
            batch = self.text(response).to(parameter.device, parameter.dtype)
            origins = draw_origins(
                batch,
                drafter.k,
                count=settings.origins,
                depth_exposure=settings.depth_exposure,
                seed=settings.seed,
                epoch=0,
            )
            if at >= len(self.responses):
                origins = Origins(origins.position, origins.depth * 0)
            weights = torch.ones(2, dtype=torch.float64, device=parameter.device)
            sums = add_sums(sums, unroll(batch, origins, weights, 1.0).sums)
        return {name: mean for name, mean in reduce_sums(sums).items() if name.startswith(("loss_", "accuracy_"))}

    def text(self, response: Response) -> TextBatch:
        """A response with the features that the drafter reads, as a batch of one row."""
        feature_spec = artifacts.feature_spec(self.config)
        (sample,) = read_batch(
            self.target, [text_of(response, self.config.train.max_length)], feature_spec, self.target.dtype
        )
        return collate([replace(sample, features=drafters_row(sample, feature_spec))])


def predictions(
    records: Sequence[Replay], gate: Gate, thresholds: Sequence[float], costs: Costs, *, k: int
) -> tuple[dict, float]:
    """The row of a validation, and predicted tokens per second under the gate.

    If the threshold is still to be chosen, the gate has the fastest one.
    """
    swept = sweep(records, candidates(gate, thresholds), costs, k, gate.max_stages)
    best = fastest(swept["sweep"], gate.paper_threshold) if swept["sweep"] else simulated(records, gate, costs)
    row = {
        f"{name}_{walk}": point[name]
        for walk, point in (("s1", swept["S1"]), ("gated", best), ("oracle", swept["oracle"]))
        for name in ("tau", "tokens_per_second")
    }
    row |= {
        "threshold": best.get("threshold"),
        "stages_gated": best["stages"],
        "full_acceptance": swept["full_acceptance_by_stage"],
        "by_threshold": {
            f"{point['threshold']:g}": {name: point[name] for name in ("tau", "tokens_per_second", "stages")}
            for point in swept["sweep"]
        },
    }
    return row, best["tokens_per_second"]


def gate_scores(records: Sequence[Replay]) -> dict:
    """First-stage scores at every position, as probabilities in bins.

    Returns the number of scores in each bin and the share of these blocks that is accepted completely.
    """
    probability = np.concatenate([record.scores[:, 0].exp().numpy() for record in records])
    full = np.concatenate([(record.accepted >= record.k).numpy() for record in records])
    counts, edges = np.histogram(probability, bins=BINS, range=(0, 1))
    accepted, _ = np.histogram(probability[full], bins=edges)
    return {
        "gate_score_histogram": counts.tolist(),
        "gate_calibration": [a / n if n else None for a, n in zip(accepted.tolist(), counts.tolist(), strict=True)],
    }


def settings_of(config: Config) -> dict:
    """The settings on which scores and chosen thresholds depend."""
    return {
        "gate": {"kind": type(config.gate).__name__, **asdict(config.gate)},
        "evaluate.thresholds": config.evaluate.thresholds,
        "train.validate_prompts": config.train.validate_prompts,
        "greedy answers": artifacts.greedy(config).key,
    }


def require_same_validation(config: Config) -> None:
    """Raise ValueError if the run's validations so far used another gate or other prompts.

    Their scores and thresholds could not be compared with new ones.
    """
    path = artifacts.run_folder(config) / VALIDATED_BY
    if path.is_file():
        require_same(json.loads(path.read_text()), settings_of(config), path)


def chosen_threshold(folder: Path, step: int) -> float | None:
    """The threshold that validation chose at a step of the run in `folder`; None if that step was not validated."""
    path = folder / LOG
    rows = [row for row in read_jsonl(path) if row["step"] == step and "threshold" in row] if path.is_file() else []
    return rows[-1]["threshold"] if rows else None
