"""Copies of a host's state in memory: taken every few steps in one go, as a single run of bytes that others can hold, and put back
after a failure without a look at the disk. The main host's holds the dense part; every host's its own experts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from experts.expert_state import stacked_names
from experts.membership import Membership
from orchestrator.train.checkpoint import Contents
from orchestrator.train.precision import Precision
from orchestrator.train.rooms import Rooms
from orchestrator.train.state import Progress, model_tensors, optimizer_state, random_state
from orchestrator.train.world import World

_ALIGNED = 64  # bytes that each tensor begins at a multiple of

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Piece:
    """Where a tensor lies in the bytes, under the name that a checkpoint has for it."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Header:
    """What the bytes of one host hold."""

    epoch: int
    """Of the group that the host was a member of."""
    step: int
    rank: int
    size: int
    pieces: tuple[Piece, ...]
    state: dict[str, Any]


class Outbox(Protocol):
    """Where copies are fetched from, by someone else and in their own time."""

    def make_room(self, life: Membership) -> None:
        """Wait until the copy before the last one is needed no more."""
        ...

    def put(self, header: Any, data: Any) -> None: ...


Copies = Sequence[tuple[Header, Bytes]]


class Snapshots:
    """Takes copies every so many steps. All hosts take theirs after the same steps."""

    def __init__(
        self,
        every: int,
        epoch: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        world: World,
        outbox: Outbox,
        rooms: Rooms,
    ) -> None:
        self.every, self._epoch, self._outbox, self._world = every, epoch, outbox, world
        self._model, self._optimizer, self._precision = model, optimizer, precision
        self._rooms, self._last, self._prepared = rooms, -1, False

    def due(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0

    def prepare(self) -> None:
        """After a step: what copies need is known now, for an optimizer has nothing before its first."""
        if not self._prepared and self.every > 0:
            self._prepared = True
            self._rooms.prepare(_offsets([tensor for _, _, tensor, _ in self._state()[0]])[1])

    def take(self, progress: Progress) -> None:
        """Copy what is needed to go on from here, unless this step is copied already."""
        if progress.step == self._last:
            return
        self._last = progress.step
        self._outbox.make_room(self._world.life)
        tensors, values, groups = self._state()
        offsets, size = _offsets([tensor for _, _, tensor, _ in tensors])
        room = self._rooms.next(size)
        for (_, _, tensor, _), offset in zip(tensors, offsets, strict=True):
            _place(room, offset, tensor).copy_(tensor, non_blocking=True)
        if self._world.device.type == "cuda":
            torch.cuda.current_stream(self._world.device).synchronize()
        pieces = tuple(piece for entry, offset in zip(tensors, offsets, strict=True) for piece in _pieces(*entry, offset))
        state = {
            "progress": asdict(progress),
            "precision": self._precision.state(),
            "optimizer": {"kind": type(self._optimizer).__name__, "groups": groups, "values": values},
            "random": random_state(),
        }
        header = Header(self._epoch, progress.step, self._world.rank, self._world.size, pieces, state)
        self._outbox.put(header, room[:size].numpy())

    def _state(self) -> tuple[list[tuple[str, str, Tensor, list[str] | None]], dict[str, Any], list[dict[str, Any]]]:
        """Kind, name and tensor of what this host is to keep, with the names of its pieces where experts are stacked in it."""
        stacked = stacked_names(self._model)
        slots, values, groups = optimizer_state(self._model, self._optimizer, stacked)
        named = [("model", name, name, tensor.detach()) for name, tensor in model_tensors(self._model).items()]
        named += [("optimizer", f"{slot}/{name}", name, tensor) for slot, of_slot in slots.items() for name, tensor in of_slot.items()]
        kept = [(kind, key, tensor, stacked.get(name)) for kind, key, name, tensor in named if self._world.is_main or name in stacked]
        return kept, values, groups


def _offsets(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.numel() * tensor.itemsize // _ALIGNED) * _ALIGNED
    return offsets, end


def _place(room: Tensor, offset: int, tensor: Tensor) -> Tensor:
    return room[offset : offset + tensor.numel() * tensor.itemsize].view(tensor.dtype).view(tensor.shape)


def _pieces(kind: str, key: str, tensor: Tensor, experts: list[str] | None, offset: int) -> Iterator[Piece]:
    """A tensor by expert. A scalar of a stacked parameter (Adam's step counter) is each expert's own."""
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if experts is None:
        yield Piece(kind, key, dtype, shape, offset)
        return
    slot = key.rpartition("/")[0] if kind == "optimizer" else ""
    stride = tensor[0].numel() * tensor.itemsize if shape else 0
    for number, expert in enumerate(experts):
        yield Piece(kind, f"{slot}/{expert}" if slot else expert, dtype, shape[1:], offset + number * stride)


def put_together(copies: Copies, rank: int, without: Set[str]) -> Contents:
    """The copies of all hosts as the contents of a checkpoint, but for the names ``without`` which the host of that ``rank`` does.
    Tensors share the memory of the copies. Python's random state is that of the same rank, where there was one."""
    main = next(header for header, _ in copies if header.rank == 0)
    own = next((header for header, _ in copies if header.rank == rank), main)
    tensors: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
    values: dict[str, Any] = {}
    for header, data in copies:
        values |= header.state["optimizer"]["values"]
        for piece in header.pieces:
            name = piece.name.partition("/")[2] if piece.kind == "optimizer" else piece.name
            if name not in without:
                tensors[piece.kind][piece.name] = _tensor(piece, data)
    optimizer = {**main.state["optimizer"], "values": values}
    return Contents(tensors, {**main.state, "optimizer": optimizer, "random": own.state["random"]})


def _tensor(piece: Piece, data: Bytes) -> Tensor:
    dtype = getattr(torch, piece.dtype)
    size = dtype.itemsize * int(np.prod(piece.shape, dtype=np.int64))
    with warnings.catch_warnings():  # what lies in shared memory cannot be written to, and is not going to be
        warnings.simplefilter("ignore", UserWarning)
        flat = torch.from_numpy(data[piece.offset : piece.offset + size])
    return (flat if size else torch.empty(0, dtype=torch.uint8)).view(dtype).view(piece.shape)
