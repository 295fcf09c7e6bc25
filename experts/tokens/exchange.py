"""The exchange between hosts: all-to-all of counts and of rows.

Counts are exchanged first, together with a header that describes the rows to come. Hosts that are
out of step, or expect other shapes, fail on both sides before a row is sent. See ``types`` for the
letters of shapes; C counts columns of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from experts.host_copy import to_host
from experts.hosts.group import AsyncWork, Group

_COUNT_COLUMNS = 64  # the columns of a table of counts are padded to a multiple of this
_MAX_COUNT = 2**31 - 1  # more rows than any device holds


class Exchange(Protocol):
    """All-to-all communication between hosts, seen from the host ``rank`` of ``size``."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_to_all_counts(self, counts_NC: Tensor, header: Sequence[int]) -> Tensor:
        """Send row n of the table to host n and return the rows received, by host, in host memory.

        ``header`` must be the same on all hosts."""
        ...

    def all_to_all_rows(
        self, rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> PendingRows:
        """Start sending rows, which are sorted by host. Without counts, as many go to each host."""
        ...


@dataclass
class Meter:
    """Cost of the exchange for this host since the last ``take``."""

    bytes: int = 0
    rows: int = 0
    seconds: float = 0.0

    def take(self) -> tuple[int, int, float]:
        """Return bytes, rows and seconds, and start again from zero."""
        taken = (self.bytes, self.rows, self.seconds)
        self.bytes = 0
        self.rows = 0
        self.seconds = 0.0
        return taken


@dataclass
class PendingRows:
    """Rows that other hosts are sending to this one."""

    received: Tensor
    work: AsyncWork | None
    meter: Meter
    sent: Tensor | None = None
    """The rows that this host sends. The collective reads them until it is done."""

    def wait(self) -> Tensor:
        if self.work is not None:
            start = perf_counter()
            self.work.wait()
            self.meter.seconds += perf_counter() - start
            self.work = None
            self.sent = None
        return self.received


class LocalExchange:
    """The exchange of a single host: nothing is sent."""

    rank = 0
    size = 1

    def all_to_all_counts(self, counts_NC: Tensor, header: Sequence[int]) -> Tensor:  # noqa: ARG002
        return counts_NC.cpu()

    def all_to_all_rows(
        self,
        rows: Tensor,
        send_counts: Sequence[int],  # noqa: ARG002
        receive_counts: Sequence[int],  # noqa: ARG002
    ) -> PendingRows:
        return PendingRows(rows, None, Meter())


@dataclass
class GroupExchange:
    """The exchange of several hosts, over a process group."""

    group: Group
    meter: Meter = field(default_factory=Meter)
    _num_exchanges: int = 0

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def all_to_all_counts(self, counts_NC: Tensor, header: Sequence[int]) -> Tensor:
        self._num_exchanges += 1
        header = [self._num_exchanges, *header]
        header_NC = counts_NC.new_tensor(header).expand(self.size, -1)
        sent = torch.cat([header_NC, counts_NC], dim=1)
        # gloo aborts the process where lengths differ, before any host could compare headers: pad
        # to one length.
        sent = F.pad(sent, (0, -sent.shape[1] % _COUNT_COLUMNS))
        received = torch.empty_like(sent)
        start = perf_counter()
        self.group.all_to_all(received, sent, [], []).wait()
        received = to_host(received)
        # On a GPU, the host has waited for the device, which an abort of the group releases with wrong
        # values.
        self.group.check()
        self.meter.seconds += perf_counter() - start
        begin = len(header)
        self._check_headers(header, received[:, :begin].tolist())
        received_NC = received[:, begin : begin + counts_NC.shape[1]]
        self._check_counts(received_NC)
        return received_NC

    def _check_headers(self, header: list[int], headers: list[list[int]]) -> None:
        for host, received in enumerate(headers):
            if received != header:
                raise RuntimeError(
                    f"host {self.rank} is at exchange {header}, host {host} at {received}: out of "
                    f"step; nothing was sent"
                )

    def _check_counts(self, counts_NC: Tensor) -> None:
        if not counts_NC.numel():
            return
        least, most = map(int, counts_NC.aminmax())
        if 0 <= least <= most <= _MAX_COUNT:
            return
        for host, row in enumerate(counts_NC.tolist()):
            if not (min(row) >= 0 and max(row) <= _MAX_COUNT):
                raise RuntimeError(
                    f"host {host} sent counts from {min(row)} to {max(row)} to host {self.rank}; 0 to "
                    f"{_MAX_COUNT} were needed: they were damaged on the way. If it happens again, check the "
                    f"network between the hosts"
                )

    def all_to_all_rows(
        self, rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> PendingRows:
        rows = rows.contiguous()
        if not send_counts:
            send_counts = receive_counts = [len(rows) // self.size] * self.size
        if sum(send_counts) != len(rows):
            raise RuntimeError(
                f"{sum(send_counts)} rows were announced to the other hosts; there are {len(rows)} to send"
            )
        received = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
        return self.all_to_all_into(received, rows, send_counts, receive_counts)

    def all_to_all_into(
        self, received: Tensor, rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> PendingRows:
        """Start sending rows as ``all_to_all_rows`` does, into memory of the caller. Both are contiguous."""
        num_leaving = len(rows) - send_counts[self.rank]
        # Moved experts and gradients of copies come as plain bytes: those are no tokens' rows.
        if rows.dim() > 1:
            self.meter.rows += num_leaving
        self.meter.bytes += num_leaving * rows.stride(0) * rows.itemsize
        work = self.group.all_to_all(received, rows, receive_counts, send_counts)
        return PendingRows(received, work, self.meter, rows)
