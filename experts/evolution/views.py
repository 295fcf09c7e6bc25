"""The measurements that decisions about experts are made from, and what is remembered between decisions.

All values are frozen. Matrices are tuples of rows, in the order of the gate's rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from experts.structure import Change

Matrix = tuple[tuple[float, ...], ...]

_BY_EXPERT = ("overloaded", "dormant", "barred")  # the maps of a LayerState


@dataclass(frozen=True)
class ExpertView:
    """One expert in a window."""

    id: int
    size: int
    """Hidden size."""
    share: float
    """Its part of the layer's use: of the choices, or of the gate's weights if every token goes to
    every expert. The shares of a layer sum to one."""
    age_steps: int
    """Steps since its birth."""
    warming: bool = False
    """Whether it is in its warm-up."""
    hosts: tuple[int, ...] = (0,)
    twin_of: int | None = None
    """The parent whose tokens it shares during its warm-up."""
    split_from: int | None = None
    """The parent that it was a copy of at its birth; None for other experts."""


@dataclass(frozen=True)
class LayerView:
    """One MoE layer in a window."""

    layer: int
    name: str
    experts: tuple[ExpertView, ...]
    top_k: int
    """Experts per token; equal to the number of experts if every token goes to every expert."""
    next_id: int
    entropy: float
    """Mean entropy of the gate's probabilities, divided by the logarithm of the number of experts."""
    tokens: int
    """Tokens of the window."""
    coactivation: Matrix = ()
    weight_similarity: Matrix = ()
    """Similarity of the experts' weights, -1 to 1; empty if it was not measured."""
    response_similarity: Matrix = ()
    """Similarity of the experts' outputs for the same tokens, -1 to 1; empty if it was not measured."""

    @property
    def is_full(self) -> bool:
        """Whether every token goes to every expert. ``top_k`` then follows the number of experts."""
        return self.top_k == len(self.experts)

    @property
    def even_share(self) -> float:
        return 1 / len(self.experts)


@dataclass(frozen=True)
class RunView:
    """All MoE layers in a window, and the course of the loss."""

    step: int
    losses: tuple[float, ...]
    """Mean training losses of the recent windows, oldest first."""
    layers: tuple[LayerView, ...]
    most_experts: int | None = None
    """Experts that fit into the memory, per layer; None if it sets no limit."""


@dataclass(frozen=True)
class LayerState:
    """The memory of the decisions about a layer. Streaks count windows in a row."""

    uncertain: int = 0
    overloaded: Mapping[int, int] = field(default_factory=dict)
    """Streaks by expert id; an expert without one is left out."""
    dormant: Mapping[int, int] = field(default_factory=dict)
    changed_step: int | None = None
    """The step of the last change."""
    barred: Mapping[int, int] = field(default_factory=dict)
    """Experts that take part in no change, with the step until which this holds."""

    def to_json(self) -> dict[str, Any]:
        # Keys of a JSON object are text.
        maps = {name: {str(key): value for key, value in getattr(self, name).items()} for name in _BY_EXPERT}
        return asdict(self) | maps

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> LayerState:
        maps: dict[str, Any] = {
            name: {int(key): value for key, value in fields[name].items()} for name in _BY_EXPERT
        }
        return cls(**fields | maps)


@dataclass(frozen=True)
class PolicyState:
    """The memory of the decisions about a run, part of a checkpoint."""

    layers: Mapping[str, LayerState] = field(default_factory=dict)
    """By the name of the layer."""
    best_loss: float | None = None
    """The smallest smoothed loss that counted as an improvement."""
    stalled: int = 0
    """Windows since then."""

    def to_json(self) -> dict[str, Any]:
        layers = {name: layer.to_json() for name, layer in self.layers.items()}
        return {"layers": layers, "best_loss": self.best_loss, "stalled": self.stalled}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> PolicyState:
        layers = {name: LayerState.from_json(entry) for name, entry in fields["layers"].items()}
        return cls(layers, fields["best_loss"], fields["stalled"])


@dataclass(frozen=True)
class Decision:
    """The changes to carry out, in this order, and the state for the next decision."""

    changes: tuple[Change, ...]
    state: PolicyState
