"""Real worker processes for tests: a forkserver that has torch loaded already starts a rank in about 0.1 s.

    def summed(rank: int, size: int, store_path: str) -> float:      # a function of a module, not of a test
        with gloo(rank, size, store_path):
            value = torch.tensor(float(rank))
            dist.all_reduce(value)
            return value.item()

    assert run_ranks(summed, 3) == [3.0, 3.0, 3.0]

The ranks meet in a file, so no port is taken. Each is a session of its own that ends with its loaders, also when the
process that runs the tests is killed. The environment is the one in which the first rank of the session was started.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel.distributed",
    "torch.distributed.fsdp",
    "torch._dynamo",  # what the first optimizer of a process imports
    "torch.testing",
    "pytest",
    "orchestrator.train.worker.build",
    "orchestrator.record.trackers",
    "tests.support.steppers",
)
GRACE_S = 5.0  # for the others to fail too, once a rank has failed
PEER_GONE = (
    "Connection reset by peer",
    "Connection closed by peer",
    "Broken pipe",
    "Socket closed",
    "Connection refused",
)


class RanksFailed(AssertionError):
    """What went wrong, by rank; the text begins with the likeliest cause."""

    def __init__(self, failures: dict[int, str]) -> None:
        self.failures = failures
        super().__init__("\n".join(f"--- rank {rank}: {text.rstrip()}" for rank, text in failures.items()))


class Ranks:
    """Running ranks. ``start_ranks`` makes them, and ends them all when its block ends."""

    def __init__(
        self, function: Callable[..., Any], size: int, arguments: tuple[Any, ...], folder: Path
    ) -> None:
        self.store_path = str(folder / "store")
        self._folder = folder
        self._killed: set[int] = set()
        self._answers: dict[int, Any] = {}
        self._failures: dict[int, str] = {}
        self._pipes: dict[int, Connection] = {}
        self.processes: list[BaseProcess] = []
        # Pickled here: multiprocessing's own way shares tensors by handles that die with the sender.
        self._job = pickle.dumps((function, size, self.store_path, arguments))

    def start(self, size: int) -> None:
        context = _context()
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(rank, self._job, theirs, str(self._stack(rank))), name=f"rank-{rank}"
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes[rank] = ours

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Kills a rank on purpose (its answer is then None), or freezes it with SIGSTOP."""
        if number != signal.SIGSTOP:
            self._killed.add(rank)
        os.kill(self._pid(rank), number)

    def results(self, timeout: float = 120.0, ranks: Iterable[int] | None = None) -> list[Any]:
        """What the ranks returned, in order. Raises ``RanksFailed`` where one raised, died or did not answer in time."""
        asked = list(range(len(self.processes))) if ranks is None else list(ranks)
        deadline = time.monotonic() + timeout
        while pending := [rank for rank in asked if rank not in self._answers and rank not in self._failures]:
            ready = wait([self._pipes[rank] for rank in pending], max(0.0, deadline - time.monotonic()))
            for rank in pending:
                if self._pipes[rank] in ready:
                    self._hear(rank)
            if self._failures:
                deadline = min(deadline, time.monotonic() + GRACE_S)
            if not ready:
                self._failures |= {rank: self._hung(rank, timeout) for rank in pending}
        if self._failures:
            raise RanksFailed(dict(sorted(self._failures.items(), key=lambda item: _standing(item[1]))))
        return [self._answers[rank] for rank in asked]

    def close(self) -> None:
        for process in self.processes:
            _end(process)
        for pipe in self._pipes.values():
            pipe.close()

    def _hear(self, rank: int) -> None:
        try:
            well, content = pickle.loads(self._pipes[rank].recv_bytes())  # noqa: S301 - from a process of our own
        except (EOFError, OSError):
            self.processes[rank].join(GRACE_S)
            if rank in self._killed:
                self._answers[rank] = None
            else:
                self._failures[rank] = (
                    f"ended without a word, exit code {self.processes[rank].exitcode}\n{self._said(rank)}"
                )
            return
        (self._answers if well else self._failures)[rank] = content

    def _hung(self, rank: int, timeout: float) -> str:
        """Where the rank stands, from its own mouth; a frozen one does not tell."""
        with suppress(ProcessLookupError):
            os.kill(self._pid(rank), signal.SIGUSR1)
        end = time.monotonic() + 1.0
        while not self._said(rank) and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(0.05)
        after = "after another had failed" if self._failures else f"within {timeout:g} s"
        return f"{HUNG} {after}\n{self._said(rank)}"

    def _pid(self, rank: int) -> int:
        pid = self.processes[rank].pid
        assert pid is not None, f"rank {rank} was not started"
        return pid

    def _stack(self, rank: int) -> Path:
        return self._folder / f"stack_{rank}"

    def _said(self, rank: int) -> str:
        path = self._stack(rank)
        return path.read_text(errors="replace") if path.exists() else ""


HUNG = "did not answer"


def run_ranks(function: Callable[..., Any], size: int, *arguments: Any, timeout: float = 120.0) -> list[Any]:
    """Runs ``function(rank, size, store_path, *arguments)`` in ``size`` processes and returns what each returned."""
    with start_ranks(function, size, *arguments) as ranks:
        return ranks.results(timeout)


@contextmanager
def start_ranks(function: Callable[..., Any], size: int, *arguments: Any) -> Iterator[Ranks]:
    """The same, with the processes at hand while they run: to kill one, or to freeze it."""
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    ranks = Ranks(function, size, arguments, folder)
    try:
        ranks.start(size)
        yield ranks
    finally:
        ranks.close()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def gloo(rank: int, size: int, store_path: str, timeout_s: float = 60.0) -> Iterator[None]:
    """The default process group of a rank, over gloo."""
    import torch.distributed as dist

    store = dist.FileStore(store_path, size)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


@cache
def _context() -> ForkServerContext:
    context = get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    return context


def _rank_main(rank: int, job: bytes, pipe: Connection, stack: str) -> None:
    """The whole life of a rank."""
    with suppress(PermissionError):
        os.setsid()
    threading.Thread(target=_end_with_parent, args=(pipe, Path(stack).parent), daemon=True).start()
    with open(stack, "w") as spoken:
        faulthandler.enable(spoken)
        faulthandler.register(signal.SIGUSR1, spoken)
        answer = _answer(rank, job)
        with suppress(BrokenPipeError, ConnectionError):
            pipe.send_bytes(answer)
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.enable(sys.__stderr__ or 2)


def _answer(rank: int, job: bytes) -> bytes:
    try:
        import torch

        torch.set_num_threads(1)
        function, size, store_path, arguments = pickle.loads(job)  # noqa: S301 - from the test
        return pickle.dumps((True, function(rank, size, store_path, *arguments)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


def _end_with_parent(pipe: Connection, folder: Path) -> None:
    """Nothing is ever sent this way: when the pipe ends, so has the parent, and nobody else clears up."""
    with suppress(OSError):
        pipe.poll(None)
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(os.getpgid(0), signal.SIGKILL)


def _end(process: BaseProcess) -> None:
    """The rank and what it started."""
    pid = process.pid
    if pid is not None and process.exitcode != 0:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        process.kill()
    process.join(GRACE_S)


def _standing(text: str) -> int:
    """The cause before its consequences: a rank that only lost its peer, or waited for it, did nothing wrong."""
    if text.startswith(HUNG):
        return 1
    return 2 if any(phrase in text for phrase in PEER_GONE) else 0
