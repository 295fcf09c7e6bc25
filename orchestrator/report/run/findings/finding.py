"""A finding about a run: how it learnt or what slows it, the numbers that show it, and advice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "data",
    "memory",
    "communication",
    "compute",
    "host",
    "imbalance",
    "evaluation",
    "checkpoint",
    "recovery",
    "unknown",
    "diverged",
    "overfitting",
    "rising",
    "not learning",
    "still falling",
    "levelled off",
    "too short",
    "no trend",
    "uneven experts",
]
"""What a run is bound by, how it learnt, or what else harms its result."""

_HEADLINES: dict[Kind, str] = {
    "data": "The model waits for data",
    "communication": "The workers wait for each other",
    "recovery": "Failures take much of the time",
    "memory": "Memory is the limit",
    "compute": "Compute is the limit",
    "host": "The GPU waits for Python",
    "imbalance": "The work is unbalanced",
    "evaluation": "Evaluation takes much of the time",
    "checkpoint": "Checkpoints take much of the time",
    "unknown": "Not enough data for a verdict",
    "diverged": "The loss diverged",
    "overfitting": "The model overfits",
    "rising": "The validation loss rises",
    "not learning": "The loss does not fall",
    "still falling": "The loss was still falling",
    "levelled off": "The loss has levelled off",
    "too short": "Too short to judge the learning",
    "no trend": "No trend beyond the noise",
    "uneven experts": "Experts are used unevenly",
}
Tone = Literal["good", "calm", "info", "warn", "bad"]
# A run that is bound by compute uses its device well; most other findings deserve a look.
_TONES: dict[Kind, Tone] = {
    "compute": "good",
    "unknown": "calm",
    "diverged": "bad",
    "still falling": "info",
    "levelled off": "good",
    "too short": "calm",
    "no trend": "calm",
}

MAX_ADVICE = 3


@dataclass(frozen=True)
class Finding:
    """What slows a run, or how it learnt; the numbers that show it, and things to try."""

    kind: Kind
    evidence: tuple[str, ...]
    advice: tuple[str, ...]

    @property
    def headline(self) -> str:
        return _HEADLINES[self.kind]

    @property
    def tone(self) -> Tone:
        return _TONES.get(self.kind, "warn")


def merge(*findings: Finding | None) -> Finding | None:
    """Merge findings with the same cause; advice that several give is given once."""
    found = [finding for finding in findings if finding is not None]
    if not found:
        return None
    evidence = tuple(line for finding in found for line in finding.evidence)
    advice = dict.fromkeys(line for finding in found for line in finding.advice)
    return Finding(found[0].kind, evidence, tuple(advice))
