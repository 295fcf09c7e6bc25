"""Gradients of experts that have copies on several hosts.

Each copy computes some of the expert's tokens. The sum of their gradients is the gradient of the expert.
Each of its hosts sums a share of the gradient and sends the sum to the others: a reduce-scatter and an
all-gather among the copies, in pieces, so that little memory is needed beside the gradients. All pieces go
through the exchange of all hosts, which those without a copy enter with nothing to send."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn

from experts.copy_costs import PIECE_ELEMENTS
from experts.moe.bank import ExpertBank
from experts.moe.routed import RoutedExperts
from experts.structure import LayerStructure
from experts.tokens.exchange import GroupExchange

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_NOT_HELD = 0
_FROZEN = 1
_FIRST_DTYPE = 2
_HEADER = (0x636F7079,)  # marks the exchange in which hosts agree on types


ValuesOf = Callable[[nn.Parameter], Tensor]
"""Returns the values of a stack that are added up over the copies."""


def gradient_of(stack: nn.Parameter) -> Tensor:
    """Return the gradient of a stack of experts."""
    assert stack.grad is not None, "an expert without tokens has a gradient of zero"
    return stack.grad


@dataclass(frozen=True)
class _CopiedExperts:
    """One parameter of all experts of a layer with the same size and the same hosts, as one vector."""

    bank: ExpertBank
    role: str
    size: int
    rows: tuple[int, ...]
    """The experts' rows in the gate."""
    hosts: tuple[int, ...]

    @property
    def row_length(self) -> int:
        """Elements of one expert."""
        return prod(self.bank.form.shape(self.role, self.bank.width, self.size))

    @property
    def length(self) -> int:
        return self.row_length * len(self.rows)


@dataclass(frozen=True)
class _LocalCopies:
    """The gradient of copied experts on a host that holds them: runs of neighbours in a stack."""

    stack: nn.Parameter
    hosts: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    """The first and the last place of each run, in the order of the vector."""
    values_of: ValuesOf

    @classmethod
    def of(cls, copied: _CopiedExperts, values_of: ValuesOf) -> _LocalCopies:
        (group,) = (each for each in copied.bank.classes if each.hidden == copied.size)
        places = [group.rows.index(row) for row in copied.rows]
        runs: list[tuple[int, int]] = []
        for place in places:
            if runs and place == runs[-1][1] + 1:
                runs[-1] = (runs[-1][0], place)
            else:
                runs.append((place, place))
        stack = copied.bank.get_parameter(f"{copied.role}_{copied.size}")
        return cls(stack, copied.hosts, tuple(runs), values_of)

    def views(self, begin: int, end: int) -> Iterator[Tensor]:
        """Yield the parts of the gradient that hold these elements of the vector."""
        gradient = self.values_of(self.stack)
        row_length = gradient[0].numel()
        first = 0
        for first_place, last_place in self.runs:
            length = (last_place + 1 - first_place) * row_length
            low = max(begin, first) - first
            high = min(end, first + length) - first
            if low < high:
                # A view, not a reshape: what is written to a copy of the gradient would be lost.
                yield gradient[first_place : last_place + 1].view(-1)[low:high]
            first += length


@dataclass(frozen=True)
class _Piece:
    """Some elements of the vector, which its hosts sum together."""

    copies: _LocalCopies
    begin: int
    end: int

    def share(self, host: int) -> tuple[int, int]:
        """Return the first element that a host sums, and the one after its last."""
        position = self.copies.hosts.index(host)
        length = self.end - self.begin
        number = len(self.copies.hosts)
        return self.begin + length * position // number, self.begin + length * (position + 1) // number

    def length(self, host: int) -> int:
        begin, end = self.share(host)
        return end - begin

    def views(self, host: int) -> Iterator[Tensor]:
        """Yield the parts of this host's gradient that ``host`` sums."""
        return self.copies.views(*self.share(host))


@dataclass
class _Round:
    """The pieces of this host that are summed at the same time; there may be none."""

    dtype: torch.dtype
    pieces: list[_Piece] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces, each in equal shares: a host neither sends nor receives more at a time."""
        # The largest share counts for every host: pieces of few elements do not divide evenly.
        lengths = [len(p.copies.hosts) * max(map(p.length, p.copies.hosts)) for p in self.pieces]
        return self.dtype.itemsize * sum(lengths)

    def with_host(self, host: int, own: int) -> list[_Piece]:
        """Return the pieces that another host has a copy of too."""
        return [piece for piece in self.pieces if host != own and host in piece.copies.hosts]


class CopiedGradients:
    """Adds up the gradients of copies, in the order of hosts: all copies get the same sum to the bit."""

    def __init__(
        self, layers: Sequence[RoutedExperts], exchange: GroupExchange, sums: ValuesOf | None = None
    ) -> None:
        """``sums`` returns the gradient of a stack as integers, where these are added up in its place."""
        self._exchange = exchange
        self._values_of = sums or gradient_of
        self._sum_dtype = torch.int64 if sums else None
        self._device = layers[0].load_E.device if layers else torch.device("cpu")
        banks = {layer.bank: layer.structure for layer in layers}
        self._banks = list(banks.items())
        experts = [expert for structure in banks.values() for expert in structure.experts]
        self._any_copied = any(len(expert.hosts) > 1 for expert in experts)
        self._rounds: list[_Round] | None = None
        """None until the hosts have agreed on them, in the first sum."""

    @torch.no_grad()
    def add_up(self) -> None:
        """Sum the gradients of each copied expert over its hosts. All hosts must call it."""
        if not self._any_copied:
            return
        if self._rounds is None:
            self._rounds = self._plan_rounds()
        most_bytes = max((pieces.num_bytes for pieces in self._rounds), default=0)
        # All rounds reuse two buffers: new ones of other sizes would stay in the allocator's cache.
        buffers = [torch.empty(most_bytes, dtype=torch.uint8, device=self._device) for _ in range(2)]
        for pieces in self._rounds:
            self._reduce_scatter(pieces, buffers)
            self._all_gather(pieces, buffers)

    def _reduce_scatter(self, pieces: _Round, buffers: Sequence[Tensor]) -> None:
        """Collect the copies of this host's share of each piece, and sum them in the order of hosts."""
        own = self._exchange.rank
        others = [pieces.with_host(host, own) for host in range(self._exchange.size)]
        sent = [
            [view for piece in shared for view in piece.views(host)] for host, shared in enumerate(others)
        ]
        lengths = [[piece.length(own) for piece in shared] for shared in others]
        received = self._exchanged(sent, lengths, buffers, pieces.dtype)
        parts = [iter(from_host) for from_host in received]
        for piece in pieces.pieces:
            summed = torch.zeros(piece.length(own), dtype=pieces.dtype, device=self._device)
            for host in piece.copies.hosts:
                if host == own:
                    _add(piece.views(own), summed)
                else:
                    summed += next(parts[host])
            _write(summed, piece.views(own))

    def _all_gather(self, pieces: _Round, buffers: Sequence[Tensor]) -> None:
        """Send this host's share of each sum to the other copies, and write the shares of the others."""
        own = self._exchange.rank
        others = [pieces.with_host(host, own) for host in range(self._exchange.size)]
        sent = [[view for piece in shared for view in piece.views(own)] for shared in others]
        lengths = [[piece.length(host) for piece in shared] for host, shared in enumerate(others)]
        received = self._exchanged(sent, lengths, buffers, pieces.dtype)
        for host, shared in enumerate(others):
            for piece, part in zip(shared, received[host], strict=True):
                _write(part, piece.views(host))

    def _exchanged(
        self,
        sent: list[list[Tensor]],
        lengths: list[list[int]],
        buffers: Sequence[Tensor],
        dtype: torch.dtype,
    ) -> list[list[Tensor]]:
        """Send parts of gradients to each host. Return the parts from each host, which have ``lengths``.

        Both are in ``buffers``, which the next call overwrites."""
        send_counts = [dtype.itemsize * sum(part.numel() for part in to_host) for to_host in sent]
        receive_counts = [dtype.itemsize * sum(from_host) for from_host in lengths]
        leaving = buffers[0][: sum(send_counts)]
        arriving = buffers[1][: sum(receive_counts)]
        parts = [part for to_host in sent for part in to_host]
        if parts:
            torch.cat(parts, out=leaving.view(dtype))
        # Plain bytes: the meter counts no rows of tokens.
        self._exchange.all_to_all_into(arriving, leaving, send_counts, receive_counts).wait()
        values = iter(arriving.view(dtype).split([length for from_host in lengths for length in from_host]))
        return [[next(values) for _ in from_host] for from_host in lengths]

    # Rounds

    def _plan_rounds(self) -> list[_Round]:
        """Return this host's pieces of each round. All hosts have the same number of rounds.

        Each host has a line of elements, cut into rounds of ``PIECE_ELEMENTS``. The gradient of an expert is
        appended at one place of all its hosts' lines: the first that is free on each. So its hosts sum it in
        the same rounds, experts with other hosts are summed at the same time, and no host sums more than
        ``PIECE_ELEMENTS`` in a round. Each type has rounds of its own."""
        rounds: list[_Round] = []
        dtype_of = self._agreed_dtypes()
        for dtype in _DTYPES:
            ends = [0] * self._exchange.size
            pieces: list[tuple[int, _Piece]] = []
            for copied in self._copied_experts():
                if dtype_of[copied.bank, copied.role] != dtype:
                    continue
                begin = max(ends[host] for host in copied.hosts)
                for host in copied.hosts:
                    ends[host] = begin + copied.length
                if self._exchange.rank in copied.hosts:
                    pieces += _cut(_LocalCopies.of(copied, self._values_of), begin, copied.length)
            of_dtype = [_Round(self._sum_dtype or dtype) for _ in range(-(-max(ends) // PIECE_ELEMENTS))]
            for number, piece in pieces:
                of_dtype[number].pieces.append(piece)
            rounds += of_dtype
        return rounds

    def _copied_experts(self) -> Iterator[_CopiedExperts]:
        """Yield the parameters of the copied experts of all hosts, in the same order on each host."""
        for bank, structure in self._banks:
            for role in bank.form.roles:
                for (size, hosts), rows in _by_hosts(structure).items():
                    yield _CopiedExperts(bank, role, size, tuple(rows), hosts)

    def _agreed_dtypes(self) -> dict[tuple[ExpertBank, str], torch.dtype | None]:
        """Return the type of each parameter of experts; None if it is frozen, or copied nowhere.

        A host without experts of a layer does not know their type, so the hosts exchange what they know."""
        keys = [(bank, role) for bank, _ in self._banks for role in bank.form.roles]
        codes = dict.fromkeys(keys, _NOT_HELD)
        for copied in self._copied_experts():
            if self._exchange.rank in copied.hosts:
                stack = copied.bank.get_parameter(f"{copied.role}_{copied.size}")
                dtype = stack.grad_dtype or stack.dtype
                code = _FIRST_DTYPE + _DTYPES.index(dtype) if stack.requires_grad else _FROZEN
                codes[copied.bank, copied.role] = code
        own = torch.tensor(list(codes.values()), dtype=torch.int64, device=self._device)
        table_NC = own.expand(self._exchange.size, -1).contiguous()
        received_NC = self._exchange.all_to_all_counts(table_NC, _HEADER)
        dtypes: dict[tuple[ExpertBank, str], torch.dtype | None] = {}
        for key, column in zip(keys, received_NC.T.tolist(), strict=True):
            known = {code for code in column if code != _NOT_HELD}
            if len(known) > 1:
                raise RuntimeError(
                    f"copies of the parameter {key[1]} of experts differ between hosts: {column} by host "
                    f"(0: not held, 1: frozen, from 2 on: a type); they must be trained in one type or frozen"
                )
            code = max(known, default=_FROZEN)
            dtypes[key] = _DTYPES[code - _FIRST_DTYPE] if code >= _FIRST_DTYPE else None
        return dtypes


def _by_hosts(structure: LayerStructure) -> dict[tuple[int, tuple[int, ...]], list[int]]:
    """Return the rows of copied experts by their size and their hosts."""
    rows: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for row, expert in enumerate(structure.experts):
        if len(expert.hosts) > 1:
            rows.setdefault((expert.size, expert.hosts), []).append(row)
    return rows


def _cut(copies: _LocalCopies, begin: int, length: int) -> Iterator[tuple[int, _Piece]]:
    """Yield the pieces of a gradient with their rounds. ``begin`` is its place in the lines of its hosts."""
    end = begin + length
    for number in range(begin // PIECE_ELEMENTS, -(-end // PIECE_ELEMENTS)):
        low = max(begin, number * PIECE_ELEMENTS)
        high = min(end, (number + 1) * PIECE_ELEMENTS)
        yield number, _Piece(copies, low - begin, high - begin)


def _add(views: Iterable[Tensor], summed: Tensor) -> None:
    """Add the parts of a gradient to a sum."""
    first = 0
    for view in views:
        summed[first : first + view.numel()] += view
        first += view.numel()


def _write(values: Tensor, views: Iterable[Tensor]) -> None:
    """Copy values into the parts of a gradient."""
    first = 0
    for view in views:
        view.copy_(values[first : first + view.numel()])
        first += view.numel()
