"""The files that ``orchestrator launch`` writes: the templates of ``templates/``, filled for one launch.

Every value goes through a filter: ``scalar`` or ``literal`` for YAML, ``sh`` for a shell, ``comment``.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from orchestrator.errors import UserError
from orchestrator.launch.launch import Kind, Launch

TEMPLATES: Mapping[Kind, str] = {
    "kuberay": "kuberay.yaml",
    "kuberay-cluster": "kuberay.yaml",
    "slurm": "slurm.sbatch",
    "ssh": "hosts.sh",
    "ray-up": "ray_up.yaml",
    "skypilot": "skypilot.yaml",
}
_ANY_WIDTH = 10**6
_NFS_OPTIONS = "nfsvers=4.1,hard,timeo=600"
_DEFAULT_CLAIM = "training-runs"
_DASHBOARD_PORT = 8265
_SKYPILOT_GPUS = {"a100": "A100-80GB"}
"""SkyPilot's names of GPUs, where they are not ours in capitals."""


def file_text(launch: Launch) -> str:
    """Return the file of a launch. Raises UserError for options that its kind needs."""
    environment = Environment(
        loader=PackageLoader("orchestrator.launch"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # "{#" stands in "${#array[@]}" of a shell.
        comment_start_string="<#",
        comment_end_string="#>",
        autoescape=False,
    )
    environment.filters |= {"scalar": _scalar, "literal": _literal, "sh": shlex.quote, "comment": _comment}
    kind = launch.options.kind
    values: dict[str, Any] = {
        "launch": launch,
        "options": launch.options,
        "command": launch.launch_command(),
        "train": shlex.join(launch.train_command()),
    }
    if kind in _VALUES:
        values |= _VALUES[kind](launch)
    return environment.get_template(TEMPLATES[kind]).render(values)


# --- filters


def _scalar(text: str) -> str:
    """Return a text as a YAML value on one line."""
    style = None if text.isprintable() else '"'
    written = yaml.safe_dump(text, default_style=style, width=_ANY_WIDTH, allow_unicode=True)
    return written.removesuffix("...\n").rstrip("\n")


def _literal(text: str) -> str:
    """Return a text of several lines as a YAML value of the outermost level: a block if that is possible."""
    return yaml.safe_dump(text, default_style="|", width=_ANY_WIDTH, allow_unicode=True).rstrip("\n")


def _comment(text: str) -> str:
    """Return a text as a part of a comment, which a line break in it must not end."""
    return "\n# ".join(text.splitlines())


# --- the values of each kind


def _kuberay_values(launch: Launch) -> dict[str, Any]:
    # --metrics-port 9400 or --metrics-port=9400; 0 is a port that nobody knows before the run.
    words = [word for flag in launch.flags for word in flag.split("=", 1)]
    given = [value for flag, value in pairwise(words) if flag == "--metrics-port"]
    command = shlex.join(launch.train_command())
    return {
        "claim": launch.options.storage or _DEFAULT_CLAIM,
        "in_folder": f"cd {shlex.quote(launch.shared_folder)} && exec {command}",
        "open_ports": [_DASHBOARD_PORT, *(int(port) for port in given[-1:] if port != "0")],
    }


def _ssh_values(launch: Launch) -> dict[str, Any]:
    if len(launch.hosts) != launch.nodes:
        needed = f"{launch.options.workers} workers on nodes of {launch.options.gpus_per_node} GPUs"
        raise UserError(f"--hosts names {len(launch.hosts)} hosts; {needed} need {launch.nodes}")
    return {"hosts": shlex.join(launch.hosts)}


def _ray_up_values(launch: Launch) -> dict[str, Any]:
    command = shlex.join(launch.train_command())
    values = _machine_values(launch) if launch.options.cloud == "none" else _cloud_values(launch)
    with_token = f"cd {shlex.quote(launch.shared_folder)} && RAY_AUTH_MODE=token {command}"
    return {"with_token": with_token, **values}


def _machine_values(launch: Launch) -> dict[str, Any]:
    """Return the values for machines of one's own."""
    hosts = launch.hosts
    if len(hosts) != launch.nodes:
        raise UserError(
            f"--hosts names {len(hosts)} machines; {launch.options.workers} workers need {launch.nodes}"
        )
    users = {host.partition("@")[0] for host in hosts if "@" in host}
    if len(users) > 1:
        raise UserError(
            f"--hosts has the users {', '.join(sorted(users))}; 'ray up' needs one for all machines"
        )
    return {
        "on_cloud": False,
        "ray": f"{shlex.quote(launch.options.python)} -m ray.scripts.scripts",
        "machines": [host.rpartition("@")[2] for host in hosts],
        "user": users.pop() if users else "ubuntu",
    }


def _cloud_values(launch: Launch) -> dict[str, Any]:
    options = launch.options
    if options.gpus_per_node > 1 and options.instance_type is None:
        raise UserError(
            f"--gpus-per-node is {options.gpus_per_node}; name a machine that has as many: "
            "--instance-type p5.48xlarge on AWS, a3-highgpu-8g on GCP"
        )
    mounts = _mount_commands(launch)
    if options.cloud == "gcp" and options.project is None:
        raise UserError("launch ray-up --cloud gcp needs the id of the project: --project ID")
    return {"on_cloud": True, "ray": "ray", "mounts": mounts}


def _skypilot_values(launch: Launch) -> dict[str, Any]:
    mounts = _mount_commands(launch)
    gpu = launch.options.gpu
    if launch.options.gpus_per_node and gpu is None:
        raise UserError("launch skypilot needs the model of the GPUs: --gpu L4")
    return {"mounts": mounts, "gpu": gpu and _SKYPILOT_GPUS.get(gpu.lower(), gpu.upper())}


def _mount_commands(launch: Launch) -> list[str]:
    """Return the commands that mount the shared folder on a node; a folder of the node if none is needed."""
    folder = shlex.quote(launch.shared_folder)
    make = f"sudo mkdir -p {folder}"
    storage = launch.options.storage
    if storage is None:
        if launch.needs_storage:
            raise UserError(
                f"launch {launch.options.kind} needs storage for the run folder; give --storage "
                "SERVER:/EXPORT of an NFS server (EFS, Filestore), or --run-dir s3://bucket/run1"
            )
        return [make, f"sudo chmod 1777 {folder}"]
    if ":/" not in storage:
        raise UserError(f"--storage is {storage}; SERVER:/EXPORT of an NFS server was needed")
    install = "sudo apt-get update -qq && sudo apt-get install -qq -y nfs-common"
    mount = f"sudo mount -t nfs4 -o {_NFS_OPTIONS} {shlex.quote(storage)} {folder}"
    return [f"command -v mount.nfs4 || ({install})", make, f"mountpoint -q {folder} || {mount}"]


_VALUES: Mapping[Kind, Callable[[Launch], dict[str, Any]]] = {
    "kuberay": _kuberay_values,
    "kuberay-cluster": _kuberay_values,
    "ssh": _ssh_values,
    "ray-up": _ray_up_values,
    "skypilot": _skypilot_values,
}
