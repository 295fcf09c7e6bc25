"""Environment variables of a worker. Read and set here, handed on by hand."""

from __future__ import annotations

import os
from collections.abc import Callable


def set_variables(values: dict[str, str]) -> None:
    """Before the libraries that read them begin."""
    os.environ.update(values)


def variable(name: str) -> str:
    """Empty where it is not set."""
    return os.environ.get(name, "")


def setting(values: dict[str, str]) -> Callable[[], None]:
    """Sets those that are not set, in whatever process it is called: it is sent by value, and asks for none of our code."""

    def set_missing() -> None:
        import os

        for name, value in values.items():
            os.environ.setdefault(name, value)

    return set_missing
