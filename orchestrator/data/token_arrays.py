"""Files of token ids, mapped into memory: ``.npy`` files, and ``.bin`` files of plain numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from orchestrator.errors import UserError


def map_tokens(file: Path, dtype: str) -> np.ndarray:
    """Map the tokens of a file. ``dtype`` is that of a ``.bin`` file; a ``.npy`` file tells its own.

    Raises ``UserError`` if the file holds something else."""
    try:
        if file.suffix != ".npy":
            return np.memmap(file, dtype=dtype, mode="r")
        tokens = np.lib.format.open_memmap(file, mode="r")  # refuses pickled objects
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the tokens of {file} as {dtype}: {error}") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        raise UserError(
            f"{file} holds {tokens.dtype} of shape {tokens.shape}; one row of whole numbers was needed"
        )
    return tokens
