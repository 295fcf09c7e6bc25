"""The task file of SkyPilot: its run section starts Ray on every node, and trains from the first."""

from __future__ import annotations

import shlex
from typing import Any

from orchestrator.errors import UserError
from orchestrator.launch.clouds import mount_commands
from orchestrator.launch.launch import Launch
from orchestrator.launch.scripts import fill
from orchestrator.launch.yaml_text import yaml_text

_NAMES = {"a100": "A100-80GB"}
"""SkyPilot's names of GPUs, where they are not ours in capitals."""
_INSTALL = (
    "python3 -m venv ~/venv",
    "~/venv/bin/pip install --quiet -c constraints.txt '.[s3,gcs,hf]'",
)


def skypilot_task(launch: Launch) -> str:
    spot = "sky jobs launch" if launch.options.spot else "sky launch"
    comment = [
        f"Written by: {launch.launch_command()}",
        'Start, in the root of the repository: export RAY_AUTH_TOKEN="$(openssl rand -hex 32)"',
        f"  {spot} --secret RAY_AUTH_TOKEN FILE",
    ]
    setup = "\n".join(["set -e", *mount_commands(launch), *_INSTALL]) + "\n"
    values = {
        "GPUS": str(launch.options.gpus_per_node),
        "NAME": launch.options.name,
        "SHARED_FOLDER": shlex.quote(launch.shared_folder),
        "TRAIN": shlex.join(launch.train_command()),
    }
    content = {
        "name": launch.options.name,
        "workdir": ".",
        "num_nodes": launch.nodes,
        "resources": _resources(launch),
        "envs": {"RAY_AUTH_MODE": "token"},
        "secrets": {"RAY_AUTH_TOKEN": None},
        "setup": setup,
        "run": fill("skypilot_run.sh", values),
    }
    return yaml_text(comment, content)


def _resources(launch: Launch) -> dict[str, Any]:
    options = launch.options
    resources: dict[str, Any] = {
        "cpus": f"{launch.cpus_on_node}+",
        "memory": f"{launch.memory_on_node_gib}+",
        "use_spot": options.spot,
    }
    if launch.options.gpus_per_node:
        if options.gpu is None:
            raise UserError("launch skypilot needs the model of the GPUs: --gpu L4")
        name = _NAMES.get(options.gpu.lower(), options.gpu.upper())
        resources["accelerators"] = f"{name}:{launch.options.gpus_per_node}"
    return resources
