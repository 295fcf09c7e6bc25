"""Tests of the parsers of search spaces: flags, YAML files and ledgers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.config.sweep.space import Range, Values, point_key
from orchestrator.config.sweep.space_parser import parse_space, read_space, space_from_json
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
def test_an_entry_becomes_a_domain(entry: str, name: str, domain: Values | Range) -> None:
    assert parse_space([entry]).domains == {name: domain}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["batchsize=3"], "did you mean 'batch_size'"),
        (["precision=fp64"], "precision is 'fp64'; 'auto' or 'fp32' or 'bf16' or 'fp16' or 'fp8' was needed"),
        (["precision=a..b"], "precision is no number"),
        (["batch-size=9..3"], "the lower end goes first"),
        (["batch-size=1..x"], "'x' is no number"),
        (["batch-size="], "a setting and its values were needed"),
        (["batch-size"], "a setting and its values were needed"),
        (["batch-size=1..9:x1"], "lead nowhere"),
        (["batch-size=1..9:-2"], "lead nowhere"),
        (["batch-size=1..1000000:1"], "at most 10,000"),
        (["learning-rate=0..1:log"], "begins above 0"),
        (["run-dir=a,b"], "is not swept over"),
        (["gpu-mode=cpu,auto"], "is not swept over"),
        (["learning-rate=1e-3,nan"], "learning_rate is nan"),
        (["batch-size=0,4"], "batch_size is 0"),
        (["batch-size=auto,16"], "give the sizes to try"),
        ([], "nothing to sweep"),
        (["batch-size=1,2", "batch_size=3"], "given twice"),
    ],
)
def test_a_mistake_is_reported(entries: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_space(entries)
    assert message in str(caught.value)


def test_a_file_maps_settings_to_domains(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(
        "batch_size: [16, 64]\nlearning-rate: 1e-4..1e-2:log\nprecision: fp32\n"
        "expert_hidden_size: [[8, 16], [32]]\n"
    )
    space = read_space(path)
    assert space.domains["batch_size"] == Values((16, 64))
    assert space.domains["learning_rate"] == Range(1e-4, 1e-2, log=True, integer=False)
    assert space.domains["expert_hidden_size"] == Values(((8, 16), (32,)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2]", "holds no space"),
        ("a: [", "is not YAML"),
        ("batch_size: []", "no values"),
        ("bath_size: 3", "did you mean"),
        ("- {batch_size: many}\n", "point 1: batch_size is 'many'"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        read_space(path)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        read_space(tmp_path / "none.yaml")


def test_settings_given_as_a_file_are_told_the_flag() -> None:
    with pytest.raises(UserError, match=r"write --sweep precision=fp32,bf16$"):
        read_space(Path("precision=fp32,bf16"))


def test_a_file_may_list_points(tmp_path: Path) -> None:
    path = tmp_path / "points.yaml"
    path.write_text(
        "- {batch_size: 16, workers: 1}\n- {batch-size: 64, workers: 2, sharding: zero2}\n"
        "- {workers: 1, batch_size: 16}\n"
    )
    space = read_space(path)
    assert space.grid() == [
        {"batch_size": 16, "workers": 1},
        {"batch_size": 64, "workers": 2, "sharding": "zero2"},
    ]
    assert {point_key(point) for point in space.draws(0)} == {point_key(point) for point in space.grid()}
    assert space.domains["batch_size"] == Values((16, 64))


def test_the_json_of_a_space_reads_back_the_same(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(
        "expert_hidden_size: [[64, 128], [128]]\ndata_dir: [../a, b]\nexperts: 2..9\n"
        "learning_rate: 1e-4..1e-2:log\nz_loss: [0, 0.1]\n"
    )
    space = read_space(path)
    assert space_from_json(json.loads(json.dumps(space.to_json()))) == space
    assert space.domains["data_dir"] == Values((Path("../a"), Path("b")))
