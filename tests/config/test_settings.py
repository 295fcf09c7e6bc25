"""The settings themselves: one flat name each, documented, checked where they are declared."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.reference import setting_texts
from orchestrator.config.settings import Config, did_you_mean, flat_names, section_types, setting_types
from orchestrator.errors import UserError
from tests.support.inventories import VALUES


def value_of(config: Config, name: str) -> Any:
    section = flat_names()[name]
    return getattr(getattr(config, section) if section else config, name)


# --- names


def test_flat_names_are_unique_over_all_sections():
    declared = [f.name for kind in section_types().values() for f in fields(kind)]
    declared += [f.name for f in fields(Config) if f.name not in section_types()]
    assert len(declared) == len(set(declared)) == len(flat_names())
    assert flat_names().keys() == setting_types().keys()
    assert flat_names().keys().isdisjoint(section_types())


def test_no_setting_begins_with_no():
    """``--no-x`` turns x off; a setting of that name would be two flags in one."""
    assert [name for name in flat_names() if name.startswith("no_")] == []


def test_each_setting_is_documented_in_a_sentence():
    texts = setting_texts()
    undocumented = [name for name in flat_names() if len(texts.get(name, "")) < 10]
    assert undocumented == []


def test_the_generator_of_configs_knows_every_setting():
    assert flat_names().keys() == VALUES.keys()


# --- values


def test_config_is_frozen_equal_by_value_and_hashable():
    assert Config() == Config()
    assert hash(Config.of(expert_hidden_size=[8, 16])) == hash(Config.of(expert_hidden_size=(8, 16)))
    with pytest.raises(FrozenInstanceError):
        Config().task = "text"  # pyright: ignore[reportAttributeAccessIssue]


def test_of_and_but_set_by_flat_name_and_leave_the_rest():
    config = Config.of(task="text", epochs=3, learning_rate=0.1)
    assert (config.task, config.run.epochs, config.optim.learning_rate) == ("text", 3, 0.1)
    changed = config.but(epochs=4)
    assert (changed.run.epochs, changed.task, changed.optim) == (4, "text", config.optim)
    assert config.run.epochs == 3


@pytest.mark.parametrize("given", ["0,2", "0, 2", [0, 2], (0, 2), ["0", "2"]])
def test_of_takes_devices_as_text_or_list(given: Any):
    assert Config.of(devices=given).parallel.devices == (0, 2)


def test_of_makes_what_is_declared():
    config = Config.of(run_dir="here", expert_hidden_size=64, trackers="wandb", tf32=True, learning_rate=1)
    assert config.run.run_dir == Path("here")
    assert config.moe.expert_hidden_size == (64,)
    assert config.watch.trackers == ("wandb",)
    assert config.device.tf32 == "on"
    assert isinstance(config.optim.learning_rate, float)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("workers", "all"),
        ("workers", 1.5),
        ("workers", True),
        ("workers", None),
        ("devices", "0,x"),
        ("devices", "0,,2"),
        ("devices", None),
        ("sharding", "zero1"),
        ("backend", "mpi"),
        ("parallel_strategy", "ddp"),
        ("gate", "everywhere"),
        ("placement", None),
        ("exchange_chunks", 1.5),
        ("expert_kernel", "triton"),
        ("expert_kind", "relu"),
        ("gate_scores", "tanh"),
        ("normalise_weights", 7),
        ("capacity_factor", "full"),
        ("epochs", "three"),
        ("epochs", 2.5),
        ("epochs", True),
        ("epochs", None),
        ("precision", "bf17"),
        ("gpu_mode", "tpu"),
        ("trackers", "comet"),
        ("trackers", None),
        ("expert_hidden_size", [8, True]),
        ("batch_size", "automatic"),
        ("run_dir", 5),
        ("learning_rate", "fast"),
        ("compile", "perhaps"),
        ("deterministic", 7),
    ],
)
def test_of_refuses_another_type_by_name(name: str, value: Any):
    with pytest.raises(UserError, match=rf"^{name} is .*; .* was needed$"):
        Config.of(**{name: value})


def test_of_refuses_an_unknown_name_with_the_nearest():
    with pytest.raises(UserError, match=r"^unknown setting 'epoch' \(did you mean 'epochs'\?\)$"):
        Config.of(epoch=3)
    with pytest.raises(UserError, match=r"^unknown setting 'qqqqqq'$"):
        Config.of(qqqqqq=3)


BAD: list[tuple[str, Any]] = [
    ("name", ""),
    ("name", "a/b"),
    ("name", ".hidden"),
    ("name", "-x"),
    ("name", "two words"),
    ("epochs", 0),
    ("max_steps", 0),
    ("early_stopping_patience", 0),
    ("seed", -1),
    ("seed", 2**63),
    ("experts", -1),
    ("expert_hidden_size", (8, 0)),
    ("top_k", 0),
    ("width", 0),
    ("layers", 0),
    ("context_length", -1),
    ("vocabulary", 0),
    ("balance_loss", -0.1),
    ("balance_loss", math.nan),
    ("z_loss", -1),
    ("z_loss", math.inf),
    ("shared_expert_size", 0),
    ("balance_bias", -0.001),
    ("balance_bias", math.nan),
    ("gate_jitter", -0.1),
    ("gate_jitter", 1.0),
    ("gate_jitter", math.nan),
    ("capacity_factor", 0.0),
    ("capacity_factor", -1.0),
    ("capacity_factor", math.inf),
    ("capacity_factor", math.nan),
    ("samples", 0),
    ("loader_workers", -2),
    ("batch_size", 0),
    ("accumulation_steps", 0),
    ("global_batch_size", 0),
    ("eval_batch_size", 0),
    ("gpu_memory_fraction", 0.0),
    ("gpu_memory_fraction", 90),
    ("gpu_memory_fraction", math.nan),
    ("learning_rate", 0),
    ("learning_rate", -1e-3),
    ("learning_rate", math.nan),
    ("learning_rate", math.inf),
    ("warmup_steps", -1),
    ("weight_decay", -1),
    ("weight_decay", math.nan),
    ("clip_norm", -1),
    ("clip_norm", math.nan),
    ("empty_cache_every", -1),
    ("workers", 0),
    ("devices", (1, 0, -1)),
    ("devices", (0, 0)),
    ("placement", ""),
    ("placement", "round-robin"),
    ("placement", "somewhere"),
    ("exchange_chunks", 0),
    ("bucket_cap_mb", 0),
    ("max_failures", -1),
    ("collective_timeout", 0),
    ("resource_timeout", 0),
    ("ray_address", ""),
    ("ray_address", "somewhere"),
    ("ray_address", "10.0.0.1"),
    ("ray_address", "10.0.0.1:"),
    ("ray_address", "10.0.0.1:0"),
    ("ray_address", "10.0.0.1:65536"),
    ("ray_address", "http://10.0.0.1:8265"),
    ("ray_address", "-x:1"),
    ("ray_address", "::1:6379"),
    ("ray_address", "ray://10.0.0.1:10001"),
    ("checkpoint_every", -1),
    ("keep", 0),
    ("log_every", 0),
    ("evaluate_every", -1),
    ("gpu_log_interval", -1),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{name}={value}" for name, value in BAD])
def test_a_value_out_of_range_is_refused_with_its_name_and_value(name: str, value: Any):
    with pytest.raises(UserError) as caught:
        Config.of(**{name: value})
    assert str(caught.value).startswith(f"{name} is ")
    assert str(value if not isinstance(value, tuple) else 0) in str(caught.value)


EDGES: list[tuple[str, Any]] = [
    ("seed", 0), ("seed", 2**63 - 1), ("experts", 0), ("context_length", 0), ("loader_workers", -1), ("loader_workers", 0),
    ("gpu_memory_fraction", 0.05), ("gpu_memory_fraction", 1.0), ("clip_norm", 0), ("warmup_steps", 0), ("keep", 1),
    ("trackers", ()), ("name", "a"), ("name", "0.9_x-Y"), ("log_every", 1), ("weight_decay", 0.0),
    ("workers", 1), ("workers", "auto"), ("devices", ()), ("devices", (2, 0)), ("max_failures", 0), ("collective_timeout", 1),
    ("bucket_cap_mb", 1), ("ray_address", "local"), ("ray_address", "10.0.0.1:6379"), ("ray_address", "head-1.example.org:65535"),
    ("ray_address", "[fe80::1]:6379"), ("gpu_mode", "multi_gpu"),
    ("gate_jitter", 0.0), ("gate_jitter", 0.999), ("capacity_factor", 0.01), ("capacity_factor", None), ("balance_bias", 0.0),
    ("shared_expert_size", 1), ("exchange_chunks", 1), ("placement", "round_robin"), ("placement", "../a b.json"), ("gate", "primary"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), EDGES)
def test_a_value_at_the_edge_is_taken(name: str, value: Any):
    assert value_of(Config.of(**{name: value}), name) == value


# --- contradictions

HOSTS: dict[str, Any] = {"parallel_strategy": "expert_parallel"}
COPIES: dict[str, Any] = {"parallel_strategy": "data_parallel"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"experts": 3, "top_k": 4}, ("top_k is 4", "only 3 experts")),
        ({"experts": 3, "expert_hidden_size": (8, 8)}, ("2 sizes", "3 experts")),
        (
            {"batch_size": 8, "accumulation_steps": 2, "global_batch_size": 32, "workers": 1},
            ("8 × accumulation_steps 2", "is 16", "32"),
        ),
        (
            {"batch_size": 8, "accumulation_steps": 2, "global_batch_size": 32, "workers": 4},
            ("8 × accumulation_steps 2", "is 64", "32"),
        ),
        (
            {"batch_size": 8, "accumulation_steps": 2, "global_batch_size": 32, "gpu_mode": "single_gpu"},
            ("is 16", "32", "two of the three"),
        ),
        (
            {"batch_size": 8, "accumulation_steps": 4, "global_batch_size": 32},
            ("workers auto", "32", "two of the three", "--workers N"),
        ),
        ({"gpu_mode": "cpu", "devices": (0, 2)}, ("devices 0,2", "gpu_mode is cpu")),
        ({"gpu_mode": "cpu", "backend": "nccl"}, ("backend nccl", "gpu_mode is cpu", "gloo")),
        ({"gpu_mode": "single_gpu", "workers": 2}, ("single_gpu", "workers is 2", "multi_gpu")),
        ({"gpu_mode": "single_gpu", "devices": (0, 2)}, ("single_gpu", "devices names 2 (0,2)")),
        ({"gpu_mode": "multi_gpu", "workers": 1}, ("multi_gpu", "workers is 1")),
        ({"gpu_mode": "multi_gpu", "devices": 3}, ("multi_gpu", "devices names one (3)")),
        ({"devices": (0, 2), "workers": 3}, ("workers is 3", "devices names 2 (0,2)")),
        ({"sharding": "none", "cpu_offload": True}, ("cpu_offload", "sharding none", "zero2 or zero3")),
        ({"deterministic": True, "share_by_speed": "on"}, ("deterministic", "share_by_speed")),
        ({"ray_address": "ray://head:10001"}, ("ray://head:10001", "not supported", "ray job submit")),
        ({"batch_size": 64, "global_batch_size": 32}, ("batch_size is 64", "global_batch_size 32")),
        (
            {"accumulation_steps": 9, "global_batch_size": 8},
            ("accumulation_steps is 9", "global_batch_size 8"),
        ),
        ({"resume": "auto", "init_from": Path("x")}, ("resume", "init_from", "give one")),
        ({"deterministic": True, "tf32": "on"}, ("deterministic", "tf32")),
        ({"deterministic": True, "cudnn_benchmark": "on"}, ("deterministic", "cudnn_benchmark")),
        ({"gpu_mode": "cpu", "tf32": "on"}, ("tf32", "gpu_mode is cpu")),
        ({"batch_size": "auto", "auto": False}, ("batch_size auto", "--no-auto")),
        ({"experts": 0, "shared_expert_size": 64}, ("shared_expert_size is 64", "experts is 0", "dense")),
        (
            {**HOSTS, "experts": 0},
            ("experts is 0, a dense model", "expert_parallel", "raise --experts", "data_parallel"),
        ),
        ({**HOSTS, "sharding": "zero2"}, ("sharding zero2", "works with data_parallel", "expert_parallel")),
        ({**HOSTS, "sharding": "zero3"}, ("sharding zero3", "works with data_parallel", "expert_parallel")),
        ({**HOSTS, "cpu_offload": True}, ("cpu_offload", "works with data_parallel", "expert_parallel")),
        (
            {**HOSTS, "sync_batchnorm": True},
            ("sync_batchnorm", "works with data_parallel", "expert_parallel"),
        ),
        ({**HOSTS, "static_graph": True}, ("static_graph", "works with data_parallel", "DDP")),
        (
            {**HOSTS, "find_unused_parameters": True},
            ("find_unused_parameters", "works with data_parallel", "DDP"),
        ),
        (
            {**HOSTS, "batch_size": "auto"},
            ("batch_size auto", "expert_parallel", "whole models are measured"),
        ),
        ({**HOSTS, "gpu_mode": "single_gpu", "workers": 2}, ("single_gpu", "workers is 2")),
        ({"gate": "primary", "share_by_speed": "on"}, ("gate primary", "share_by_speed on", "leave one out")),
        (
            {**COPIES, "gate": "primary"},
            ("gate primary works with expert_parallel", "parallel_strategy is data_parallel", "leave it out"),
        ),
        ({**COPIES, "placement": "x.json"}, ("placement x.json works with expert_parallel", "data_parallel")),
        ({**COPIES, "exchange_chunks": 2}, ("exchange_chunks 2 works with expert_parallel", "data_parallel")),
        (
            {
                **HOSTS,
                "gate": "primary",
                "batch_size": 8,
                "accumulation_steps": 2,
                "global_batch_size": 32,
                "workers": 2,
            },
            ("8 × accumulation_steps 2 × 1", "gate primary", "is 16", "32"),
        ),
    ],
)
def test_a_contradiction_names_both_sides(settings: dict[str, Any], words: tuple[str, ...]):
    with pytest.raises(UserError) as caught:
        Config.of(**settings)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    "settings",
    [
        {"experts": 0, "top_k": 2},
        {"experts": 4, "top_k": 4, "expert_hidden_size": (1, 2, 3, 4)},
        {"experts": 4, "expert_hidden_size": (16,)},
        {"batch_size": 8, "accumulation_steps": 4, "global_batch_size": 32, "workers": 1},
        {"batch_size": 8, "accumulation_steps": 2, "global_batch_size": 32, "workers": 2},
        {"batch_size": 8, "accumulation_steps": 4, "global_batch_size": 32, "gpu_mode": "single_gpu"},
        {"gpu_mode": "cpu", "workers": 4, "backend": "gloo"},
        {"gpu_mode": "single_gpu", "workers": 1, "devices": (3,)},
        {"gpu_mode": "multi_gpu", "workers": 2, "devices": (0, 2, 3)},
        {"sharding": "zero2", "cpu_offload": True},
        {"cpu_offload": True},
        {"deterministic": True, "share_by_speed": "off"},
        {"batch_size": 32, "global_batch_size": 32},
        {"accumulation_steps": 5, "global_batch_size": 8},
        {"batch_size": "auto", "global_batch_size": 8},
        {"deterministic": True, "tf32": "off", "cudnn_benchmark": "off"},
        {**HOSTS, "gate": "primary", "placement": "round_robin", "exchange_chunks": 4},
        {**HOSTS, "workers": 1, "gpu_mode": "single_gpu"},
        {**HOSTS, "sharding": "none", "batch_size": 8, "bucket_cap_mb": 50},
        {
            **HOSTS,
            "gate": "primary",
            "batch_size": 8,
            "accumulation_steps": 4,
            "global_batch_size": 32,
            "workers": 2,
        },
        {**HOSTS, "gate": "primary", "batch_size": 8, "accumulation_steps": 4, "global_batch_size": 32},
        {**HOSTS, "batch_size": 8, "accumulation_steps": 2, "global_batch_size": 32, "workers": 2},
        {"gate": "primary", "placement": "x.json", "exchange_chunks": 2, "workers": 2},
        {"experts": 4, "top_k": 1, "normalise_weights": True},
    ],
)
def test_what_goes_together_is_taken(settings: dict[str, Any]):
    Config.of(**settings)


def test_suggestions_are_near_or_none():
    assert did_you_mean("trian", ["train", "plan"]) == " (did you mean 'train'?)"
    assert did_you_mean("xyzzy", ["train", "plan"]) == ""
