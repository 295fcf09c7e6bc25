"""Parts that the files for clouds share: the shared folder, and the checks of their options."""

from __future__ import annotations

import shlex

from orchestrator.errors import UserError
from orchestrator.launch.launch import Launch

_NFS_OPTIONS = "nfsvers=4.1,hard,timeo=600"


def mount_commands(launch: Launch) -> list[str]:
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
