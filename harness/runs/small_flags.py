"""Flags of the smallest run by the command line."""

from __future__ import annotations

CPU = ("--gpu-mode", "cpu")
SMALL = (
    "--task", "synthetic", "--width", "8", "--sequence-length", "8",
    "--layers", "1", "--experts", "2", "--samples", "32",
)  # fmt: skip
