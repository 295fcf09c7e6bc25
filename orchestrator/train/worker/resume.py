"""The point that a run starts from: fresh, given weights, a checkpoint, or snapshots in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from experts.balance import gated_layers
from experts.expert_state import remote_expert_names
from orchestrator.checkpoint.files import KINDS, Contents, is_checkpoint, load
from orchestrator.checkpoint.hashed_file import no_progress
from orchestrator.checkpoint.progress import Progress, read_progress
from orchestrator.checkpoint.saved_experts import SavedExperts, read_experts
from orchestrator.checkpoint.store import CheckpointStore, LoadedCheckpoint, Skipped, first_good
from orchestrator.config.settings import Config
from orchestrator.errors import CheckpointDamaged, OrchestratorError, UserError
from orchestrator.record.events import kinds
from orchestrator.record.files.log import Log, SilentLog
from orchestrator.run.run_dir import given_location
from orchestrator.train.checkpoint.restore import restore, restore_model
from orchestrator.train.checkpoint.snapshot_format import SnapshotPart, read_part
from orchestrator.train.checkpoint.snapshot_source import SnapshotSource, fetch_contents, using_snapshots
from orchestrator.train.checkpoint.state import TrainState
from orchestrator.train.group.world import World


@dataclass(frozen=True)
class ResumeFrom:
    """The point that a worker of a restarted run resumes from.

    A run that starts for the first time has none. Without snapshots the worker loads the run's
    newest good checkpoint."""

    snapshots: SnapshotSource | None = None
    """The state of the hosts, as the driver kept it in memory."""
    halvings: int = 0
    """How often the micro-batch was halved because a worker ran out of memory."""
    checkpoint_is_newer: bool = False
    """Whether the run has a checkpoint newer than the snapshots: they serve only if it is damaged."""


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


def saved_experts_to_start_with(
    config: Config, start: StartPoint, resume: ResumeFrom | None
) -> SavedExperts | None:
    """Return the experts of the state that the run will start from; None if the task builds them.

    The model must be built with them before the state can be restored. All workers must call it."""
    if resume is not None and resume.snapshots is not None and not resume.checkpoint_is_newer:
        with using_snapshots():
            header, data = resume.snapshots.fetch_dense()
            _, state = read_part(SnapshotPart(header.rank, header.dense_end, data))
            saved = read_experts(state)
        return saved if saved.layers else None
    source = _source(config, start, restarted=resume is not None)
    if source is None:
        return None
    begins_anew = source != "auto" and config.checkpoint.init_from is not None
    fields = _newest_experts(source, start, begins_anew) if start.world.is_main else None
    fields = start.world.broadcast_value("experts", fields)
    return read_experts({"experts": fields}) if fields else None


def experts_to_show(config: Config, run_dir: Path) -> SavedExperts | None:
    """Return the experts of the checkpoint that a run will start from, if some were born, merged or pruned.

    The workers read them again. A checkpoint that this process cannot read is theirs to refuse."""
    store = CheckpointStore(run_dir / "checkpoints", repair=False)
    start = StartPoint(store, World.single_process(), SilentLog())
    with suppress(OrchestratorError, OSError):
        saved = saved_experts_to_start_with(config, start, None)
        return saved if saved is not None and saved.have_changed else None
    return None


def _newest_experts(source: str, start: StartPoint, begins_anew: bool) -> dict[str, Any]:
    """Return the experts of the newest checkpoint whose list of them can be read."""
    for path in find_candidates(source, start.store).paths:
        with suppress(CheckpointDamaged, UserError), start.store.reading(Path(path)) as readable:
            state = load(readable, kinds=frozenset()).state
            return (_experts_at_start(state) if begins_anew else read_experts(state)).to_json()
    return {}


def _experts_at_start(state: Mapping[str, Any]) -> SavedExperts:
    """Return the experts of a checkpoint for a run whose steps begin at 0 again."""
    saved = read_experts(state)
    step = read_progress(state).step
    return replace(saved, layers=tuple(layer.shifted(step) for layer in saved.layers))


def _source(config: Config, start: StartPoint, restarted: bool) -> str | None:
    """Return what the run starts from, as ``--resume`` names it."""
    settings = config.checkpoint
    if restarted and _has_checkpoints(start):
        return "auto"
    return str(settings.init_from) if settings.init_from is not None else settings.resume


@dataclass(frozen=True)
class StartPoint:
    """Where a worker looks for checkpoints, and with whom it agrees on one."""

    store: CheckpointStore
    world: World
    log: Log
    progress: Callable[[], None] = no_progress
    """Called for each piece of a checkpoint that is read."""


def restore_newest(
    snapshots: SnapshotSource, state: TrainState, start: StartPoint, checkpoint_is_newer: bool
) -> Progress:
    """Restore this host's part of the snapshots, or of a newer checkpoint that is good.

    Return the progress. ``checkpoint_is_newer`` says whether to look for one, the same on all hosts."""
    checkpoint = None
    skipped: list[Skipped] = []
    if checkpoint_is_newer:
        newer = None
        if start.world.is_main:
            paths = _newest_first(start.store, after_step=snapshots.headers[0].step)
            newer = Candidates(paths, "auto", "auto")
        checkpoint, skipped = _load_together(newer, start, remote_expert_names(state.model))
    if checkpoint is not None:
        return _resumed(restore(checkpoint.contents, state), start, checkpoint.path.name, skipped)
    with using_snapshots():
        progress = restore(fetch_contents(snapshots, start.world.rank, state.model), state)
    return _resumed(progress, start, None, skipped, source="memory")


def restore_checkpoint(
    config: Config, state: TrainState, start: StartPoint, restarted: bool = False
) -> Progress:
    """Restore what ``--resume`` or ``--init-from`` asks for. Return the progress to start with.

    A run that was ``restarted`` after a failure resumes from its own newest checkpoint. As long
    as it has none, it starts again where the user asked it to start."""
    check_start_checkpoint(config)
    settings = config.checkpoint
    if restarted and _has_checkpoints(start):
        settings = replace(settings, resume="auto", init_from=None)
    not_needed = remote_expert_names(state.model)
    if settings.init_from is not None:
        found = _find_on_main(str(settings.init_from), start)
        checkpoint, _ = _load_together(found, start, not_needed, frozenset({"model"}))
        assert checkpoint is not None
        restore_model(checkpoint.contents, state.model)
        for _, layer in gated_layers(state.model):
            if layer.statistics is not None:
                layer.statistics.reset()  # those of the earlier run
        location = given_location(checkpoint.path)
        start.log.write(kinds.Resume(step=0, path=location, weights_only=True))
        return Progress()
    if settings.resume is None:
        return Progress()
    checkpoint, skipped = _load_together(_find_on_main(settings.resume, start), start, not_needed)
    progress = restore(checkpoint.contents, state) if checkpoint else Progress()
    return _resumed(progress, start, checkpoint.path.name if checkpoint else None, skipped)


def _resumed(
    progress: Progress,
    start: StartPoint,
    name: str | None,
    skipped: Sequence[Skipped],
    source: str | None = None,
) -> Progress:
    """Record what the run has resumed from, and return the progress."""
    # All have read: damaged checkpoints and later ones may now be renamed.
    if start.world.is_main:
        start.store.set_aside_after(progress.step, start.progress)
    # The main worker may wait for the driver: the others must not wait for it in their first collective.
    start.world.wait_for_main("checkpoints set aside")
    recorded = tuple(kinds.SkippedCheckpoint(entry.path.name, entry.reason) for entry in skipped)
    start.log.write(kinds.Resume(step=progress.step, path=name, skipped=recorded, source=source))
    return progress


def _has_checkpoints(start: StartPoint) -> bool:
    """Whether the run has checkpoints of its own.

    The main worker looks: all must decide the same."""
    count = len(start.store.newest_first()) if start.world.is_main else None
    return bool(start.world.all_reduce_max([float(count or 0)])[0])


def _find_on_main(resume: str, start: StartPoint) -> Candidates | None:
    return find_candidates(resume, start.store) if start.world.is_main else None


def load_named(path: str, start: StartPoint, not_needed: Set[str], kinds: Set[str]) -> Contents:
    """Load the tensors of ``kinds`` of a checkpoint on all workers. Raises ``CheckpointDamaged``."""
    found = Candidates([path], "checkpoint", path) if start.world.is_main else None
    checkpoint, _ = _load_together(found, start, not_needed, kinds)
    assert checkpoint is not None
    return checkpoint.contents


def _load_together(
    found: Candidates | None, start: StartPoint, not_needed: Set[str], kinds: Set[str] = KINDS
) -> tuple[LoadedCheckpoint | None, list[Skipped]]:
    """Load the same checkpoint on all workers. Each reads and verifies only what it needs.

    The main worker has listed the candidates. Where any worker finds damage, all go on to the next."""
    world = start.world
    fields = world.broadcast_value("checkpoints", asdict(found) if found is not None else None)

    def load_one(path: Path) -> Contents:
        contents: Contents | None = None
        damage: str | None = None
        try:
            with start.store.reading(path) as readable:
                contents = load(readable, not_needed, kinds, start.progress)
        except CheckpointDamaged as error:
            damage = str(error)
        # To read takes as long as a checkpoint is large: the others wait without a time limit.
        world.wait_for_all(f"loaded {path.name}")
        damage = world.broadcast_value(f"damage of {path.name}", damage)
        if damage is not None or contents is None:
            raise CheckpointDamaged(damage)
        return contents

    return Candidates(**fields).first_good(load_one)


@dataclass(frozen=True)
class Candidates:
    """The checkpoints that a run may start from, best first."""

    paths: Sequence[str]
    source: Literal["auto", "checkpoint", "run"]
    """The run's own, one that the user named, or those of a run that the user named."""
    resume: str
    """The setting, for messages."""

    def first_good(
        self, load_one: Callable[[Path], Contents]
    ) -> tuple[LoadedCheckpoint | None, list[Skipped]]:
        """Return the first good one, and the damaged ones that were passed over.

        Only a run without checkpoints of its own may begin without one."""
        checkpoint, skipped = first_good([Path(path) for path in self.paths], load_one)
        if checkpoint is None and self.source == "checkpoint":
            raise CheckpointDamaged(skipped[0].reason)
        if checkpoint is None and self.source == "run":
            raise UserError(
                f"--resume {self.resume}: the run has no good checkpoint ({len(skipped)} damaged)"
            )
        return checkpoint, skipped


def find_candidates(resume: str, store: CheckpointStore) -> Candidates:
    """Return the checkpoints that ``--resume`` names.

    ``auto`` stands for the run's own. A path is that checkpoint, or a run folder with some."""
    path = Path(resume)
    if resume == "auto":
        return Candidates(_newest_first(store), "auto", resume)
    if is_checkpoint(path) or not (path / "checkpoints").is_dir():
        return Candidates([resume], "checkpoint", resume)
    other_store = CheckpointStore(path / "checkpoints", repair=False)
    return Candidates(_newest_first(other_store), "run", resume)


def _newest_first(store: CheckpointStore, after_step: int = -1) -> list[str]:
    return [str(path) for step, path in store.newest_first() if step > after_step]
