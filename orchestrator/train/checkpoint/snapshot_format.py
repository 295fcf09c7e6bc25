"""The bytes of a snapshot, and the snapshots of hosts merged into the contents of a checkpoint.

Every host's snapshot has its own part: its experts, and its shards of the dense part, if that is sharded.
The main host's also has the dense part, without what is in shards. A part is one array of bytes: the
tensors, each aligned, then a JSON text with their names and with the state that is not a tensor."""

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
from orchestrator.checkpoint.shard_rows import ShardRows, join_rows

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
    own_end: int
    """Where the tensors of the host's own part end and its JSON text begins."""
    dense_end: int
    """The same of the dense part; 0 on hosts without one."""
    held: Mapping[str, tuple[int, ...]]
    """The ids of the host's experts, by the name of their bank."""
    sharded: bool = False
    """Whether the dense part is divided among the hosts, by ``shard_rows``."""
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
    rows: ShardRows | None = None
    """The rows of a shard; None for a whole tensor."""

    @property
    def parameter(self) -> str:
        """The name of the parameter, or of the buffer."""
        return _parameter(self.kind, self.name)


class LiveTensor(NamedTuple):
    """A tensor of the live state that a snapshot copies."""

    kind: str
    name: str
    tensor: Tensor
    experts: list[str] | None = None
    """The names of the experts that are stacked in the tensor, if any."""
    rows: ShardRows | None = None
    """The rows of a shard; None for a whole tensor."""

    @property
    def is_own(self) -> bool:
        """Whether this host alone has it."""
        return self.experts is not None or self.rows is not None


class SnapshotLayout:
    """The place of each tensor in the bytes.

    It is computed once and used for every snapshot of the same tensors."""

    def __init__(self, tensors: Sequence[LiveTensor]) -> None:
        self._forms = _forms(tensors)
        self._shapes = [(live.tensor.shape, live.tensor.dtype) for live in tensors]
        self._offsets: list[int] = []
        self.tensor_bytes = 0
        for shape, dtype in self._shapes:
            self._offsets.append(self.tensor_bytes)
            num_bytes = shape.numel() * dtype.itemsize
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
            places = zip(self._offsets, self._shapes, strict=True)
            self._views[address] = [_view(buffer, offset, *form) for offset, form in places]
            # A buffer that was replaced by a larger one is not used again: forget its views.
            self._views = dict(list(self._views.items())[-_NUM_BUFFERS:])
        return self._views[address]


def _forms(tensors: Sequence[LiveTensor]) -> list[tuple[Any, ...]]:
    """Return the tensors without their data. Equal forms have equal layouts."""
    return [(kind, name, t.shape, t.dtype, experts, rows) for kind, name, t, experts, rows in tensors]


def _view(buffer: Tensor, offset: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return buffer[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)


def _entries(live: LiveTensor, offset: int) -> Iterator[TensorEntry]:
    """Yield the entry of a tensor, or one per expert.

    A scalar (Adam's step counter) belongs to every expert."""
    kind, name, tensor, experts, rows = live
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    if experts is None:
        yield TensorEntry(kind, name, dtype, shape, offset, rows)
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
        TensorEntry(kind, name, dtype, tuple(shape), offset, ShardRows(*rows) if rows else None)
        for kind, name, dtype, shape, offset, rows in description["tensors"]
    ]
    return entries, description["state"]


def merge_snapshots(
    dense: SnapshotPart,
    own_parts: Sequence[SnapshotPart],
    rank: int,
    without: Set[str],
    wanted: Mapping[str, ShardRows],
) -> Contents:
    """Return the dense part and hosts' own parts as the contents of a checkpoint, for the host of ``rank``.

    Tensors named in ``without``, which that host does not need, are left out; of tensors in shards it gets
    the ``wanted`` rows, by the parameter's name. All share the memory of the snapshots, but for rows that
    several hosts had. The state of Python's generators is that of the same rank, where there was one."""
    pieces: dict[tuple[str, str], list[tuple[ShardRows, Tensor]]] = {}
    tensors: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
    optimizer_values: dict[str, Any] = {}
    main_state: dict[str, Any] = {}
    random_state = None
    for part in (dense, *own_parts):
        entries, state = read_part(part)
        main_state = main_state or state
        optimizer_values |= state["optimizer"]["values"]
        if part.rank == rank:
            random_state = state["random"]
        for entry in entries:
            if entry.rows is not None:
                piece = entry.rows, _tensor(entry, part.data)
                pieces.setdefault((entry.kind, entry.name), []).append(piece)
            elif entry.parameter not in without:
                tensors[entry.kind][entry.name] = _tensor(entry, part.data)
    shards: dict[str, set[str]] = {"model": set(), "optimizer": set()}
    for (kind, key), found in pieces.items():
        rows = wanted[_parameter(kind, key)]
        tensors[kind][key] = join_rows(found, rows)
        if not rows.are_all:
            shards[kind].add(key)
    optimizer = {**main_state["optimizer"], "values": optimizer_values}
    random_state = main_state["random"] if random_state is None else random_state
    return Contents(tensors, {**main_state, "optimizer": optimizer, "random": random_state}, shards)


def _parameter(kind: str, key: str) -> str:
    """Return the name of the parameter of a tensor."""
    # At the first slash: the name of a module may have slashes of its own.
    return key.partition("/")[2] if kind == "optimizer" else key


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
