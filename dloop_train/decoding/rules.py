"""Acceptance rules: which drafted tokens does the target confirm?"""

from collections.abc import Sequence


def accept_greedy(drafted: Sequence[int], predicted: Sequence[int]) -> int:
    """Length of the drafted prefix that the target would have chosen itself; predicted[i] follows the i-th drafted token."""
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == predicted[accepted]:
        accepted += 1
    return accepted
