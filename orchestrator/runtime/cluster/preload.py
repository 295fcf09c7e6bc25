"""Imports of the driver while it waits for a cluster that starts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def preloading_planner() -> Iterator[None]:
    """Import torch and the modules that plan a run in a thread, as long as the block waits.

    The block must not use torch, nor import parts of it, as ``ray.init`` does not: it would find
    modules that are half imported. At its end the imports are complete."""
    thread = threading.Thread(target=_import_planner, name="preload", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _import_planner() -> None:
    # The code that needs a module reports the error.
    with suppress(Exception):
        import orchestrator.measure.tracing.model_facts
        import orchestrator.run.prepared_run  # noqa: F401
