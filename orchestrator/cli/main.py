"""The command line: which verb, which options, which exit code. Nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import errno
import os
import select
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.config.settings import Config, did_you_mean
from orchestrator.errors import OrchestratorError, UserError
from orchestrator.redaction import MaskedStream
from orchestrator.types import VERSION

USAGE = """usage: orchestrator VERB [options]

Trains PyTorch models: detects the hardware, chooses good settings, says why, and leaves a report.

  train    train a task and leave a report
  plan     show every choice with its reason, and the memory estimate, before anything runs
  check    look at the machine and try what training needs
  bench    measure forward and backward time of a task
  sweep    try settings against each other on the cluster, and leave scaling tables
  report   draw plots and report.html again from the folder of a run or a sweep
  init     write a commented config for this machine

orchestrator VERB --help lists a verb's options. Settings come from --config FILE (YAML) and flags; flags win.
Exit codes: 0 done, 2 a mistake in the call, 3 resources not to be had, 4 training failed, 130 interrupted."""


@dataclass(frozen=True)
class TrainOptions:
    """Train a task and leave a report in the run folder."""

    settings: Config
    config: Path | None = None
    """YAML file with settings; flags win over it."""
    tuned: Path | None = None
    """Folder of a sweep: train with the settings of its best trial that the devices here are enough for; flags win over them."""


@dataclass(frozen=True)
class PlanOptions:
    """Show every choice with its reason, before anything runs."""

    settings: Config
    config: Path | None = None
    """YAML file with settings; flags win over it."""
    cluster: str | None = None
    """Predict the scaling table of a cluster instead, one that need not be there: nodes=16,gpus=8,gpu=h200,link=nvlink,net=400gbit
    (nics=8 for as many network cards of that rate in a node)."""
    calibration: Path | None = None
    """Measured figures to predict from. Default: calibration.json of the results folder, where there is one."""
    json: bool = False
    """Print JSON for machines."""


@dataclass(frozen=True)
class BenchOptions:
    """Measure forward and backward time of a task, warm-up excluded."""

    settings: Config
    config: Path | None = None
    """YAML file with settings; flags win over it."""
    iterations: int = 20
    """Steps that are measured."""
    precisions: bool = False
    """Compare fp32, tf32, bf16 and fp16: speed, memory and loss."""
    calibrate: bool = False
    """Measure the machine itself instead, for predictions of the step time (plan); takes less than a minute."""
    calibration: Path | None = None
    """Where the calibration is kept. Default: calibration.json in the results folder."""
    json: bool = False
    """Print JSON for machines."""


@dataclass(frozen=True)
class CheckOptions:
    """Look at the machine and try what training needs."""

    full: bool = False
    """Also train two steps and check each part of the way."""
    json: bool = False
    """Print JSON for machines."""


@dataclass(frozen=True)
class InitOptions:
    """Write a commented config for this machine."""

    path: Path = Path("orchestrator.yaml")
    """Where to write it."""
    force: bool = False
    """Overwrite an existing file."""


@dataclass(frozen=True)
class ReportOptions:
    """Draw plots, performance_summary.txt and report.html again from a run folder."""

    folder: Path
    """The folder of a run or of a sweep."""


def _train(argv: Sequence[str]) -> int:
    from orchestrator.config.reader import read_flags

    options, resolved = read_flags(TrainOptions, argv, "orchestrator train")
    from orchestrator.cli import commands

    return commands.train(resolved, options.tuned)


def _plan(argv: Sequence[str]) -> int:
    from orchestrator.config.reader import read_flags

    options, resolved = read_flags(PlanOptions, argv, "orchestrator plan")
    from orchestrator.cli import commands

    return commands.show_plan(resolved, options.json, options.cluster, options.calibration)


def _bench(argv: Sequence[str]) -> int:
    from orchestrator.config.reader import read_flags

    options, resolved = read_flags(BenchOptions, argv, "orchestrator bench")
    if options.calibrate:
        from orchestrator.cli.predict import calibrate_machine

        return calibrate_machine(options.calibration, options.json)
    from orchestrator.cli import commands

    return commands.bench(resolved, options.iterations, options.precisions, options.json)


def _sweep(argv: Sequence[str]) -> int:
    from orchestrator.cli.sweep import SweepOptions, sweep
    from orchestrator.config.reader import read_flags

    return sweep(*read_flags(SweepOptions, argv, "orchestrator sweep"))


def _check(argv: Sequence[str]) -> int:
    from orchestrator.config.reader import read_own

    options = read_own(CheckOptions, argv, "orchestrator check")
    from orchestrator.cli import check as checking

    return checking.show_check(options.full, options.json)


def _init(argv: Sequence[str]) -> int:
    from orchestrator.config.reader import read_own

    options = read_own(InitOptions, argv, "orchestrator init", positional="path")
    from orchestrator.cli import commands

    return commands.init(options.path, options.force)


def _report(argv: Sequence[str]) -> int:
    from orchestrator.config.reader import read_own

    options = read_own(ReportOptions, argv, "orchestrator report", positional="folder")
    from orchestrator.cli import commands

    return commands.show_report(options.folder)


VERBS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": _train,
    "plan": _plan,
    "check": _check,
    "bench": _bench,
    "sweep": _sweep,
    "report": _report,
    "init": _init,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb. A known error becomes a short message and its exit code; a bug of ours keeps its traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        _mask_output()
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_left():
            raise
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # or the interpreter would complain when it ends
        return 141
    except OrchestratorError as error:
        sys.stderr.write(f"orchestrator: {error}\n")
        return error.exit_code
    except OSError as error:
        if error.errno not in (errno.ENAMETOOLONG, errno.ELOOP):
            raise
        sys.stderr.write(
            f"orchestrator: {error.strerror}: {str(error.filename)[:80]} …; another path was needed\n"
        )
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("orchestrator: interrupted\n")
        return 130


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(USAGE + "\n")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        sys.stdout.write(f"expert-orchestrator {VERSION}\n")
        return 0
    verb = VERBS.get(arguments[0])
    if verb is None:
        raise UserError(
            f"unknown verb {arguments[0]!r}{did_you_mean(arguments[0], VERBS)}; verbs are {', '.join(VERBS)}"
        )
    return verb(arguments[1:])


def _reader_left() -> bool:
    """Whether our output goes into a pipe that nobody reads any more, as behind ``| head``. Other broken pipes are bugs."""
    watched = select.poll()
    watched.register(sys.stdout.fileno(), 0)
    return bool(watched.poll(0))


def _mask_output() -> None:
    """Nothing that this program says, tracebacks included, tells a secret of its environment."""
    from orchestrator.plan.inventory.hardware import secret_values

    secrets = secret_values()
    sys.stdout, sys.stderr = MaskedStream(sys.stdout, secrets), MaskedStream(sys.stderr, secrets)  # pyright: ignore[reportAttributeAccessIssue]


if __name__ == "__main__":
    sys.exit(main())
