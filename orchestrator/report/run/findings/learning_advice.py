"""Advice that follows from how a run learnt. It names only settings that the run can take."""

from __future__ import annotations

from orchestrator.record.events.decoding import finite
from orchestrator.record.events.kinds import Evaluation
from orchestrator.report.run.figures.read import RunRecord, section

SMALL_FALL = 0.1
"""The part of its first value by which a training loss falls in all if the steps were too small."""


def divergence_advice(record: RunRecord) -> tuple[str, ...]:
    advice = [f"a lower {learning_rate_name(record)}"]
    if record.takes("warmup_steps"):
        advice.append("more --warmup-steps")
    if not section(record.config, "optim").get("clip_norm", 1.0):
        advice.append("--clip-norm 1: limits the gradients of single steps")
    return tuple(advice)


def levelled_advice(record: RunRecord, is_fitting: bool, fall: float) -> tuple[str, ...]:
    """Return what may lower a loss that has levelled off. ``fall`` is the part that it fell by in all."""
    advice = ["more data or a larger model: more steps of this run change little"]
    if is_fitting:
        advice = [
            "more or augmented data, or more weight decay: the model fits its training data ever closer"
        ]
    if fall < SMALL_FALL:
        rate = learning_rate_name(record)
        advice.insert(0, f"a higher {rate}: the training loss fell by {max(0.0, fall):.0%} in all")
    if section(record.config, "optim").get("schedule") == "constant" and record.takes("schedule"):
        advice.append("--schedule cosine: a rate that falls to zero often lowers the loss once more")
    return (*advice, *_patience_advice(record))


def longer_advice(record: RunRecord) -> str:
    """Return the advice to train longer, by the setting that ended the run."""
    run = section(record.config, "run")
    last = record.steps[-1].step if record.steps else 0
    total = finite(record.fact("total_steps"))
    if record.status != "completed" and total is not None and last < total:
        return f"resume the run: it ended at step {last} of {total:.0f}"
    if isinstance(run.get("max_steps"), int):
        return f"--max-steps {2 * run['max_steps']} (was {run['max_steps']}): a longer run"
    epochs = run.get("epochs")
    return (
        f"--epochs {2 * epochs} (was {epochs}): a longer run" if isinstance(epochs, int) else "a longer run"
    )


def overfitting_advice(record: RunRecord, best: Evaluation) -> tuple[str, ...]:
    decay = section(record.config, "optim").get("weight_decay") if record.takes("weight_decay") else None
    higher = f"--weight-decay {max(0.05, 5 * decay):g} (was {decay:g})" if isinstance(decay, float) else ""
    regularised = f"{higher or 'more weight decay'}, more or augmented data, or a smaller model"
    return (shorter_advice(record, best), *_patience_advice(record), regularised)


def _patience_advice(record: RunRecord) -> tuple[str, ...]:
    if section(record.config, "run").get("early_stopping_patience"):
        return ()
    return ("--early-stopping-patience 3: ends a run that no longer becomes better",)


def shorter_advice(record: RunRecord, best: Evaluation) -> str:
    """Return the advice to end where the best result was; the weights may be the best ones already."""
    length = f"--max-steps {best.step}"
    if best.epoch is not None and not section(record.config, "run").get("max_steps"):
        length = f"--epochs {best.epoch + 1}"
    if record.final is not None and record.final.step == best.step:
        return f"{length}: the kept weights are the best ones already; later steps changed nothing"
    return f"{length}, or leave out --keep-last: a run then ends with its best weights"


def learning_rate_name(record: RunRecord) -> str:
    """Return the setting with its value; in words where the task has an optimizer of its own."""
    if not record.takes("learning_rate"):
        return "learning rate"
    rate = finite(record.setting("optim", "learning_rate"))
    return "--learning-rate" if rate is None else f"--learning-rate (was {rate:g})"


def evaluation_advice(record: RunRecord, by_validation: bool) -> str:
    if not by_validation:
        return longer_advice(record)
    interval = max(1, record.evaluations[-1].step // (2 * len(record.evaluations)))
    return f"--evaluate-every {interval}, or a larger validation set: more and quieter evaluations"
