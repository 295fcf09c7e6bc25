"""The names of tensors in files and in a model, by ``transformers``' own conversions.

Files have a tensor for each expert, or stacks under other names. ``transformers`` describes per family
how they become the model's tensors; the same objects describe the way back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from experts.transformers.files.places import ExpertsPlace, Places


@dataclass
class TensorGroup:
    """The tensors of files that become one tensor of the model, or a few of one conversion."""

    target: str
    """The name of the model's tensor; the first of several."""
    converter: Any | None
    """A ``WeightConverter``; None for a tensor that only its name changes."""
    keys: dict[str, list[str]] = field(default_factory=dict)
    """The names in the files by the converter's patterns, experts in their order."""

    @property
    def all_keys(self) -> list[str]:
        return [key for keys in self.keys.values() for key in keys]


@dataclass(frozen=True)
class Grouping:
    """All tensors of the files by what becomes of them."""

    groups: Sequence[TensorGroup]
    unexpected: Sequence[str]
    """Names in the files that the model has no tensor for."""


def group_keys(model: Any, keys: Iterable[str], places: Places) -> Grouping:
    """Find the model's tensor of each name in the files."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key

    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    converter_of = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    groups: dict[str, TensorGroup] = {}
    unexpected: list[str] = []
    # In natural order: experts.10 comes after experts.9.
    for key in sorted(keys, key=dot_natural_key):
        target, pattern = _target_name(model, key, renamings, converters, places)
        if target not in places:
            unexpected.append(key)
            continue
        converter = None if pattern is None else converter_of[pattern]
        group = groups.setdefault(target, TensorGroup(target, converter))
        if (converter is None) != (group.converter is None):
            raise ValueError(f"{key} and {group.all_keys[0]} both become {target}; the files hold it twice")
        group.keys.setdefault(pattern or key, []).append(key)
    return Grouping(list(groups.values()), [key for key in unexpected if not _is_ignored(model, key)])


def _target_name(
    model: Any, key: str, renamings: list[Any], converters: list[Any], places: Places
) -> tuple[str, str | None]:
    from transformers.core_model_loading import rename_source_key

    prefix = model.base_model_prefix
    state: Any = places
    target, pattern = rename_source_key(key, renamings, converters, prefix, state)
    if target not in places and key in places:
        # Files in the merged layout: the name is the model's own already.
        return rename_source_key(key, [], [], prefix, state)
    return target, pattern


def _is_ignored(model: Any, key: str) -> bool:
    """Whether the family expects the name in files, and has no use for it."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
    return any(re.search(pattern, key) for pattern in patterns)


class _Shapes:
    """Answers the questions of conversions about the model's shapes.

    The model itself cannot: the experts' stacks are in our layout, and have the held experts only."""

    def __init__(self, places: Places, row: int | None) -> None:
        self._places = places
        self._row = row

    def get_parameter(self, name: str) -> Tensor:
        place = self._places[name]
        if isinstance(place, ExpertsPlace) and self._row is not None:
            return torch.empty(place.held[self._row].shape, device="meta")
        return torch.empty(place.shape, device="meta")

    get_parameter_or_buffer = get_parameter


def convert(
    group: TensorGroup,
    inputs: Mapping[str, Sequence[Tensor]],
    config: Any,
    places: Places,
    row: int | None = None,
) -> dict[str, Tensor]:
    """Return the model's tensors from those of the files, which come by their patterns.

    With ``row``, both are those of one expert."""
    converter: Any = deepcopy(group.converter)
    for pattern, tensors in inputs.items():
        for tensor in tensors:
            converter.add_tensor(group.target, pattern, pattern, tensor)
    converted = converter.convert(group.target, model=_Shapes(places, row), config=config)
    return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


Division = Literal["names", "rows", "none"]
"""How a host finds one expert in files: by its own tensors, as a row of stacks, or not at all."""


def division_of(group: TensorGroup, place: ExpertsPlace, shapes: Mapping[str, tuple[int, ...]]) -> Division:
    """Return how an expert is found in the tensors of a group. ``shapes`` are those in the files.

    Raises ``ValueError`` where experts are missing."""
    num_experts = place.shape[0]
    operations = list(group.converter.operations) if group.converter is not None else []
    merges = [i for i, operation in enumerate(operations) if type(operation).__name__ == "MergeModulelist"]
    for keys in group.keys.values():
        found = len(keys) if merges else shapes[keys[0]][:1]
        if found not in (num_experts, (num_experts,)):
            raise ValueError(
                f"the files hold {found if merges else shapes[keys[0]]} of {keys[0]} for {group.target}; the "
                f"model has {num_experts} experts: config.json and the weights are of different models"
            )
    if not merges:
        return "rows" if _keep_rows(operations) else "none"
    merge = operations[merges[0]]
    return "names" if merge.dim == 0 and _keep_rows(operations[merges[0] + 1 :]) else "none"


def _keep_rows(operations: Sequence[Any]) -> bool:
    """Whether the operations leave the first dimension, that of the experts, as it is."""
    dims_of = {
        "Concatenate": ("dim",),
        "Chunk": ("dim",),
        "Interleave": ("dim",),
        "Transpose": ("dim0", "dim1"),
    }
    for operation in operations:
        dims = dims_of.get(type(operation).__name__)
        if dims is None or any(getattr(operation, dim) == 0 for dim in dims):
            return False
    return True


def check_complete(model: nn.Module, grouping: Grouping, places: Places) -> None:
    """Raise ``ValueError`` for tensors of the model that the files do not hold."""
    found = {name for group in grouping.groups for name in targets_of(group, places)}
    found_memory = {_memory(places[name]) for name in found}
    missing = [name for name in places if name not in found and _memory(places[name]) not in found_memory]
    if not missing:
        return
    unexpected = grouping.unexpected
    others = f" They hold {_listed(unexpected)}, which the model has not." if unexpected else ""
    raise ValueError(
        f"the files have no {_listed(missing)}, which {type(model).__name__} needs.{others} config.json and "
        "the weights are of different models, or files are missing: download them again"
    )


def _memory(place: Any) -> object:
    """Return a key that is the same for tied tensors, and different for others."""
    if isinstance(place, ExpertsPlace):
        return place.name
    return (place.memory.device, place.memory.data_ptr()) if place.memory.numel() else place.name


def targets_of(group: TensorGroup, places: Places) -> list[str]:
    """Return the names of all tensors that a group becomes."""
    if group.converter is None:
        return [group.target]
    patterns = group.converter.target_patterns
    first = next((pattern for pattern in patterns if pattern in group.target), None)
    if first is None:
        return [group.target]
    return [name for name in (group.target.replace(first, p, 1) for p in patterns) if name in places]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
