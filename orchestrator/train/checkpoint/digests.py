"""Digests of the state of a run, by which two runs show that their bits are equal.

The digest of a tensor is the sum over its elements of (the bits of the element as an integer) × (an odd
number that follows from the element's position), in int64 with wrap-around. The order of the additions does
not show in it, so neither do placement and sharding, and every flipped bit changes it: 2^b times an odd
number is not 0 in 64 bits. An expert is a tensor of its own, by its permanent id.

Shapes: E tensors of one shape, N elements of each, in blocks of C elements, S of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experts.balance import gated_layers
from experts.expert_state import copied_expert_names, is_expert_parallel, stacked_names
from experts.moe.bank import ExpertBank
from orchestrator.record.events import kinds
from orchestrator.record.files.log import Log
from orchestrator.train.checkpoint.state import TrainState, model_tensors, optimizer_state
from orchestrator.train.group.world import World
from orchestrator.train.optim.shards import full_tensor

COLUMNS = 2**14
"""Elements of a block. The odd number of an element is that of its block times that of its place in it, so
that two short tables serve tensors of any size."""
_MAX_AT_ONCE = {"cpu": 2**18, "cuda": 2**24}  # elements: the products take 8 bytes each
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ABSENT = "-" * 16
"""In place of the digest of a tensor that a parameter does not have, as one that is not trained."""

Words = NDArray[np.uint64]
"""Digests, whose sums and products wrap around."""


def odd_numbers(count: int, salt: int) -> Words:
    """Return the first odd numbers of a sequence that looks random (splitmix64)."""
    z = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(salt << 32)
    z *= np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def odd_number_of(name: str) -> int:
    """Return the odd number by which the digest of a part counts in that of the whole."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") | 1


@lru_cache(maxsize=16)
def _table(count: int, salt: int, device: torch.device) -> Tensor:
    return torch.from_numpy(odd_numbers(count, salt).view(np.int64)).to(device)


def _block_numbers(count: int, device: torch.device) -> Tensor:
    """Return the odd numbers of blocks; tables of few sizes serve all tensors."""
    return _table(max(64, 1 << (count - 1).bit_length()), 2, device)[:count]


@torch.no_grad()
def digests_of(tensors_EN: Tensor) -> Tensor:
    """Return the digest of each tensor of a stack, as int64 on its device."""
    stack = tensors_EN.detach().contiguous()
    bits_EN = stack.view(_INTEGERS[stack.element_size()]).reshape(len(stack), -1)
    device = bits_EN.device
    columns_C = _table(COLUMNS, 1, device)
    num_tensors, num_elements = bits_EN.shape
    num_blocks = num_elements // COLUMNS
    blocks_S = _block_numbers(num_blocks + 1, device)
    digests_E = torch.zeros(num_tensors, dtype=torch.int64, device=device)
    rest_EN = bits_EN[:, num_blocks * COLUMNS :]
    if rest_EN.shape[1]:
        digests_E += (rest_EN * columns_C[: rest_EN.shape[1]]).sum(1) * blocks_S[num_blocks]
    at_once = _MAX_AT_ONCE.get(device.type, 2**20) // COLUMNS
    bits_ESC = bits_EN[:, : num_blocks * COLUMNS].view(num_tensors, num_blocks, COLUMNS)
    for begin in range(0, num_blocks, at_once):
        end = min(begin + at_once, num_blocks)
        tensors_at_once = max(1, at_once // (end - begin))
        for first in range(0, num_tensors, tensors_at_once):
            part = slice(first, first + tensors_at_once)
            sums_ES = (bits_ESC[part, begin:end] * columns_C).sum(2)
            digests_E[part] += (sums_ES * blocks_S[begin:end]).sum(1)
    return digests_E


class _Named(NamedTuple):
    """A tensor of the state: its slot, "" for the weights, and a name for each of its experts."""

    slot: str
    name: str
    parts: Sequence[str]
    tensor: Tensor


class Digests:
    """Writes ``digest`` events of the state of a run. All workers call it at the same steps."""

    def __init__(
        self, state: TrainState, world: World, log: Log, every: int, steps: Set[int] | None = None
    ) -> None:
        """``every`` is the number of steps between two events; ``steps`` are those of a record that is
        recomputed, in its place."""
        self._state = state
        self._world = world
        self._log = log
        self._every = every
        self._steps = steps

    def is_due(self, step: int, saved: bool = False) -> bool:
        """Return whether a step gets an event; ``saved`` says that a checkpoint of it is saved."""
        if self._steps is not None:
            return step in self._steps
        return self._every > 0 and step > 0 and (saved or step % self._every == 0)

    def is_due_at_start(self, step: int) -> bool:
        """Return whether the state that the run starts from is compared with a record."""
        return self._steps is not None and step in self._steps

    @torch.no_grad()
    def write(self, step: int) -> None:
        """Compute the digests of the state after a step, and record them."""
        model = self._state.model
        slots = ["", *self._slots()]
        banks = {name: module for name, module in model.named_modules() if isinstance(module, ExpertBank)}
        stacks = stacked_names(model)
        names = sorted(name for name in self._weights() if name not in stacks)
        parts = names + [part for name, bank in banks.items() for part in _parts(name, bank)]
        cells = self._sum_over_workers(slots, parts, stacks)
        self._log.write(_event(step, cells, slots, names, banks))

    def _slots(self) -> list[str]:
        """Return the names of the optimizer's tensors, those of all workers."""
        states = self._state.optimizer.state.values()
        own = {slot for state in states for slot, value in state.items() if isinstance(value, Tensor)}
        return sorted({slot for slots in self._world.gather_values(sorted(own)) for slot in slots})

    def _sum_over_workers(
        self, slots: Sequence[str], parts: Sequence[str], stacks: Mapping[str, Sequence[str]]
    ) -> _Cells:
        """Return the digest of each part in each slot.

        Each worker fills the cells of its own experts, and of its share of the rest: the sum has them all."""
        row_of = {slot: row for row, slot in enumerate(slots)}
        column_of = {part: column for column, part in enumerate(parts)}
        device = self._world.device
        filled = torch.zeros(2, len(slots), len(parts), dtype=torch.int64, device=device)
        divided = is_expert_parallel(self._state.model)
        copied = copied_expert_names(self._state.model)
        for number, named in enumerate(self._tensors(stacks)):
            # Sharded tensors are gathered by all workers, in the same order.
            whole = full_tensor(named.tensor.detach())
            if divided and named.name in stacks:
                own = [place for place, part in enumerate(named.parts) if part not in copied]
            else:
                own = list(range(len(named.parts))) if number % self._world.size == self._world.rank else []
            if not own:
                continue
            # Of a counter of steps that a stack has in common, each expert has its own.
            stack = whole.expand(len(named.parts)) if whole.ndim == 0 else whole
            stack = stack if named.name in stacks else whole.reshape(1, -1)
            columns = torch.tensor([column_of[named.parts[place]] for place in own], device=device)
            digests = digests_of(stack.to(device))[torch.tensor(own, device=device)]
            filled[0, row_of[named.slot], columns] = digests
            filled[1, row_of[named.slot], columns] = 1
        digests, counts = self._world.all_reduce(filled).cpu().numpy()
        return _Cells(digests.view(np.uint64), counts)

    def _tensors(self, stacks: Mapping[str, Sequence[str]]) -> Iterator[_Named]:
        """Yield the tensors of this worker, those that all workers have in the same order."""
        optimizer = optimizer_state(self._state, {name: list(parts) for name, parts in stacks.items()})
        found = [("", name, tensor) for name, tensor in self._weights().items()]
        found += [(slot, *item) for slot, named in optimizer.slots.items() for item in named.items()]
        # Stacks last: hosts of experts have different ones.
        for slot, name, tensor in sorted(found, key=lambda entry: (entry[1] in stacks, entry[1], entry[0])):
            yield _Named(slot, name, stacks.get(name, [name]), tensor)

    def _weights(self) -> dict[str, Tensor]:
        """Return the saved parameters, and the biases of gates, which training changes without gradients."""
        model = self._state.model
        saved = model_tensors(model)
        weights = {name: saved[name] for name, _ in model.named_parameters() if name in saved}
        return weights | {f"{name}.gate.bias_E": layer.gate.bias_E for name, layer in gated_layers(model)}


class _Cells(NamedTuple):
    """The digests of all parts, a row for each slot, and how many workers have computed each of them."""

    digests: Words
    counts: NDArray[np.int64]


def _parts(name: str, bank: ExpertBank) -> list[str]:
    """Return the names of a bank's experts' tensors, all roles of an expert together."""
    return [f"{name}.{expert}.{role}" for expert in bank.ids for role in bank.form.roles]


def _event(
    step: int, cells: _Cells, slots: Sequence[str], names: Sequence[str], banks: Mapping[str, ExpertBank]
) -> kinds.Digest:
    """Return the event of the digests after a step.

    All tensors of all experts would be ten times as many. So the experts of a bank are summed by role, and
    the roles by expert: where one tensor of one expert differs, one of each does."""
    tensors = {name: _texts(cells, slice(column, column + 1)) for column, name in enumerate(names)}
    experts: dict[str, str] = {}
    ids: dict[str, tuple[int, ...]] = {}
    # The digest of all is the sum of those of all tensors, each times an odd number of its name.
    whole = np.zeros(len(slots), dtype=np.uint64)
    factors = np.array([odd_number_of(name) for name in names], dtype=np.uint64)
    whole += (cells.digests[:, : len(names)] * factors).sum(1)
    begin = len(names)
    for name, bank in banks.items():
        roles = bank.form.roles
        num_parts = len(bank.ids) * len(roles)
        table = cells.digests[:, begin : begin + num_parts].reshape(len(slots), len(bank.ids), len(roles))
        counts = cells.counts[:, begin : begin + num_parts].reshape(table.shape)
        begin += num_parts
        of_expert = np.array([odd_number_of(f"{name}.{expert}") for expert in bank.ids], dtype=np.uint64)
        by_role = (table * of_expert[:, None]).sum(1)
        for column, role in enumerate(roles):
            tensors[f"{name}.{role}"] = _text(by_role[:, column], counts[:, :, column].sum(1))
            whole += by_role[:, column] * np.uint64(odd_number_of(role))
        of_tensor = [[odd_number_of(f"{slot}/{role}") for role in roles] for slot in slots]
        by_expert = (table * np.array(of_tensor, dtype=np.uint64)[:, None]).sum((0, 2))
        experts[name] = "".join(f"{_folded(int(digest)):08x}" for digest in by_expert)
        if bank.ids != tuple(range(len(bank.ids))):
            ids[name] = tuple(bank.ids)
    of_slot = np.array([odd_number_of(slot) for slot in slots], dtype=np.uint64)
    return kinds.Digest(
        step=step,
        weights=f"{int(whole[0]):016x}",
        state=f"{int((whole * of_slot).sum()):016x}",
        slots=tuple(slots),
        tensors=tensors,
        experts=experts,
        ids=ids,
    )


def _texts(cells: _Cells, columns: slice) -> str:
    return _text(cells.digests[:, columns].sum(1), cells.counts[:, columns].sum(1))


def _text(digests: Words, counts: NDArray[np.int64]) -> str:
    """Return the digests of a tensor in all slots, 16 characters each."""
    pairs = zip(digests.tolist(), counts.tolist(), strict=True)
    return "".join(f"{digest:016x}" if count else ABSENT for digest, count in pairs)


def _folded(digest: int) -> int:
    """Return 32 bits of a digest, which say which expert differs; its tensor's 64 say whether one does."""
    mixed = digest * 0x9E3779B97F4A7C15 % 2**64
    return mixed >> 32
