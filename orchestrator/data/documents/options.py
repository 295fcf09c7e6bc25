"""Options of language data: how rows become documents of tokens, and documents become samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from orchestrator.errors import UserError


@dataclass(frozen=True)
class DocumentOptions:
    sequence_length: int
    """Tokens of a sample."""
    packing: bool = True
    """Put several documents into a sample; otherwise a sample has one, with padding after it."""
    train_on: Literal["assistant", "all"] = "assistant"
    """Tokens of chats and of prompts with completions that have a loss: the answers, or all."""
    text_column: str = "text"
    skip_bad: bool = False
    """Leave out rows that cannot be used, and count them; otherwise the first one is an error."""
    seed: int = 0
    """Seed of the order of documents before packing."""
    vocabulary: int | None = None
    """Tokens that the model has embeddings for; None skips the check of the data's tokens."""

    def __post_init__(self) -> None:
        if self.sequence_length < 2:
            raise UserError(
                f"the sequence length is {self.sequence_length}; at least 2 was needed: "
                "a token and the one that follows it"
            )
