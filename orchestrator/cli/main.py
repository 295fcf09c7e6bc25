"""The entry of the command line: find the verb, run it, and map errors to exit codes.

Each verb lives in ``orchestrator.cli.VERB``, which reads its own options. The module of a verb
is imported when the verb is called, so that ``--help`` imports neither torch nor Ray.
"""

from __future__ import annotations

import errno
import importlib
import os
import select
import sys
from collections.abc import Sequence

from orchestrator.config.names.nearest import did_you_mean
from orchestrator.errors import OrchestratorError, ResourceError, UserError
from orchestrator.interrupts import ignore_signals, interrupt_on_signals
from orchestrator.redaction import MaskedStream
from orchestrator.types import VERSION, printable

VERBS = {
    "train": "train a task and write a report",
    "resume": "continue the run of a folder with its own settings",
    "evaluate": "write the metrics of a checkpoint beside it, on any number of workers",
    "verify": "recompute steps of a reproducible run, and compare them with its record",
    "export": "write a checkpoint as a folder that transformers loads",
    "plan": "show every choice with its reason, and the memory estimate, before anything runs",
    "check": "inspect the machine and test what training needs",
    "bench": "measure forward and backward time of a task",
    "sweep": "compare settings in short trials on the cluster, and write scaling tables",
    "watch": "show a running or finished run in the terminal: progress, hosts, experts, events",
    "report": "draw plots and report.html again from the folder of a run or a sweep; compare runs",
    "launch": "write the file that starts a cluster and trains on it: KubeRay, Slurm, ssh, ray up, SkyPilot",
    "init": "write a commented config for this machine",
}
_VERB_LINES = "\n".join(f"  {verb:8} {text}" for verb, text in VERBS.items())

USAGE = f"""usage: orchestrator VERB [options]

Trains PyTorch models: detects the hardware, chooses good settings with their reasons, and writes a report.

{_VERB_LINES}

orchestrator VERB --help lists a verb's options. orchestrator --completion bash|zsh|fish writes a script that
completes verbs, flags and their words. Settings come from --config FILE (YAML) and flags; flags win.
Exit codes: 0 done, 2 a mistake in the call, 3 insufficient resources, 4 training failed or
verify found a difference, 130 interrupted."""

_BROKEN_PIPE = 141
"""The exit code that a shell shows for a program that SIGPIPE ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb and return its exit code.

    A known error becomes a short message and its exit code. Any other exception is a bug of this
    project and keeps its traceback.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        # Before anything slow: a verb that has begun to start processes must be able to end them.
        interrupt_on_signals()
        _mask_output()
    try:
        try:
            return _run_verb(arguments)
        finally:
            ignore_signals()  # the verb has cleaned up, and the program ends
            sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        # The interpreter flushes stdout once more when it ends, and would complain about the closed
        # pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except OrchestratorError as error:
        # Messages may quote the files of a run, which may come from anywhere.
        text = "\n".join(map(printable, str(error).split("\n")))
        sys.stderr.write(f"orchestrator: {text}\n")
        return error.exit_code
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = f": {error.filename}" if error.filename else ""
            sys.stderr.write(f"orchestrator: {error.strerror}{where}; make room, or lift the quota\n")
            return ResourceError.exit_code
        if error.errno not in (errno.ENAMETOOLONG, errno.ELOOP):
            raise
        path = str(error.filename)[:80]
        sys.stderr.write(f"orchestrator: {error.strerror}: {path} …; choose another path\n")
        return UserError.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("orchestrator: interrupted\n")
        return 130


def _run_verb(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(USAGE + "\n")
        return 0 if arguments else UserError.exit_code
    verb, *rest = arguments
    if verb == "--version":
        sys.stdout.write(f"expert-orchestrator {VERSION}\n")
        return 0
    if verb == "--completion":
        from orchestrator.cli.completion import completion

        sys.stdout.write(completion(rest[0] if rest else "", VERBS))
        return 0
    if verb not in VERBS:
        raise UserError(f"unknown verb {verb!r}{did_you_mean(verb, VERBS)}; verbs are {', '.join(VERBS)}")
    return importlib.import_module(f"orchestrator.cli.{verb}").run(rest)


def _reader_has_left() -> bool:
    """Whether stdout is a pipe whose reader has closed it, as ``| head`` does.

    Other broken pipes are bugs.
    """
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return bool(poll.poll(0))


def _mask_output() -> None:
    """Mask the secrets of the environment in all output of this program, tracebacks included."""
    from orchestrator.plan.inventory.hardware import secret_values

    secrets = secret_values()
    sys.stdout = MaskedStream(sys.stdout, secrets)
    sys.stderr = MaskedStream(sys.stderr, secrets)


if __name__ == "__main__":
    sys.exit(main())
