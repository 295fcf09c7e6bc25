"""The kinds of files that ``orchestrator launch`` writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from orchestrator.launch.kuberay import ray_cluster, ray_job
from orchestrator.launch.launch import Launch
from orchestrator.launch.options import Kind
from orchestrator.launch.ray_up import ray_up_file
from orchestrator.launch.scripts import hosts_script, slurm_script
from orchestrator.launch.skypilot import skypilot_task

WRITERS: Mapping[Kind, Callable[[Launch], str]] = {
    "kuberay": ray_job,
    "kuberay-cluster": ray_cluster,
    "slurm": slurm_script,
    "ssh": hosts_script,
    "ray-up": ray_up_file,
    "skypilot": skypilot_task,
}


def file_text(launch: Launch) -> str:
    """Return the file of a launch."""
    return WRITERS[launch.options.kind](launch)
