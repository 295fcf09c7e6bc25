"""The tensors of a model under the names of ``transformers``, and their memory on this host.

See ``experts.types`` for the letters of shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from experts.kernels.packed import PackedForm
from experts.kernels.packed_product import PackedLinear
from experts.moe.bank import ExpertBank
from experts.transformers.hosted import HostedExperts
from experts.transformers.layout import in_our_layout, is_experts_module, parameter_names


@dataclass(frozen=True)
class PackedTarget:
    """The place of a packed matrix: numbers that are copied to it are packed, on its device.

    ``shape`` is that of the numbers: of an expert with a leading dimension of one, and ``transposed`` where
    its module has matrices of inner × outer numbers."""

    packed: Tensor
    form: PackedForm
    shape: tuple[int, ...]
    transposed: bool = False

    @classmethod
    def of_expert(cls, packed: Tensor, form: PackedForm, transposed: bool) -> PackedTarget:
        size = form.shape[::-1] if transposed else form.shape
        return cls(packed, form, (1, *size), transposed)

    def copy_(self, numbers: Tensor, stored: Tensor | None = None) -> None:
        """Pack numbers; ``stored`` bytes of files are taken as they are, if they stand for these numbers."""
        matrix = numbers.to(self.packed.device).reshape(self.shape[-2:])
        matrix = matrix.t() if self.transposed else matrix
        if stored is None or not self._stands_for(stored.to(self.packed.device), matrix):
            stored = self.form.pack(matrix)
        self.packed.copy_(stored)

    def _stands_for(self, stored: Tensor, matrix: Tensor) -> bool:
        has_form = self.form.packing == "nf4" and len(stored) == self.form.num_bytes
        return has_form and torch.equal(self.form.unpack(stored, matrix.dtype), matrix)


Target = Tensor | PackedTarget
"""The memory that numbers are copied to."""


@dataclass(frozen=True)
class Place:
    """A tensor that all hosts hold."""

    name: str
    target: Target

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.target.shape)

    @property
    def memory(self) -> Tensor:
        """The tensor that has the numbers, packed or not."""
        return self.target.packed if isinstance(self.target, PackedTarget) else self.target


@dataclass(frozen=True)
class ExpertsPlace:
    """A stack of experts in the layout of ``transformers``, of which this host holds some."""

    name: str
    shape: tuple[int, ...]
    """The shape with all experts."""
    held: Mapping[int, Target]
    """A view of each held expert, with a leading dimension of one."""


Places = Mapping[str, Place | ExpertsPlace]


def places_of(model: nn.Module) -> Places:
    """Return the places of all parameters and persistent buffers, by their names in ``transformers``.

    Tied tensors have a place under each of their names."""
    places: dict[str, Place | ExpertsPlace] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, HostedExperts | ExpertBank):
            continue
        if is_hosted(module):
            for place in experts_places(prefix, module):
                places[place.name] = place
        for name, target in own_tensors(module).items():
            if name not in module._non_persistent_buffers_set:
                full_name = f"{prefix}.{name}" if prefix else name
                places[full_name] = Place(full_name, target)
    return places


def own_tensors(module: nn.Module) -> dict[str, Target]:
    """Return the places of the parameters and buffers of a module itself."""
    own = {**module._parameters, **module._buffers}
    targets: dict[str, Target] = {name: tensor.detach() for name, tensor in own.items() if tensor is not None}
    if isinstance(module, PackedLinear):
        targets["weight"] = PackedTarget(module.weight.detach(), module.form, module.form.shape)
    return targets


def is_hosted(module: nn.Module) -> bool:
    """Whether a module of experts has its weights in a bank of ours."""
    return is_experts_module(module) and hasattr(module, "hosted")


def experts_places(prefix: str, experts: Any) -> list[ExpertsPlace]:
    """Return the places of a module of experts. ``prefix`` is its name."""
    bank: ExpertBank = experts.hosted.bank
    names = parameter_names(experts)
    num_experts = len(bank.sizes)
    if not bank.held:
        # This host has no expert of the layer, and no stack that tells the shapes.
        return [ExpertsPlace(f"{prefix}.{name}", (num_experts,), {}) for name in names.values()]
    places = []
    for group, role, stack in bank.stacks():
        form = bank.form.packed(role, bank.width, group.hidden)
        held: dict[int, Target]
        if form is None:
            theirs = in_our_layout(experts, stack.detach())
            held = {row: theirs[slot : slot + 1] for slot, row in enumerate(group.rows)}
        else:
            packed = zip(group.rows, stack.detach().unbind(), strict=True)
            held = {row: PackedTarget.of_expert(own, form, experts.is_transposed) for row, own in packed}
        shape = (num_experts, *held[group.rows[0]].shape[1:])
        places.append(ExpertsPlace(f"{prefix}.{names[role]}", shape, held))
    return places


def check_memory(model: nn.Module) -> None:
    """Refuse a model with tensors on the meta device."""
    without = [name for name, tensor in model.named_parameters() if tensor.device == torch.device("meta")]
    if without:
        raise ValueError(
            f"{without[0]} and {len(without) - 1} other parameters have no memory to read into; "
            "call model.to_empty(device=...) first"
        )
