"""Schedule: the learning rate, with a linear warm-up and a cosine decay to zero."""

import math


def learning_rate(step: int, total: int, peak: float, warmup: float) -> float:
    """Rate of step `step` (from 0) of `total`. It reaches the peak at the last warm-up step and never exceeds it."""
    warm = max(1, round(warmup * total))
    if step < warm:
        return peak * (step + 1) / warm
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm + 1) / (total - warm + 1)))
