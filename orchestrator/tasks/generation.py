"""The interface of a task whose model continues prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from orchestrator.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

MAX_NEW_TOKENS = 64
_FILE_ENDINGS = (".txt", ".md", ".jsonl", ".json")


@dataclass(frozen=True)
class GenerationOptions:
    """The texts that a model continues after an evaluation; without any, the first prompts of the data."""

    prompts: tuple[str, ...] = ()
    max_new_tokens: int = MAX_NEW_TOKENS

    @classmethod
    def of(cls, prompts: Sequence[str], max_new_tokens: int) -> GenerationOptions:
        """Return the options with the lines of files among the prompts."""
        if max_new_tokens < 0:
            raise UserError(f"--max-new-tokens is {max_new_tokens}; it must be at least 0")
        texts = tuple(text for prompt in prompts for text in _texts(prompt))
        return cls(texts, max_new_tokens)

    def check_task(self, task: Any) -> None:
        """Refuse prompts for a task that cannot continue them."""
        if self.prompts and not hasattr(task, "prompts"):
            raise UserError("--prompts: the task generates no text; leave it out, or evaluate a run of lm")


@dataclass(frozen=True)
class Prompt:
    """Tokens that a model continues, and the text that its data has after them."""

    tokens: Sequence[int]
    reference: str | None = None


class Generating(Protocol):
    """A task whose model continues prompts, token by token."""

    stop_tokens: frozenset[int]

    def prompts(self, texts: Sequence[str], data: Any, max_new_tokens: int) -> list[Prompt]:
        """Return the prompts of texts; without texts the first ones of the data."""
        ...

    def logits(self, model: nn.Module, input_ids_BS: Tensor) -> Tensor:
        """Return the scores of the next token at each position."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...


def _texts(prompt: str) -> list[str]:
    """Return the lines of a file, or the prompt itself."""
    path = Path(prompt)
    try:
        if not path.is_file():
            _check_is_no_file(prompt)
            return [prompt]
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except ValueError as error:
        raise UserError(f"--prompts {prompt}: the file is no text in UTF-8 ({error})") from None
    except OSError:
        return [prompt]  # a text that is too long for a name of a file
    if not lines:
        raise UserError(f"--prompts {prompt}: the file has no line with text; it needs one prompt a line")
    return lines


def _check_is_no_file(prompt: str) -> None:
    """Raise ``UserError`` for the name of a text file that is not there."""
    if prompt.endswith(_FILE_ENDINGS) and not any(letter.isspace() for letter in prompt):
        raise UserError(
            f"--prompts {prompt}: there is no such file; give a file with one prompt a line, or a text"
        )
