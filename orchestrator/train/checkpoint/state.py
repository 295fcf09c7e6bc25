"""The live state of a run by name: tensors of the model and the optimizer, and plain values.

Nothing is pickled."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from experts.balance import moe_layers
from experts.model import structure_of
from orchestrator.checkpoint.progress import Progress
from orchestrator.checkpoint.saved_experts import EvolutionState, SavedExperts
from orchestrator.errors import UserError
from orchestrator.train.device.precision import Precision


@dataclass(frozen=True)
class TrainState:
    """The parts of a run that hold state.

    The model is the task's own and never a wrapper of it, so the names of its parameters are the
    task's too."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    precision: Precision
    evolution: EvolutionState | None = None
    """Only where experts may change during training."""


@dataclass(frozen=True)
class OptimizerState:
    """The state of an optimizer by name, as opposed to torch's numbering of parameters."""

    slots: dict[str, dict[str, Tensor]]
    """Tensors by slot ("exp_avg") and parameter name."""
    values: dict[str, Any]
    """Plain values by ``slot/name``; one per expert for a stacked parameter."""
    groups: list[dict[str, Any]]
    """The settings of each parameter group."""


def frozen_base(model: nn.Module) -> str | None:
    """Return the fingerprint of the files that hold the frozen weights; None if checkpoints hold them."""
    return getattr(model, "frozen_base", None)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the saved parameters and the persistent buffers by name. Shared ones appear once.

    Frozen weights that the task reads from files at each start are not saved."""
    persistent = set(model.state_dict())
    named = [*model.named_parameters(), *model.named_buffers()]
    if frozen_base(model) is not None:
        persistent -= {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {name: tensor for name, tensor in named if name in persistent}


def optimizer_state(state: TrainState, stacked: Mapping[str, list[str]]) -> OptimizerState:
    """Return the optimizer's state by name.

    ``stacked`` maps a stacked parameter to the names of its experts."""
    # An optimizer keys its state by parameter; a checkpoint needs names.
    named_parameters = state.model.named_parameters()
    names: dict[Tensor, str] = {parameter: name for name, parameter in named_parameters}
    tensors: dict[str, dict[str, Tensor]] = {}
    values: dict[str, Any] = {}
    for parameter, slots in state.optimizer.state.items():
        for slot, value in slots.items():
            name = names[parameter]
            if isinstance(value, Tensor):
                tensors.setdefault(slot, {})[name] = value
            elif is_plain(value):
                # Each expert gets a value of its own, as experts may move to different hosts.
                for expert_name in stacked.get(name, [name]):
                    values[f"{slot}/{expert_name}"] = value
            else:
                raise UserError(
                    f"optimizer state {slot!r} is a {type(value).__name__}; "
                    "only tensors and plain values can be saved without pickle"
                )
    return OptimizerState(
        tensors,
        values,
        [_group_settings(group) for group in state.optimizer.param_groups if "same_as" not in group],
    )


class StateTensor(NamedTuple):
    """A tensor of the state: its kind ("model", "optimizer"), slot ("" for the model) and name."""

    kind: str
    slot: str
    name: str
    tensor: Tensor

    @property
    def num_bytes(self) -> int:
        """The size of the tensor with all its shards."""
        return self.tensor.shape.numel() * self.tensor.itemsize

    @property
    def key(self) -> str:
        return self.key_of(self.name)

    def key_of(self, name: str) -> str:
        """Return the key in a checkpoint of an expert in this tensor."""
        return f"{self.slot}/{name}" if self.slot else name


def state_tensors(model: nn.Module, optimizer: OptimizerState) -> list[StateTensor]:
    """Return the tensors of a model and its optimizer."""
    tensors = [StateTensor("model", "", name, tensor) for name, tensor in model_tensors(model).items()]
    for slot, named in optimizer.slots.items():
        tensors += [StateTensor("optimizer", slot, name, tensor) for name, tensor in named.items()]
    return tensors


def _group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params" and is_plain(value)}


def is_plain(value: object) -> bool:
    """Whether a value can be saved as JSON and restored without loss."""
    return value is None or isinstance(value, bool | int | float | str)


def plain_state(state: TrainState, optimizer: OptimizerState, progress: Progress) -> dict[str, Any]:
    """Return all state that is not a tensor, as JSON can hold it."""
    return {
        "progress": asdict(progress),
        "precision": state.precision.state_dict(),
        "optimizer": {
            "kind": type(state.optimizer).__name__,
            "groups": optimizer.groups,
            "values": optimizer.values,
        },
        "experts": saved_experts(state.model).to_json(),
        "frozen_base": frozen_base(state.model),
        "evolution": asdict(state.evolution) if state.evolution is not None else None,
        "random": random_state(),
    }


def saved_experts(model: nn.Module) -> SavedExperts:
    """Return the experts of a model as they are now."""
    hosts = [layer.context.exchange.size for _, layer in moe_layers(model)]
    return SavedExperts(tuple(structure_of(model)), max(hosts, default=1))


def random_state() -> dict[str, Any]:
    """Return the states of Python's and numpy's generators, which user code may draw from.

    Torch's generators are not part of it: every step seeds them anew."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    numpy_keys = [int(key) for key in np.asarray(keys)]
    return {
        "python": [version, list(words), gauss],
        "numpy": [str(kind), numpy_keys, int(position), int(has_gauss), float(cached)],
    }


def restore_random_state(saved: Mapping[str, Any]) -> None:
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = saved["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
