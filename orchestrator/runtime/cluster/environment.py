"""Environment variables of a process: read and set here, passed on explicitly."""

from __future__ import annotations

import os
from collections.abc import Callable

from orchestrator.runtime.ray_internals import niceness_variable


def set_variables(values: dict[str, str]) -> None:
    """Set variables, before the libraries that read them start."""
    os.environ.update(values)


def variable(name: str) -> str:
    """Return the value of a variable; empty if it is not set."""
    return os.environ.get(name, "")


def priority_variables() -> dict[str, str]:
    """Return the variables by which a worker process has the priority of a program that the user starts.

    Ray lowers its workers to nice 15. Any other program of the machine would then slow the training, and
    a process that imports at nice 19 would take 29% of a busy core from it, at nice 0 only 1.6%. A value
    that the user has set stays.
    """
    name = niceness_variable()
    return {} if variable(name) else {name: "0"}


def variables_with_prefix(prefix: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(prefix)}


def make_variable_setter(values: dict[str, str]) -> Callable[[], None]:
    """Return a function that sets those of the variables that are not set.

    The function is pickled by value and imports none of our modules, so that any process can run
    it.
    """

    def set_missing() -> None:
        import os

        for name, value in values.items():
            os.environ.setdefault(name, value)

    return set_missing
