"""Files of token ids, mapped into memory: each worker reads the windows that it trains on.

Shapes: B samples of a batch, S tokens of a window.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchestrator.data.files import map_tokens
from orchestrator.errors import UserError
from orchestrator.storage.address import as_url
from orchestrator.storage.local_copy import local_copy
from orchestrator.tasks.task import WindowData

_DTYPES = ("uint16", "uint32", "int32", "int64")


class TokenFile:
    """Windows of a file of tokens: sample i is tokens [i × context, (i + 1) × context].

    A window has one token more than the context, so that each token but the first is a target once.
    ``file`` is a ``.npy`` file, or a ``.bin`` file of plain numbers of type ``dtype``. A remote file is
    copied to this machine first.
    """

    def __init__(self, file: str | Path, context: int, dtype: str = "uint16") -> None:
        if dtype not in _DTYPES:
            raise UserError(f"dtype is {dtype!r}; {', '.join(_DTYPES)} were possible")
        if context < 1:
            raise UserError(f"context is {context}; at least 1 was needed")
        location = file if as_url(file) is None else local_copy("the token file", file)
        self.file = Path(location).expanduser().absolute()
        self.context = context
        self._dtype = dtype
        self._tokens = map_tokens(self.file, self._dtype)
        if len(self) < 1:
            raise UserError(f"{self.file} has {len(self._tokens)} tokens; a window needs {context} + 1")

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self.context

    def gather(self, index_B: Tensor) -> Tensor:
        start_B1 = index_B.cpu().numpy()[:, None] * self.context
        tokens_BS = self._tokens[start_B1 + np.arange(self.context + 1)]
        return torch.from_numpy(tokens_BS.astype(np.int64))

    def to(self, device: torch.device) -> TokenFile | WindowData:
        """Return the tokens in the memory of a GPU; for a CPU they stay in the file."""
        if device.type == "cpu":
            return self
        return WindowData(torch.from_numpy(self._tokens.astype(np.int64)).to(device), self.context)

    @property
    def nbytes(self) -> int:
        return self._tokens.nbytes

    def __getstate__(self) -> dict[str, Any]:
        # A worker maps the file itself: the tokens must not travel with the task.
        return {name: value for name, value in self.__dict__.items() if name != "_tokens"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokens = map_tokens(self.file, self._dtype)
