"""A finding about a run: what slows it or harms its result, the numbers that show it, and advice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BoundBy = Literal[
    "data",
    "memory",
    "communication",
    "compute",
    "host",
    "imbalance",
    "evaluation",
    "checkpoint",
    "recovery",
    "overfitting",
    "uneven experts",
    "unknown",
]

MAX_ADVICE = 3


@dataclass(frozen=True)
class Finding:
    """A cause that slows a run or harms its result, the numbers that show it, and things to try."""

    bound_by: BoundBy
    evidence: tuple[str, ...]
    advice: tuple[str, ...]


def merge(*findings: Finding | None) -> Finding | None:
    """Merge findings with the same cause; advice that several give is given once."""
    found = [finding for finding in findings if finding is not None]
    if not found:
        return None
    evidence = tuple(line for finding in found for line in finding.evidence)
    advice = dict.fromkeys(line for finding in found for line in finding.advice)
    return Finding(found[0].bound_by, evidence, tuple(advice))
