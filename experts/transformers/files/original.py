"""The way of a model's tensors back into files, with the original names: a tensor per expert.

Tensors come under the names of a checkpoint: experts by id, in our layout. ``transformers`` converts
them as ``save_pretrained`` does, one expert at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experts.transformers.layout import in_our_layout, is_experts_module, parameter_names

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint: its type, its shape, and its place among the files."""

    dtype: torch.dtype
    shape: Shape
    position: tuple[int, int] = (0, 0)
    """The number of the file and the offset in it. Reading in this order is the fastest."""


@dataclass(frozen=True)
class Output:
    """A tensor of the files that are written, or one row of it."""

    name: str
    row: int | None = None


@dataclass(frozen=True)
class Unit:
    """Tensors that are read and converted together: one expert's, or a tensor of the dense part."""

    inputs: Mapping[str, Sequence[str]]
    """The names in the checkpoint, by the model's tensor that they are. Several are a whole stack."""
    outputs: tuple[Output, ...]
    is_plain: bool
    """Whether the one input is the one output under another name."""


@dataclass(frozen=True)
class WritingPlan:
    """All tensors of the files that are written, in their order, and the units that make them."""

    shapes: Mapping[str, tuple[torch.dtype, Shape]]
    units: Sequence[Unit]
    unused: tuple[str, ...]
    """Names in the checkpoint that the model has no tensor for."""


class OriginalNames:
    """The names and layouts of files for a model, which is on the meta device."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter

        self.model = model
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        # As save_pretrained does for a model that was not loaded.
        conversions = [entry for entry in conversions if not isinstance(entry, PrefixChange)]
        model._weight_conversions = conversions
        converters = [entry for entry in conversions[::-1] if isinstance(entry, WeightConverter)]
        self._converters = [entry.reverse_transform() for entry in converters]
        self._experts = {
            f"{prefix}.{name}": (module, role, f"{prefix}.hosted.bank")
            for prefix, module in model.named_modules()
            if is_experts_module(module)
            for role, name in parameter_names(module).items()
        }

    def revert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of the model as files have them."""
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self.model, dict(tensors))

    def model_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that ``save_pretrained`` writes. Tied ones appear once."""
        persistent = self.model.state_dict().keys()
        ignored = getattr(self.model, "_keys_to_ignore_on_save", None) or ()
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: tensor for name, tensor in named if name in persistent and name not in ignored}

    def stored_as(self, name: str, stored: Mapping[str, Stored]) -> list[str]:
        """Return the names in the checkpoint of a model's tensor: its own, or one for each expert."""
        if name in stored or name not in self._experts:
            return [name]
        experts, role, bank = self._experts[name]
        return [f"{bank}.{expert}.{role}" for expert in range(experts.num_experts)]

    def stack(self, name: str, experts: Sequence[Tensor]) -> Tensor:
        """Return experts of a checkpoint as a stack in the layout of the model's tensor."""
        return in_our_layout(self._experts[name][0], torch.stack(list(experts)))

    def expert_shape(self, name: str, stack: Tensor) -> Shape:
        """Return the shape of one expert in a checkpoint."""
        return tuple(in_our_layout(self._experts[name][0], stack).shape[1:])

    def groups(self, names: Sequence[str]) -> Iterator[tuple[list[str], bool]]:
        """Yield the names of the model's tensors that are converted together.

        False for a tensor that only its name changes."""
        converted: dict[str, list[str]] = {}
        for name in names:
            renamed = next(filter(None, (_renamed(name, converter) for converter in self._converters)), None)
            if renamed is None:
                yield [name], False
            else:
                converted.setdefault(renamed, []).append(name)
        for group in converted.values():
            yield group, True


def _renamed(name: str, converter: Any) -> str | None:
    """Return the name after a conversion; None if it is for other tensors."""
    renamed, pattern = converter.rename_source_key(name)
    return None if pattern is None else renamed


def plan_writing(
    original: OriginalNames, stored: Mapping[str, Stored], dtype: torch.dtype | None
) -> WritingPlan:
    """Plan the files of a checkpoint's tensors, in ``dtype`` or as they are.

    Raises ``ValueError`` where the checkpoint is of another model."""
    tensors = original.model_tensors()
    stored_as = {name: original.stored_as(name, stored) for name in tensors}
    _check_stored(original, tensors, stored_as, stored)
    shapes: dict[str, tuple[torch.dtype, Shape]] = {}
    units: list[Unit] = []
    for group, is_converted in original.groups(list(tensors)):
        inputs = {name: stored_as[name] for name in group}
        written = original.revert({name: tensors[name] for name in group})
        of_checkpoint = stored[inputs[group[0]][0]].dtype
        for name, tensor in written.items():
            chosen = _written_dtype(original.model, group[0], of_checkpoint, dtype)
            shapes[name] = (chosen, tuple(tensor.shape))
        units += _units(original, inputs, tensors, list(written), is_converted)
    used = {name for names in stored_as.values() for name in names}
    unused = tuple(name for name in stored if name not in used and not name.endswith(".hosted.load_E"))
    units.sort(key=lambda unit: stored[next(iter(unit.inputs.values()))[0]].position)
    return WritingPlan(shapes, units, unused)


def _units(
    original: OriginalNames,
    inputs: Mapping[str, Sequence[str]],
    tensors: Mapping[str, Tensor],
    written: Sequence[str],
    is_converted: bool,
) -> Iterator[Unit]:
    (name, names), *others = inputs.items()
    is_stacked = names[0] != name
    if others or not is_stacked:
        yield Unit(inputs, tuple(Output(each) for each in written), is_plain=not is_converted)
        return
    num_experts = len(names)
    of_one = list(original.revert({name: tensors[name][:1]}))
    has_a_name_each = list(written[::num_experts]) == of_one and len(written) == num_experts * len(of_one)
    if not has_a_name_each and list(written) != of_one:
        # A conversion that mixes experts: the whole stack is converted at once.
        yield Unit(inputs, tuple(Output(each) for each in written), is_plain=False)
        return
    for expert, stored_name in enumerate(names):
        if has_a_name_each:
            outputs = tuple(Output(each) for each in written[expert::num_experts])
        else:
            outputs = tuple(Output(each, expert) for each in written)
        yield Unit({name: [stored_name]}, outputs, is_plain=False)


def _written_dtype(
    model: Any, name: str, of_checkpoint: torch.dtype, asked: torch.dtype | None
) -> torch.dtype:
    """Return the type to write a tensor in. Some families keep a few of theirs in fp32."""
    kept = [
        *(getattr(model, "_keep_in_fp32_modules", None) or ()),
        *(getattr(model, "_keep_in_fp32_modules_strict", None) or ()),
    ]
    is_kept = any(re.search(rf"(^|\.){re.escape(part)}(\.|$)", name) for part in kept)
    if asked is None or is_kept or not of_checkpoint.is_floating_point:
        return of_checkpoint
    return asked


def _check_stored(
    original: OriginalNames,
    tensors: Mapping[str, Tensor],
    stored_as: Mapping[str, Sequence[str]],
    stored: Mapping[str, Stored],
) -> None:
    """Raise ``ValueError`` unless the checkpoint has the tensors of the model."""
    missing = [key for keys in stored_as.values() for key in keys if key not in stored]
    if missing:
        raise ValueError(
            f"the checkpoint has no {missing[0]} and {len(missing) - 1} other tensors of "
            f"{type(original.model).__name__}: it is of another model than config.json"
        )
    for name, keys in stored_as.items():
        for key in keys:
            is_expert = key != name
            needed = original.expert_shape(name, tensors[name]) if is_expert else tuple(tensors[name].shape)
            if stored[key].shape != needed:
                raise ValueError(
                    f"{key} has shape {stored[key].shape} in the checkpoint; the model of config.json needs "
                    f"{needed}: they are of different models"
                )
