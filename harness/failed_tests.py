"""Names the tests that failed last; exits with 1 if there are none, or too many to be run again.

python -m harness.failed_tests 4"""

from __future__ import annotations

import json
import sys
from pathlib import Path

_CACHE = Path(".pytest_cache/v/cache/lastfailed")


def failed_tests(cache: Path) -> list[str]:
    return sorted(json.loads(cache.read_text(encoding="utf-8"))) if cache.exists() else []


def main() -> int:
    most = int(sys.argv[1])
    failed = failed_tests(_CACHE)
    if not failed or len(failed) > most:
        sys.stdout.write(f"{len(failed)} tests have failed; 1 to {most} are run again\n")
        return 1
    for test in failed:
        sys.stdout.write(f"run again, alone: {test}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
