"""Bounds of the rows that hosts send to each other, so that no host waits for their counts.

With counts, a host waits for its device in every layer, to learn how many rows it sends and receives.
With a bound, it sends the same number of rows to each host in every step: its rows, and padding without
experts. The counts travel with the rows, in a header, and the device checks them. The host reads them once
a step. A step with more rows than a bound loses some: it is repeated with counts. See ``types`` for the
letters of shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from experts.host_copy import to_host
from experts.hosts.group import Group
from experts.tokens.received_rows import InvalidRows

HEADER_BYTES = 32
"""Four numbers: that of the exchange, the layer, rows, and rows for experts."""
_SLACK = 1.25  # of a new bound: rows vary from step to step
_ROUND: int = 64  # bounds are multiples of this
_MAX_PADDING = 1024  # rows of padding for each host that are never too many


@dataclass(frozen=True)
class RowBound:
    """The most rows of a chunk, equal on all hosts."""

    rows: int
    """From one host to another."""
    expert_rows: int
    """For the experts of one host: a token counts once for each of them."""

    @property
    def block(self) -> int:
        """Rows of a message from one host to another, with the header."""
        return self.rows + 1


@dataclass(frozen=True)
class SeenRows:
    """The most rows of a layer's chunks, over all hosts."""

    rows: int
    """From one host to another."""
    received: int
    """To one host."""
    expert_rows: int
    """For the experts of one host."""

    def fit(self, bound: RowBound) -> bool:
        return self.rows <= bound.rows and self.expert_rows <= bound.expert_rows


def next_bound(before: RowBound | None, seen: SeenRows, num_hosts: int) -> RowBound | None:
    """Return the bound of the next step. None: padding would cost more than the wait for counts."""
    rows = _next(before.rows if before else None, seen.rows)
    padding = num_hosts * rows - seen.received
    if padding > max(seen.received, _MAX_PADDING * num_hosts):
        return None
    return RowBound(rows, _next(before.expert_rows if before else None, seen.expert_rows))


def _next(before: int | None, seen: int) -> int:
    """Return a bound for ``seen`` rows. It stays where it is near, so that buffers keep their sizes."""
    wanted = -(-max(1, int(seen * _SLACK)) // _ROUND) * _ROUND
    return before if before is not None and seen <= before <= 2 * wanted else wanted


@dataclass
class ExchangeBounds:
    """The bounds of all layers, and the rows that were seen in this attempt at a step."""

    device: torch.device
    counts_only: bool = False
    """Whether the next attempt exchanges counts in every layer."""
    _is_active: bool = False
    """Whether there is an attempt at a step. Evaluations exchange counts."""
    _num_exchanges: int = 0
    """Exchanges of bounded rows so far: as many on all hosts, or they are out of step."""
    _of_layer: dict[int, RowBound] = field(default_factory=dict)
    _counted: list[tuple[int, list[int]]] = field(default_factory=list)
    """Layer and rows of the exchanges with counts."""
    _bounded: list[tuple[int, RowBound, Tensor]] = field(default_factory=list)
    """Layer, bound and figures of the other exchanges."""

    def of_layer(self, layer_id: int) -> RowBound | None:
        """Return the bound of a layer's rows; None if counts are exchanged."""
        return self._of_layer.get(layer_id) if self._is_active and not self.counts_only else None

    def next_number(self) -> int:
        self._num_exchanges += 1
        return self._num_exchanges

    def begin_attempt(self) -> None:
        self._is_active = True
        self._counted = []
        self._bounded = []

    def forget(self) -> None:
        """Let the next attempt exchange counts: the experts have other hosts, or passes another size."""
        self._of_layer = {}

    def add_counts(self, layer_id: int, rows_N: Sequence[int], expert_rows: int) -> None:
        """Record a chunk of which the host knows the rows from each host."""
        if self._is_active:
            self._counted.append((layer_id, [max(rows_N), sum(rows_N), expert_rows]))

    def add_headers(
        self,
        layer_id: int,
        bound: RowBound,
        received_N4: Tensor,
        sent_N4: Tensor,
        choices: tuple[Tensor, Tensor],
    ) -> None:
        """Record a chunk whose counts are on the device, and check it there.

        ``choices`` are the received ids of experts and their slots on this host."""
        ids_GK, slots_GK = choices
        is_local_GK = slots_GK >= 0
        rows_N, expert_rows_N = received_N4[:, 2], received_N4[:, 3]
        is_cut = (rows_N > bound.rows).any()
        announced = expert_rows_N.sum()
        figures = [
            rows_N.max(),
            rows_N.sum(),
            announced,
            (received_N4[:, :2] != sent_N4[:, :2]).sum(),
            ((ids_GK != -1) ^ is_local_GK).sum(),
            (is_local_GK.sum() != announced) & ~is_cut,
        ]
        self._bounded.append((layer_id, bound, torch.stack([figure.long() for figure in figures])))

    def end_attempt(self, group: Group) -> bool:
        """Return whether all rows were sent, on all hosts, and set the bounds of the next attempt.

        All hosts must call it. The host waits for the device, once. Raises ``InvalidRows`` if rows were
        damaged on the way."""
        figures = self._global_figures(group)
        seen: dict[int, SeenRows] = {}
        all_fit = True
        num_counted = len(self._counted)
        for (layer_id, _), row in zip(self._counted, figures[:num_counted], strict=True):
            _add(seen, layer_id, row)
        for (layer_id, bound, _), row in zip(self._bounded, figures[num_counted:], strict=True):
            _check(layer_id, row)
            _add(seen, layer_id, row)
            all_fit &= SeenRows(*row[:3]).fit(bound)
        next_bounds = {
            layer_id: next_bound(self._of_layer.get(layer_id), rows, group.size)
            for layer_id, rows in seen.items()
        }
        self._of_layer = {layer_id: bound for layer_id, bound in next_bounds.items() if bound is not None}
        self.counts_only = not all_fit
        self._is_active = False
        return all_fit

    def _global_figures(self, group: Group) -> list[list[int]]:
        """Return the largest figures over all hosts, of each exchange of the attempt."""
        counted = torch.tensor([[*rows, 0, 0, 0] for _, rows in self._counted], dtype=torch.int64)
        figures = [counted.view(-1, 6).to(self.device), *(figures for *_, figures in self._bounded)]
        table = torch.cat([part.view(-1, 6) for part in figures])
        if len(table):
            group.all_reduce_max(table).wait()
            table = to_host(table)
            group.check()
        return table.tolist()


def _add(seen: dict[int, SeenRows], layer_id: int, figures: Sequence[int]) -> None:
    before = seen.get(layer_id, SeenRows(0, 0, 0))
    rows, received, expert_rows = figures[:3]
    seen[layer_id] = SeenRows(
        max(before.rows, rows), max(before.received, received), max(before.expert_rows, expert_rows)
    )


def _check(layer_id: int, figures: Sequence[int]) -> None:
    out_of_step, wrong_ids, wrong_count = figures[3:]
    if not (out_of_step or wrong_ids or wrong_count):
        return
    if out_of_step:
        found = "rows of another layer or step: the hosts are out of step"
    elif wrong_ids:
        found = f"{wrong_ids} experts that the host does not have"
    else:
        found = "another number of experts than was announced"
    raise InvalidRows(
        f"layer {layer_id}: a host received rows that name {found}; they were damaged on the way, or the "
        "hosts run different versions. If it happens again, check the network between the hosts"
    )
