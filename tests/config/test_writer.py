"""Tests of the other forms of a config: YAML that reads back, JSON values, absolute paths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.fakes.inventories import VALUES, configs
from orchestrator.config.reading.reader import Resolved, read_file
from orchestrator.config.settings import Config, flat_names
from orchestrator.config.writer import dump, to_json, with_absolute_paths, write_file


@settings(max_examples=30, deadline=None)
@given(config=configs())
def test_a_written_config_reads_back_the_same(config_file: Path, config: Config):
    write_file(Resolved(config, {}), config_file)
    again = read_file(config_file)
    assert again.config == config
    assert again.origins.keys() == flat_names().keys()
    assert dump(Resolved(again.config, {})) == config_file.read_text(encoding="utf-8")


@pytest.mark.extended(but_first=10)
@pytest.mark.parametrize("name", VALUES)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_every_setting_reads_back_the_same(config_file: Path, name: str, data: st.DataObject):
    config = data.draw(configs(name))
    write_file(Resolved(config, {name: f"flag --{name}"}), config_file)
    assert read_file(config_file).config == config


@settings(max_examples=30, deadline=None)
@given(config=configs())
def test_the_file_is_plain_yaml_of_the_same_values(config: Config):
    assert yaml.safe_load(dump(Resolved(config, {}))) == to_json(config) | {"task": config.task}


def test_a_comment_never_becomes_a_setting(config_file: Path):
    odd = Resolved(Config(), {"epochs": "file odd\n  max_steps: 1  # name.yaml:3"})
    write_file(odd, config_file)
    assert read_file(config_file).config == Config()


def test_the_comment_of_a_value_is_its_origin(config_file: Path):
    text = dump(Resolved(Config.of(epochs=3), {"epochs": "flag --epochs"}))
    assert "  epochs: 3  # flag --epochs\n" in text
    assert "  seed: 0  # default\n" in text


@settings(max_examples=30, deadline=None)
@given(config=configs())
def test_the_json_form_has_json_values_only(config: Config):
    assert json.loads(json.dumps(to_json(config), allow_nan=False)) == to_json(config)


def test_relative_paths_become_absolute_and_absolute_ones_stay(tmp_path: Path):
    config = with_absolute_paths(Config.of(run_dir="a", data_dir="/b", init_from="c/d", epochs=3), tmp_path)
    assert config == Config.of(run_dir=tmp_path / "a", data_dir="/b", init_from=tmp_path / "c/d", epochs=3)
    assert with_absolute_paths(Config(), tmp_path) == Config()


def test_a_placement_file_and_a_checkpoint_become_absolute_too(tmp_path: Path):
    assert with_absolute_paths(Config.of(placement="a.json", resume="b"), tmp_path) == Config.of(
        placement=str(tmp_path / "a.json"), resume=str(tmp_path / "b")
    )
    assert with_absolute_paths(Config.of(placement="/a.json"), tmp_path).parallel.placement == "/a.json"
    for word in ("auto", "round_robin"):
        assert with_absolute_paths(Config.of(placement=word, resume="auto"), tmp_path) == Config.of(
            placement=word, resume="auto"
        )
