"""A run whose experts change is resumed at any step: in a warm-up, after a merge, on other hosts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from experts.model import structure_of
from experts.structure import LayerStructure
from harness.hosts.ranks import run_ranks
from harness.runs.loop_runs import SMALL, losses_in
from orchestrator import load_weights
from orchestrator.checkpoint.saved_experts import SavedExperts
from orchestrator.config.settings import Config
from orchestrator.live.callbacks.callbacks import CallbackRunner
from orchestrator.live.screen.screen import Screen
from orchestrator.plan.inventory.cluster import Cluster
from orchestrator.record.files.event_log import EventLog
from orchestrator.record.files.log import Log, SilentLog
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.run.prepared_run import PreparedRun, banner_rows
from orchestrator.tasks.task import Task
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.worker.resume import experts_to_show
from orchestrator.train.worker.run import Supervision, run_worker
from orchestrator.trainer import Trainer
from orchestrator.training_run import TrainingRun

STEPS = 170
EVOLVING: dict[str, Any] = SMALL | {
    "epochs": 40,
    "batch_size": 16,
    "global_batch_size": 48,
    "experts": 4,
    "expert_hidden_size": (4, 4, 8, 8),
    "schedule": "constant",
    "evolution": "bold",
    "sleep_every": 9,
    "evaluate_every": 9,
    "birth_entropy": 0.1,
    "birth_patience": 1,
    "newborn_warmup": 6,
    "merge_similarity": 0.2,
    "change_tolerance": 10.0,
    "keep": 200,
    "checkpoint_every": 1,
}


def prepare(run_dir: Path, **settings: Any) -> PreparedRun:
    config = Config.of(**EVOLVING | settings, run_dir=run_dir)
    return Trainer(config=config, quiet=True).prepare()


def run(run_dir: Path, world: World | None = None, **settings: Any) -> None:
    """Train in this process, as a worker does."""
    world = world or World.single_process()
    run_dir.mkdir(parents=True, exist_ok=True)
    log: Log = EventLog(run_dir / "events.jsonl") if world.is_main else SilentLog()
    run_worker(prepare(run_dir, **settings), world, run_dir, log, Supervision())
    log.close()


def changes_in(run_dir: Path) -> list[dict[str, Any]]:
    return of_kind(read_events(run_dir / "events.jsonl"), "expert")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to the end, with a checkpoint of every step."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    run(run_dir, max_steps=STEPS)
    return run_dir


@pytest.mark.extended
def test_experts_change_before_an_evaluation_of_the_same_step(whole: Path) -> None:
    """So that the metrics are those of the experts that a checkpoint of this step holds."""
    events = read_events(whole / "events.jsonl")
    changed = {event["step"]: index for index, event in enumerate(events) if event["event"] == "expert"}
    evaluated = {event["step"]: index for index, event in enumerate(events) if event["event"] == "evaluate"}
    assert changed.keys() & evaluated.keys()
    assert all(index < evaluated[step] for step, index in changed.items() if step in evaluated)


def test_experts_are_born_and_merged(whole: Path) -> None:
    changes = {change["change"] for change in changes_in(whole)}
    assert changes >= {"born", "warmed", "merged"}
    for change in changes_in(whole):
        if change["change"] == "born":
            assert change["output_change"] < 1e-6
            assert change["loss_after"] == pytest.approx(change["loss_before"], rel=1e-5)
    graphs = of_kind(read_events(whole / "events.jsonl"), "expert_graph")
    assert graphs[-1]["layers"][0]["experts"]


def steps_to_resume_at(whole: Path) -> dict[str, int]:
    first = {}
    for change in changes_in(whole):
        first.setdefault(change["change"], change["step"])
    return {
        "before a birth": first["born"] - 1,
        "after a birth": first["born"],
        "a twin": first["born"] + 3,
        "the ramp": first["warmed"] + 2,
        "after a merge": first["merged"],
        "between observations": first["merged"] + 5,
    }


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize(
    "moment",
    ["after a birth", "before a birth", "a twin", "the ramp", "after a merge", "between observations"],
)
def test_a_resumed_run_continues_exactly(whole: Path, moment: str, tmp_path: Path) -> None:
    step = steps_to_resume_at(whole)[moment]
    run_dir = tmp_path / "run"
    copy_until(whole, run_dir, step)
    run(run_dir, max_steps=STEPS, resume="auto")
    assert losses_in(run_dir) == losses_in(whole)[step:]
    later = [change for change in changes_in(whole) if change["step"] > step]
    assert [(c["step"], c["change"], c["ids"]) for c in changes_in(run_dir)] == [
        (c["step"], c["change"], c["ids"]) for c in later
    ]


def copy_until(whole: Path, run_dir: Path, step: int) -> None:
    """Copy the checkpoint of a step, as if the run had ended there."""
    name = f"step_{step:08d}"
    shutil.copytree(whole / "checkpoints" / name, run_dir / "checkpoints" / name)


def test_weights_of_a_changed_model_start_another_run(whole: Path, tmp_path: Path) -> None:
    step = steps_to_resume_at(whole)["the ramp"]
    checkpoint = whole / "checkpoints" / f"step_{step:08d}"
    run(tmp_path / "run", max_steps=2, init_from=checkpoint, evolution="off")
    assert len(losses_in(tmp_path / "run")) == 2


@torch.no_grad()
def validation_loss(task: Task, model: nn.Module) -> float:
    """Return the mean loss over the validation data, in one batch."""
    data = task.validation_data()
    loss = task.loss(model.eval(), data.gather(torch.arange(len(data))))
    return float(loss.sum / loss.count)


@pytest.mark.parametrize("moment", ["a twin", "the ramp", "after a merge"])
def test_another_program_gets_the_experts_of_a_changed_model(
    whole: Path, moment: str, tmp_path: Path
) -> None:
    step = steps_to_resume_at(whole)[moment]
    copy_until(whole, tmp_path / "run", step)
    task = prepare(tmp_path / "other").task
    model = task.build_model()
    assert load_weights(model, tmp_path / "run") == step
    number = next(change["experts"] for change in reversed(changes_in(whole)) if change["step"] <= step)
    (layer,) = structure_of(model)
    assert len(layer.experts) == number
    assert not layer.is_initial
    result = Trainer(config=Config.of(**EVOLVING), quiet=True).evaluate(tmp_path / "run")
    assert validation_loss(task, model) == pytest.approx(result.loss, rel=1e-5)


def resume_on_host(rank: int, size: int, store: str, run_dir: Path) -> None:
    with process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 60) as world:
        run(
            run_dir,
            world,
            max_steps=STEPS,
            resume="auto",
            workers=size,
            parallel_strategy="expert_parallel",
            rebalance="off",
        )


@pytest.mark.extended
@pytest.mark.parametrize("moment", ["a twin", "the ramp"])
def test_three_hosts_continue_a_run_of_one_process(whole: Path, moment: str, tmp_path: Path) -> None:
    step = steps_to_resume_at(whole)[moment]
    run_dir = tmp_path / "run"
    copy_until(whole, run_dir, step)
    run_ranks(resume_on_host, 3, run_dir)
    assert losses_in(run_dir)[:10] == pytest.approx(losses_in(whole)[step : step + 10], rel=1e-4)


class _BannerShown(Exception):
    """Ends a run once its banner is on the screen."""


def end_run(*_: Any) -> None:
    raise _BannerShown


def task_in(output: str) -> str:
    """Return the task and its model, as a banner shows them."""
    text = " ".join(output.replace("│", " ").split())
    return text[text.index("digits (") : text.index(")") + 1]


def experts_text(whole: Path, step: int) -> str:
    """Return the end of the model's description after a change of experts in this step."""
    number = next(change["experts"] for change in reversed(changes_in(whole)) if change["step"] == step)
    assert number != EVOLVING["experts"]
    return f" parameters as built, {number} experts in 1 layer as saved)"


def train(prepared: PreparedRun, run_dir: Path, hosts: int) -> None:
    """Train as ``Trainer`` does, in this process or on hosts."""
    training = TrainingRun(Screen(), CallbackRunner([]), None, None, None, None, False)
    if hosts == 1:
        training.in_process(prepared, run_dir)
    else:
        training.on_workers(prepared, Cluster.of(prepared.inventory), run_dir, 0.0)


@pytest.mark.parametrize("hosts", [1, 2])
def test_the_banner_shows_the_experts_of_the_checkpoint(
    whole: Path,
    hosts: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    step = steps_to_resume_at(whole)["after a birth"]
    run_dir = tmp_path / "run"
    copy_until(whole, run_dir, step)
    parallel = {"workers": hosts, "parallel_strategy": "expert_parallel"} if hosts > 1 else {}
    prepared = prepare(run_dir, max_steps=STEPS, resume="auto", **parallel)
    # Training itself is not of interest.
    monkeypatch.setattr("orchestrator.train.worker.run.run_worker", end_run)
    monkeypatch.setattr("orchestrator.runtime.driver.drive", end_run)
    with pytest.raises(_BannerShown):
        train(prepared, run_dir, hosts)
    assert task_in(capsys.readouterr().out).endswith(experts_text(whole, step))


def test_the_banner_of_an_evaluation_shows_the_experts_of_the_checkpoint(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = steps_to_resume_at(whole)["after a birth"]
    copy_until(whole, tmp_path / "run", step)
    config = Config.of(**EVOLVING)
    Trainer(config=config).evaluate(tmp_path / "run" / "checkpoints" / f"step_{step:08d}")
    assert task_in(capsys.readouterr().out).endswith(experts_text(whole, step))


def test_layers_with_other_numbers_of_experts_are_shown_by_their_range(tmp_path: Path) -> None:
    layers = [LayerStructure.initial(f"moe{number}", [8] * number) for number in (3, 5)]
    rows = dict(banner_rows(prepare(tmp_path), tmp_path, saved=SavedExperts(tuple(layers))))
    assert "3 to 5 experts in" in rows["task"]
    rows = dict(banner_rows(prepare(tmp_path), tmp_path))
    assert "4 experts in 1 layer)" in rows["task"]
    assert "--evolution off keeps their number" in rows["evolution"]


def test_the_banner_of_a_run_without_a_readable_checkpoint_shows_the_experts_of_the_task(
    whole: Path, tmp_path: Path
) -> None:
    step = steps_to_resume_at(whole)["after a birth"]
    run_dir = tmp_path / "run"
    config = Config.of(**EVOLVING, resume="auto")
    assert experts_to_show(config, run_dir) is None
    copy_until(whole, run_dir, step)
    assert experts_to_show(config, run_dir) is not None
    (run_dir / "checkpoints" / f"step_{step:08d}" / "manifest.json").write_text("{")
    assert experts_to_show(config, run_dir) is None
