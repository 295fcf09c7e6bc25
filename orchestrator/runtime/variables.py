"""Environment variables of a worker. Read and set here, handed on by hand."""

from __future__ import annotations

import os


def set_variables(values: dict[str, str]) -> None:
    """Before the libraries that read them begin."""
    os.environ.update(values)


def variable(name: str) -> str:
    """Empty where it is not set."""
    return os.environ.get(name, "")
