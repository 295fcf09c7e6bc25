"""Findings about the quality of the trained model: overfitting, and experts that learn from few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from orchestrator.config.metric import Criterion
from orchestrator.record.files.events import Event
from orchestrator.report.run.expert_load import busiest_layer, idlest_layer, layer_loads
from orchestrator.report.run.finding import Finding
from orchestrator.report.run.load_findings import balance_advice
from orchestrator.report.run.outcome import score_text
from orchestrator.report.run.read import RunRecord, section
from orchestrator.report.run.stats import plural, score_number, values, watched_criterion
from orchestrator.report.run.verdict import MIN_STEPS

MIN_EVALUATIONS = 5
MIN_LATER = 2
"""Evaluations after the best one: a single worse result may be chance."""
MIN_RISE = {"loss": 0.05}
"""The part of its best value by which a metric must have become worse."""
MIN_RISE_OF_OTHERS = 0.005
NOISE_FACTOR = 2.5
"""It must also be worse by this multiple of the noise between neighbouring evaluations."""
MIN_TRAINING_FALL = 0.05
"""The part by which the training loss must have fallen meanwhile."""
EXPERT_IMBALANCE = 2.0
"""Ratio of the busiest expert to the even share, once the gate has settled."""
IDLE_SHARE = 0.25
"""Part of a layer's experts that are idle."""
_MAD_TO_DEVIATION = 1.4826  # of a normal distribution
_SECOND_DIFFERENCE = 1.5**0.5  # deviation of x[i] - (x[i-1] + x[i+1]) / 2, in deviations of x


@dataclass(frozen=True)
class _Decline:
    """A validation metric that became worse after its best value."""

    name: str
    best: Event
    best_value: float
    later: float
    """The median of the evaluations after the best one."""
    num_later: int

    def text(self) -> str:
        change = abs(self.later - self.best_value) / max(1e-12, abs(self.best_value))
        verb = "rose" if self.later > self.best_value else "fell"
        times = plural(self.num_later, "evaluation", "evaluations")
        return (
            f"validation {self.name} was best at step {self.best['step']} ({score_text(self.best_value)}), "
            f"then {verb} by {change:.1%} (to {score_text(self.later)}, the median of {times})"
        )


def overfitting_finding(record: RunRecord) -> Finding | None:
    """Return that the validation became worse while the training loss fell."""
    watched = watched_criterion(record)
    criteria = dict.fromkeys((watched, Criterion("loss", "min")))
    declines = [decline for criterion in criteria if (decline := _decline(record, criterion)) is not None]
    if not declines:
        return None
    best = declines[0].best
    losses = _training_losses(record, best["step"])
    if losses is None or losses[1] > (1 - MIN_TRAINING_FALL) * losses[0]:
        return None
    training = f"the training loss fell from {score_text(losses[0])} to {score_text(losses[1])} meanwhile"
    evidence = [*(decline.text() for decline in declines), training]
    return Finding("overfitting", tuple(evidence), _advice(record, best))


def _decline(record: RunRecord, criterion: Criterion) -> _Decline | None:
    """Return how far a metric became worse after its best value; None if that may be noise."""
    known = [event for event in record.evaluations if score_number(event, criterion.name) is not None]
    # Larger is better here, whatever the metric.
    scores = [criterion.score(score_number(event, criterion.name) or 0.0) for event in known]
    if len(scores) < MIN_EVALUATIONS:
        return None
    best_index = max(range(len(scores)), key=scores.__getitem__)
    later = scores[best_index + 1 :]
    if len(later) < MIN_LATER:
        return None
    best = scores[best_index]
    # The best of many noisy values is partly chance: its neighbours say where the model was.
    fall = median(scores[max(0, best_index - 1) : best_index + 2]) - median(later)
    least = MIN_RISE.get(criterion.name, MIN_RISE_OF_OTHERS) * abs(best)
    if fall < max(least, NOISE_FACTOR * _noise(scores)):
        return None
    best_value = score_number(known[best_index], criterion.name) or 0.0
    sign = 1.0 if best_value == best else -1.0
    return _Decline(criterion.name, known[best_index], best_value, sign * median(later), len(later))


def _noise(scores: Sequence[float]) -> float:
    """Return the standard deviation of chance, from each value's distance to the mean of its neighbours.

    A trend hardly adds to it, nor does the steep beginning of a run."""
    triples = zip(scores, scores[1:], scores[2:], strict=False)
    distances = [abs(middle - (before + after) / 2) for before, middle, after in triples]
    return _MAD_TO_DEVIATION * median(distances) / _SECOND_DIFFERENCE


def _training_losses(record: RunRecord, best_step: int) -> tuple[float, float] | None:
    """Return the mean training loss of the steps before the best evaluation, and of as many at the end."""
    steps = [event["step"] for event in record.evaluations]
    before = max((step for step in steps if step < best_step), default=0)
    until_best = values((e for e in record.steps if before < e["step"] <= best_step), "loss")
    last = values(record.steps[-max(1, best_step - before) :], "loss")
    return (fmean(until_best), fmean(last)) if until_best and last else None


def _advice(record: RunRecord, best: Event) -> tuple[str, ...]:
    run = section(record.config, "run")
    advice = [_shorter_run(record, best)]
    if not run.get("early_stopping_patience"):
        advice.append("--early-stopping-patience 3: ends a run that no longer becomes better")
    decay = section(record.config, "optim").get("weight_decay") if record.takes("weight_decay") else None
    higher = f"--weight-decay {max(0.05, 5 * decay):g} (was {decay:g})" if isinstance(decay, float) else ""
    advice.append(f"{higher or 'more weight decay'}, more or augmented data, or a smaller model")
    return tuple(advice)


def _shorter_run(record: RunRecord, best: Event) -> str:
    """Return the advice to end where the best result was; the weights may be the best ones already."""
    epoch = best.get("epoch")
    length = f"--max-steps {best['step']}"
    if isinstance(epoch, int) and not section(record.config, "run").get("max_steps"):
        length = f"--epochs {epoch + 1}"
    final = record.final or {}
    if final.get("step") == best["step"]:
        return (
            f"{length}: the final weights are the best ones already, and the steps after them change nothing"
        )
    return f"{length}, or leave out --keep-last: a run then ends with its best weights"


def uneven_experts_finding(record: RunRecord) -> Finding | None:
    """Return an expert with far more than its share, or many with none.

    With few experts or a large top-k only the second can occur. It costs little time on one device, but
    experts with few tokens learn little."""
    if len(record.steps) < MIN_STEPS:
        return None
    layers = layer_loads(record)
    evidence = []
    busiest = busiest_layer(layers)
    if busiest is not None and busiest[1] >= EXPERT_IMBALANCE:
        layer, ratio = busiest
        evidence.append(f"the busiest expert of layer {layer} receives {ratio:.1f} times its even share")
    idlest = idlest_layer(layers)
    if idlest is not None and idlest[1] >= IDLE_SHARE * idlest[2]:
        layer, num_idle, num_experts = idlest
        evidence.append(f"{num_idle} of {num_experts} experts of layer {layer} receive almost no tokens")
    if not evidence:
        return None
    advice = [balance_advice(record)]
    sizes = {"experts": "fewer --experts", "top_k": "a larger --top-k"}
    changes = [text for name, text in sizes.items() if record.takes(name)]
    if changes:
        advice.append(f"{', or '.join(changes)}, if some stay idle to the end")
    return Finding("uneven experts", tuple(evidence), tuple(advice))
