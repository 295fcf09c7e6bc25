"""Files of ``ray up``: clusters on AWS and GCP, and on machines of one's own.

The token is a file of this machine, ``~/.ray/auth_token``, which ``ray up`` copies to the nodes.
"""

from __future__ import annotations

import shlex
from typing import Any

from orchestrator.errors import UserError
from orchestrator.launch.clouds import mount_commands
from orchestrator.launch.launch import Launch
from orchestrator.launch.yaml_text import yaml_text

_PORT = 6379
_TOKEN = "~/.ray/auth_token"
_REGIONS = {"aws": "us-west-2", "gcp": "us-central1"}
_MACHINES = {"aws": "g6.2xlarge", "gcp": "g2-standard-8"}
_HEAD_MACHINES = {"aws": "m7i.xlarge", "gcp": "n2-standard-4"}
_DISK_GB = 200
_GCP_IMAGE = "projects/deeplearning-platform-release/global/images/family/common-cu128-ubuntu-2204-nvidia-570"
_IDLE_MINUTES = 30
_START = "RAY_AUTH_MODE=token {ray} start --disable-usage-stats"


def ray_up_file(launch: Launch) -> str:
    run = (
        f"cd {shlex.quote(launch.shared_folder)} && RAY_AUTH_MODE=token {shlex.join(launch.train_command())}"
    )
    comment = [
        f"Written by: {launch.launch_command()}",
        f"Needs a token in {_TOKEN} of this machine: (umask 077; ray get-auth-token --generate)",
        "Start: ray up FILE; end: ray down FILE",
        f"Train: ray exec --tmux FILE {shlex.quote(run)}; follow: ray attach --tmux FILE",
    ]
    content = _machines(launch) if launch.options.cloud == "none" else _cloud(launch)
    return yaml_text(comment, content)


def _common(launch: Launch, ray: str, max_workers: int) -> dict[str, Any]:
    start = _START.format(ray=ray)
    bootstrap = "--autoscaling-config=~/ray_bootstrap_config.yaml"
    return {
        "cluster_name": launch.options.name,
        "max_workers": max_workers,
        "idle_timeout_minutes": _IDLE_MINUTES,
        "file_mounts": {_TOKEN: _TOKEN},
        "head_start_ray_commands": [f"{start} --head --port={_PORT} --dashboard-host=127.0.0.1 {bootstrap}"],
        "worker_start_ray_commands": [f"{start} --address=$RAY_HEAD_IP:{_PORT}"],
    }


def _machines(launch: Launch) -> dict[str, Any]:
    """Return the file for machines of one's own.

    It never calls ``ray stop``, which would end the Ray of others too."""
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
    head, *others = [host.rpartition("@")[2] for host in hosts]
    ray = f"{shlex.quote(launch.options.python)} -m ray.scripts.scripts"
    return _common(launch, ray, len(others)) | {
        "provider": {"type": "local", "head_ip": head, "worker_ips": others},
        "auth": {"ssh_user": users.pop() if users else "ubuntu"},
    }


def _cloud(launch: Launch) -> dict[str, Any]:
    options = launch.options
    if options.gpus_per_node > 1 and options.instance_type is None:
        raise UserError(
            f"--gpus-per-node is {options.gpus_per_node}; name a machine that has as many: "
            "--instance-type p5.48xlarge on AWS, a3-highgpu-8g on GCP"
        )
    folder = launch.shared_folder
    return _common(launch, "ray", launch.nodes) | {
        "provider": _provider(launch),
        "auth": {"ssh_user": "ubuntu"},
        "docker": {
            "image": options.image,
            "container_name": "ray",
            "run_options": ["--ulimit nofile=65536:65536", f"--volume {shlex.quote(f'{folder}:{folder}')}"],
        },
        "initialization_commands": mount_commands(launch),
        "head_node_type": "head",
        "available_node_types": _node_types(launch),
    }


def _provider(launch: Launch) -> dict[str, Any]:
    options = launch.options
    region = options.region or _REGIONS[options.cloud]
    if options.cloud == "aws":
        return {"type": "aws", "region": region, "cache_stopped_nodes": False}
    if options.project is None:
        raise UserError("launch ray-up --cloud gcp needs the id of the project: --project ID")
    return {
        "type": "gcp",
        "region": region,
        "availability_zone": f"{region}-a",
        "project_id": options.project,
    }


def _node_types(launch: Launch) -> dict[str, Any]:
    """Return the head and the nodes that train. One node is the head itself."""
    cloud = launch.options.cloud
    machine = launch.options.instance_type or _MACHINES[cloud]
    resources = {"CPU": launch.cpus_on_node, "GPU": launch.options.gpus_per_node}
    training = {"resources": resources, "node_config": _node_config(launch, machine, launch.options.spot)}
    if launch.nodes == 1:
        return {"head": training}
    # No CPU is declared, so that no worker is placed beside the driver.
    head = {"resources": {"CPU": 0}, "node_config": _node_config(launch, _HEAD_MACHINES[cloud], False)}
    limits = {"min_workers": launch.nodes, "max_workers": launch.nodes}
    return {"head": head, "worker": limits | training}


def _node_config(launch: Launch, machine: str, spot: bool) -> dict[str, Any]:
    return _aws_config(machine, spot) if launch.options.cloud == "aws" else _gcp_config(machine, spot)


def _aws_config(machine: str, spot: bool) -> dict[str, Any]:
    disk = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": _DISK_GB, "VolumeType": "gp3"}}
    config: dict[str, Any] = {"InstanceType": machine, "BlockDeviceMappings": [disk]}
    return config | ({"InstanceMarketOptions": {"MarketType": "spot"}} if spot else {})


def _gcp_config(machine: str, spot: bool) -> dict[str, Any]:
    disk = {
        "boot": True,
        "autoDelete": True,
        "type": "PERSISTENT",
        "initializeParams": {"diskSizeGb": _DISK_GB, "sourceImage": _GCP_IMAGE},
    }
    # Machines with GPUs cannot move to another host while it is maintained.
    scheduling: dict[str, Any] = {"onHostMaintenance": "TERMINATE"}
    if spot:
        scheduling |= {"provisioningModel": "SPOT", "instanceTerminationAction": "DELETE"}
    metadata = {"items": [{"key": "install-nvidia-driver", "value": "True"}]}
    return {"machineType": machine, "disks": [disk], "metadata": metadata, "scheduling": [scheduling]}
