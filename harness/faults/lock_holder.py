"""A process that trains into a run folder, as far as its lock tells."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HOLD = """
import sys
from pathlib import Path
from orchestrator.run.folder_lock import folder_lock

with folder_lock(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


@contextmanager
def lock_holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Hold the lock of a folder in another process, which ends with the block or is killed in it."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", _HOLD, str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=root, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()
