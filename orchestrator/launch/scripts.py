"""Shell scripts: a Slurm batch script, and a script that starts Ray on hosts over ssh.

Every value goes through ``shlex.quote``. The scripts themselves are files in ``templates/``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from importlib.resources import files

from orchestrator.errors import UserError
from orchestrator.launch.launch import Launch
from orchestrator.launch.yaml_text import comment_text

_PLACE = re.compile(r"@([A-Z_]+)@")


def slurm_script(launch: Launch) -> str:
    comment = [
        f"Written by: {launch.launch_command()}",
        "Start: sbatch FILE, with the Python environment activated; end: scancel --batch --signal=TERM JOB",
        "Flags of sbatch win over the lines below: sbatch --partition=gpu --time=4:00:00 FILE",
    ]
    gpus = launch.options.gpus_per_node
    gpu_line = f"#SBATCH --gres=gpu:{gpus}" if gpus else "# No GPUs"
    values = _values(launch, comment) | {"NODES": str(launch.nodes), "GPU_LINE": gpu_line}
    return fill("slurm.sbatch", values)


def hosts_script(launch: Launch) -> str:
    hosts = launch.hosts
    if len(hosts) != launch.nodes:
        needed = f"{launch.options.workers} workers on nodes of {launch.options.gpus_per_node} GPUs"
        raise UserError(f"--hosts names {len(hosts)} hosts; {needed} need {launch.nodes}")
    comment = [
        f"Written by: {launch.launch_command()}",
        "Start: bash FILE start, then: bash FILE train; end with a checkpoint: bash FILE stop",
        "Needs ssh without a password to every host, and the packages in the same place on all of them.",
    ]
    return fill("hosts.sh", _values(launch, comment) | {"HOSTS": shlex.join(hosts)})


def _values(launch: Launch, comment: list[str]) -> dict[str, str]:
    return {
        "COMMENT": comment_text(comment).rstrip("\n"),
        "NAME": launch.options.name,
        "CPUS": str(launch.cpus_on_node),
        "GPUS": str(launch.options.gpus_per_node),
        "PYTHON": shlex.quote(launch.options.python),
        "SHARED_FOLDER": shlex.quote(launch.shared_folder),
        "TRAIN": shlex.join(launch.train_command()),
    }


def fill(template: str, values: Mapping[str, str]) -> str:
    """Return a template with its values; text that a value brings in is not looked at again."""
    text = files("orchestrator.launch").joinpath("templates", template).read_text(encoding="utf-8")
    return _PLACE.sub(lambda match: values[match[1]], text)
