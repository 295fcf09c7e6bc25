"""Freed memory stays with the process that trains.

The blocks are glibc's own: builds of torch for ARM have an allocator besides, which keeps and returns
pages by rules of its own."""

from __future__ import annotations

import resource
import threading

import pytest
import torch

from orchestrator.train.device import memory
from orchestrator.train.device.memory import keep_freed_memory
from orchestrator.types import MIB

needs_glibc = pytest.mark.skipif(memory._glibc() is None, reason="only glibc has mallopt")
NUM_BLOCKS = 20
BLOCK_BYTES = 8 * MIB


def faults_of_a_step() -> int:
    """Return the page faults of this thread in a step that needs 160 MB, after others: the blocks find
    their places within a few."""
    before = 0
    for _ in range(8):
        before = num_faults()
        allocate_and_free()
    return num_faults() - before


def allocate_and_free() -> None:
    blocks = [bytearray(b"1") * BLOCK_BYTES for _ in range(NUM_BLOCKS)]
    del blocks


def num_faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def faults_in_a_thread(device: str) -> int:
    """An expert host trains in a thread, whose memory glibc manages in another way."""
    faults: list[int] = []

    def train() -> None:
        with keep_freed_memory(torch.device(device)):
            faults.append(faults_of_a_step())

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    return faults[0]


@needs_glibc
def test_a_later_step_finds_the_pages_of_an_earlier_one() -> None:
    with keep_freed_memory(torch.device("cpu")):
        assert faults_of_a_step() < 200
    assert faults_in_a_thread("cpu") < 200


@needs_glibc
def test_memory_is_returned_after_the_run() -> None:
    with keep_freed_memory(torch.device("cpu")):
        allocate_and_free()
        kept = resident_bytes()
    assert kept - resident_bytes() > 100 * MIB


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_glibc", lambda: None)
    with keep_freed_memory(torch.device("cpu")):
        memory.release_freed_memory()
