"""The model at the end of a run: with the weights of the best step, or of the last one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from torch import nn

from experts.balance import gated_layers, moe_layers
from experts.model import structure_of
from experts.moe.token_dropout import token_dropouts
from orchestrator.checkpoint.files import AVERAGE_SLOT, Contents, load, step_name
from orchestrator.checkpoint.progress import read_progress
from orchestrator.checkpoint.saved_experts import OtherExperts
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.errors import CheckpointDamaged, ResourceError, TrainingFailed, UserError
from orchestrator.record.events import kinds
from orchestrator.record.events.effective import effective_events
from orchestrator.record.events.kinds import End, Evaluation, Event
from orchestrator.record.events.sessions import last_of
from orchestrator.record.files.log import Log
from orchestrator.record.summary.index import read_fold
from orchestrator.record.summary.summary import best_evaluation, metric_of_best
from orchestrator.run.prepared_run import PreparedRun
from orchestrator.tasks.task import Task
from orchestrator.tasks.validate import build_checked_model
from orchestrator.train.checkpoint.restore import check_experts, restore_model
from orchestrator.train.device.short_weights import lengthen_weights
from orchestrator.train.worker.placed_experts import build_experts
from orchestrator.train.worker.resume import find_candidates


def final_model(
    prepared: PreparedRun,
    run_dir: Path,
    log: Log,
    began_s: float,
    live_model: nn.Module | None = None,
    held: Sequence[Event] = (),
) -> nn.Module:
    """Return the model that a run ends with, and record which step its weights are of.

    ``began_s`` is when this process began the run, by ``perf_counter``.
    ``live_model`` was trained in this process, and has the weights of the last step. Without it the
    model is built, and all weights come from a checkpoint. With ``--evaluate-ema`` they are the
    average, which the validation results are of. ``held`` are events that could not be written to the
    record."""
    events = effective_events(read_fold(run_dir / "events.jsonl", held).events())
    end = last_of(events, End)
    if end is None or end.steps is None:
        raise ResourceError(
            f"{run_dir / 'events.jsonl'} does not say how the run ended: its end could not be written. "
            "Make room there, and continue the run from its newest checkpoint"
        )
    last_step = end.steps
    chosen = choose_weights(events, end, prepared.resolved.config.checkpoint.keep_last)
    averaged = prepared.resolved.config.optim.evaluate_ema
    contents: Contents | None = None
    if chosen.weights == "best" and (live_model is None or chosen.step != last_step):
        try:
            contents = load(run_dir / "checkpoints" / step_name(chosen.step), kinds=weight_kinds(averaged))
        except (CheckpointDamaged, UserError) as error:
            reason = f"the best weights, of step {chosen.step}, cannot be restored: {error}"
            chosen = kinds.Final(step=last_step, weights="last", reason=reason)
            log.write(kinds.Warned(kind="checkpoint", message=f"{reason}; the model has the last ones"))
    if contents is None and live_model is None:
        contents = _newest_weights(prepared, run_dir)
        chosen = replace(chosen, step=read_progress(contents.state).step)
    model = _built_model(prepared.task) if live_model is None else live_model
    lengthen_weights(model)  # an average of weights in bf16 is in fp32
    if contents is not None:
        restore_weights(model, with_average(contents) if averaged else contents)
    _end_training(model)
    log.write(replace(chosen, seconds=perf_counter() - began_s))
    return model


def _end_training(model: nn.Module) -> None:
    """Remove from a model what belongs to its training, so that it computes anywhere and in any type."""
    for _, layer in gated_layers(model):
        layer.statistics = None
    for _, layer in moe_layers(model):
        layer.bank.fp8 = False
    for _, dropout in token_dropouts(model):
        dropout.context = None  # its numbers would be those of the last step for ever


def _built_model(task: Task) -> nn.Module:
    """Build a task's model. Frozen weights that no checkpoint holds are read from their files."""
    model = build_checked_model(task)
    initialise: Callable[[nn.Module], None] | None = getattr(task, "initialise", None)
    if initialise is not None and not all(parameter.requires_grad for parameter in model.parameters()):
        initialise(model)
    return model


def choose_weights(events: Sequence[Event], end: End, keep_last: bool) -> kinds.Final:
    """Choose the step whose weights a run ends with, from the events that count. Pure."""
    last_step = end.steps or 0
    best = best_evaluation(events)
    if end.status != "completed":
        return kinds.Final(step=last_step, weights="last", reason="the run can be continued")
    if keep_last:
        return kinds.Final(step=last_step, weights="last", reason="set by --keep-last")
    if best is not None:
        return kinds.Final(
            step=best.step, weights="best", reason=f"the best validation {metric_of_best(events)}"
        )
    if last_of(events, Evaluation) is not None:
        # The run was continued in a folder of its own.
        return kinds.Final(
            step=last_step, weights="last", reason="the best result is of an earlier run, in another folder"
        )
    return kinds.Final(step=last_step, weights="last", reason="there is no validation result to choose by")


def copy_model(source: nn.Module, target: nn.Module, step: int) -> None:
    """Copy the weights of ``step`` from one whole model to another, whose experts may be others."""
    structures = structure_of(source)
    if structures != structure_of(target):
        build_experts(target, structures)
    target.load_state_dict({name: tensor.cpu() for name, tensor in source.state_dict().items()})
    use_priors(target, step)


def _newest_weights(prepared: PreparedRun, run_dir: Path) -> Contents:
    """Return the weights of the last checkpoint, with their average if it is needed."""
    kinds = weight_kinds(prepared.resolved.config.optim.evaluate_ema)
    store = CheckpointStore(run_dir / "checkpoints", repair=False)
    checkpoint, _ = store.newest_good(kinds)
    resume = prepared.resolved.config.checkpoint.resume
    if checkpoint is None and resume not in (None, "auto"):
        # The run was resumed from another run that had no step left to do.
        candidates = find_candidates(str(resume), store)
        checkpoint, _ = candidates.first_good(lambda path: load(path, kinds=kinds))
    if checkpoint is None:
        raise TrainingFailed(f"no good checkpoint in {run_dir / 'checkpoints'}")
    return checkpoint.contents


def weight_kinds(averaged: bool) -> frozenset[str]:
    """Return the kinds of tensors to read. The average is a part of the optimizer's state."""
    return frozenset({"model", "optimizer"}) if averaged else frozenset({"model"})


def with_average(contents: Contents) -> Contents:
    """Return a checkpoint's contents with the average in place of the weights that have one."""
    prefix = f"{AVERAGE_SLOT}/"
    if not any(key.startswith(prefix) for key in contents.tensors["optimizer"]):
        raise UserError(
            "the checkpoint has no average of the weights, which a run keeps with --ema-decay; use its "
            "weights: --no-evaluate-ema, or average=False of load_weights"
        )
    averages = {
        key.removeprefix(prefix): tensor
        for key, tensor in contents.tensors["optimizer"].items()
        if key.startswith(prefix)
    }
    weights = {**contents.tensors["model"], **averages}
    return replace(contents, tensors={**contents.tensors, "model": weights})


def restore_weights(model: nn.Module, contents: Contents) -> None:
    """Restore the weights of a checkpoint into a whole model, whose experts may be others."""
    try:
        check_experts(contents, model)
    except OtherExperts as other:
        device = next(model.parameters()).device
        build_experts(model, other.saved.layers)
        model.to(device)
    restore_model(contents, model)
    use_priors(model, read_progress(contents.state).step)


def use_priors(model: nn.Module, step: int) -> None:
    """Let newborn experts have the share of the tokens that they had after ``step``."""
    for _, layer in gated_layers(model):
        layer.use_priors(step)
