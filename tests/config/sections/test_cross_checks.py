"""Tests of the checks between settings: contradictions are refused with both sides named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.settings import Config
from orchestrator.errors import UserError

EXPERT_PARALLEL: dict[str, Any] = {"parallel_strategy": "expert_parallel"}


DATA_PARALLEL: dict[str, Any] = {"parallel_strategy": "data_parallel"}
LIVE: dict[str, Any] = {**DATA_PARALLEL, "recovery": "live"}


@pytest.mark.parametrize(
    ("settings", "parts"),
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
        ({"optimizer": "adamw8bit", "momentum": 0.9}, ("momentum", "adamw8bit has --betas")),
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
        ({"resume": "auto", "init_from": Path("x")}, ("resume auto", "init_from x", "leave one of them out")),
        ({"deterministic": True, "tf32": "on"}, ("deterministic", "tf32")),
        ({"deterministic": True, "cudnn_benchmark": "on"}, ("deterministic", "cudnn_benchmark")),
        ({"gpu_mode": "cpu", "tf32": "on"}, ("tf32 on", "gpu_mode cpu")),
        ({"batch_size": "auto", "auto": False}, ("batch_size auto", "no auto")),
        ({"experts": 0, "shared_expert_size": 64}, ("shared_expert_size is 64", "experts is 0", "dense")),
        (
            {**EXPERT_PARALLEL, "experts": 0},
            ("experts is 0, a dense model", "expert_parallel", "raise --experts", "data_parallel"),
        ),
        (
            {**EXPERT_PARALLEL, "cpu_offload": True},
            ("cpu_offload", "works with data_parallel", "expert_parallel"),
        ),
        (
            {**EXPERT_PARALLEL, "sync_batchnorm": True},
            ("sync_batchnorm", "works with data_parallel", "expert_parallel"),
        ),
        ({**EXPERT_PARALLEL, "static_graph": True}, ("static_graph", "works with data_parallel", "DDP")),
        (
            {**EXPERT_PARALLEL, "find_unused_parameters": True},
            ("find_unused_parameters", "works with data_parallel", "DDP"),
        ),
        ({**EXPERT_PARALLEL, "gpu_mode": "single_gpu", "workers": 2}, ("single_gpu", "workers is 2")),
        (
            {"gate": "primary", "share_by_speed": "on"},
            ("gate primary", "share_by_speed on", "leave one of them out"),
        ),
        (
            {**DATA_PARALLEL, "gate": "primary"},
            ("gate primary works with expert_parallel", "parallel_strategy is data_parallel", "leave it out"),
        ),
        (
            {**LIVE, "gate": "primary"},
            ("gate primary works with expert_parallel", "parallel_strategy is data_parallel", "leave it out"),
        ),
        (
            {"recovery": "live", "static_graph": True},
            (
                "static_graph works with recovery restart",
                "recovery is live: gradients are summed without DDP",
            ),
        ),
        (
            {**LIVE, "sync_batchnorm": True},
            ("sync_batchnorm works with recovery restart", "recovery is live"),
        ),
        ({**LIVE, "cpu_offload": True}, ("cpu_offload works with recovery restart", "on the device")),
        (
            {**EXPERT_PARALLEL, "recovery": "restart"},
            ("recovery restart works with data_parallel", "is expert_parallel: a lost host is replaced"),
        ),
        (
            {**DATA_PARALLEL, "placement": "x.json"},
            ("placement x.json works with expert_parallel", "data_parallel"),
        ),
        (
            {**DATA_PARALLEL, "exchange_chunks": 2},
            ("exchange_chunks 2 works with expert_parallel", "data_parallel"),
        ),
        (
            {
                **EXPERT_PARALLEL,
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
def test_a_contradiction_names_both_sides(settings: dict[str, Any], parts: tuple[str, ...]):
    with pytest.raises(UserError) as caught:
        Config.of(**settings)
    assert [part for part in parts if part not in str(caught.value)] == []


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
        {**EXPERT_PARALLEL, "gate": "primary", "placement": "round_robin", "exchange_chunks": 4},
        {**EXPERT_PARALLEL, "workers": 1, "gpu_mode": "single_gpu"},
        {**EXPERT_PARALLEL, "recovery": "live"},
        {**DATA_PARALLEL, "recovery": "restart", "static_graph": True},
        {**LIVE, "sharding": "zero3", "bucket_cap_mb": 5, "spares": 1},
        {"recovery": "live", "gate": "primary"},
        {**LIVE, "batch_size": "auto"},
        {**EXPERT_PARALLEL, "sharding": "none", "batch_size": 8, "bucket_cap_mb": 50},
        {
            **EXPERT_PARALLEL,
            "gate": "primary",
            "batch_size": 8,
            "accumulation_steps": 4,
            "global_batch_size": 32,
            "workers": 2,
        },
        {
            **EXPERT_PARALLEL,
            "gate": "primary",
            "batch_size": 8,
            "accumulation_steps": 4,
            "global_batch_size": 32,
        },
        {**EXPERT_PARALLEL, "batch_size": 8, "accumulation_steps": 2, "global_batch_size": 32, "workers": 2},
        {"gate": "primary", "placement": "x.json", "exchange_chunks": 2, "workers": 2},
        {"experts": 4, "top_k": 1, "normalise_weights": True},
    ],
)
def test_settings_that_agree_are_accepted(settings: dict[str, Any]):
    Config.of(**settings)
