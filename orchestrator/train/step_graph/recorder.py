"""Records the work of a function on a GPU as a CUDA graph, and replays it: one launch instead of hundreds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from orchestrator.train.device.memory import free_cached, is_out_of_memory
from orchestrator.types import first_line

T = TypeVar("T")


class CaptureFailed(Exception):
    """A function that cannot be recorded; the text is the reason."""


class Recorder(Protocol):
    """Records functions without arguments. Their tensors stay where they are, and are written again."""

    def warm_up(self, function: Callable[[], T]) -> T:
        """Run a function as it will be recorded: libraries allocate their memory for it."""
        ...

    def record(self, function: Callable[[], T]) -> Callable[[], T]:
        """Return a function that repeats the work of ``function``, and returns the same tensors each time.

        Nothing is computed until it is called. Raises ``CaptureFailed``."""
        ...

    def forget(self) -> None:
        """Release the memory of the recorded functions. They must not be called again."""
        ...


class CudaRecorder:
    """Records CUDA graphs, all in one pool of memory: no two of them run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The default stream cannot be captured.
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], T]) -> T:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                return function()
        finally:
            # Also after an error: the step is repeated on the current stream, with the same tensors.
            current.wait_stream(self._stream)

    def record(self, function: Callable[[], T]) -> Callable[[], T]:
        # Memory that ordinary steps have cached would be missing in the graph's own pool.
        free_cached(self._device)
        torch.cuda.synchronize(self._device)
        replay = self._try(function)
        if isinstance(replay, str):
            self._clean_up()
            raise CaptureFailed(replay)
        return replay

    def _try(self, function: Callable[[], T]) -> Callable[[], T] | str:
        """Return the replay of a function, or the reason why it was not captured.

        The error itself stays here: its frames keep the tensors of the capture alive."""
        graph = torch.cuda.CUDAGraph()
        try:
            return partial(_replay, graph, self._capture(graph, function))
        except Exception as error:
            return _reason(error)

    def forget(self) -> None:
        # A pool whose graphs are gone takes no further ones.
        self._pool = torch.cuda.graph_pool_handle()
        free_cached(self._device)

    def _capture(self, graph: torch.cuda.CUDAGraph, function: Callable[[], T]) -> T:
        with torch.cuda.stream(self._stream):
            # Threads that read the state of the device or save a checkpoint must not end the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                return function()
            finally:
                graph.capture_end()

    def _clean_up(self) -> None:
        """End the capture of torch's allocator and generator, which go on after a capture that failed."""
        index = self._device.index or 0
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(index, self._pool)
        generator: Any = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())
        with suppress(RuntimeError):  # an error that a launch has left behind
            torch.cuda.synchronize(self._device)
        self.forget()


def _replay(graph: torch.cuda.CUDAGraph, result: T) -> T:
    graph.replay()
    return result


def _reason(error: BaseException) -> str:
    """Return why a capture failed: the first error, since it makes the end of the capture fail too."""
    while error.__context__ is not None:
        error = error.__context__
    if is_out_of_memory(error):
        return "there is too little memory beside it"
    return f"{type(error).__name__}: {first_line(error)}"
