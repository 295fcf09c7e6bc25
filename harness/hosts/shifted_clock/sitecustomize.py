"""Shifts the wall clock of the Python processes of a node, also while they run.

Python imports a module of this name as it starts. The kernel has one wall clock for all namespaces; C++
code still reads that."""

from __future__ import annotations

import mmap
import os
import struct
import time


def _shift(path: str) -> None:
    with open(path, "rb") as file:
        offset = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    unshifted_s = time.time
    unshifted_ns = time.time_ns
    time.time = lambda: unshifted_s() + struct.unpack("d", offset[:8])[0]
    time.time_ns = lambda: unshifted_ns() + int(1e9 * struct.unpack("d", offset[:8])[0])


if path := os.environ.get("SHIFTED_CLOCK"):
    _shift(path)
