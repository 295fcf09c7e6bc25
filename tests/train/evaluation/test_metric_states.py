"""Tests of metrics with a state: one process and several workers agree, to the last sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.hosts.ranks import run_ranks
from orchestrator.config.metric import Metric, as_metric
from orchestrator.config.settings import Config
from orchestrator.errors import TaskFailed, UserError
from orchestrator.record.files.log import SilentLog
from orchestrator.tasks.metrics import AUC, F1, Perplexity
from orchestrator.tasks.task import Loss, Task, TensorData
from orchestrator.train.data.steps import MicroBatch
from orchestrator.train.evaluation.metric_states import MetricStates
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.worker.build import WorkerContext, build_training
from orchestrator.trainer import Trainer

CPU = torch.device("cpu")


def dim_zero_sum(x: Tensor) -> Tensor:
    return x.sum(0)


def dim_zero_cat(x: Tensor) -> Tensor:
    return x


def dim_zero_mean(x: Tensor) -> Tensor:
    return x.mean(0)


class Foreign:
    """The attributes of a metric of torchmetrics that are used: it keeps a sum and a list."""

    higher_is_better = False
    sync_on_compute = True
    _to_sync = True

    def __init__(self, sum_reduction: Any = dim_zero_sum) -> None:
        self._defaults: dict[str, Any] = {"total": torch.zeros(()), "rows": []}
        self._reductions = {"total": sum_reduction, "rows": dim_zero_cat}
        self.reset()

    def reset(self) -> None:
        self.total = torch.zeros(())
        self.rows: Any = []

    def to(self, device: Any) -> Foreign:
        self.total = self.total.to(device)
        return self

    def update(self, values_B: Tensor) -> None:
        self.total = self.total + values_B.sum()
        self.rows.append(values_B)

    def compute(self) -> Tensor:
        assert not self.sync_on_compute, "the workers would be added up twice"
        return self.total + self.rows.max()


class Odd(Metric):
    """Not a mean of batches: the square of a sum, and a bool that travels as rows."""

    total: Tensor
    flags: Any

    def __init__(self) -> None:
        super().__init__("min")
        self.add_state("total", torch.zeros(2, dtype=torch.int64))
        self.add_state("flags", reduce="gather")

    def update(self, labels_B: Tensor) -> None:
        self.total = self.total + torch.stack([labels_B.sum(), torch.tensor(len(labels_B))])
        self.flags.append((labels_B > 0)[:, None].expand(-1, 3))

    def compute(self) -> float:
        assert self.flags.shape == (int(self.total[1]), 3)
        assert self.flags.dtype == torch.bool
        return float(self.total[0]) ** 2 + int(self.flags.sum())


class FromTen(Metric):
    """A sum that does not begin at zero."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__("min")
        self.add_state("total", torch.tensor(10))

    def update(self, labels_B: Tensor) -> None:
        self.total = self.total + labels_B.sum()

    def compute(self) -> Tensor:
        return self.total


class Undeclared(Metric):
    """A metric that keeps a total of its own."""

    def __init__(self) -> None:
        super().__init__("min")
        self.total = 0.0

    def update(self, values_B: Tensor) -> None:
        self.total += float(values_B.sum())

    def compute(self) -> float:
        return self.total


class Measured(Task):
    """A small classifier whose 23 validation samples leave a short last batch."""

    metrics = {  # noqa: RUF012
        "f1": F1(3),
        "auc": AUC(),
        "ppl": Perplexity(),
        "odd": Odd(),
        "from_ten": FromTen(),
        "foreign": Foreign(),
    }

    def build_model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(4, 3)

    def train_data(self) -> TensorData:
        return self._samples(24, 0)

    def validation_data(self) -> TensorData:
        return self._samples(23, 1)

    def _samples(self, count: int, seed: int) -> TensorData:
        generator = torch.Generator().manual_seed(seed)
        return TensorData(
            torch.randn(count, 4, generator=generator), torch.randint(3, (count,), generator=generator)
        )

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        logits_BC = model(batch[0])
        labels_B = batch[1]
        total = F.cross_entropy(logits_BC, labels_B, reduction="sum")
        return Loss(
            total,
            len(labels_B),
            {
                "accuracy": (logits_BC.argmax(-1) == labels_B).sum(),
                "f1": (logits_BC, labels_B),
                "auc": (logits_BC[:, 0], labels_B == 0),
                "ppl": (total, len(labels_B)),
                "odd": (labels_B,),
                "from_ten": (labels_B,),
                "foreign": (logits_BC.detach().amax(-1),),
            },
        )


def evaluate_on_rank(rank: int, size: int, store: str, eval_batch: int, folder: Path) -> dict[str, Any]:
    config = Config.of(
        run_dir=folder, workers=size, parallel_strategy="data_parallel", eval_batch_size=eval_batch,
        global_batch_size=6,
    )  # fmt: skip
    prepared = Trainer(task=Measured(), config=config, quiet=True).prepare()
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 30) as world:
        training = build_training(WorkerContext(prepared, world, folder, SilentLog()))
        assert training.evaluation is not None
        result = training.evaluation()
        again = training.evaluation()
        training.close()
    assert result["metrics"] == again["metrics"], "an evaluation begins with fresh states"
    return result["metrics"]


def one_pass() -> dict[str, float]:
    """Return the metrics of all samples in one batch of one process."""
    task = Measured()
    states = MetricStates({name: as_metric(m) or Metric() for name, m in task.metrics.items()}, CPU)
    data = task.validation_data()
    with torch.no_grad():
        loss = task.loss(task.build_model(), data.gather(torch.arange(len(data))))
    updates = {name: value for name, value in loss.metrics.items() if isinstance(value, tuple)}
    states.update(updates)
    return states.compute(World.single_process())


# Batches of 3 × 5 leave 8 samples for three workers; batches of 3 × 11 leave no sample for the last one.
@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize("eval_batch", [11, 5])
def test_three_workers_compute_the_metrics_of_all_samples(tmp_path: Path, eval_batch: int) -> None:
    expected = one_pass()
    for metrics in run_ranks(evaluate_on_rank, 3, eval_batch, tmp_path):
        accuracy = metrics.pop("accuracy")
        assert accuracy * 23 == pytest.approx(round(accuracy * 23), abs=1e-9)
        assert metrics == pytest.approx(expected, rel=1e-6)
        assert metrics["f1"] == expected["f1"]
        assert metrics["odd"] == expected["odd"]


def test_dummy_samples_are_not_counted(tmp_path: Path) -> None:
    prepared = Trainer(task=Measured(), config=Config.of(run_dir=tmp_path), quiet=True).prepare()
    training = build_training(WorkerContext(prepared, World.single_process(), tmp_path, SilentLog()))
    assert training.evaluation is not None
    batch = Measured().validation_data().gather(torch.arange(2))
    states = MetricStates({"odd": Odd()}, CPU)
    training.evaluation._evaluate(MicroBatch(0, lambda: batch, num_dummies=2), states, 8)
    training.close()
    with pytest.raises(UserError, match="the loss returns no values"):
        states.compute(World.single_process())


def test_a_metric_with_a_state_can_be_the_best_result(tmp_path: Path) -> None:
    config = Config.of(run_dir=tmp_path / "run", epochs=2, batch_size=8, early_stopping_metric="foreign",
                       trackers=(), monitor_gpu=False)  # fmt: skip
    result = Trainer(task=Measured(), config=config, quiet=True).fit()
    assert result.summary["best"]["foreign"] == pytest.approx(
        min(result.history["validation_foreign"].dropna())
    )


def test_a_state_needs_a_start_or_none() -> None:
    with pytest.raises(UserError, match="a sum needs a tensor to start with"):
        Metric("min").add_state("total")
    with pytest.raises(UserError, match="gather needs none"):
        Metric("min").add_state("rows", torch.zeros(1), reduce="gather")


@pytest.mark.parametrize("start", [0, 0.0, [0]])
def test_a_sum_that_starts_with_no_tensor_is_refused(start: Any) -> None:
    with pytest.raises(UserError, match=r"a sum needs a tensor to start with, such as torch.zeros"):
        Metric("min").add_state("total", start)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (Foreign(dim_zero_mean), "Foreign reduces its state 'total' over workers by"),
        (Undeclared(), "the metric Undeclared has an update, and no state is declared"),
    ],
)
def test_a_metric_that_workers_cannot_reduce_is_refused_before_the_run(
    tmp_path: Path, metric: Any, message: str
) -> None:
    task = Measured()
    task.metrics = {"own": metric}
    trainer = Trainer(task=task, config=Config.of(run_dir=tmp_path), quiet=True)
    with pytest.raises(UserError, match=message):
        trainer.prepare()


class Counted(Metric):
    """A metric whose value is given."""

    def __init__(self, value: Any) -> None:
        super().__init__("min")
        self.add_state("count", torch.zeros(()))
        self.value = value

    def update(self, count: int) -> None:
        self.count = self.count + count

    def compute(self) -> Any:
        return self.value


@pytest.mark.parametrize(
    ("value", "found"),
    [([1, 2], "a list"), (None, "a NoneType"), (torch.zeros(3), r"a tensor of shape \(3,\)")],
)
def test_a_value_that_is_no_number_is_refused(value: Any, found: str) -> None:
    states = MetricStates({"churn": Counted(value)}, CPU)
    states.update({"churn": (1,)})
    with pytest.raises(UserError, match=f"compute of the metric 'churn' returned {found}; one number"):
        states.compute(World.single_process())


def test_mistakes_are_named() -> None:
    states = MetricStates({"f1": F1(), "churn": Metric("min")}, CPU)
    with pytest.raises(UserError, match="returns a tuple for the metric 'churn'"):
        states.update({"churn": (1,)})
    with pytest.raises(UserError, match="the metric 'f1' has an update, and the loss returns no values"):
        states.compute(World.single_process())
    with pytest.raises(TaskFailed, match="updating the metric f1"):
        states.update({"f1": (1,)})
