"""Finds the known name that a misspelt one probably means, and none if nothing is near."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LETTERS_PER_SLIP = 4
"""One slip is forgiven for each of these letters of a name, and one in any case."""
_MIN_PREFIX = 4
"""Letters of a name that is the beginning of another (``optimizer`` of ``optim``)."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ' (did you mean 'X'?)' if a known name is near, else ''."""
    near = nearest(name, known)
    return f" (did you mean {near!r}?)" if near else ""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most like this one, if a few slips of the finger explain the difference."""
    alike = difflib.get_close_matches(name, list(known), n=5, cutoff=0.6)
    return next((candidate for candidate in alike if _is_near(name, candidate)), None)


def _is_near(name: str, candidate: str) -> bool:
    shorter = min(name, candidate, key=len)
    longer = max(name, candidate, key=len)
    if len(shorter) >= _MIN_PREFIX and longer.startswith(shorter):
        return True
    return slips(name, candidate) <= max(1, len(name) // _LETTERS_PER_SLIP)


def slips(first: str, second: str) -> int:
    """Return how many letters were left out, added, replaced or exchanged with their neighbour.

    The optimal string alignment distance: row i of its table has the distances of first[:i] to
    every beginning of second.
    """
    before: list[int] = []
    row = list(range(len(second) + 1))
    for i, letter in enumerate(first, start=1):
        two_before = before
        before = row
        row = [i]
        for j, other in enumerate(second, start=1):
            replaced = before[j - 1] + (letter != other)
            distance = min(replaced, before[j] + 1, row[j - 1] + 1)
            is_exchange = i > 1 and j > 1 and letter == second[j - 2] and first[i - 2] == other
            if is_exchange:
                distance = min(distance, two_before[j - 2] + 1)
            row.append(distance)
    return row[-1]
