"""Data loading, the number of steps and the warm-up."""

from __future__ import annotations

from typing import Any

import pytest

from harness.fakes.inventories import cluster, gpu, machine, model, planned
from orchestrator.types import GIB, MIB

CPU = machine()
H200 = machine(gpu())
READ_BY_SAMPLE = model(gathered_bytes=None)


@pytest.mark.parametrize(("cores", "workers"), [(1, 0), (2, 1), (8, 7), (9, 8), (64, 8)])
def test_loader_processes_take_all_cores_but_one(cores: int, workers: int):
    assert planned(machine(gpu(), cores=cores), READ_BY_SAMPLE).loader_workers.value == workers
    assert planned(machine(cores=cores), READ_BY_SAMPLE).loader_workers.value == 0
    assert planned(machine(gpu(), cores=cores)).loader_workers.value == 0
    for count in (0, 5):
        chosen = planned(machine(gpu(), cores=cores), READ_BY_SAMPLE, loader_workers=count)
        assert chosen.loader_workers.value == count
    assert planned(machine(gpu(), cores=cores), READ_BY_SAMPLE, auto=False).loader_workers.value == 0


def test_the_processes_of_a_loader_are_kept_unless_a_flag_replaces_them():
    from_loader = model(gathered_bytes=None, loader_processes=3)
    for inventory in (CPU, H200):
        chosen = planned(inventory, from_loader).loader_workers
        assert (chosen.value, chosen.reason[:11]) == (3, "num_workers")
        assert planned(inventory, from_loader, loader_workers=0).loader_workers.value == 0


def test_the_cores_of_a_worker_limit_its_loader_processes():
    chosen = planned(machine(gpu(), gpu(1), cores=8), READ_BY_SAMPLE).loader_workers
    assert (chosen.value, "2 workers" in chosen.reason) == (3, True)
    assert planned(machine(gpu(), gpu(1), cores=2), READ_BY_SAMPLE).loader_workers.value == 0


def test_workers_on_a_node_share_its_ram_for_prefetching():
    enough_for_one = machine(gpu(), gpu(1), cores=4, ram_free=12 * GIB)
    assert planned(enough_for_one, READ_BY_SAMPLE).prefetch.value == 2
    on_two_nodes = planned(enough_for_one, READ_BY_SAMPLE, cluster(1, 1), loader_workers=1)
    assert on_two_nodes.prefetch.value == 4


@pytest.mark.parametrize(
    ("ram_free", "settings", "prefetch"),
    [
        (48 * GIB, {}, 2),
        (48 * GIB + 1, {}, 4),
        (2**60, {"auto": False}, 2),
        (2**60, {"loader_workers": 0}, 2),
    ],
)
def test_prefetching_doubles_above_eight_gib_for_each_loader_process(
    ram_free: int, settings: dict[str, Any], prefetch: int
):
    """Two workers of three loader processes each."""
    inventory = machine(gpu(), gpu(1), ram_free=ram_free)
    given: dict[str, Any] = {"loader_workers": 3, **settings}
    chosen = planned(inventory, READ_BY_SAMPLE, **given)
    assert chosen.prefetch.value == prefetch


@pytest.mark.parametrize(
    ("gathered", "on_device"), [(None, False), (0, False), (4 * GIB, True), (4 * GIB + MIB, False)]
)
def test_small_data_is_kept_on_the_gpu(gathered: int | None, on_device: bool):
    assert planned(H200, model(gathered_bytes=gathered)).data_on_device.value == on_device
    assert not planned(CPU, model(gathered_bytes=gathered)).data_on_device.value
    assert not planned(H200, model(gathered_bytes=gathered), auto=False).data_on_device.value


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"batch_size": 100, "epochs": 3}, 300),
        ({"batch_size": 300, "epochs": 1}, 34),
        ({"batch_size": 100, "epochs": 3, "max_steps": 7}, 7),
        ({"batch_size": 100, "epochs": 3, "max_steps": 7000}, 300),
        ({"debug": True}, 4),
        ({"debug": True, "max_steps": 2}, 2),
        ({"debug": True, "max_steps": 9}, 4),
    ],
)
def test_epochs_and_flags_set_the_number_of_steps(settings: dict[str, Any], steps: int):
    assert planned(CPU, **settings).total_steps.value == steps


def test_the_reason_names_the_setting_that_ends_the_run_early():
    settings: dict[str, Any] = {"batch_size": 100, "epochs": 3}
    at_the_end = planned(CPU, **settings, max_steps=300).total_steps
    assert at_the_end.reason == "3 epochs of 100 steps each (10,000 samples in batches of 100)"
    early = planned(CPU, **settings, max_steps=299).total_steps
    assert (early.value, early.reason) == (299, f"set by --max-steps; {at_the_end.reason} would be 300")
    assert planned(CPU, batch_size=10_000, epochs=1).total_steps.reason.startswith("1 epoch of 1 step each (")
    more = planned(CPU, **settings, max_steps=400).total_steps
    assert more.value == 300
    assert more.reason == f"{at_the_end.reason}, less than --max-steps 400: raise --epochs for more"


@pytest.mark.parametrize("debug", [False, True])
def test_a_tiny_data_set_still_has_a_step(debug: bool):
    chosen = planned(CPU, model(samples=1, validation_samples=0, gathered_bytes=MIB), epochs=1, debug=debug)
    assert (chosen.total_steps.value, chosen.batch_size.value, chosen.global_batch_size.value) == (1, 1, 1)


@pytest.mark.parametrize(("steps", "warmup"), [(19, 0), (20, 1), (2000, 100), (20_020, 1000), (30_000, 1000)])
def test_warm_up_is_a_twentieth_of_the_run_up_to_a_thousand_steps(steps: int, warmup: int):
    settings: dict[str, Any] = {"batch_size": 1, "epochs": 3, "max_steps": steps}
    assert planned(CPU, **settings).warmup_steps.value == warmup
    assert planned(CPU, **settings, warmup_steps=9).warmup_steps.value == 9
    assert planned(CPU, **settings, auto=False).warmup_steps.value == 0


@pytest.mark.parametrize(
    ("steps", "on_cpu", "on_gpu"),
    [(1, 1, 10), (40, 2, 10), (200, 10, 10), (220, 10, 11), (260, 10, 13), (1000, 10, 50), (3000, 10, 50)],
)
def test_the_loss_is_logged_a_twentieth_of_the_run_apart_within_limits(steps: int, on_cpu: int, on_gpu: int):
    settings: dict[str, Any] = {"batch_size": 1, "max_steps": steps}
    assert planned(CPU, **settings).log_every.value == on_cpu
    assert planned(H200, **settings).log_every.value == on_gpu


def test_settings_replace_the_chosen_logging_interval():
    assert planned(CPU, max_steps=1000, log_every=3).log_every.value == 3
    assert planned(CPU, debug=True).log_every.value == 1
    assert planned(CPU, max_steps=20, auto=False).log_every.value == 10


def test_data_of_unknown_length_has_no_number_of_steps_without_a_limit():
    stream = model(samples=None, gathered_bytes=None, validation_samples=None)
    chosen = planned(CPU, stream, epochs=3)
    assert chosen.total_steps.value is None
    assert "3 epochs" in chosen.total_steps.reason
    assert "--schedule cosine needs --max-steps: the learning rate is constant" in chosen.total_steps.reason
    assert "needs" not in planned(CPU, stream, schedule="constant").total_steps.reason
    assert (chosen.warmup_steps.value, chosen.log_every.value) == (0, 10)
    limited = planned(CPU, stream, max_steps=400)
    assert (limited.total_steps.value, limited.warmup_steps.value) == (400, 20)
    assert planned(CPU, stream, debug=True).total_steps.value == 4


@pytest.mark.parametrize(
    "settings", [{}, {"batch_size": 7}, {"global_batch_size": 10**6}, {"batch_size": "auto"}]
)
def test_steps_of_data_of_unknown_length_are_not_cut(settings: dict[str, Any]):
    stream = planned(H200, model(samples=None, gathered_bytes=None), **settings)
    long = planned(H200, model(samples=10**9, gathered_bytes=None), **settings)
    assert stream.global_batch_size == long.global_batch_size
    assert stream.eval_batch_size.value == long.eval_batch_size.value


def test_weights_that_are_trained_already_have_a_small_learning_rate():
    assert planned(CPU).learning_rate.value == 3e-3
    given: list[dict[str, Any]] = [
        {},
        {"lora": 8},
        {"from_scratch": True},
        {"lora": 8, "learning_rate": 1e-3},
    ]
    plans = [planned(CPU, task="lm", model="folder", **settings) for settings in given]
    assert [plan.learning_rate.value for plan in plans] == [2e-5, 2e-4, 3e-3, 1e-3]
