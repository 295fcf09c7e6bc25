"""The Python API: train a model, data and loss of your own, or a named task, in a few lines."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.config.reader import Resolved, absolute
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.plan.hardware import inventory, set_environment
from orchestrator.plan.planning import choose_device, choose_precision, plan
from orchestrator.record.screen import Screen
from orchestrator.running import (
    Prepared,
    banner_rows,
    conclude,
    open_run_dir,
    outcome_lines,
    recording,
    train,
    with_measured_batch,
    write_intentions,
)

if TYPE_CHECKING:
    from torch import nn

    from orchestrator.tasks.task import Task
    from orchestrator.train.batch_size import Found
    from orchestrator.train.bench import Measured


@dataclass(frozen=True)
class Result:
    """How a run ended: its status, its folder, its summary, and the trained model."""

    status: str
    run_dir: Path
    summary: dict[str, Any]
    model: nn.Module

    @property
    def best_checkpoint(self) -> Path | None:
        """The checkpoint with the best validation result; ``--init-from`` begins with its weights."""
        step = self.summary["best"].get("step")
        path = self.run_dir / "checkpoints" / f"step_{step or 0:08d}"
        return path if step and path.is_dir() else None

    def performance_summary(self) -> str:
        return (self.run_dir / "performance_summary.txt").read_text(encoding="utf-8")


class Trainer:
    """Trains a task. Give a ``config`` that names one, or a model, data and loss of your own::

        trainer = Trainer(model, data=(x, y), loss=loss, config=Config.of(epochs=3))
        result = trainer.fit()

    ``data`` and ``validation`` are tensors, tuples of tensors, or data sets with ``__len__`` and ``__getitem__``.
    ``loss(model, batch)`` returns a scalar mean, a pair (sum, count), or a ``Loss``. ``optimizer`` makes an optimizer
    from parameters; ``schedule`` gives the factor of the learning rate at a step. The model holds the trained weights
    afterwards."""

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        data: Any = None,
        loss: Callable[[Any, Any], Any] | None = None,
        validation: Any = None,
        optimizer: Callable[[Iterable[Any]], Any] | None = None,
        schedule: Callable[[int], float] | None = None,
        task: Task | None = None,
        config: Config | Resolved | None = None,
        quiet: bool = False,
    ) -> None:
        self.resolved = config if isinstance(config, Resolved) else Resolved(config or Config(), {})
        self.quiet = quiet
        self._model = model
        self._given: Task | None = task
        if not isinstance(config, Config | Resolved | None):
            raise UserError(f"config is a {type(config).__name__}; a Config was needed: Config.of(epochs=3)")
        if task is not None and not all(callable(getattr(task, member, None)) for member in ("build_model", "train_data", "loss")):
            raise UserError(
                f"task is {task!r}; an object with build_model, train_data and loss was needed (a name goes into Config.of(task=...))"
            )
        if model is None and any(part is not None for part in (data, loss, validation, optimizer, schedule)):
            raise UserError("data and loss were given without a model: Trainer(model, data=..., loss=...)")
        if model is not None:
            if data is None or loss is None:
                raise UserError("a model of your own needs data and loss beside it: Trainer(model, data=..., loss=...)")
            self._given = _given_task(model, data, loss, validation, optimizer, schedule)
        if self._given is not None:
            own = f"python:{type(self._given if model is None else model).__name__}"
            self.resolved = Resolved(self.resolved.config.but(task=own), self.resolved.origins)

    def prepare(self) -> Prepared:
        """Load the task, look at the hardware, trace the model and plan. Nothing is written."""
        from orchestrator.tasks.load import load_task
        from orchestrator.train.facts import model_facts

        # read by torch when it first touches the GPU: without it large batches fail for fragments, not for lack of memory
        set_environment("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        config = absolute(self.resolved.config, Path.cwd())
        task = self._given or load_task(config)
        found = inventory(config.run.run_dir or Path.cwd())
        device = choose_device(config, found).value
        precision = choose_precision(config, found, device).value
        facts = model_facts(task, device, precision)
        return Prepared(Resolved(config, self.resolved.origins), task, found, facts, plan(config, found, facts))

    def find_batch_size(self) -> Found:
        """What ``--batch-size auto`` would find: the largest batch that fits the GPU, or the fastest on the CPU."""
        from orchestrator.train.assemble import machine_settings
        from orchestrator.train.probing import find_batch
        from orchestrator.train.world import World

        prepared = self.prepare()
        config, chosen = prepared.resolved.config, prepared.plan
        with machine_settings(config, chosen):
            return find_batch(config, chosen, prepared.task, World.alone(chosen.device.value), prepared.facts)

    def bench(self, iterations: int = 20, precisions: bool = False) -> list[Measured]:
        """Forward, backward and optimizer time over whole steps, warm-up left out; in each precision if asked for."""
        from orchestrator.train.bench import measure, measure_precisions

        prepared = self.prepare()
        config, chosen, task = prepared.resolved.config, prepared.plan, prepared.task
        return measure_precisions(config, chosen, task, iterations) if precisions else [measure(config, chosen, task, iterations)]

    def fit(self) -> Result:
        """Train to the end. Works in a notebook and from a running event loop too; ``fit_async`` leaves that loop free."""
        return self._run(self.prepare())

    async def fit_async(self) -> Result:
        return await asyncio.to_thread(self.fit)

    def _run(self, prepared: Prepared) -> Result:
        from orchestrator.report.page import draw_report
        from orchestrator.train.assemble import build_loop, check_beginning, kept_randomness, machine_settings
        from orchestrator.train.world import World

        config = prepared.resolved.config
        check_beginning(config)
        run_dir = open_run_dir(config, self.resolved.config.run.name)
        world = World.alone(prepared.plan.device.value)
        screen = Screen(quiet=self.quiet)
        with ExitStack() as stack:
            stack.enter_context(kept_randomness())
            stack.enter_context(machine_settings(config, prepared.plan))
            prepared = with_measured_batch(prepared, world, run_dir, screen)
            write_intentions(prepared, run_dir)
            log = stack.enter_context(recording(prepared, run_dir, screen))
            loop, parts = build_loop(config, prepared.plan, prepared.task, world, run_dir, log)
            screen.banner(banner_rows(prepared, run_dir), "expert-orchestrator")
            outcome = train(loop, prepared, run_dir, log, stack)
        if self._model is not None:
            self._model.load_state_dict({name: tensor.cpu() for name, tensor in parts.model.state_dict().items()})
        summary = conclude(run_dir)
        draw_report(run_dir)
        for line in outcome_lines(summary, run_dir):
            screen.note(line)
        return Result(outcome.status, run_dir, summary, parts.model)


def _given_task(model: Any, data: Any, loss: Any, validation: Any, optimizer: Any, schedule: Any) -> Task:
    """A task from objects. Models for tracing and probing are copies; the trained weights go back into the given one."""
    from orchestrator.tasks.task import Task as Protocol

    class Given(Protocol):
        def build_model(self) -> Any:
            return copy.deepcopy(model)

        def train_data(self) -> Any:
            return data

        def validation_data(self) -> Any:
            return validation

        def loss(self, model: Any, batch: Any) -> Any:
            return loss(model, batch)

        def build_optimizer(self, parameters: Iterable[Any]) -> Any:
            return optimizer(parameters) if optimizer else None

        def schedule(self) -> Any:
            return schedule

    return Given()
