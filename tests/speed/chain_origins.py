r"""Cost of one training step of a chain drafter unrolled from sampled origins or from every position.

Prints FLOPs, memory and seconds. The default is EAGLE-3 at SmolLM2's sizes, 4 stages of 7 passes over 256 tokens:

    python tests/speed/chain_origins.py
    python tests/speed/chain_origins.py --hidden 4096 --intermediate 12288 --heads 32 --groups 8 \
        --vocabulary 151936 --length 2048 --origins 256
"""

import argparse
import resource
import subprocess
import sys
import time

import torch
from torch.utils.flop_counter import FlopCounterMode

from dloop_train.data.batches import TextBatch
from dloop_train.drafters.eagle3 import Eagle3Config, Eagle3Shape
from dloop_train.drafters.sizes import LayerSizes, Rope
from dloop_train.targets.head import TargetHead
from dloop_train.training.anchors import Origins
from dloop_train.training.unroll import Terms, Unroll


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {
        "hidden": 576,
        "intermediate": 1536,
        "heads": 9,
        "groups": 3,
        "vocabulary": 8192,
        "length": 256,
        "origins": 16,
        "k": 7,
        "stages": 4,
        "loss-rows": 128,
    }
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--form", choices=["sampled", "all"], help="one form alone, in this process")
    return parser.parse_args()


def main() -> None:
    wanted = arguments()
    if wanted.form:
        print(" ".join(map(str, measure(wanted))))
        return
    rows = {}
    for form in ("sampled", "all"):  # one process each, because ru_maxrss is the peak of a whole process
        result = subprocess.run([sys.executable, *sys.argv, "--form", form], capture_output=True, text=True, check=True)
        rows[form] = [float(number) for number in result.stdout.split()]
    print(f"{wanted.stages} stages x {wanted.k} passes over {wanted.length} tokens, forward and backward")
    print(
        f"{'form':8} {'origins':>8} {'GFLOPs':>10} {'per origin':>11} {'peak MB':>9} {'per origin':>11} {'seconds':>8}"
    )
    for form, (origins, flops, memory, seconds) in rows.items():
        print(
            f"{form:8} {origins:8.0f} {flops / 1e9:10.1f} {flops / origins / 1e9:11.3f} "
            f"{memory / 1e6:9.0f} {memory / origins / 1e6:11.2f} {seconds:8.2f}"
        )
    ratios = [every / some for every, some in zip(rows["all"], rows["sampled"], strict=True)]
    print(
        f"all / sampled: {ratios[0]:.1f} x the origins, {ratios[1]:.1f} x the FLOPs, {ratios[2]:.1f} x the memory, "
        f"{ratios[3]:.1f} x the time"
    )


def measure(wanted: argparse.Namespace) -> tuple[int, float, float, float]:
    """Number of origins, FLOPs, bytes by which the step raises the peak of the process's memory, and seconds."""
    unroll, batch = step_of(wanted)
    count = wanted.length - 1 if wanted.form == "all" else wanted.origins
    position = torch.linspace(1, wanted.length - 1, count).long()[None]
    deepest = torch.clamp((wanted.length - 1 - position - 1) // wanted.k + 1, 1, wanted.stages)
    order = (-deepest[0]).argsort(stable=True)
    origins = Origins(position[:, order], deepest[:, order])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    started = time.perf_counter()
    with FlopCounterMode(display=False) as counter:
        unroll(batch, origins, unroll.weights(batch, origins), 0.0).loss.backward()
    seconds = time.perf_counter() - started
    return count, counter.get_total_flops(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before, seconds


def step_of(wanted: argparse.Namespace) -> tuple[Unroll, TextBatch]:
    """The unrolled step of a drafter with random weights, and a batch of one random text, in bf16."""
    torch.manual_seed(0)
    layer = LayerSizes(
        architecture="llama",
        hidden_size=wanted.hidden,
        intermediate_size=wanted.intermediate,
        num_attention_heads=wanted.heads,
        num_key_value_heads=wanted.groups,
        head_dim=wanted.hidden // wanted.heads,
        rms_norm_eps=1e-5,
        rope=Rope(1e4),
        max_position_embeddings=8192,
    )
    shape = Eagle3Shape(
        format="specforge_eagle3",
        layers=(layer,),
        taps=(0, 1, 2),
        num_target_layers=30,
        vocab_size=wanted.vocabulary,
        target_hidden_size=wanted.hidden,
        draft_vocab_size=wanted.vocabulary,
        own_lm_head=True,
        state="raw",
    )
    table = torch.randn(wanted.vocabulary, wanted.hidden, dtype=torch.bfloat16)
    drafter = Eagle3Config(tokens_per_stage=wanted.k).build(shape, TargetHead(table, table)).bfloat16()
    text = torch.randint(wanted.vocabulary, (1, wanted.length))
    states = torch.randn(1, wanted.length, 4 * wanted.hidden, dtype=torch.bfloat16)
    batch = TextBatch(
        ("text",),
        text,
        torch.ones_like(text, dtype=torch.bool),
        states[..., wanted.hidden :],
        states[..., : wanted.hidden],
    )
    return Unroll(drafter, Terms(wanted.stages - 1), max_rows=wanted.loss_rows), batch


if __name__ == "__main__":
    main()
