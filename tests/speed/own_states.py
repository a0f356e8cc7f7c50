"""Compare the forms of own states of a block drafter by the tokens that stage 2 adds.

    python tests/speed/own_states.py artifacts/runs/quickstart-dflash                   # the run's initial drafter
    python tests/speed/own_states.py artifacts/runs/quickstart-dflash <drafter folder>  # for example base-trained

For each form it prints the tokens accepted from stage 2 at positions where stage 1 was accepted completely.
"""

import sys
from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf

from dloop_train.checkpoints.files import load_drafter, locate_drafter
from dloop_train.config import check, from_hydra
from dloop_train.decoding.gates import Always, Never
from dloop_train.decoding.replay import walk_gate
from dloop_train.phases import artifacts
from dloop_train.phases.replaying import next_stage_tokens, replay_all, tau_of
from dloop_train.targets.head import TargetHead
from dloop_train.targets.sources import load_target


def main(run: Path, drafter: str | None) -> None:
    config = from_hydra(OmegaConf.load(run / "config.yaml"))
    target = load_target(config.target, dtype=config.evaluate.dtype)
    responses = artifacts.greedy_responses(config, "validation")
    check(config.drafter.kind == "block", "a chain has one form of own states: the one that it feeds back")
    check(
        bool(drafter) or config.drafter.init != "scratch",
        "this run started from scratch; name a drafter's folder behind it",
    )
    folder = locate_drafter(drafter or config.drafter.init, config.drafter.revision)
    slots = ("own", "next") if config.drafter.alignment == "fill_in" else ("own",)
    print(f"{folder} on {len(responses)} validation responses")
    for state in ("context_norm", "post_norm", "raw"):
        for slot in slots:
            settings = replace(config.drafter.as_exported({}), state=state, slot=slot)
            looped = (
                load_drafter(
                    folder,
                    settings,
                    TargetHead.of(target),
                    dtype=target.dtype,
                    target=target.spec,
                    taps=artifacts.taps(config),
                )
                .to(target.device)
                .eval()
            )
            records = replay_all(
                target,
                looped,
                responses,
                Always(max_stages=2),
                [],
                {},
                stages=2,
                max_new_tokens=config.generate.greedy_max_new_tokens,
            )
            second = next_stage_tokens(records)
            print(
                f"{state:12} {slot:4}  stage 2 adds {second['tokens']:.2f} of {looped.k} tokens "
                f"at {second['positions']} positions; "
                f"S = 1 tau {tau_of([walk_gate(record, Never()) for record in records]):.2f}"
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
