"""Copies of a host's state in memory: taken every few steps in one go, as a single run of bytes that others can hold, and put back
after a failure without a look at the disk. The main host's holds the dense part; every host's its own experts."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence, Set
from dataclasses import asdict, astuple, dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from experts.expert_state import stacked_names
from experts.membership import GroupMembership
from orchestrator.train.checkpoint.pinned_buffers import PinnedBuffers
from orchestrator.train.checkpoint.state import Progress, model_tensors, optimizer_state, random_state
from orchestrator.train.checkpoint.store import Contents
from orchestrator.train.parts.precision import Precision
from orchestrator.train.parts.world import World

_ALIGNED = 64  # bytes that each tensor begins at a multiple of

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies in the bytes, under the name that a checkpoint has for it."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Header:
    """Whose the bytes are. All that is needed to look after them: what they hold is written behind them."""

    generation: int
    """Of the group that the host was a member of."""
    step: int
    rank: int
    size: int
    end: int
    """Of the tensors; a text follows that names them, with all that is no tensor."""


class SnapshotSink(Protocol):
    """Holds the last snapshots until the driver has fetched them."""

    def wait_for_space(self, membership: GroupMembership) -> None:
        """Wait until the copy before the last one is needed no more."""
        ...

    def put(self, header: Any, data: Any) -> None: ...


HostSnapshots = Sequence[tuple[Header, Bytes]]


@dataclass(frozen=True)
class SnapshotTarget:
    """Where a host writes its snapshots, and the generation of its process group."""

    sink: SnapshotSink
    buffers: PinnedBuffers
    generation: int


class Snapshots:
    """Takes copies every so many steps. All hosts take theirs after the same steps."""

    def __init__(
        self,
        every: int,
        target: SnapshotTarget,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        world: World,
    ) -> None:
        self.every = every
        self._generation = target.generation
        self._sink = target.sink
        self._buffers = target.buffers
        self._world = world
        self._model, self._optimizer, self._precision = model, optimizer, precision
        self._last = -1
        self._prepared = False
        self._layout = _Layout([])

    def due(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0

    def prepare(self) -> None:
        """After a step: what copies need is known now, for an optimizer has nothing before its first."""
        if not self._prepared and self.every > 0:
            self._prepared = True
            _, end, told = self._look(Progress())
            self._buffers.prepare(end + len(told))

    def take(self, progress: Progress) -> None:
        """Copy what is needed to go on from here, unless this step is copied already."""
        if progress.step == self._last:
            return
        self._last = progress.step
        self._sink.wait_for_space(self._world.membership)
        tensors, end, told = self._look(progress)
        room = self._buffers.next_buffer(end + len(told))
        _fill(self._layout.places(room), tensors)
        data = room.numpy()[: end + len(told)]
        data[end:] = np.frombuffer(told, dtype=np.uint8)
        if self._world.device.type == "cuda":
            torch.cuda.current_stream(self._world.device).synchronize()
        self._sink.put(Header(self._generation, progress.step, self._world.rank, self._world.size, end), data)

    def _look(self, progress: Progress) -> tuple[list[Tensor], int, bytes]:
        """The tensors that this host is to keep, where their bytes end, and the text that is to follow."""
        stacked = stacked_names(self._model)
        slots, values, groups = optimizer_state(self._model, self._optimizer, stacked)
        named = [
            ("model", name, name, tensor.detach()) for name, tensor in model_tensors(self._model).items()
        ]
        named += [
            ("optimizer", f"{slot}/{name}", name, tensor)
            for slot, of_slot in slots.items()
            for name, tensor in of_slot.items()
        ]
        kept = [
            (kind, key, tensor, stacked.get(name))
            for kind, key, name, tensor in named
            if self._world.is_main or name in stacked
        ]
        if not self._layout.fits(kept):
            self._layout = _Layout(kept)
        state = {
            "progress": asdict(progress),
            "precision": self._precision.state_dict(),
            "optimizer": {"kind": type(self._optimizer).__name__, "groups": groups, "values": values},
            "random": random_state(),
        }
        told = f'{{"pieces": {self._layout.told}, "state": {json.dumps(state)}}}'
        return [tensor for _, _, tensor, _ in kept], self._layout.end, told.encode()


_Kept = list[tuple[str, str, Tensor, list[str] | None]]
"""Kind, name and tensor, with the names of its pieces where experts are stacked in it."""


class _Layout:
    """Where each tensor lies in the bytes. From one copy to the next it is the same, unless the tensors are others."""

    def __init__(self, kept: _Kept) -> None:
        self._like = _like(kept)
        self._offsets, self.end = _offsets([tensor for _, _, tensor, _ in kept])
        pieces = [
            astuple(piece)
            for entry, offset in zip(kept, self._offsets, strict=True)
            for piece in _pieces(*entry, offset)
        ]
        self.told = json.dumps(pieces)
        self._places: dict[int, list[Tensor]] = {}

    def fits(self, kept: _Kept) -> bool:
        return self._like == _like(kept)

    def places(self, room: Tensor) -> list[Tensor]:
        """Each tensor's place in the room. Those of the two rooms in use are remembered."""
        if room.data_ptr() not in self._places:
            forms = zip(self._offsets, self._like, strict=True)
            self._places[room.data_ptr()] = [
                _place(room, offset, shape, dtype) for offset, (_, _, shape, dtype, _) in forms
            ]
            self._places = dict(list(self._places.items())[-2:])
        return self._places[room.data_ptr()]


def _like(kept: _Kept) -> list[tuple[str, str, torch.Size, torch.dtype, list[str] | None]]:
    return [(kind, key, tensor.shape, tensor.dtype, experts) for kind, key, tensor, experts in kept]


def _offsets(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.numel() * tensor.itemsize // _ALIGNED) * _ALIGNED
    return offsets, end


def _place(room: Tensor, offset: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return room[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)


def _fill(places: list[Tensor], tensors: list[Tensor]) -> None:
    if tensors:
        torch._foreach_copy_(places, tensors, non_blocking=True)  # pyright: ignore[reportPrivateImportUsage]


def _pieces(
    kind: str, key: str, tensor: Tensor, experts: list[str] | None, offset: int
) -> Iterator[TensorEntry]:
    """A tensor by expert. A scalar of a stacked parameter (Adam's step counter) is each expert's own."""
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if experts is None:
        yield TensorEntry(kind, key, dtype, shape, offset)
        return
    slot = key.rpartition("/")[0] if kind == "optimizer" else ""
    stride = tensor[0].numel() * tensor.itemsize if shape else 0
    for number, expert in enumerate(experts):
        yield TensorEntry(
            kind, f"{slot}/{expert}" if slot else expert, dtype, shape[1:], offset + number * stride
        )


def read_snapshot(header: Header, data: Bytes) -> tuple[list[TensorEntry], dict[str, Any]]:
    """Which tensors a copy holds, and all that is no tensor."""
    told = json.loads(data[header.end :].tobytes())
    return [
        TensorEntry(kind, name, dtype, tuple(shape), offset)
        for kind, name, dtype, shape, offset in told["pieces"]
    ], told["state"]


def merge_snapshots(copies: HostSnapshots, rank: int, without: Set[str]) -> Contents:
    """The copies of all hosts as the contents of a checkpoint, but for the names ``without`` which the host of that ``rank`` does.
    Tensors share the memory of the copies. Python's random state is that of the same rank, where there was one."""
    states: dict[int, dict[str, Any]] = {}
    tensors: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
    values: dict[str, Any] = {}
    for header, data in copies:
        pieces, states[header.rank] = read_snapshot(header, data)
        values |= states[header.rank]["optimizer"]["values"]
        for piece in pieces:
            name = piece.name.partition("/")[2] if piece.kind == "optimizer" else piece.name
            if name not in without:
                tensors[piece.kind][piece.name] = _tensor(piece, data)
    optimizer = {**states[0]["optimizer"], "values": values}
    return Contents(
        tensors, {**states[0], "optimizer": optimizer, "random": states.get(rank, states[0])["random"]}
    )


def _tensor(piece: TensorEntry, data: Bytes) -> Tensor:
    dtype = getattr(torch, piece.dtype)
    size = dtype.itemsize * int(np.prod(piece.shape, dtype=np.int64))
    with warnings.catch_warnings():  # what lies in shared memory cannot be written to, and is not going to be
        warnings.simplefilter("ignore", UserWarning)
        flat = torch.from_numpy(data[piece.offset : piece.offset + size])
    return (flat if size else torch.empty(0, dtype=torch.uint8)).view(dtype).view(piece.shape)
