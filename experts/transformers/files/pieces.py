"""Work on the files of a model in pieces, by several threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import torch

PIECE_BYTES = 2**25
"""Tensors that are not converted are read and written some rows at a time, of about so many bytes."""

OnProgress = Callable[[int, int], None]
"""Called with the bytes that are done, and all bytes."""


@dataclass(frozen=True)
class Piece:
    """Some bytes of tensors, and the function that brings them to their place."""

    num_bytes: int
    run: Callable[[], None]


def no_progress(done_bytes: int, all_bytes: int) -> None:
    """Ignore the progress."""


def run_pieces(pieces: Sequence[Piece], threads: int, on_progress: OnProgress) -> None:
    """Run all pieces, without gradients. An error ends those that have not begun."""
    all_bytes = sum(piece.num_bytes for piece in pieces)
    done_bytes = 0
    on_progress(done_bytes, all_bytes)
    pool = ThreadPoolExecutor(threads, "model-files")
    try:
        runs = {pool.submit(torch.no_grad()(piece.run)): piece for piece in pieces}
        for finished in as_completed(runs):
            finished.result()
            done_bytes += runs[finished].num_bytes
            on_progress(done_bytes, all_bytes)
    finally:
        pool.shutdown(cancel_futures=True)
