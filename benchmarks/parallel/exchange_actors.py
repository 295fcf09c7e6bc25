"""Two Ray actors that exchange rows: in a gloo group, and through Ray's object store."""

from __future__ import annotations

import queue
import time
from typing import Any

import ray
import torch
import torch.distributed as dist

from benchmarks.parallel.spmd_layer import WIDTH

LONGEST_S = 300.0
WARM_UP = 3


class ExchangeActor:
    """An actor that sends its peer rows and gets as many back.

    Its methods return the seconds of each exchange.
    """

    def __init__(self, rank: int, store: str) -> None:
        torch.set_num_threads(1)
        self.rank = rank
        self.received: queue.Queue[list[Any]] = queue.Queue()
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

    def by_group(self, num_rows: int, repeats: int) -> list[float]:
        """Exchange by ``all_to_all_single``."""
        own = self._rows(num_rows, self.rank)
        splits = [0, num_rows] if self.rank == 0 else [num_rows, 0]
        peers = torch.empty_like(own)
        returned = torch.empty_like(own)
        seconds = []
        for _ in range(WARM_UP + repeats):
            dist.barrier()
            begun = time.perf_counter()
            dist.all_to_all_single(peers, own, splits, splits)
            dist.all_to_all_single(returned, peers, splits, splits)
            seconds.append(time.perf_counter() - begun)
        self._check(own, peers, returned)
        return seconds[WARM_UP:]

    def by_store(self, peer: Any, num_rows: int, repeats: int) -> list[float]:
        """Exchange through the object store, as arrays, which Ray maps from shared memory without a copy."""
        own = self._rows(num_rows, self.rank)
        peers = own
        returned = own
        seconds = []
        for _ in range(WARM_UP + repeats):
            dist.barrier()
            begun = time.perf_counter()
            peers = self._swap(peer, own)
            returned = self._swap(peer, peers)
            seconds.append(time.perf_counter() - begun)
        self._check(own, peers, returned)
        return seconds[WARM_UP:]

    def receive(self, reference: list[Any]) -> None:
        """Take a reference to rows.

        It comes in a list, so that Ray passes the reference and not the rows.
        """
        self.received.put(reference)

    def _swap(self, peer: Any, rows: torch.Tensor) -> torch.Tensor:
        peer.receive.remote([ray.put(rows.numpy())])
        return torch.from_numpy(ray.get(self.received.get(timeout=LONGEST_S)[0]))

    def _rows(self, num_rows: int, rank: int) -> torch.Tensor:
        return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(rank))

    def _check(self, own: torch.Tensor, peers: torch.Tensor, returned: torch.Tensor) -> None:
        expected = self._rows(len(own), 1 - self.rank)
        if not torch.equal(returned, own) or not torch.equal(peers, expected):
            raise RuntimeError(f"host {self.rank} got other rows than were sent")
