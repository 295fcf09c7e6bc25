"""Initial weights and computed buffers of a ``transformers`` model, by its own ``_init_weights``.

Each module is initialised as a stand-in on the CPU, with random numbers that depend on the seed, the
module's name and the expert's id: the same on every device, host and placement."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from experts.model import mix
from experts.transformers.files.places import Target, check_memory, experts_places, is_hosted, own_tensors
from experts.transformers.hosted import HostedExperts


@torch.no_grad()
def initialise_weights(model: Any, seed: int) -> None:
    """Fill a model with random weights of its family's distribution, in place.

    The model has memory, and each of its banks holds the experts of this host alone, as for
    ``read_weights``. Raises ``ValueError`` for a parameter that the family does not initialise."""
    check_memory(model)
    # Tied tensors are two after to_empty.
    model.tie_weights()
    restore_buffers(model)
    first_names = {name for name, _ in model.named_parameters()}
    all_names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    tied = {name for name in all_names if name not in first_names}
    filled: set[str] = set()
    with torch.random.fork_rng(devices=[]):
        for name, module, owner in _modules(model):
            if is_hosted(module):
                _initialise_experts(name, module, owner, seed)
                continue
            torch.manual_seed(mix(seed, name))
            stand_in = _StandIn(name, module)
            owner._init_weights(stand_in.module)
            # A tied tensor has the values of its first name, whichever module comes last.
            filled |= stand_in.copy_back(lambda tensor_name: tensor_name not in tied)
    ours = {name for name in first_names if ".hosted.bank." in name}
    _check_filled(model, first_names - ours - filled)


@torch.no_grad()
def await_weights(model: Any) -> None:
    """Make a model ready for the weights of a checkpoint: until they are restored, all are NaN."""
    check_memory(model)
    model.tie_weights()
    restore_buffers(model)
    for parameter in model.parameters():
        parameter.fill_(torch.nan)


def _initialise_experts(name: str, experts: Any, owner: Any, seed: int) -> None:
    """Initialise each held expert as a module with this expert alone."""
    places = experts_places(name, experts)
    for row in experts.hosted.bank.held:
        expert_id = experts.hosted.bank.ids[row]
        targets = {place.name.rpartition(".")[2]: place.held[row] for place in places}
        stand_in = _StandIn(name, experts, targets)
        torch.manual_seed(mix(seed, name, expert_id))
        owner._init_weights(stand_in.module)
        filled = stand_in.copy_back()
        _check_filled(owner, {place.name for place in places} - filled)


@torch.no_grad()
def restore_buffers(model: Any) -> None:
    """Compute the buffers that no file holds, as those of rotary embeddings: ``to_empty`` loses them."""
    with torch.random.fork_rng(devices=[]):
        for name, module, owner in _modules(model):
            computed = {
                f"{name}.{buffer}" if name else buffer
                for buffer in module._non_persistent_buffers_set
                if module._buffers[buffer] is not None
            }
            if computed:
                stand_in = _StandIn(name, module)
                owner._init_weights(stand_in.module)
                _check_filled(model, computed - stand_in.copy_back(computed.__contains__))
    for module in model.modules():
        if isinstance(module, HostedExperts):
            module.bank.slot_E.copy_(module.bank.slots())
            module.load_E.zero_()
            module.use_structure(module.structure, module.host)


def _check_filled(model: nn.Module, missing: Set[str]) -> None:
    if missing:
        raise ValueError(
            f"{type(model).__name__}._init_weights gives no value to {', '.join(sorted(missing)[:3])}; load "
            "weights from files, or add it there"
        )


def _modules(model: Any) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield the modules of ``transformers``, children first, with the model whose family they are of."""
    from transformers import PreTrainedModel

    def walk(name: str, module: nn.Module, owner: Any) -> Iterator[tuple[str, nn.Module, Any]]:
        owner = module if isinstance(module, PreTrainedModel) else owner
        for child_name, child in module.named_children():
            if not isinstance(child, HostedExperts):
                yield from walk(f"{name}.{child_name}" if name else child_name, child, owner)
        yield name, module, owner

    yield from walk("", model, model)


class _StandIn:
    """A copy of a module on the CPU, of the same class, whose tensors are not filled yet.

    Some families initialise the tensors of a child from its parent: a child that is asked for becomes
    a stand-in too. ``tensors`` are in the place of the module's own."""

    def __init__(self, name: str, module: nn.Module, tensors: Mapping[str, Target] | None = None) -> None:
        self._name = name
        self._targets = own_tensors(module) if tensors is None else tensors
        self._children: dict[str, _StandIn] = {}
        self.module = copy.copy(module)
        blanks = {key: _blank(tensor) for key, tensor in self._targets.items()}
        buffers = {key: blanks[key] for key in module._buffers if key in blanks}
        parameters = {key: nn.Parameter(blanks[key]) for key in blanks if key not in buffers}
        absent: dict[str, Any] = {key: None for key in module._parameters if key not in blanks}
        state = self.module.__dict__
        state["_parameters"] = absent | parameters
        state["_buffers"] = {key: buffers.get(key) for key in module._buffers}
        state["_modules"] = _Children(module._modules, self._child)

    def _child(self, name: str, module: nn.Module) -> nn.Module:
        if name not in self._children:
            self._children[name] = _StandIn(f"{self._name}.{name}" if self._name else name, module)
        return self._children[name].module

    def copy_back(self, is_wanted: Callable[[str], bool] = lambda _: True) -> set[str]:
        """Copy the tensors that were filled to the module, and return their names."""
        filled: set[str] = set()
        for key, target in self._targets.items():
            full_name = f"{self._name}.{key}" if self._name else key
            value = self.module._parameters.get(key)
            value = self.module._buffers[key] if value is None else value
            assert value is not None
            is_filled = not (value.is_floating_point() and bool(value.isnan().any()))
            if is_filled and is_wanted(full_name):
                target.copy_(value)
                filled.add(full_name)
        for child in self._children.values():
            filled |= child.copy_back(is_wanted)
        return filled


class _Children(dict[str, Any]):
    """The children of a stand-in, which are stand-ins too once they are asked for."""

    def __init__(self, modules: Mapping[str, Any], child: Callable[[str, nn.Module], nn.Module]) -> None:
        super().__init__(modules)
        self._child = child

    def __getitem__(self, name: str) -> Any:
        module = super().__getitem__(name)
        return module if module is None else self._child(name, module)


def _blank(tensor: Target) -> Tensor:
    """Return a tensor that shows whether it was filled: all of it NaN.

    Weights are drawn in fp32 whatever their type is."""
    if isinstance(tensor, Tensor) and not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return torch.full(tensor.shape, torch.nan)
