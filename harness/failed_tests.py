"""Names the tests that failed last; exits with 1 if there are none, or too many to be run again, or if pytest
ended before it had run all tests.

python -m harness.failed_tests 4"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_CACHE = Path(".pytest_cache/v")
ENDED = "expert-orchestrator/ended"
"""The key of pytest's exit code in its cache."""
_ALL_RUN = 1  # pytest's exit code if some tests failed, and nothing else went wrong


def failed_tests(cache: Path) -> list[str]:
    """Return the tests that failed in a run of all; nothing if the run ended early."""
    if _read(cache / ENDED) != _ALL_RUN:
        return []
    return sorted(_read(cache / "cache/lastfailed") or [])


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def main() -> int:
    most = int(sys.argv[1])
    failed = failed_tests(_CACHE)
    if not failed or len(failed) > most:
        sys.stdout.write(f"{len(failed)} tests of a whole run have failed; 1 to {most} are run again\n")
        return 1
    for test in failed:
        sys.stdout.write(f"run again, alone: {test}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
