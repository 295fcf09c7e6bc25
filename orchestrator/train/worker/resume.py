"""The point that a run starts from: fresh, given weights, a checkpoint, or snapshots in memory."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from pathlib import Path

from experts.expert_state import remote_expert_names
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.record.log import Log
from orchestrator.train.checkpoint.files import load
from orchestrator.train.checkpoint.progress import Progress
from orchestrator.train.checkpoint.restore import restore, restore_model
from orchestrator.train.checkpoint.snapshot_source import SnapshotSource, fetch_contents
from orchestrator.train.checkpoint.state import TrainState
from orchestrator.train.checkpoint.store import CheckpointStore, LoadedCheckpoint, Skipped
from orchestrator.train.parts.world import World


@dataclass(frozen=True)
class ResumeFrom:
    """The point that a worker of a restarted run resumes from.

    A run that starts for the first time has none. Without snapshots the worker loads the run's
    newest good checkpoint."""

    snapshots: SnapshotSource | None = None
    """The state of the hosts, as the driver kept it in memory."""
    halvings: int = 0
    """How often the micro-batch was halved because a worker ran out of memory."""


def check_start_checkpoint(config: Config) -> None:
    """Refuse a checkpoint that does not exist, before anything is created."""
    resume = config.checkpoint.resume
    init_from = config.checkpoint.init_from
    if resume not in (None, "auto") and not Path(str(resume)).is_dir():
        raise UserError(
            f"--resume {resume}: there is no such folder; give a checkpoint or a run folder, or auto"
        )
    if init_from is not None and not init_from.is_dir():
        raise UserError(f"--init-from {init_from}: there is no such folder; give a checkpoint")


def restore_snapshots(snapshots: SnapshotSource, state: TrainState, world: World, log: Log) -> Progress:
    """Restore this host's part of the snapshots. Return their progress."""
    contents = fetch_contents(snapshots, world.rank, state.model)
    progress = restore(contents, state)
    log.write("resume", step=progress.step, path=None, source="memory", skipped=[])
    return progress


def restore_checkpoint(
    config: Config,
    state: TrainState,
    store: CheckpointStore,
    world: World,
    log: Log,
    restarted: bool = False,
) -> Progress:
    """Restore what ``--resume`` or ``--init-from`` asks for. Return the progress to start with.

    A run that was ``restarted`` after a failure resumes from its own newest checkpoint. As long
    as it has none, it starts again where the user asked it to start."""
    check_start_checkpoint(config)
    settings = config.checkpoint
    if restarted and _has_checkpoints(store, world):
        settings = replace(settings, resume="auto", init_from=None)
    not_needed = remote_expert_names(state.model)
    if settings.init_from is not None:
        checkpoint, _ = _load_on_all(str(settings.init_from), store, world, not_needed)
        assert checkpoint is not None
        restore_model(checkpoint.contents, state.model)
        log.write("resume", step=0, path=str(checkpoint.path), skipped=[], weights_only=True)
        return Progress()
    if settings.resume is None:
        return Progress()
    checkpoint, skipped = _load_on_all(settings.resume, store, world, not_needed)
    progress = restore(checkpoint.contents, state) if checkpoint else Progress()
    # Others may still be reading: the checkpoint that they read keeps its name.
    if world.is_main:
        store.set_aside_after(progress.step)
    skipped_fields = [{"path": entry.path.name, "reason": entry.reason} for entry in skipped]
    name = checkpoint.path.name if checkpoint else None
    log.write("resume", step=progress.step, path=name, skipped=skipped_fields)
    return progress


def _has_checkpoints(store: CheckpointStore, world: World) -> bool:
    """Whether the run has checkpoints of its own.

    The main worker looks: all must decide the same."""
    count = len(store.newest_first()) if world.is_main else None
    return bool(world.broadcast_value("own checkpoints", count))


def _load_on_all(
    resume: str, store: CheckpointStore, world: World, not_needed: Set[str]
) -> tuple[LoadedCheckpoint | None, list[Skipped]]:
    """Load the same checkpoint on all workers.

    The main worker chooses it; each loads the tensors that it needs."""
    checkpoint, skipped = find_checkpoint(resume, store) if world.is_main else (None, [])
    # To verify a checkpoint takes as long as it is large: the others wait without a time limit.
    world.wait_for_main("checkpoint")
    message = {"path": str(checkpoint.path) if checkpoint else None} if world.is_main else None
    chosen = world.broadcast_value("checkpoint", message)["path"]
    if checkpoint is None and chosen is not None:
        checkpoint = LoadedCheckpoint(Path(chosen), load(Path(chosen), not_needed))
    return checkpoint, skipped


def find_checkpoint(resume: str, store: CheckpointStore) -> tuple[LoadedCheckpoint | None, list[Skipped]]:
    """Return the checkpoint that ``--resume`` names, and the damaged ones that were passed over.

    ``auto`` is the run's own newest good checkpoint. A path is that checkpoint, or a run
    folder's newest good one."""
    if resume == "auto":
        return store.newest_good()
    path = Path(resume)
    if (path / "manifest.json").exists() or not (path / "checkpoints").is_dir():
        return LoadedCheckpoint(path, load(path)), []
    checkpoint, skipped = CheckpointStore(path / "checkpoints", repair=False).newest_good()
    if checkpoint is None:
        raise UserError(f"--resume {resume}: the run has no good checkpoint ({len(skipped)} damaged)")
    return checkpoint, skipped
