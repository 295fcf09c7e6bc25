"""``python -m orchestrator``, the same as ``orchestrator``."""

import sys

from orchestrator.cli import main

sys.exit(main())
