"""The tensors of a model's files under the names of a checkpoint: experts by id, in our layout.

They are read and converted one by one, so that no more than one is in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from experts.transformers.files.names import TensorGroup, division_of, group_keys, targets_of
from experts.transformers.files.original import Stored
from experts.transformers.files.places import ExpertsPlace, is_hosted, places_of
from experts.transformers.files.reading import converted, expert_parts, whole_parts
from experts.transformers.files.shards import Shards, Slice
from experts.transformers.layout import in_our_layout, parameter_names


class ModelWeights:
    """The weights of a model in its original files, which several threads read.

    ``model`` has no memory, and its experts are ours (``use``)."""

    def __init__(self, model: Any, shards: Shards) -> None:
        self._model = model
        self._shards = shards
        self._places = places_of(model)
        self._experts = _expert_names(model)
        grouping = group_keys(model, shards.entries, self._places)
        self._group_of: dict[str, TensorGroup] = {
            target: group for group in grouping.groups for target in targets_of(group, self._places)
        }
        self._last = threading.local()
        self.stored: Mapping[str, Stored] = dict(self._stored())

    @property
    def packed(self) -> frozenset[str]:
        """The names of matrices whose packed bytes are read from the files as they are."""
        of_target = {
            target: all(self._shards.is_packed(key) for key in group.all_keys) and self._keeps_bytes(target)
            for target, group in self._group_of.items()
        }
        return frozenset(
            name
            for name in self.stored
            if of_target[self._experts[name][1] if name in self._experts else name]
        )

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Return a tensor by its name in a checkpoint, or a range of its rows."""
        if name in self._experts:
            tensor = self._read_expert(*self._experts[name])
        else:
            group = self._group_of[name]
            if group.converter is None:
                return self._shards.read(Slice(group.all_keys[0], rows))
            tensor = self._read_whole(group)[name]
        return tensor if rows is None else tensor[slice(*rows)]

    def _read_expert(self, module: Any, target: str, row: int) -> Tensor:
        """Return one expert in our layout."""
        group = self._group_of[target]
        place = self._places[target]
        assert isinstance(place, ExpertsPlace)
        division = division_of(group, place, self._shapes(group))
        if division == "none":
            value = self._read_whole(group)[target][row : row + 1]
        else:
            parts = expert_parts(group, division, row)
            value = converted(self._model, group, parts, self._places, self._shards, row)[target]
        return in_our_layout(module, value)[0]

    def _keeps_bytes(self, target: str) -> bool:
        """Whether a tensor is read without a conversion of its own, or one expert at a time."""
        place, group = self._places[target], self._group_of[target]
        if not isinstance(place, ExpertsPlace):
            return group.converter is None
        return division_of(group, place, self._shapes(group)) != "none"

    def _read_whole(self, group: TensorGroup) -> Mapping[str, Tensor]:
        """Return all tensors of a group. The last is kept: its experts are asked for one after another."""
        if getattr(self._last, "group", None) is not group:
            self._last.group = group
            self._last.tensors = converted(self._model, group, whole_parts(group), self._places, self._shards)
        return self._last.tensors

    def _shapes(self, group: TensorGroup) -> dict[str, tuple[int, ...]]:
        return {key: self._shards.entries[key].shape for key in group.all_keys}

    def _stored(self) -> Iterator[tuple[str, Stored]]:
        numbers = {file: number for number, file in enumerate(sorted(self._files()))}

        def entry(target: str, shape: tuple[int, ...]) -> Stored:
            key = self._group_of[target].all_keys[0]
            found = self._shards.entries[key]
            return Stored(found.dtype, shape, (numbers[self._shards.file_of(key)], found.begin))

        for target in self._group_of:
            place = self._places[target]
            if not isinstance(place, ExpertsPlace):
                yield target, entry(target, place.shape)
        for name, (module, target, _) in self._experts.items():
            if target in self._group_of:
                shape = in_our_layout(module, torch.empty(self._places[target].shape, device="meta")).shape
                yield name, entry(target, tuple(shape[1:]))

    def _files(self) -> set[str]:
        return {self._shards.file_of(name) for name in self._shards.entries}


def _expert_names(model: Any) -> dict[str, tuple[Any, str, int]]:
    """Return the module, the model's tensor and the row of each expert's parameters, by name."""
    names: dict[str, tuple[Any, str, int]] = {}
    for prefix, module in model.named_modules():
        if is_hosted(module):
            experts: Any = module
            for role, parameter in parameter_names(experts).items():
                for row, expert_id in enumerate(experts.hosted.bank.ids):
                    name = f"{prefix}.hosted.bank.{expert_id}.{role}"
                    names[name] = (experts, f"{prefix}.{parameter}", row)
    return names
