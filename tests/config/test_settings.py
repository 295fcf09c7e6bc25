"""Tests of the settings: unique flat names, documentation, types and limits."""

from __future__ import annotations

import inspect
import math
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.fakes.inventories import VALUES
from orchestrator.config.names.nearest import did_you_mean
from orchestrator.config.sections.optim import OptimSettings
from orchestrator.config.settings import Config, flat_names, section_types, setting_types
from orchestrator.config.writer import setting_texts
from orchestrator.errors import UserError


def value_of(config: Config, name: str) -> Any:
    section = flat_names()[name]
    return getattr(getattr(config, section) if section else config, name)


def test_flat_names_are_unique_over_all_sections():
    declared = [f.name for kind in section_types().values() for f in fields(kind)]
    declared += [f.name for f in fields(Config) if f.name not in section_types()]
    assert len(declared) == len(set(declared)) == len(flat_names())
    assert flat_names().keys() == setting_types().keys()
    # Three sections have a setting of their name: --evolution bold is the flag of a preset.
    assert flat_names().keys() & section_types().keys() == {"evolution", "model", "data"}


def test_no_setting_begins_with_no():
    """``--no-x`` turns x off; a setting of that name would be two flags in one."""
    assert [name for name in flat_names() if name.startswith("no_")] == []


def test_each_setting_is_documented():
    texts = setting_texts()
    undocumented = [name for name in flat_names() if len(texts.get(name, "")) < 10]
    assert undocumented == []


def test_the_generator_of_configs_knows_every_setting():
    assert flat_names().keys() == VALUES.keys()


def test_config_is_frozen_equal_by_value_and_hashable():
    assert Config() == Config()
    assert hash(Config.of(expert_hidden_size=[8, 16])) == hash(Config.of(expert_hidden_size=(8, 16)))
    with pytest.raises(FrozenInstanceError):
        Config().task = "text"  # pyrefly: ignore[read-only]


def test_of_and_but_set_by_flat_name_and_leave_the_rest():
    config = Config.of(task="text", epochs=3, learning_rate=0.1)
    assert (config.task, config.run.epochs, config.optim.learning_rate) == ("text", 3, 0.1)
    changed = config.but(epochs=4)
    assert (changed.run.epochs, changed.task, changed.optim) == (4, "text", config.optim)
    assert config.run.epochs == 3


@pytest.mark.parametrize("given", ["0,2", "0, 2", [0, 2], (0, 2), ["0", "2"]])
def test_of_takes_devices_as_text_or_list(given: Any):
    assert Config.of(devices=given).parallel.devices == (0, 2)


def test_of_converts_to_the_declared_types():
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


OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("name", ""),
    ("name", "a/b"),
    ("name", ".hidden"),
    ("name", "-x"),
    ("name", "two parts"),
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
    ("sequence_length", -1),
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
    ("metrics_port", -1),
    ("metrics_port", 65536),
    ("metrics_address", " "),
]


@pytest.mark.parametrize(
    ("name", "value"), OUT_OF_RANGE, ids=[f"{name}={value}" for name, value in OUT_OF_RANGE]
)
def test_a_value_out_of_range_is_refused_with_its_name_and_value(name: str, value: Any):
    with pytest.raises(UserError) as caught:
        Config.of(**{name: value})
    assert str(caught.value).startswith(f"{name} is ")
    assert str(value if not isinstance(value, tuple) else 0) in str(caught.value)


AT_THE_LIMIT: list[tuple[str, Any]] = [
    ("seed", 0),
    ("seed", 2**63 - 1),
    ("experts", 0),
    ("sequence_length", 0),
    ("loader_workers", -1),
    ("loader_workers", 0),
    ("gpu_memory_fraction", 0.05),
    ("gpu_memory_fraction", 1.0),
    ("clip_norm", 0),
    ("warmup_steps", 0),
    ("keep", 1),
    ("trackers", ()),
    ("name", "a"),
    ("name", "0.9_x-Y"),
    ("log_every", 1),
    ("weight_decay", 0.0),
    ("workers", 1),
    ("workers", "auto"),
    ("devices", ()),
    ("devices", (2, 0)),
    ("max_failures", 0),
    ("collective_timeout", 1),
    ("bucket_cap_mb", 1),
    ("ray_address", "local"),
    ("ray_address", "10.0.0.1:6379"),
    ("ray_address", "head-1.example.org:65535"),
    ("ray_address", "[fe80::1]:6379"),
    ("gpu_mode", "multi_gpu"),
    ("gate_jitter", 0.0),
    ("gate_jitter", 0.999),
    ("capacity_factor", 0.01),
    ("capacity_factor", None),
    ("balance_bias", 0.0),
    ("shared_expert_size", 1),
    ("exchange_chunks", 1),
    ("placement", "round_robin"),
    ("placement", "../a b.json"),
    ("gate", "primary"),
]


@pytest.mark.parametrize(("name", "value"), AT_THE_LIMIT)
def test_a_value_at_the_limit_is_accepted(name: str, value: Any):
    assert value_of(Config.of(**{name: value}), name) == value


def test_only_near_names_are_suggested():
    assert did_you_mean("trian", ["train", "plan"]) == " (did you mean 'train'?)"
    assert did_you_mean("xyzzy", ["train", "plan"]) == ""


def test_adapters_have_a_positive_rank_and_belong_to_the_task_lm():
    assert Config.of(task="lm", model="a", lora=8, lora_targets=("q_proj",)).model.lora_targets == ("q_proj",)
    for settings, message in (
        ({"lora": 0}, "lora is 0"),
        ({"lora": 8, "lora_alpha": 0.0}, "lora_alpha is 0"),
        ({"lora_alpha": 8.0}, "lora_alpha is given without lora"),
        ({"lora_targets": ("experts",)}, "lora_targets is given without lora"),
        ({"frozen_weights": "nf4"}, "frozen_weights is nf4, but without lora no weights are frozen"),
    ):
        with pytest.raises(UserError, match=message):
            Config.of(task="lm", model="a", **settings)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("precision", "fp8"),
        ("compile", "on"),
        ("cuda_graph", "on"),
        ("sharding", "zero2"),
        ("sharding", "zero3"),
        ("cpu_offload", True),
        ("evolution", "bold"),
    ],
)
def test_settings_that_packed_weights_exclude_are_refused_with_the_reason(setting: str, value: object):
    given: dict[str, Any] = {"task": "lm", "model": "a", "lora": 8, "workers": 2, setting: value}
    Config.of(**given, frozen_weights="auto")
    with pytest.raises(UserError, match=rf"frozen_weights int8 and {setting}.* contradict each other: .+; "):
        Config.of(**given, frozen_weights="int8")


def test_the_configuration_of_a_language_model_fixes_its_experts():
    for settings, message in (
        ({"experts": 4}, "experts is given"),
        ({"width": 8, "top_k": 2, "z_loss": 0.1}, "width, top_k, z_loss are given"),
    ):
        with pytest.raises(
            UserError, match=f"{message}, but for task lm the configuration of --model decides"
        ):
            Config.of(task="lm", model="a", **settings)
    assert Config.of(task="lm", model="a", balance_loss=0.1, balance_bias=0.01).moe.balance_bias == 0.01


def test_the_defaults_of_adamw_are_those_of_torch():
    defaults = inspect.signature(torch.optim.AdamW).parameters
    settings = OptimSettings()
    assert (settings.betas, settings.eps) == (defaults["betas"].default, defaults["eps"].default)
