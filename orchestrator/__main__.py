"""``python -m orchestrator``, the same as ``orchestrator``."""

import sys


def _run() -> int:
    """Run the command line. A node without our packages is answered in one line, with the remedy."""
    try:
        from orchestrator.cli.main import main

        return main()
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package in ("orchestrator", "experts"):
            raise
        sys.stderr.write(
            f"orchestrator: {sys.executable} has no package {package!r}; install the project on this "
            "node: pip install expert-orchestrator, or pip install -e . in a checkout of it\n"
        )
        return 3


sys.exit(_run())
