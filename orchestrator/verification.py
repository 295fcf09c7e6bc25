"""A part of a run that is computed again: the bits of its record are right, or it says what differs first."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.config.reading.reader import Resolved, read_file
from orchestrator.config.settings import Config, flat_names
from orchestrator.config.writer import flat_values, to_json
from orchestrator.errors import CheckpointDamaged, Interrupted, TrainingFailed, UserError
from orchestrator.live.callbacks.callbacks import CallbackRunner
from orchestrator.live.screen.screen import Screen
from orchestrator.plan.inventory.cluster import Cluster
from orchestrator.plan.inventory.hardware import secret_values
from orchestrator.record.events.kinds import Digest, Event, Start, Step
from orchestrator.record.files.event_log import EventLog
from orchestrator.run.comparison import (
    Difference,
    RecordedSteps,
    first_difference,
    read_recorded_steps,
    tensor_differences,
)
from orchestrator.run.manifest import bit_settings, read_manifest
from orchestrator.run.plan_file import CONFIG
from orchestrator.run.prepared_run import Stretch
from orchestrator.run.run_settings import NOT_TAKEN, check_masked, read_run_settings
from orchestrator.storage.address import refuse_address
from orchestrator.types import counted

if TYPE_CHECKING:
    from orchestrator.run.prepared_run import PreparedRun
    from orchestrator.tasks.task import Task

_STEPS = re.compile(r"(\d{1,15})\.\.(\d{1,15})?", re.ASCII)
_NUM_LISTED = 5
_SIZES = frozenset({"batch_size", "accumulation_steps", "global_batch_size"})


class _Decided(Exception):
    """All is compared, or a difference is found: the recomputation ends."""


@dataclass(frozen=True)
class VerificationResult:
    """What ``orchestrator verify`` has compared, and the first difference."""

    run: str
    first_step: int
    """The step of the state that the recomputation started from."""
    last_step: int
    steps: int
    """Steps whose loss, gradient norm, learning rate and samples were compared."""
    digests: int
    """Steps whose digests of all tensors were compared."""
    workers: int
    strategy: str
    seconds: float
    difference: Difference | None = None

    @property
    def equal(self) -> bool:
        return self.difference is None

    @property
    def lines(self) -> list[str]:
        """The result for the screen."""
        compared = f"{counted(self.steps, 'step')} and the digests of {counted(self.digests, 'step')}"
        where = f"steps {self.first_step + 1} to {self.last_step} of {self.run}"
        if self.difference is None:
            return [f"equal: {compared} were compared, {where}, on {counted(self.workers, 'worker')}"]
        return [f"differs at step {self.difference.step}: {where}", *self.difference.lines]

    def to_json(self) -> dict[str, Any]:
        return {"equal": self.equal, **asdict(self)}


class Verification:
    """The recomputation of a stretch of a run, which it only reads: the run may go on meanwhile."""

    def __init__(self, run: Path, steps: str | None, other_machine: bool, quiet: bool) -> None:
        refuse_address("orchestrator verify RUN", run)
        self._run = run.absolute()
        self._other_machine = other_machine
        _check_run(self._run)
        self.manifest = read_manifest(self._run)
        self._recorded = read_recorded_steps(self._run / "events.jsonl")
        self._checkpoint, self._first, self._last = _choose_stretch(self._run, steps, self._recorded)
        _check_recorded(self._run, self._recorded, self._first, self._last)
        self._config = _settings_of(self._run, self._recorded, self._first, self._last)
        self.screen = Screen(quiet=quiet, secrets=secret_values())

    def settings(self, given: Resolved) -> Resolved:
        """Return the settings of the run, with those given for the division of the work."""
        names = {name for name, origin in given.origins.items() if origin != "default"}
        _check_given(names)
        before = flat_values(self._config)
        check_masked(before, names | NOT_TAKEN, self._run / CONFIG)
        changes: dict[str, Any] = dict(to_json(Config())["parallel"])
        changes |= {"expert_replicas": 1, "rebalance": "auto", "gpu_mode": self._gpu_mode()}
        if "parallel_strategy" not in names:
            changes["workers"] = 1
        changes |= {name: value for name, value in flat_values(given.config).items() if name in names}
        # Nothing that only watches the run, and nothing that ends it early.
        changes |= {"trackers": (), "callbacks": (), "plots": "off", "profile": False, "monitor_gpu": False}
        changes |= {"metrics_port": None, "early_stopping_patience": None, "snapshot_every": 0}
        changes |= {"name": None, "run_dir": None}
        if self._checkpoint is not None:
            changes |= {"resume": str(self._checkpoint), "init_from": None}
        else:
            changes["resume"] = None
        if not self._config.run.debug:
            sizes = (self.manifest.micro_batch_size, None, self.manifest.global_batch_size)
            changes |= dict(
                zip(("batch_size", "accumulation_steps", "global_batch_size"), sizes, strict=True)
            )
        origins = dict.fromkeys(before, f"run {self._run.name}") | dict(given.origins)
        return Resolved(self._config.but(**changes), origins)

    def _gpu_mode(self) -> str:
        return "cpu" if self._recorded.device.startswith("cpu") else "auto"

    def task(self, own_task: Task | None, config: Config) -> Task:
        from orchestrator.tasks.load import load_task

        if own_task is None and config.task.startswith("python:"):
            raise UserError(
                f"{self._run} trains an object of a Python program ({config.task}), which no command line "
                f"can name; verify it in Python: Trainer(...).verify({str(self._run)!r})"
            )
        return own_task or load_task(config, self._run)

    def run_in_process(self, prepared: PreparedRun) -> VerificationResult:
        from orchestrator.train.group.requests import Requests
        from orchestrator.train.group.world import World
        from orchestrator.train.worker.observers import with_requests_of
        from orchestrator.train.worker.run import Supervision, run_worker
        from orchestrator.train.worker.torch_settings import preserved_random_state

        with TemporaryDirectory(prefix="verify-") as folder:
            prepared, run_dir, observer = self._begin(prepared, Path(folder))
            world = World.single_process(prepared.plan.device.value)
            supervision = Supervision(with_requests_of(observer, Requests))
            log = EventLog(run_dir / "events.jsonl", [self.screen, observer], secrets=secret_values())
            with preserved_random_state(), closing(log), self._ending(observer):
                run_worker(prepared, world, run_dir, log, supervision)
        return self._result(prepared, observer)

    def run_on_workers(self, prepared: PreparedRun, cluster: Cluster) -> VerificationResult:
        from orchestrator.runtime.driver import Observers, drive
        from orchestrator.training_run import attempt_starter

        # All nodes that see the run see a folder beside it.
        with _folder_beside(self._run) as folder:
            prepared, run_dir, observer = self._begin(prepared, folder)
            with self._ending(observer):
                observers = Observers(self.screen, observer)
                status = drive(attempt_starter(prepared), prepared, cluster, run_dir, observers)
                if status == "stopped":
                    raise Interrupted("the verification was interrupted; the run is as it was")
        return self._result(prepared, observer)

    def _begin(self, prepared: PreparedRun, folder: Path) -> tuple[PreparedRun, Path, _Observer]:
        digest_steps = frozenset(step for step in self._recorded.digests if self._first <= step <= self._last)
        stretch = Stretch(self._last, digest_steps)
        prepared = replace(prepared, stretch=stretch)
        run_dir = folder / "run"
        (run_dir / "checkpoints").mkdir(parents=True)
        self._began_s = perf_counter()
        self.screen.banner(self._banner_rows(prepared, len(digest_steps)), "expert-orchestrator verify")
        observer = _Observer(self._recorded, stretch, lambda: self._check_same(run_dir))
        return prepared, run_dir, observer

    def _banner_rows(self, prepared: PreparedRun, num_digests: int) -> list[tuple[str, str]]:
        from orchestrator.run.prepared_run import banner_rows

        rows = dict(banner_rows(prepared, self._run))
        start = "the beginning" if self._checkpoint is None else self._checkpoint.name
        return [
            ("run", str(self._run)),
            ("steps", f"{self._first + 1} to {self._last}, from {start}"),
            ("digests", counted(num_digests, "step")),
            *((name, rows[name]) for name in ("task", "processes", "device", "precision", "batch")),
        ]

    @contextmanager
    def _ending(self, observer: _Observer) -> Iterator[None]:
        """End where all is compared. A checkpoint that the run has removed meanwhile is no damage."""
        try:
            yield
        except _Decided:
            pass
        except (CheckpointDamaged, UserError, OSError):
            if self._checkpoint is not None and not self._checkpoint.is_dir():
                raise UserError(
                    f"{self._checkpoint} is gone: the run goes on, and keeps the newest --keep checkpoints. "
                    "Verify a later stretch, or copy the run folder first"
                ) from None
            raise
        finally:
            self.screen.close()
        observer.check_same()
        if not observer.has_all and self._difference(observer) is None:
            compared = f"{len(observer.steps)} of {self._last - self._first} steps were compared"
            raise TrainingFailed(
                f"the recomputation ended before step {self._last}, the last one to compare: {compared}. The "
                "data or the settings end earlier than the recorded run did"
            )

    def _check_same(self, run_dir: Path) -> None:
        """Raise UserError where the recomputation has other data, settings or devices than the run."""
        now = read_manifest(run_dir)
        # The manifest has the settings of the newest start.
        is_newest = not any(step >= self._last for step, _ in self._recorded.changes)
        differences = self.manifest.differences(now, with_settings=is_newest)
        if differences:
            listed = "; ".join(differences[:_NUM_LISTED])
            raise UserError(
                f"the run in {self._run} cannot be recomputed here: {listed}. Its bits follow from the same "
                "data and settings: give the data that it was trained on (--data, --data-dir)"
            )
        here = now.environments[-1]
        for then in self.manifest.environments_of(self._first, self._last):
            if not then.same_as(here) and not self._other_machine:
                raise UserError(
                    f"steps {self._first + 1} to {self._last} of {self._run} were computed on {then.text}; "
                    f"here is {here.text}. Other devices and versions round in other ways. Devices that may "
                    f"reproduce the run: {' and '.join(then.devices)}, with the same versions; verify it "
                    "there, or compare nevertheless with --other-machine"
                )

    def _difference(self, observer: _Observer) -> Difference | None:
        return first_difference(self._recorded, observer.steps, observer.digests)

    def _result(self, prepared: PreparedRun, observer: _Observer) -> VerificationResult:
        result = VerificationResult(
            str(self._run),
            self._first,
            self._last,
            len(observer.steps),
            len(observer.digests),
            prepared.plan.workers.value,
            prepared.plan.strategy.value,
            perf_counter() - self._began_s,
            self._difference(observer),
        )
        for line in result.lines:
            self.screen.note(line)
        return result


class _Observer(CallbackRunner):
    """Keeps the recomputed steps, and ends the recomputation when the result is known."""

    def __init__(self, recorded: RecordedSteps, stretch: Stretch, check_same: Callable[[], None]) -> None:
        super().__init__([])
        self.steps: dict[int, Step] = {}
        self.digests: dict[int, Digest] = {}
        self._recorded = recorded
        self._stretch = stretch
        self._check_same = check_same
        self._problem: UserError | None = None
        self._state_differs = False

    def __call__(self, event: Event) -> None:
        match event:
            case Start():
                try:
                    self._check_same()
                except UserError as error:
                    self._problem = error
            case Step():
                self.steps[event.step] = event
            case Digest() if event.step in self._stretch.digest_steps:
                self.digests[event.step] = event
                self._state_differs |= bool(tensor_differences(self._recorded.digests[event.step], event))

    @property
    def has_all(self) -> bool:
        """Whether everything was recomputed that can be compared."""
        last_digest = max(self._stretch.digest_steps)
        return self._stretch.last_step in self.steps and last_digest in self.digests

    def check_same(self) -> None:
        if self._problem is not None:
            raise self._problem

    def check(self) -> None:
        self.check_same()
        if self._state_differs or self.has_all:
            raise _Decided


@contextmanager
def _folder_beside(run: Path) -> Iterator[Path]:
    try:
        folder = TemporaryDirectory(prefix=".verify-", dir=run.parent)
    except OSError as error:
        raise UserError(
            f"workers need a folder beside the run, and {run.parent} cannot be written: {error.strerror}; "
            "copy the run to a folder that all nodes see, or verify it in one process (--workers 1)"
        ) from None
    with folder as path:
        yield Path(path)


def _check_run(run: Path) -> None:
    """Raise UserError unless a folder has a run that can be verified."""
    if not run.is_dir():
        raise UserError(f"{run}: there is no such folder; give the folder of a run")
    if not (run / CONFIG).is_file() or not (run / "events.jsonl").is_file():
        raise UserError(
            f"{run} holds no run: {CONFIG} and events.jsonl are needed; give the folder of a run, such as "
            "results/NAME"
        )
    if not read_run_settings(run).run.reproducible:
        raise UserError(
            f"the run in {run} was trained without --reproducible: its bits depend on the number of workers "
            "and on chance, so a recomputation would differ. Only runs with --reproducible can be verified"
        )


def _settings_of(run: Path, recorded: RecordedSteps, first: int, last: int) -> Config:
    """Return the settings with which a stretch was trained: a resume may have changed them."""
    inside = [(step, _of_bits(names)) for step, names in recorded.changes if first < step < last]
    inside = [(step, names) for step, names in inside if names]
    if inside:
        step, names = inside[-1]
        raise UserError(
            f"the run in {run} was resumed at step {step} with other settings ({', '.join(names)}); verify "
            f"the steps before and after it one by one: --steps {first}..{step} and --steps {step}..{last}"
        )
    changed = [step for step, names in recorded.changes if any(name in flat_names() for name in names)]
    num_before = sum(step < last for step in changed)
    if num_before == len(changed):
        return read_run_settings(run)
    # Each start with other settings has renamed those before it.
    earlier = sorted(run.glob("config.[0-9][0-9][0-9].yaml"))
    if len(earlier) != len(changed):
        raise UserError(
            f"the run in {run} was resumed with other settings {counted(len(changed), 'time')} and has "
            f"{counted(len(earlier), 'file')} of earlier settings (config.001.yaml, ...), so those of steps "
            f"{first + 1} to {last} are not known; give --steps from step {changed[-1]} on"
        )
    return read_file(earlier[num_before]).config


def _choose_stretch(run: Path, steps: str | None, recorded: RecordedSteps) -> tuple[Path | None, int, int]:
    """Return the checkpoint to start from (None: the beginning), its step, and the last step."""
    saved = dict(CheckpointStore(run / "checkpoints", repair=False).newest_first())
    kept = f"its checkpoints are of steps {_listed(sorted(saved))}" if saved else "it has no checkpoint"
    first, last = _parse_steps(steps)
    if recorded.last_step == 0:
        raise UserError(f"the record of {run} has no step yet; verify the run when it has trained some")
    if last is None:
        last = recorded.last_step
    if first is None:
        first = min(saved, default=0)
    if last > recorded.last_step:
        raise UserError(
            f"--steps {steps} ends after the last recorded step: the run in {run} has done "
            f"{counted(recorded.last_step, 'step')}"
        )
    start = max((step for step in saved if step <= first), default=None)
    if start is None and first > 0:
        raise UserError(
            f"no checkpoint of {run} is of step {first} or earlier: {kept}. Give --steps with a later "
            f"beginning, or --steps 0..{last} to recompute from the beginning"
        )
    if (start or 0) >= last:
        raise UserError(
            f"nothing to recompute: the steps end at {last}, and {kept}. Give --steps 0..{last} to recompute "
            "from the beginning; a run with --checkpoint-every N and --keep M keeps more checkpoints"
        )
    return (saved[start], start, last) if start else (None, 0, last)


def _parse_steps(steps: str | None) -> tuple[int | None, int | None]:
    if steps is None:
        return None, None
    match = _STEPS.fullmatch(steps.strip())
    if match is None:
        raise UserError(f"--steps {steps}: two steps were needed, as 40..60, or 40.. until the last one")
    first, last = int(match[1]), int(match[2]) if match[2] else None
    if last is not None and last <= first:
        raise UserError(f"--steps {steps}: the second step must be after the first one")
    return first, last


def _check_recorded(run: Path, recorded: RecordedSteps, first: int, last: int) -> None:
    """Refuse a stretch that the record does not have as a whole."""
    missing = [step for step in range(first + 1, last + 1) if step not in recorded.steps]
    if missing:
        raise UserError(
            f"the record of {run} lacks {counted(len(missing), 'step')} of {first + 1} to {last}: "
            f"{_listed(missing)}; its lines are damaged, or were lost with a host. Give --steps without them"
        )
    if not any(first < step <= last for step in recorded.digests):
        known = f"those of steps {_listed(sorted(recorded.digests))}" if recorded.digests else "none"
        raise UserError(
            f"the record of {run} has no digests of steps {first + 1} to {last}: there are {known}. Give "
            "--steps with some of them; runs with --digest-every 0 have none"
        )


def _check_given(names: Iterable[str]) -> None:
    """Refuse settings that would change the bits."""
    of_bits = sorted(name for name in _of_bits(names) if name in flat_names())
    if of_bits:
        flag = of_bits[0].replace("_", "-")
        raise UserError(
            f"--{flag} decides on the bits of a run, and verify recomputes them with those of the run; leave "
            "it out. --workers, --parallel-strategy, --placement and the like may be given"
        )


def _of_bits(names: Iterable[str]) -> list[str]:
    """Return those that decide on the bits: also what is no setting, such as the number of samples."""
    decide = {*bit_settings(Config())} | _SIZES
    return [name for name in names if name in decide or name not in flat_names()]


def _listed(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:_NUM_LISTED]))
    return f"{shown} and {len(steps) - _NUM_LISTED} more" if len(steps) > _NUM_LISTED else shown
