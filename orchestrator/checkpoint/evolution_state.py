"""The memory of evolution between two points of a run, as part of a checkpoint and a snapshot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class EvolutionState:
    """Plain values, so that they can be saved as JSON."""

    policy: dict[str, Any] | None = None
    """The memory of the decisions on births, merges and prunes."""
    balance: dict[str, Any] | None = None
    """The memory of the decisions on moves and copies."""
    losses: list[float] = field(default_factory=list)
    """Mean training losses of the last windows, oldest first."""
    window_epoch: int = 0
    window_loss: float = 0.0
    """The sum of losses in the epoch when the current window began."""
    window_count: float = 0.0
    balance_step: int = 0
    """The step of the next decision on moves and copies."""
    balance_interval: int = 0

    def restore(self, fields: dict[str, Any]) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, fields[name])
