"""``orchestrator launch``: write the file that starts a cluster and trains on it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from orchestrator.cli.train import TrainOptions
from orchestrator.config.reading.flags import read_flags, read_options
from orchestrator.config.reading.reader import Resolved
from orchestrator.errors import ResourceError, UserError
from orchestrator.launch.files import file_text
from orchestrator.launch.launch import Launch, LaunchOptions
from orchestrator.plan.inventory.hardware import secret_values
from orchestrator.redaction import mask
from orchestrator.types import counted, flag_of

_SET_BY_THE_FILE = ("workers", "run_dir", "name", "resume", "init_from", "ray_address", "devices")


def run(argv: Sequence[str]) -> int:
    own, flags = split(argv)
    options = read_options(LaunchOptions, own, "orchestrator launch", positional="kind")
    launch = Launch(options, tuple(flags))
    resolved = _read_train_flags(launch)
    notes = _check_plan(launch, resolved)
    _write(launch, notes)
    return 0


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags of launch, and those of train, which follow after ``--``."""
    arguments = list(argv)
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def _read_train_flags(launch: Launch) -> Resolved:
    """Return the settings of the run. Raises UserError for flags that the cluster would refuse."""
    _, resolved = read_flags(TrainOptions, launch.flags, "orchestrator train")
    for name in _SET_BY_THE_FILE:
        if resolved.origin(name).startswith("flag"):
            raise UserError(
                f"{flag_of(name)} stands after the --, but the file sets it; give --workers, --run-dir and "
                "--name before the --, and leave the others out"
            )
    _, resolved = read_flags(
        TrainOptions, [*launch.flags, "--workers", str(launch.options.workers)], "orchestrator train"
    )
    return resolved


def _check_plan(launch: Launch, resolved: Resolved) -> list[str]:
    """Return notes on the plan of the run on this cluster. Raises ResourceError if it does not fit."""
    _check_devices(launch, resolved)
    gpus = launch.options.gpus_per_node
    if launch.options.gpu is None:
        if not gpus:
            return []
        return ["not checked: whether the model fits; give the model of the GPUs, such as --gpu H100"]
    from orchestrator.cli.planning.prediction import (
        DeviceFigures,
        predict_step,
        prepare_on_cluster,
        shortage_of,
    )
    from orchestrator.plan.cost.cluster_spec import machine_of, parse_cluster
    from orchestrator.tasks.load import load_task

    if not gpus:
        raise UserError("--gpu names a GPU, but --gpus-per-node is 0; leave one of them out")
    spec = parse_cluster(f"nodes={launch.nodes},gpus={gpus},gpu={launch.options.gpu}")
    prepared = prepare_on_cluster(resolved, load_task(resolved.config), spec)
    shortage = shortage_of(prepared)
    if shortage is not None:
        raise ResourceError(shortage)
    line, _ = predict_step(prepared, DeviceFigures(machine_of(spec), "data sheet figures"))
    return [f"planned for {spec.nodes} × {spec.gpus} {spec.gpu.upper()}: {line}"]


def _check_devices(launch: Launch, resolved: Resolved) -> None:
    """Raise ResourceError if standby hosts find no device: a GPU, or a node without GPUs."""
    spares = resolved.config.parallel.spares
    per_node = max(1, launch.options.gpus_per_node)
    needed = launch.options.workers + spares
    if needed > launch.nodes * per_node:
        who = f"{counted(launch.options.workers, 'worker')} and {counted(spares, 'spare')}"
        raise ResourceError(
            f"{who} need {needed} devices; {counted(launch.nodes, 'node')} with {per_node} each have "
            f"{launch.nodes * per_node}. Give a larger --gpus-per-node, or fewer --workers"
        )


def _write(launch: Launch, notes: Sequence[str]) -> None:
    """Write the file. Notes go to stderr, where they are not taken for a part of it."""
    _refuse_secrets(launch)
    text = file_text(launch)
    path = launch.options.out
    if path is None:
        sys.stdout.write(text)
    else:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; choose another --out") from None
        sys.stderr.write(f"wrote {path}; its first lines say how to start it\n")
    for note in notes:
        sys.stderr.write(note + "\n")


def _refuse_secrets(launch: Launch) -> None:
    """Raise UserError if an option or a flag of the run holds a secret of this environment, or a password.

    The templates hold none: they name files and variables of secrets."""
    secrets = secret_values()
    options = [f"{name} {value}" for name, value in vars(launch.options).items()]
    for given in (*options, " ".join(launch.flags)):
        masked = mask(given, secrets)
        if masked != given:
            raise UserError(
                f"the file would hold a secret: {masked}; leave it out of the flags, the nodes get "
                "secrets from their own environment (docs/clusters.md)"
            )
