"""Recognise errors of communication: another worker failed or fell silent, and this one is sound."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

from experts.hosts.membership import GroupLeft

_PHRASES = (
    "gloo/",
    "gloo timed out",
    "nccl",
    "connection reset by peer",
    "connection closed by peer",
    "broken pipe",
    "process group",
)
_ROOT = Path(__file__).resolve().parents[3]
_OWN_PACKAGES = tuple(str(_ROOT / package) for package in ("orchestrator", "experts"))


def is_communication_error(error: BaseException) -> bool:
    """Return whether an error reports a silent or lost peer rather than a fault of this worker.

    An error that a user's own code raises is the user's, whatever its message. An error without frames came
    from another process; its message alone decides.
    """
    if isinstance(error, torch._C._DistError | GroupLeft):
        return True
    if not isinstance(error, RuntimeError):
        return False
    message = str(error).lower()
    if not any(phrase in message for phrase in _PHRASES):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return True
    raised_in = frames[-1].filename
    return "site-packages" in raised_in or raised_in.startswith(_OWN_PACKAGES)
