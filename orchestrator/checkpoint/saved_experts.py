"""The experts of a run as a checkpoint or a snapshot has them: their number may have changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from experts.structure import LayerStructure
from orchestrator.checkpoint.progress import OTHER_CHECKPOINT
from orchestrator.errors import UserError


@dataclass(frozen=True)
class SavedExperts:
    """The experts of each MoE layer, and the number of hosts that they were placed on."""

    layers: tuple[LayerStructure, ...] = ()
    hosts: int = 1

    @property
    def have_changed(self) -> bool:
        """Whether the layers are not as the task builds them."""
        return any(not layer.is_initial for layer in self.layers)

    def to_json(self) -> dict[str, Any]:
        return {"layers": [layer.to_json() for layer in self.layers], "hosts": self.hosts}


class OtherExperts(Exception):
    """The model was built with other experts than the state to restore has."""

    def __init__(self, saved: SavedExperts) -> None:
        super().__init__("the checkpoint has other experts than the model")
        self.saved = saved


def read_experts(state: Mapping[str, Any]) -> SavedExperts:
    """Return the experts in the state of a checkpoint. Raise ``UserError`` if no run can have written it."""
    from pydantic import TypeAdapter, ValidationError

    try:
        entry = state["experts"]
        layers = [asdict(LayerStructure.from_json(layer)) for layer in entry["layers"]]
        # Through JSON: strict validation then accepts what JSON can hold, and nothing else.
        text = json.dumps({"layers": layers, "hosts": entry["hosts"]})
        saved = TypeAdapter(SavedExperts).validate_json(text, strict=True)
    except (ValidationError, KeyError, TypeError, ValueError, AttributeError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": ()}
        where = ".".join(str(part) for part in first["loc"]) or "it is missing or incomplete"
        raise UserError(
            f"the checkpoint's list of experts is invalid ({where}); {OTHER_CHECKPOINT}"
        ) from None
    for layer in saved.layers:
        is_valid = len(set(layer.ids)) == len(layer.ids) and all(0 <= i < layer.next_id for i in layer.ids)
        if not layer.ids or not is_valid or not all(expert.hosts for expert in layer.experts):
            raise UserError(f"the checkpoint's list of experts is invalid ({layer.name}); {OTHER_CHECKPOINT}")
    return saved


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
