"""A local copy of a remote run or checkpoint, which users know by its address."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from orchestrator.errors import OrchestratorError
from orchestrator.run.run_dir import DOWNLOADED


@contextmanager
def local_copy(results: Path, url: str) -> Iterator[Path]:
    """Yield an empty folder for a copy of a remote run; errors of the block name its address.

    It is below ``results``, which other nodes may see too, and removed at the end."""
    results.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=DOWNLOADED, dir=results) as name:
        copy = Path(name)
        try:
            yield copy
        except OrchestratorError as error:
            for path in {str(copy), str(copy.resolve())}:
                error.args = tuple(
                    value.replace(path, url) if isinstance(value, str) else value for value in error.args
                )
            raise
