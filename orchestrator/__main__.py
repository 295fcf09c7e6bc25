"""``python -m orchestrator``, the same as ``orchestrator``."""

import sys

from orchestrator.cli.main import main

sys.exit(main())
