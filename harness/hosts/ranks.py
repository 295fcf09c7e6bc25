"""Real worker processes for tests: a forkserver that has torch loaded already starts a rank in
about 0.1 s.

    def sum_of_ranks(rank: int, size: int, store_path: str) -> float:    # a function of a module,
    not of a test
        with gloo(rank, size, store_path):
            value = torch.tensor(float(rank))
            dist.all_reduce(value)
            return value.item()

    assert run_ranks(sum_of_ranks, 3) == [3.0, 3.0, 3.0]

The ranks rendezvous through a file, so that no port is needed. Each rank is a session of its own,
which ends with all its processes, also when the process that runs the tests is killed. A rank has
the environment of the process that starts it, not that of the forkserver, which the first test of
the session started."""

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
    "torch._dynamo",  # the first optimizer of a process imports it
    "torch.testing",
    "pytest",
    "transformers.modeling_utils",
    "orchestrator.train.worker.build",
    "orchestrator.live.trackers.trackers",
    "harness.faults.interrupted",
)
GRACE_S = 5.0  # for the other ranks to fail too, once one has failed
PEER_GONE = (
    "Connection reset by peer",
    "Connection closed by peer",
    "Broken pipe",
    "Socket closed",
    "Connection refused",
)
_HUNG = "did not answer"


class RanksFailed(AssertionError):
    """The failures by rank, the likeliest cause first."""

    def __init__(self, failures: dict[int, str]) -> None:
        self.failures = failures
        super().__init__("\n".join(f"--- rank {rank}: {text.rstrip()}" for rank, text in failures.items()))


class Ranks:
    """Running ranks. ``start_ranks`` starts them, and ends them all with its block."""

    def __init__(
        self, function: Callable[..., Any], size: int, arguments: tuple[Any, ...], folder: Path
    ) -> None:
        self.store_path = str(folder / "store")
        self._folder = folder
        self._expected_deaths: set[int] = set()
        self._results: dict[int, Any] = {}
        self._failures: dict[int, str] = {}
        self._pipes: dict[int, Connection] = {}
        self.processes: list[BaseProcess] = []
        # Pickled here: multiprocessing itself would share tensors by handles, which end with the
        # sender.
        self._job = pickle.dumps((dict(os.environ), function, size, self.store_path, arguments))

    def start(self, size: int) -> None:
        context = _context()
        for rank in range(size):
            own_end, rank_end = context.Pipe()
            arguments = (rank, self._job, rank_end, str(self._stack_path(rank)))
            process = context.Process(target=_rank_main, args=arguments, name=f"rank-{rank}")
            process.start()
            rank_end.close()
            self.processes.append(process)
            self._pipes[rank] = own_end

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Kill a rank on purpose, whose result is then None, or freeze it with SIGSTOP."""
        if number not in (signal.SIGSTOP, signal.SIGCONT):
            self.expect_death(rank)
        os.kill(self._pid(rank), number)

    def expect_death(self, rank: int) -> None:
        """Let the result of a rank be None where it ends without one."""
        self._expected_deaths.add(rank)

    def results(self, timeout: float = 120.0, ranks: Iterable[int] | None = None) -> list[Any]:
        """Return the results of the ranks, in order.

        Raises RanksFailed where a rank raised, died or did not answer in time."""
        wanted = list(range(len(self.processes))) if ranks is None else list(ranks)
        deadline = time.monotonic() + timeout
        while pending := [
            rank for rank in wanted if rank not in self._results and rank not in self._failures
        ]:
            ready = wait([self._pipes[rank] for rank in pending], max(0.0, deadline - time.monotonic()))
            for rank in pending:
                if self._pipes[rank] in ready:
                    self._receive(rank)
            if self._failures:
                deadline = min(deadline, time.monotonic() + GRACE_S)
            if not ready:
                self._failures |= {rank: self._hung_text(rank, timeout) for rank in pending}
        if self._failures:
            raise RanksFailed(dict(sorted(self._failures.items(), key=lambda item: _blame_order(item[1]))))
        return [self._results[rank] for rank in wanted]

    def close(self) -> None:
        for process in self.processes:
            _end(process)
        for pipe in self._pipes.values():
            pipe.close()

    def _receive(self, rank: int) -> None:
        try:
            succeeded, content = pickle.loads(self._pipes[rank].recv_bytes())  # noqa: S301 - from a process of our own
        except (EOFError, OSError):
            process = self.processes[rank]
            process.join(GRACE_S)
            if rank in self._expected_deaths:
                self._results[rank] = None
            else:
                text = f"ended without a result, exit code {process.exitcode}"
                self._failures[rank] = f"{text}\n{self._stack_text(rank)}"
            return
        if succeeded:
            self._results[rank] = content
        else:
            self._failures[rank] = content

    def _hung_text(self, rank: int, timeout: float) -> str:
        """Describe a rank that did not answer, with its stack. A frozen rank has none to show."""
        with suppress(ProcessLookupError):
            os.kill(self._pid(rank), signal.SIGUSR1)
        deadline = time.monotonic() + 1.0
        while not self._stack_text(rank) and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.05)  # the stack may be half written
        since = "after another rank had failed" if self._failures else f"within {timeout:g} s"
        return f"{_HUNG} {since}\n{self._stack_text(rank)}"

    def _pid(self, rank: int) -> int:
        pid = self.processes[rank].pid
        assert pid is not None, f"rank {rank} was not started"
        return pid

    def _stack_path(self, rank: int) -> Path:
        return self._folder / f"stack_{rank}"

    def _stack_text(self, rank: int) -> str:
        path = self._stack_path(rank)
        return path.read_text(errors="replace") if path.exists() else ""


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *arguments: Any,
    timeout: float = 120.0,
) -> list[Any]:
    """Run ``function(rank, size, store_path, *arguments)`` in ``size`` processes and return their
    results."""
    with start_ranks(function, size, *arguments) as ranks:
        return ranks.results(timeout)


@contextmanager
def start_ranks(function: Callable[..., Any], size: int, *arguments: Any) -> Iterator[Ranks]:
    """The same, for tests that kill or freeze a rank while it runs."""
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

    store = dist.FileStore(store_path, size)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


@cache
def _context() -> ForkServerContext:
    context = get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    return context


def _rank_main(rank: int, job: bytes, pipe: Connection, stack_path: str) -> None:
    """Run a rank from its start to its end."""
    with suppress(PermissionError):
        os.setsid()
    arguments = (pipe, Path(stack_path).parent)
    threading.Thread(target=_end_with_parent, args=arguments, daemon=True).start()
    with open(stack_path, "w") as stack_file:
        faulthandler.enable(stack_file)
        faulthandler.register(signal.SIGUSR1, stack_file)
        result = _run_job(rank, job)
        with suppress(BrokenPipeError, ConnectionError):
            pipe.send_bytes(result)
        # Before the file is closed: a crash at exit must not write to another file with its
        # descriptor.
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.enable(sys.__stderr__ or 2)


def _run_job(rank: int, job: bytes) -> bytes:
    """Return, pickled, True and the function's result, or False and its traceback."""
    try:
        import torch

        torch.set_num_threads(1)
        environment, function, size, store_path, arguments = pickle.loads(job)  # noqa: S301 - from the test
        _set_environment(environment)
        return pickle.dumps((True, function(rank, size, store_path, *arguments)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


def _set_environment(environment: dict[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


def _end_with_parent(pipe: Connection, folder: Path) -> None:
    """End the rank and clean up when the parent ends.

    The parent sends nothing through the pipe, so that it becomes readable only when the parent is
    gone."""
    with suppress(OSError):
        pipe.poll(None)
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(os.getpgid(0), signal.SIGKILL)


def _end(process: BaseProcess) -> None:
    """End a rank and the processes that it started."""
    pid = process.pid
    if pid is not None and process.exitcode != 0:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        process.kill()
    process.join(GRACE_S)


def _blame_order(text: str) -> int:
    """Sort causes before consequences: a rank that only waited for a peer, or lost one, is not to
    blame."""
    if text.startswith(_HUNG):
        return 1
    return 2 if any(phrase in text for phrase in PEER_GONE) else 0
