"""Random tokens in place of documents, for plans and measurements without data.

Shapes: B samples of a batch, S tokens of a sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

EXAMPLE_SAMPLES = 10_000


class ExampleTokens:
    """Samples of one document each; every token but the last has a label."""

    is_text = True
    is_chat = False

    def __init__(self, sequence_length: int, vocabulary: int) -> None:
        self._sequence_length = sequence_length
        self._vocabulary = vocabulary

    def __len__(self) -> int:
        return EXAMPLE_SAMPLES

    def gather(self, index_B: Tensor) -> dict[str, Tensor]:
        shape = (len(index_B), self._sequence_length)
        generator = torch.Generator().manual_seed(0)
        input_ids_BS = torch.randint(self._vocabulary, shape, generator=generator)
        return {
            "input_ids": input_ids_BS,
            "labels": torch.cat([input_ids_BS[:, 1:], torch.full((shape[0], 1), -100)], dim=1),
            "position_ids": torch.arange(shape[1]).expand(shape).contiguous(),
            "mask": torch.ones(shape, dtype=torch.int64),
        }

    def to(self, device: torch.device) -> ExampleTokens:
        del device
        return self

    @property
    def nbytes(self) -> int:
        return 0
