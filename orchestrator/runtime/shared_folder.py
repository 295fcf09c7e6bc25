"""Finds out whether the nodes that will train see the driver's run folder, and links those that do not.

The driver has written a random text into the folder; a short task on each node looks for it. Where one
does not find it, the run works without a shared disk, and every node must reach the remote folder."""

from __future__ import annotations

from pathlib import Path

import ray

from orchestrator.checkpoint.files import MANIFEST
from orchestrator.errors import UserError
from orchestrator.runtime.bootstrap import LINKED_FILES, NONCE_FILE
from orchestrator.runtime.cluster.survey import RayNode, ask_nodes
from orchestrator.runtime.folder_server import DriverEnd, start_server
from orchestrator.storage.folder import RemoteError, RemoteFolder
from orchestrator.train.remote.checkpoints import CHECKPOINTS
from orchestrator.train.remote.remote_start import START, RemoteStart
from orchestrator.types import first_line

_PROBE = ".reachable"
_MAX_NONCE_BYTES = 100


def open_link(run_dir: Path, remote: RemoteFolder, gpu: bool) -> DriverEnd | None:
    """Return a link to the run folder if a node does not see it; None if all do.

    Raises ``UserError`` if a node sees neither the run folder nor the remote one."""
    nonce_file = run_dir / "logs" / NONCE_FILE
    nonce = nonce_file.read_text(encoding="utf-8")
    nodes = _other_nodes("GPU" if gpu else "CPU")
    if all(sees for _, sees in ask_nodes(nodes, sees_file, str(nonce_file), nonce)):
        return None
    remote.write(_PROBE, nonce.encode())
    try:
        reasons = ask_nodes(nodes, why_unreachable, remote.url, nonce)
    finally:
        remote.remove([_PROBE])
    _refuse_unreachable(reasons, f"sees neither the folder {run_dir} nor {remote.url}")
    return DriverEnd(remote.url, start_server(run_dir, LINKED_FILES))


def nodes_see_start(start: RemoteStart, gpu: bool) -> bool:
    """Whether all nodes see the driver's copy of the checkpoint that the run begins with.

    Raises ``UserError`` if a node sees neither the copy nor the remote checkpoint."""
    nodes = _other_nodes("GPU" if gpu else "CPU")
    note = start.files[START].decode()
    answers = ask_nodes(nodes, why_no_start, str(start.copy / START), note, start.url, start.checkpoint.name)
    _refuse_unreachable(answers, f"cannot read {start.url}/{CHECKPOINTS}/{start.checkpoint.name}")
    return all(reason is None for _, reason in answers)


def _refuse_unreachable(answers: list[tuple[RayNode, str | None]], problem: str) -> None:
    """Raise ``UserError`` for the first node that answers with a reason."""
    for node, reason in answers:
        if reason:
            raise UserError(
                f"node {node['NodeManagerAddress']} {problem} ({reason}); give every node the credentials of "
                "the storage (see docs/storage.md), or start the run in a folder on a drive that all share"
            )


def why_no_start(note_file: str, note: str, url: str, checkpoint: str) -> str | None:
    """Return why this node cannot read a remote checkpoint; '' if it can, None if it sees the driver's copy.

    ``note_file`` is a file of that copy, with the content ``note``."""
    if sees_file(note_file, note):
        return None
    try:
        manifest = (RemoteFolder(url) / CHECKPOINTS).read(f"{checkpoint}/{MANIFEST}", 1)
    except (RemoteError, ImportError) as error:
        return first_line(error)
    return "" if manifest else "it is not there"


def sees_file(path: str, content: str) -> bool:
    """Whether this node has a file with this content."""
    try:
        return Path(path).read_text(encoding="utf-8") == content
    except OSError:
        return False


def why_unreachable(url: str, content: str) -> str:
    """Return why this node cannot read what the driver has written to a remote folder; '' if it can."""
    try:
        found = RemoteFolder(url).read(_PROBE, _MAX_NONCE_BYTES)
    except (RemoteError, ImportError) as error:
        return first_line(error)
    return "" if found == content.encode() else "it is another folder there"


def _other_nodes(kind: str) -> list[RayNode]:
    """Return the other nodes that workers may be placed on, as ``ray.nodes()`` describes them."""
    node_id = ray.get_runtime_context().get_node_id()
    return [
        node
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get(kind, 0) >= 1 and node["NodeID"] != node_id
    ]
