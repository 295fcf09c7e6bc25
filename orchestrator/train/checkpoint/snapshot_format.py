"""The bytes of a snapshot, and the snapshots of hosts merged into the contents of a checkpoint.

Every host's snapshot has a part with its own experts; the main host's also has the dense part. A
part is one array of bytes: the tensors, each aligned, then a JSON text with their names and with
the state that is not a tensor."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from orchestrator.checkpoint.files import Contents

_ALIGNMENT_BYTES = 64
_NUM_BUFFERS = 2  # a host writes its snapshots into two buffers in turn

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class SnapshotHeader:
    """The origin of a snapshot: all that the driver needs to handle it.

    Its contents are described in the bytes."""

    generation: int
    """The generation of the host's process group."""
    step: int
    rank: int
    size: int
    experts_end: int
    """Where the tensors of the experts' part end and its JSON text begins."""
    dense_end: int
    """The same of the dense part; 0 on hosts without one."""
    held: Mapping[str, tuple[int, ...]]
    """The ids of the host's experts, by the name of their bank."""
    stall_s: float = 0.0
    """How long the snapshot kept this host from its steps."""
    taken_at: float = 0.0
    """When it was taken, in unix seconds."""

    def holds(self, bank: str, expert: int) -> bool:
        return expert in self.held.get(bank, ())


class SnapshotPart(NamedTuple):
    """One part of a host's snapshot."""

    rank: int
    end: int
    """Where the tensors end and the JSON text begins."""
    data: Bytes


@dataclass(frozen=True)
class TensorEntry:
    """The place of one tensor in the bytes, under its name in a checkpoint."""

    kind: str
    """Either ``model`` or ``optimizer``."""
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class LiveTensor(NamedTuple):
    """A tensor of the live state that a snapshot copies."""

    kind: str
    name: str
    tensor: Tensor
    experts: list[str] | None
    """The names of the experts that are stacked in the tensor, if any."""


class _Form(NamedTuple):
    """A live tensor without its data. Equal forms have equal layouts."""

    kind: str
    name: str
    shape: torch.Size
    dtype: torch.dtype
    experts: list[str] | None


class SnapshotLayout:
    """The place of each tensor in the bytes.

    It is computed once and used for every snapshot of the same tensors."""

    def __init__(self, tensors: Sequence[LiveTensor]) -> None:
        self._forms = _forms(tensors)
        self._offsets: list[int] = []
        self.tensor_bytes = 0
        for form in self._forms:
            self._offsets.append(self.tensor_bytes)
            num_bytes = form.shape.numel() * form.dtype.itemsize
            self.tensor_bytes += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        entries = [
            astuple(entry)
            for live, offset in zip(tensors, self._offsets, strict=True)
            for entry in _entries(live, offset)
        ]
        self._entries_json = json.dumps(entries)
        self._views: dict[int, list[Tensor]] = {}

    def fits(self, tensors: Sequence[LiveTensor]) -> bool:
        return self._forms == _forms(tensors)

    def describe(self, plain_state: dict[str, Any]) -> bytes:
        """Return the text that follows the tensors."""
        return f'{{"tensors": {self._entries_json}, "state": {json.dumps(plain_state)}}}'.encode()

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return a view into the buffer for each tensor.

        The views of the two buffers in use are kept."""
        address = buffer.data_ptr()
        if address not in self._views:
            forms = zip(self._offsets, self._forms, strict=True)
            self._views[address] = [_view(buffer, offset, form.shape, form.dtype) for offset, form in forms]
            # A buffer that was replaced by a larger one is not used again: forget its views.
            self._views = dict(list(self._views.items())[-_NUM_BUFFERS:])
        return self._views[address]


def _forms(tensors: Sequence[LiveTensor]) -> list[_Form]:
    return [_Form(kind, name, t.shape, t.dtype, experts) for kind, name, t, experts in tensors]


def _view(buffer: Tensor, offset: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return buffer[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)


def _entries(live: LiveTensor, offset: int) -> Iterator[TensorEntry]:
    """Yield the entry of a tensor, or one per expert.

    A scalar (Adam's step counter) belongs to every expert."""
    kind, name, tensor, experts = live
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    if experts is None:
        yield TensorEntry(kind, name, dtype, shape, offset)
        return
    # At the first slash: the name of a module may have slashes of its own.
    slot = name.partition("/")[0] if kind == "optimizer" else ""
    stride = tensor[0].numel() * tensor.itemsize if shape else 0
    for index, expert in enumerate(experts):
        expert_name = f"{slot}/{expert}" if slot else expert
        yield TensorEntry(kind, expert_name, dtype, shape[1:], offset + index * stride)


@dataclass(frozen=True)
class CollectedPart:
    """The tensors of a part and the text that follows them, before they are copied."""

    layout: SnapshotLayout
    tensors: list[Tensor]
    text: bytes

    @property
    def num_bytes(self) -> int:
        return self.layout.tensor_bytes + len(self.text)

    def copy_into(self, buffer: Tensor) -> Bytes:
        """Copy the part. The bytes are complete once the device has done what it was given."""
        if self.tensors:
            views = self.layout.views(buffer)
            torch._foreach_copy_(views, self.tensors, non_blocking=True)
        # The text is written while the device still copies.
        data = buffer.numpy()[: self.num_bytes]
        data[self.layout.tensor_bytes :] = np.frombuffer(self.text, dtype=np.uint8)
        return data


def read_part(part: SnapshotPart) -> tuple[list[TensorEntry], dict[str, Any]]:
    """Return the entries of a part's tensors, and the state that is not a tensor."""
    description = json.loads(part.data[part.end :].tobytes())
    entries = [
        TensorEntry(kind, name, dtype, tuple(shape), offset)
        for kind, name, dtype, shape, offset in description["tensors"]
    ]
    return entries, description["state"]


def merge_snapshots(
    dense: SnapshotPart, experts: Sequence[SnapshotPart], rank: int, without: Set[str]
) -> Contents:
    """Return the dense part and experts' parts as the contents of a checkpoint, for the host of ``rank``.

    Tensors named in ``without``, which that host does not need, are left out. The others share
    the memory of the snapshots. The state of Python's generators is that of the same rank, where
    there was one."""
    tensors: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
    optimizer_values: dict[str, Any] = {}
    main_state: dict[str, Any] = {}
    random_state = None
    for part in (dense, *experts):
        entries, state = read_part(part)
        main_state = main_state or state
        optimizer_values |= state["optimizer"]["values"]
        if part.rank == rank:
            random_state = state["random"]
        for entry in entries:
            name = entry.name.partition("/")[2] if entry.kind == "optimizer" else entry.name
            if name not in without:
                tensors[entry.kind][entry.name] = _tensor(entry, part.data)
    optimizer = {**main_state["optimizer"], "values": optimizer_values}
    random_state = main_state["random"] if random_state is None else random_state
    return Contents(tensors, {**main_state, "optimizer": optimizer, "random": random_state})


def _tensor(entry: TensorEntry, data: Bytes) -> Tensor:
    dtype = getattr(torch, entry.dtype)
    num_bytes = dtype.itemsize * int(np.prod(entry.shape, dtype=np.int64))
    if num_bytes == 0:
        return torch.empty(entry.shape, dtype=dtype)
    with warnings.catch_warnings():
        # Arrays in Ray's object store are read-only, and torch warns of it. Restoring only reads
        # them.
        warnings.simplefilter("ignore", UserWarning)
        flat = torch.from_numpy(data[entry.offset : entry.offset + num_bytes])
    return flat.view(dtype).view(entry.shape)
