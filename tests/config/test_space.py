"""Search spaces: what flags and files say, and the points they stand for."""

from __future__ import annotations

import json
import math
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.settings import Config
from orchestrator.config.space import MAX_POINTS, Range, Values, point_flags, point_key
from orchestrator.config.space_parser import parse_space, read_space
from orchestrator.config.sweep import Sweep, config_from_ledger, requested_workers
from orchestrator.config.writer import changed_settings
from orchestrator.errors import UserError


@pytest.mark.parametrize(
    ("entry", "name", "domain"),
    [
        ("batch-size=16,64,256", "batch_size", Values((16, 64, 256))),
        ("batch_size=16..256:x2", "batch_size", Values((16, 32, 64, 128, 256))),
        ("batch-size=16..250:x2", "batch_size", Values((16, 32, 64, 128))),
        ("accumulation-steps=1..9:4", "accumulation_steps", Values((1, 5, 9))),
        ("--experts=2..9", "experts", Range(2, 9, log=False, integer=True)),
        ("learning-rate=1e-4..1e-2:log", "learning_rate", Range(1e-4, 1e-2, log=True, integer=False)),
        ("learning-rate=.5..1.5", "learning_rate", Range(0.5, 1.5, log=False, integer=False)),
        ("compile=on,off", "compile", Values(("on", "off"))),
        ("deterministic=true,false", "deterministic", Values((True, False))),
        ("workers=auto,2", "workers", Values(("auto", 2))),
        ("capacity-factor=none,1.25", "capacity_factor", Values((None, 1.25))),
        ("batch-size=16,16,8", "batch_size", Values((16, 8))),
        ("batch-size=1..3:0.5", "batch_size", Values((1, 2, 3))),
    ],
)
def test_a_domain_is_read(entry: str, name: str, domain: Values | Range) -> None:
    assert parse_space([entry]).domains == {name: domain}


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("batchsize=3", "did you mean 'batch_size'"),
        ("precision=fp64", "precision is 'fp64'; 'auto' or 'fp32' or 'bf16' or 'fp16' was needed"),
        ("precision=a..b", "precision is no number"),
        ("batch-size=9..3", "the lower end goes first"),
        ("batch-size=1..x", "'x' is no number"),
        ("batch-size=", "a setting and its values were needed"),
        ("batch-size", "a setting and its values were needed"),
        ("batch-size=1..9:x1", "lead nowhere"),
        ("batch-size=1..9:-2", "lead nowhere"),
        ("batch-size=1..1000000:1", "at most 10,000"),
        ("learning-rate=0..1:log", "begins above 0"),
        ("run-dir=a,b", "is not swept over"),
        ("gpu-mode=cpu,auto", "is not swept over"),
        ("learning-rate=1e-3,nan", "learning_rate is nan"),
        ("batch-size=0,4", "batch_size is 0"),
        ("batch-size=auto,16", "give the sizes to try"),
    ],
)
def test_a_mistake_is_told(entry: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_space([entry])
    assert said in str(caught.value)


def test_nothing_and_twice() -> None:
    with pytest.raises(UserError, match="nothing to sweep"):
        parse_space([])
    with pytest.raises(UserError, match="given twice"):
        parse_space(["batch-size=1,2", "batch_size=3"])


def test_a_grid_has_every_combination_once() -> None:
    grid = parse_space(["batch-size=1,2", "precision=fp32,bf16", "workers=1..3:1"]).grid()
    assert len(grid) == len({point_key(point) for point in grid}) == 12
    assert grid[0] == {"batch_size": 1, "precision": "fp32", "workers": 1}
    with pytest.raises(UserError, match="is a range; give it steps"):
        parse_space(["learning-rate=1e-4..1e-2:log"]).grid()
    with pytest.raises(UserError, match="the grid has 1,002,001 points"):
        parse_space(["batch-size=1..1001:1", "experts=1..1001:1"]).grid()
    assert MAX_POINTS < 1_002_001


def test_draws_are_the_same_for_a_seed_and_none_comes_twice() -> None:
    space = parse_space(["batch-size=1,2,3", "learning-rate=1e-4..1e-2:log", "experts=2..9"])
    first, again = list(islice(space.draws(3), 50)), list(islice(space.draws(3), 50))
    assert first == again != list(islice(space.draws(4), 50))
    assert len({point_key(point) for point in first}) == 50
    assert all(1e-4 <= point["learning_rate"] <= 1e-2 and 2 <= point["experts"] <= 9 for point in first)
    below = sum(point["learning_rate"] < 1e-3 for point in islice(space.draws(0), 400))
    assert 140 < below < 260  # evenly in the logarithm: half of them
    assert (
        len(list(parse_space(["batch-size=1,2,3", "workers=1,2"]).draws(0))) == 6
    )  # and then there are no more


def test_a_file_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(
        "batch_size: [16, 64]\nlearning-rate: 1e-4..1e-2:log\nprecision: fp32\nexpert_hidden_size: [[8, 16], [32]]\n"
    )
    space = read_space(path)
    assert space.domains["batch_size"] == Values((16, 64))
    assert space.domains["learning_rate"] == Range(1e-4, 1e-2, log=True, integer=False)
    assert space.domains["expert_hidden_size"] == Values(((8, 16), (32,)))
    for content, said in (
        ("[1, 2]", "holds no space"),
        ("a: [", "is not YAML"),
        ("batch_size: []", "no values"),
        ("bath_size: 3", "did you mean"),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=said):
            read_space(path)
    with pytest.raises(UserError, match="cannot read"):
        read_space(tmp_path / "none.yaml")


def test_a_file_may_list_points(tmp_path: Path) -> None:
    path = tmp_path / "points.yaml"
    path.write_text(
        "- {batch_size: 16, workers: 1}\n- {batch-size: 64, workers: 2, sharding: zero2}\n- {workers: 1, batch_size: 16}\n"
    )
    space = read_space(path)
    assert space.grid() == [
        {"batch_size": 16, "workers": 1},
        {"batch_size": 64, "workers": 2, "sharding": "zero2"},
    ]
    assert {point_key(point) for point in space.draws(0)} == {point_key(point) for point in space.grid()}
    assert space.domains["batch_size"] == Values((16, 64))
    again = Sweep.of_header(Sweep(space).header(), None)
    assert (Sweep(space).num_trials, again.num_trials) == (2, 2)
    assert [point_key(point) for point in again.space.grid()] == [point_key(point) for point in space.grid()]
    with pytest.raises(UserError, match="leave --search out"):
        Sweep(space, "optuna", 2)
    path.write_text("- {batch_size: many}\n")
    with pytest.raises(UserError, match="point 1: batch_size is 'many'"):
        read_space(path)


def test_a_point_becomes_flags_that_give_its_settings() -> None:
    point = {
        "batch_size": 16,
        "deterministic": True,
        "static_graph": False,
        "compile": "off",
        "capacity_factor": None,
        "precision": "fp32",
    }
    flags = point_flags(point)
    assert flags == [
        "--batch-size",
        "16",
        "--deterministic",
        "--no-static-graph",
        "--compile",
        "off",
        "--precision",
        "fp32",
    ]


def test_a_space_reads_back_the_same_from_the_ledger(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(
        "expert_hidden_size: [[64, 128], [128]]\ndata_dir: [../a, b]\nexperts: 2..9\nlearning_rate: 1e-4..1e-2:log\nz_loss: [0, 0.1]\n"
    )
    space = read_space(path)
    header = json.loads(json.dumps(Sweep(space, "random", 5).header()))
    assert Sweep.of_header(header, None).space == space
    assert space.domains["data_dir"] == Values((Path("../a"), Path("b")))


def test_a_large_space_can_be_drawn_from() -> None:
    space = parse_space(["batch-size=1..1001:1", "experts=1..1001:1"])
    assert (space.size, Sweep(space, "random", 7).num_trials) == (1_002_001, 7)


def test_a_sweep_is_checked_and_kept() -> None:
    space = parse_space(["batch-size=1,2,3", "workers=1,2"])
    sweep = Sweep(space, "optuna", 4, asha=True)
    assert (
        sweep.num_trials,
        Sweep(space).num_trials,
        Sweep(space, trials=4).num_trials,
        Sweep(space, "random", 99).num_trials,
    ) == (4, 6, 4, 6)
    assert Sweep.of_header(sweep.header(), None) == sweep
    mistakes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"search": "random"}, "give --trials"),
        ({"trials": 0}, "--trials is 0"),
        ({"search": "random", "trials": 10**9}, "at most 10,000 are made"),
        ({"trial_seconds": math.inf}, "positive and finite"),
        ({"trial_steps": 5}, "is for --objective validation_loss"),
        ({"objective": "validation_loss", "trial_seconds": 3.0}, "is for --objective throughput"),
    )
    for wrong, said in mistakes:
        with pytest.raises(UserError, match=said):
            Sweep(space, **wrong)
    with pytest.raises(UserError, match="does not say what was to be swept"):
        Sweep.of_header({"space": {"batch_size": "1,2"}}, None)


def test_settings_are_kept_by_what_differs() -> None:
    config = Config.of(batch_size=16, task="text", expert_hidden_size=(8, 16), data_dir=Path("/data"))
    kept = changed_settings(config)
    assert kept == {"task": "text", "batch_size": 16, "expert_hidden_size": [8, 16], "data_dir": "/data"}
    assert config_from_ledger(kept) == config
    with pytest.raises(UserError, match="does not know: 'bath_size'"):
        config_from_ledger({"bath_size": 3})
    assert requested_workers(parse_space(["workers=1,4,auto"]), config) == [1, 4]
    assert requested_workers(parse_space(["workers=1..7"]), config) == [1, 7]
    assert requested_workers(parse_space(["experts=3,4"]), Config.of(workers=3)) == [3]
