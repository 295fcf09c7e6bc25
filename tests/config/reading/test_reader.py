"""Tests of YAML configs: the origin of each value, and mistakes reported with their line."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.fakes.inventories import configs
from orchestrator.config.reading.reader import Resolved, read_file
from orchestrator.config.settings import Config, flat_names, setting_types
from orchestrator.config.writer import dump, write_file
from orchestrator.errors import UserError
from tests.config.helpers import TYPOS, flag_refusal, read_text, refusal


@pytest.mark.parametrize(
    "text", ["", "\n# only a comment\n", "run:\n", "run: {}\n", "---\n", "\ufeff", "null"]
)
def test_an_empty_file_is_all_default(config_file: Path, text: str):
    assert read_text(config_file, text) == Resolved(Config(), {})


@settings(max_examples=10, deadline=None)  # every example has all keys
@given(config=configs())
def test_each_origin_points_at_the_line_of_its_key(config_file: Path, config: Config):
    write_file(Resolved(config, {}), config_file)
    lines = config_file.read_text(encoding="utf-8").split("\n")
    for name, origin in read_file(config_file).origins.items():
        file, _, line = origin.rpartition(":")
        assert file == "file cfg.yaml"
        assert lines[int(line) - 1].strip().startswith(f"{name}:")


def test_merged_keys_have_their_own_lines(config_file: Path):
    resolved = read_text(
        config_file, "model: &m\n  width: 8\nrun:\n  <<: {epochs: 3, seed: 4}\n  epochs: 5\n"
    )
    assert (resolved.config.run.epochs, resolved.config.run.seed) == (5, 4)
    assert resolved.origins == {
        "width": "file cfg.yaml:2",
        "epochs": "file cfg.yaml:5",
        "seed": "file cfg.yaml:4",
    }


@pytest.mark.parametrize(("typo", "meant"), TYPOS.items())
def test_a_misspelled_key_is_answered_with_the_nearest_one(config_file: Path, typo: str, meant: str):
    section = flat_names()[meant]
    message = refusal(config_file, f"# first line\n{section}:\n  {typo}: 1\n")
    assert message == f"cfg.yaml:3: unknown setting {typo!r} (did you mean {meant!r}?)"
    at_top = refusal(config_file, f"{typo}: 1\n")
    assert at_top == f"cfg.yaml:1: unknown setting {typo!r} (did you mean {meant!r} under {section}:?)"


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("rum", "run"),
        ("modle", "model"),
        ("moee", "moe"),
        ("optimm", "optim"),
        ("checkpoints", "checkpoint"),
    ],
)
def test_a_misspelled_section_is_answered_with_the_nearest_one(config_file: Path, typo: str, meant: str):
    assert (
        refusal(config_file, f"{typo}:\n  x: 1\n")
        == f"cfg.yaml:1: unknown setting {typo!r} (did you mean {meant!r}?)"
    )


def test_all_wrong_keys_are_answered_at_once(config_file: Path):
    text = "optim:\n  lr: 0.1\n  epochs: 3\nbatch:\n  gradient_accumulation_steps: 4\nrun: 7\nrum: {}\n"
    with pytest.raises(UserError) as caught:
        read_text(config_file, text)
    assert str(caught.value).splitlines() == [
        "cfg.yaml:2: unknown setting 'lr'; write learning_rate: 0.1 under optim:",
        "cfg.yaml:3: epochs belongs under run:",
        "cfg.yaml:5: unknown setting 'gradient_accumulation_steps'; write accumulation_steps: 4 under batch:",
        "cfg.yaml:6: run is a section; its settings go below it, indented",
        "cfg.yaml:7: unknown setting 'rum' (did you mean 'run'?)",
    ]


def test_a_list_under_a_foreign_name_is_answered_with_our_form_of_a_list(config_file: Path):
    message = refusal(config_file, "parallel:\n  device_ids: [0, 2]\n")
    assert message == "cfg.yaml:2: unknown setting 'device_ids'; write devices: 0,2 under parallel:"


def test_a_key_that_is_near_to_none_is_answered_with_all_known_ones(config_file: Path):
    message = refusal(config_file, "optim:\n  zzzzzz: 1\n")
    assert message.startswith("cfg.yaml:2: unknown setting 'zzzzzz'; known in optim: optimizer, ")
    assert refusal(config_file, "zzzzzz: 1\n").startswith(
        "cfg.yaml:1: unknown setting 'zzzzzz'; known here: task, run, "
    )
    assert flag_refusal("--zzzzzz") == "unknown flag --zzzzzz; see --help"


@pytest.mark.parametrize("name", flat_names())
def test_a_key_in_the_wrong_section_is_answered_with_the_right_section(config_file: Path, name: str):
    home = flat_names()[name]
    place = f"under {home}:" if home else "at the top level"
    wrong = "watch" if home != "watch" else "run"
    assert refusal(config_file, f"{wrong}:\n  {name}: 1\n") == f"cfg.yaml:2: {name} belongs {place}"
    if home and home != name:
        assert refusal(config_file, f"{name}: 1\n") == f"cfg.yaml:1: {name} belongs {place}"


def test_a_setting_with_the_name_of_its_section_goes_below_it(config_file: Path):
    for value, written in (("bold", "bold"), ("off", "false")):
        message = refusal(config_file, f"evolution: {value}\n")
        assert message.endswith(
            f"its settings go below it, indented: write evolution: {{evolution: {written}}}"
        )
        text = message.partition("write ")[2]
        assert read_text(config_file, text).config.evolution.evolution == value


@pytest.mark.parametrize(
    ("text", "line", "name"),
    [
        ("task: a\nrun: {}\ntask: b\n", 3, "task"),
        ("run:\n  epochs: 1\n  seed: 2\n  epochs: 2\n", 4, "run.epochs"),
        ("run: {epochs: 1}\nmodel: {}\nrun: {seed: 2}\n", 3, "run"),
    ],
)
def test_a_key_given_twice_is_refused(config_file: Path, text: str, line: int, name: str):
    assert refusal(config_file, text) == f"cfg.yaml:{line}: {name} is given twice; keep one"


@pytest.mark.parametrize("key", ["on", "null", "1", "1.5", "2024-01-01", "true"])
def test_a_key_that_is_no_word_is_shown_as_written(config_file: Path, key: str):
    assert refusal(config_file, f"{key}: 3\n").startswith(
        f"cfg.yaml:1: unknown setting '{key}'; known here: "
    )


@pytest.mark.parametrize("name", flat_names())
def test_every_setting_refuses_a_mapping(config_file: Path, name: str):
    section = flat_names()[name]
    text, line = (f"{section}:\n  {name}: {{a: 1}}\n", 2) if section else (f"{name}: {{a: 1}}\n", 1)
    message = refusal(config_file, text)
    full = f"{section}.{name}" if section else name
    assert message.startswith(f"cfg.yaml:{line}: {full} is {{'a': 1}}; ")
    assert message.endswith(" was needed")


NUMBERS = [name for name, hint in setting_types().items() if hint in (int, float, int | None, float | None)]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["true", "off", "some", "[1]", "1.5.2"])
def test_every_number_refuses_other_values(config_file: Path, name: str, value: str):
    message = refusal(config_file, f"{flat_names()[name]}:\n  {name}: {value}\n")
    assert message.startswith(f"cfg.yaml:2: {flat_names()[name]}.{name} is ")
    assert "number" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run: {epochs: 2.5}", "cfg.yaml:1: run.epochs is 2.5; a whole number was needed"),
        ("run: {epochs: null}", "cfg.yaml:1: run.epochs is null; a whole number was needed"),
        ("run:\n  name: 5", "cfg.yaml:2: run.name is 5; text or null was needed"),
        ("task: yes", "cfg.yaml:1: task is true; text was needed"),
        (
            "batch: {batch_size: most}",
            "cfg.yaml:1: batch.batch_size is 'most'; a whole number or 'auto' or null was needed",
        ),
        (
            "device: {precision: off}",
            "cfg.yaml:1: device.precision is false; 'auto' or 'fp32' or 'bf16' or 'fp16' or 'fp8' was needed",
        ),
        (
            "moe: {expert_hidden_size: [8, x]}",
            "cfg.yaml:1: moe.expert_hidden_size is [8, 'x']; a list of whole numbers was needed",
        ),
        (
            "watch: {trackers: comet}",
            "cfg.yaml:1: watch.trackers is 'comet'; a list of 'tensorboard' or 'wandb' or 'mlflow' "
            "was needed",
        ),
        (
            "parallel: {devices: '0,x'}",
            "cfg.yaml:1: parallel.devices is '0,x'; a list of whole numbers was needed",
        ),
        (
            "parallel: {workers: some}",
            "cfg.yaml:1: parallel.workers is 'some'; a whole number or 'auto' was needed",
        ),
        ("parallel:\n  workers: 2\n  devices: [1, 1]", "cfg.yaml:3: devices is 1,1; name each GPU once"),
        ("run:\n  seed: 1\n  epochs: 0", "cfg.yaml:3: epochs is 0; it must be at least 1"),
        ("run: 3", "cfg.yaml:1: run is a section; its settings go below it, indented"),
        ("run: [1]", "cfg.yaml:1: run is a section; its settings go below it, indented"),
        (
            "run:\n  model:\n    width: 3",
            "cfg.yaml:2: model is a section of its own; it begins at the top level, not below run",
        ),
        ("<<: {run: 3}", "cfg.yaml:1: run is a section; its settings go below it, indented"),
        ("- run", "cfg.yaml holds a list; a mapping of sections was needed, see 'orchestrator init'"),
        ("run", "cfg.yaml holds a str; a mapping of sections was needed, see 'orchestrator init'"),
    ],
)
def test_a_wrong_value_says_found_and_needed(config_file: Path, text: str, expected: str):
    assert refusal(config_file, text) == expected


def test_a_contradiction_between_sections_names_the_line_of_the_first(config_file: Path):
    message = refusal(config_file, "run: {deterministic: true}\ndevice: {tf32: on}\n")
    assert message.startswith("cfg.yaml:1: deterministic and tf32 on contradict each other")


def test_a_huge_value_is_cut_in_the_message(config_file: Path):
    assert len(refusal(config_file, f"run: {{epochs: {list(range(5000))}}}")) < 200


@pytest.mark.parametrize(
    ("word", "value"),
    [("on", "on"), ("off", "off"), ("ON", "on"), ("yes", "on"), ("false", "off"), ("auto", "auto")],
)
@pytest.mark.parametrize("name", ["tf32", "activation_checkpointing", "cudnn_benchmark"])
def test_on_and_off_are_words_and_not_truth_values(config_file: Path, name: str, word: str, value: str):
    config = read_text(config_file, f"device:\n  {name}: {word}\n").config
    assert getattr(config.device, name) == value
    assert read_text(config_file, dump(Resolved(config, {}))).config == config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optim: {learning_rate: 3e-4}", {"learning_rate": 3e-4}),
        ("optim: {learning_rate: 1}", {"learning_rate": 1.0}),
        ("moe: {expert_hidden_size: 64}", {"expert_hidden_size": (64,)}),
        ("moe: {expert_hidden_size: [64, 32]}", {"expert_hidden_size": (64, 32)}),
        ("watch: {trackers: []}", {"trackers": ()}),
        ("watch: {trackers: wandb}", {"trackers": ("wandb",)}),
        ("run: {deterministic: on}", {"deterministic": True}),
        ("data: {data_dir: ~}", {"data_dir": None}),
        ("run: {name: '5'}", {"name": "5"}),
        ("parallel: {devices: [0, 2]}", {"devices": (0, 2)}),
        ("parallel: {devices: '0,2'}", {"devices": (0, 2)}),
        ("parallel:\n  devices: 0,2", {"devices": (0, 2)}),
        ("parallel: {devices: 3}", {"devices": (3,)}),
        ("parallel: {workers: auto}", {}),
        ("parallel: {workers: 4, sharding: none}", {"workers": 4, "sharding": "none"}),
        ("parallel: {broadcast_buffers: off}", {"broadcast_buffers": "off"}),
        (
            "parallel: {parallel_strategy: expert_parallel, gate: primary}",
            {"parallel_strategy": "expert_parallel", "gate": "primary"},
        ),
        (
            "parallel: {placement: here.json, exchange_chunks: 2}",
            {"placement": "here.json", "exchange_chunks": 2},
        ),
        (
            "moe: {capacity_factor: 1, normalise_weights: off}",
            {"capacity_factor": 1.0, "normalise_weights": False},
        ),
        ("moe: {capacity_factor: ~, shared_expert_size: 64}", {"shared_expert_size": 64}),
        ("watch: {trackers: 'wandb, mlflow'}", {"trackers": ("wandb", "mlflow")}),
    ],
)
def test_values_may_be_written_in_several_ways(config_file: Path, text: str, expected: dict[str, Any]):
    assert read_text(config_file, text).config == Config.of(**expected)


@pytest.mark.parametrize(
    ("text", "message_start"),
    [
        ("run: {epochs: 3", "cfg.yaml:1 is not YAML"),
        ("run:\n\tepochs: 3\n", "cfg.yaml:2 is not YAML"),
        ("a: b: c\n", "cfg.yaml:1 is not YAML"),
        ("run: {}\n---\nrun: {}\n", "cfg.yaml:2 is not YAML"),
        ("run:\n  name: 2024-13-45\n", "cfg.yaml:2 is not YAML: month must be in 1..12"),
        (f"run:\n  seed: {'9' * 5000}\n", "cfg.yaml:2 is not YAML"),
        ("run: \x00", "cfg.yaml is not YAML: unacceptable character"),
        ("? [a, b]\n: 3\n", "cfg.yaml:1 is not YAML"),
        ("[" * 3000, "cfg.yaml is nested too deeply"),
        ("run: &r\n  epochs: *r\n", "cfg.yaml:1 is not YAML: an alias stands for what it is part of"),
        ("&r\nrun: *r\n", "cfg.yaml:1 is not YAML: an alias stands for what it is part of"),
        ("run: *nowhere\n", "cfg.yaml:1 is not YAML: found undefined alias"),
    ],
)
def test_invalid_yaml_is_reported_with_its_line(config_file: Path, text: str, message_start: str):
    message = refusal(config_file, text)
    assert message.startswith(message_start)
    assert len(message) < 400


@pytest.mark.parametrize("raw", [b"\xff\xfer\x00u\x00n\x00", b"run: {name: \xe9}", b"\x80\x04\x95"])
def test_a_file_that_is_not_utf8_is_refused(config_file: Path, raw: bytes):
    assert "is not UTF-8 text" in refusal(config_file, raw)


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:os.mkdir ['{marker}']",
        "!!python/object/apply:subprocess.check_call [[mkdir, '{marker}']]",
        "!!python/object/new:os.mkdir ['{marker}']",
        "!!python/name:os.mkdir ''",
        "!!python/module:os ''",
        "!!python/object:orchestrator.config.settings.Config {{}}",
        "!!python/tuple [8, 8]",
        "!custom 5",
    ],
)
def test_a_python_tag_is_refused_and_runs_no_code(tmp_path: Path, tag: str):
    marker = tmp_path / "executed"
    message = refusal(tmp_path / "cfg.yaml", f"run:\n  name: {tag.format(marker=marker)}\n")
    assert message.startswith("cfg.yaml:2 is not YAML: could not determine a constructor for the tag")
    assert not marker.exists()


def test_an_unreadable_file_is_reported(tmp_path: Path):
    with pytest.raises(UserError, match=r"cannot read the config .*none\.yaml: No such file"):
        read_file(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="Is a directory"):
        read_file(tmp_path)


@settings(max_examples=120, deadline=None)
@given(raw=st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode)))
def test_no_bytes_raise_anything_but_a_user_error(config_file: Path, raw: bytes):
    with suppress(UserError):
        read_text(config_file, raw)


def test_an_endless_file_is_not_read_to_its_end(tmp_path: Path):
    (tmp_path / "endless").symlink_to("/dev/zero")
    assert "is not YAML" in flag_refusal("--config", str(tmp_path / "endless"))
