"""From files and flags to a config: what is written reads back, each value knows its origin, mistakes are told with their line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.cli.check import CheckOptions
from orchestrator.cli.init import InitOptions
from orchestrator.cli.plan import PlanOptions
from orchestrator.cli.report import ReportOptions
from orchestrator.cli.train import TrainOptions
from orchestrator.config.aliases import ALIASES
from orchestrator.config.flags import check_flags, read_flags, read_options
from orchestrator.config.reader import Resolved, read_file
from orchestrator.config.settings import Config, flat_names, section_types, setting_types
from orchestrator.config.writer import dump, to_json, with_absolute_paths, write_file
from orchestrator.errors import UserError
from tests.support.inventories import VALUES, configs


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file for the tests that write many."""
    return tmp_path_factory.mktemp("reader") / "cfg.yaml"


def reading(path: Path, text: str | bytes) -> Resolved:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_file(path)


def refusal(path: Path, text: str | bytes) -> str:
    with pytest.raises(UserError) as caught:
        reading(path, text)
    message = str(caught.value)
    assert "\n" not in message
    return message


def flags(*argv: str) -> Resolved:
    return read_flags(TrainOptions, argv, "orchestrator train")[1]


def refused(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        flags(*argv)
    return str(caught.value)


# --- there and back


@settings(max_examples=80, deadline=None)
@given(config=configs())
def test_what_is_written_reads_back_the_same(scratch: Path, config: Config):
    write_file(Resolved(config, {}), scratch)
    again = read_file(scratch)
    assert again.config == config
    assert again.origins.keys() == flat_names().keys()
    assert dump(Resolved(again.config, {})) == scratch.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", VALUES)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_every_setting_reads_back_the_same(scratch: Path, name: str, data: st.DataObject):
    config = data.draw(configs(name))
    write_file(Resolved(config, {name: f"flag --{name}"}), scratch)
    assert read_file(scratch).config == config


@settings(max_examples=30, deadline=None)
@given(config=configs())
def test_the_file_is_plain_yaml_of_the_same_values(config: Config):
    assert yaml.safe_load(dump(Resolved(config, {}))) == to_json(config) | {"task": config.task}


def test_a_comment_never_becomes_a_setting(scratch: Path):
    odd = Resolved(Config(), {"epochs": "file odd\n  max_steps: 1  # name.yaml:3"})
    write_file(odd, scratch)
    assert read_file(scratch).config == Config()


@pytest.mark.parametrize(
    "text", ["", "\n# only a comment\n", "run:\n", "run: {}\n", "---\n", "\ufeff", "null"]
)
def test_an_empty_file_is_all_default(scratch: Path, text: str):
    assert reading(scratch, text) == Resolved(Config(), {})


# --- origins


def test_origin_is_default_file_and_line_or_flag(scratch: Path):
    scratch.write_text(
        "# head\ntask: text\nrun:\n  epochs: 3\n\n  seed: 5\noptim:\n  learning_rate: 3e-4\n",
        encoding="utf-8",
    )
    resolved = flags(
        "--config",
        str(scratch),
        "--seed",
        "7",
        "--no-auto",
        "--width=32",
        "--gpu_mode",
        "cpu",
        "--task",
        "digits",
    )
    assert resolved.origin("epochs") == "file cfg.yaml:4"
    assert resolved.origin("learning_rate") == "file cfg.yaml:8"
    assert resolved.origin("seed") == "flag --seed"
    assert resolved.origin("auto") == "flag --no-auto"
    assert resolved.origin("width") == "flag --width"
    assert resolved.origin("gpu_mode") == "flag --gpu_mode"
    assert resolved.origin("task") == "flag --task"
    assert resolved.origin("precision") == "default"
    assert resolved.config == Config.of(
        epochs=3, seed=7, auto=False, width=32, gpu_mode="cpu", task="digits", learning_rate=3e-4
    )
    assert resolved.origins.keys() <= flat_names().keys()


def test_the_origins_are_written_beside_the_values(scratch: Path):
    text = dump(Resolved(Config.of(epochs=3), {"epochs": "flag --epochs"}))
    assert "  epochs: 3  # flag --epochs\n" in text
    assert "  seed: 0  # default\n" in text


@settings(max_examples=30, deadline=None)
@given(config=configs())
def test_each_origin_points_at_the_line_of_its_key(scratch: Path, config: Config):
    write_file(Resolved(config, {}), scratch)
    lines = scratch.read_text(encoding="utf-8").split("\n")
    for name, origin in read_file(scratch).origins.items():
        file, _, line = origin.rpartition(":")
        assert file == "file cfg.yaml"
        assert lines[int(line) - 1].strip().startswith(f"{name}:")


def test_merged_keys_have_their_own_lines(scratch: Path):
    resolved = reading(scratch, "model: &m\n  width: 8\nrun:\n  <<: {epochs: 3, seed: 4}\n  epochs: 5\n")
    assert (resolved.config.run.epochs, resolved.config.run.seed) == (5, 4)
    assert resolved.origins == {
        "width": "file cfg.yaml:2",
        "epochs": "file cfg.yaml:5",
        "seed": "file cfg.yaml:4",
    }


def test_the_last_config_wins_as_with_every_flag(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("run: {epochs: 3}")
    (tmp_path / "b.yaml").write_text("run: {seed: 3}")
    resolved = flags("--config", str(tmp_path / "a.yaml"), f"--config={tmp_path / 'b.yaml'}")
    assert resolved.config == Config.of(seed=3)
    assert resolved.origins == {"seed": "file b.yaml:1"}


# --- names: misspelled, in the wrong place, given twice

TYPOS = {
    "epoch": "epochs", "epohcs": "epochs", "max_step": "max_steps", "seeed": "seed", "determinstic": "deterministic",
    "early_stoping_patience": "early_stopping_patience", "expert": "experts", "expert_hiden_size": "expert_hidden_size",
    "topk": "top_k", "widht": "width", "layer": "layers", "contextlength": "context_length", "balance_los": "balance_loss",
    "datadir": "data_dir", "loader_worker": "loader_workers", "batchsize": "batch_size", "acumulation_steps": "accumulation_steps",
    "globalbatch_size": "global_batch_size", "gpu_memory_fracton": "gpu_memory_fraction", "learning_rat": "learning_rate",
    "leraning_rate": "learning_rate", "warm_up_steps": "warmup_steps", "wieght_decay": "weight_decay", "clip_nrom": "clip_norm",
    "gpumode": "gpu_mode", "precison": "precision", "tf_32": "tf32", "compil": "compile",
    "activation_checkpoint": "activation_checkpointing",
    "checkpoint_evry": "checkpoint_every", "resum": "resume", "initfrom": "init_from", "log_evry": "log_every", "tracker": "trackers",
    "run_dri": "run_dir", "worker": "workers", "paralel_strategy": "parallel_strategy", "shardng": "sharding", "bakend": "backend",
    "sync_batchnrom": "sync_batchnorm", "max_failure": "max_failures", "ray_adress": "ray_address", "cpu_ofload": "cpu_offload",
    "placment": "placement", "exchange_chunk": "exchange_chunks", "expert_kernal": "expert_kernel", "capacity_facter": "capacity_factor",
    "gate_score": "gate_scores", "share_expert_size": "shared_expert_size", "balance_bais": "balance_bias",
}  # fmt: skip


@pytest.mark.parametrize(("typo", "meant"), TYPOS.items())
def test_a_misspelled_key_is_answered_with_the_right_one(scratch: Path, typo: str, meant: str):
    section = flat_names()[meant]
    message = refusal(scratch, f"# first line\n{section}:\n  {typo}: 1\n")
    assert message == f"cfg.yaml:3: unknown setting {typo!r} (did you mean {meant!r}?)"
    at_top = refusal(scratch, f"{typo}: 1\n")
    assert at_top == f"cfg.yaml:1: unknown setting {typo!r} (did you mean {meant!r} under {section}:?)"


@pytest.mark.parametrize(("typo", "meant"), TYPOS.items())
def test_a_misspelled_flag_is_answered_with_the_right_one(typo: str, meant: str):
    ours = meant.replace("_", "-")
    for flag in (f"--{typo}", f"--{typo.replace('_', '-')}"):
        assert refused(flag, "1") == f"unknown flag {flag} (did you mean --{ours}?); see --help"
        assert refused(f"{flag}=1") == f"unknown flag {flag} (did you mean --{ours}?); see --help"


def mutations(name: str) -> Iterator[str]:
    """One letter left out, doubled, or exchanged with the next."""
    for i, letter in enumerate(name):
        yield name[:i] + name[i + 1 :]
        yield name[:i] + letter + name[i:]
        yield name[:i] + name[i + 1 : i + 2] + letter + name[i + 2 :]


@pytest.mark.parametrize("name", flat_names())
def test_any_slip_of_a_letter_finds_its_way_back(name: str):
    for wrong in set(mutations(name)) - {name, *flat_names(), *section_types(), *ALIASES}:
        with pytest.raises(UserError, match=rf"\(did you mean --{name.replace('_', '-')}\?\)"):
            check_flags([f"--{wrong}"], ())


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("rum", "run"),
        ("modle", "model"),
        ("moee", "moe"),
        ("optimizer", "optim"),
        ("checkpoints", "checkpoint"),
    ],
)
def test_a_misspelled_section_is_answered_with_the_right_one(scratch: Path, typo: str, meant: str):
    assert (
        refusal(scratch, f"{typo}:\n  x: 1\n")
        == f"cfg.yaml:1: unknown setting {typo!r} (did you mean {meant!r}?)"
    )


def test_a_list_under_an_old_name_is_answered_as_one_would_write_it(scratch: Path):
    message = refusal(scratch, "parallel:\n  device_ids: [0, 2]\n")
    assert message == "cfg.yaml:2: unknown setting 'device_ids'; write devices: 0,2 under parallel:"


def test_an_unknown_key_far_from_all_lists_the_known_ones(scratch: Path):
    message = refusal(scratch, "optim:\n  zzzzzz: 1\n")
    assert message.startswith("cfg.yaml:2: unknown setting 'zzzzzz'; known in optim: learning_rate, ")
    assert refusal(scratch, "zzzzzz: 1\n").startswith(
        "cfg.yaml:1: unknown setting 'zzzzzz'; known here: task, run, "
    )
    assert refused("--zzzzzz") == "unknown flag --zzzzzz; see --help"


@pytest.mark.parametrize("name", flat_names())
def test_a_key_on_the_wrong_level_is_sent_home(scratch: Path, name: str):
    home = flat_names()[name]
    place = f"under {home}:" if home else "at the top level"
    wrong = "watch" if home != "watch" else "run"
    assert refusal(scratch, f"{wrong}:\n  {name}: 1\n") == f"cfg.yaml:2: {name} belongs {place}"
    if home:
        assert refusal(scratch, f"{name}: 1\n") == f"cfg.yaml:1: {name} belongs {place}"


@pytest.mark.parametrize(("text", "line", "name"), [
    ("task: a\nrun: {}\ntask: b\n", 3, "task"),
    ("run:\n  epochs: 1\n  seed: 2\n  epochs: 2\n", 4, "run.epochs"),
    ("run: {epochs: 1}\nmodel: {}\nrun: {seed: 2}\n", 3, "run"),
])  # fmt: skip
def test_a_key_given_twice_is_refused(scratch: Path, text: str, line: int, name: str):
    assert refusal(scratch, text) == f"cfg.yaml:{line}: {name} is given twice; keep one"


@pytest.mark.parametrize("key", ["on", "null", "1", "1.5", "2024-01-01", "true"])
def test_a_key_that_is_no_word_is_told_as_it_was_written(scratch: Path, key: str):
    assert refusal(scratch, f"{key}: 3\n").startswith(f"cfg.yaml:1: unknown setting '{key}'; known here: ")


# --- values


@pytest.mark.parametrize("name", flat_names())
def test_every_setting_refuses_a_mapping_with_line_and_need(scratch: Path, name: str):
    section = flat_names()[name]
    text, line = (f"{section}:\n  {name}: {{a: 1}}\n", 2) if section else (f"{name}: {{a: 1}}\n", 1)
    message = refusal(scratch, text)
    full = f"{section}.{name}" if section else name
    assert message.startswith(f"cfg.yaml:{line}: {full} is {{'a': 1}}; ")
    assert message.endswith(" was needed")


NUMBERS = [name for name, hint in setting_types().items() if hint in (int, float, int | None, float | None)]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["true", "off", "some", "[1]", "1.5.2"])
def test_every_number_refuses_what_is_none(scratch: Path, name: str, value: str):
    message = refusal(scratch, f"{flat_names()[name]}:\n  {name}: {value}\n")
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
            "cfg.yaml:1: device.precision is false; 'auto' or 'fp32' or 'bf16' or 'fp16' was needed",
        ),
        (
            "moe: {expert_hidden_size: [8, x]}",
            "cfg.yaml:1: moe.expert_hidden_size is [8, 'x']; a list of whole numbers was needed",
        ),
        (
            "watch: {trackers: comet}",
            "cfg.yaml:1: watch.trackers is 'comet'; a list of 'tensorboard' or 'wandb' or 'mlflow' was needed",
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
def test_a_wrong_value_says_found_and_needed(scratch: Path, text: str, expected: str):
    assert refusal(scratch, text) == expected


def test_a_contradiction_between_sections_names_the_file(scratch: Path):
    message = refusal(scratch, "run: {deterministic: true}\ndevice: {tf32: on}\n")
    assert message.startswith("cfg.yaml: deterministic and tf32 on contradict each other")


def test_a_huge_value_is_told_short(scratch: Path):
    assert len(refusal(scratch, f"run: {{epochs: {list(range(5000))}}}")) < 200


@pytest.mark.parametrize(
    ("word", "value"),
    [("on", "on"), ("off", "off"), ("ON", "on"), ("yes", "on"), ("false", "off"), ("auto", "auto")],
)
@pytest.mark.parametrize("name", ["tf32", "activation_checkpointing", "cudnn_benchmark"])
def test_on_and_off_are_words(scratch: Path, name: str, word: str, value: str):
    config = reading(scratch, f"device:\n  {name}: {word}\n").config
    assert getattr(config.device, name) == value
    assert reading(scratch, dump(Resolved(config, {}))).config == config


@pytest.mark.parametrize(("text", "expected"), [
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
    ("parallel: {parallel_strategy: expert_parallel, gate: primary}", {"parallel_strategy": "expert_parallel", "gate": "primary"}),
    ("parallel: {placement: here.json, exchange_chunks: 2}", {"placement": "here.json", "exchange_chunks": 2}),
    ("moe: {capacity_factor: 1, normalise_weights: off}", {"capacity_factor": 1.0, "normalise_weights": False}),
    ("moe: {capacity_factor: ~, shared_expert_size: 64}", {"shared_expert_size": 64}),
    ("watch: {trackers: 'wandb, mlflow'}", {"trackers": ("wandb", "mlflow")}),
])  # fmt: skip
def test_yaml_as_people_write_it(scratch: Path, text: str, expected: dict[str, Any]):
    assert reading(scratch, text).config == Config.of(**expected)


# --- files that are no config


@pytest.mark.parametrize(("text", "words"), [
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
])  # fmt: skip
def test_what_is_not_yaml_is_told_with_its_line(scratch: Path, text: str, words: str):
    message = refusal(scratch, text)
    assert message.startswith(words)
    assert len(message) < 400


@pytest.mark.parametrize("raw", [b"\xff\xfer\x00u\x00n\x00", b"run: {name: \xe9}", b"\x80\x04\x95"])
def test_what_is_not_utf8_is_refused(scratch: Path, raw: bytes):
    assert "is not UTF-8 text" in refusal(scratch, raw)


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
def test_a_tag_is_refused_and_nothing_runs(tmp_path: Path, tag: str):
    marker = tmp_path / "executed"
    message = refusal(tmp_path / "cfg.yaml", f"run:\n  name: {tag.format(marker=marker)}\n")
    assert message.startswith("cfg.yaml:2 is not YAML: could not determine a constructor for the tag")
    assert not marker.exists()


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path):
    with pytest.raises(UserError, match=r"cannot read the config .*none\.yaml: No such file"):
        read_file(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="Is a directory"):
        read_file(tmp_path)


@settings(max_examples=120, deadline=None)
@given(raw=st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode)))
def test_no_bytes_at_all_bring_a_traceback(scratch: Path, raw: bytes):
    with suppress(UserError):
        reading(scratch, raw)


# --- flags


def test_flags_understand_both_dashes_and_win_over_the_file(scratch: Path):
    scratch.write_text("run: {epochs: 3}\nmoe: {experts: 4, top_k: 4}\n")
    assert flags("--config", str(scratch), "--max_steps", "5", "--top-k", "1").config == Config.of(
        epochs=3, experts=4, top_k=1, max_steps=5
    )


def test_a_file_does_not_say_which_cluster_is_joined(scratch: Path):
    """The user's token is shown to it. What a flag says is the user's own word, also where a file says the same."""
    scratch.write_text("parallel:\n  ray_address: head.example:6379\n")
    told = refused("--config", str(scratch))
    assert told.startswith("cfg.yaml:2: ray_address is 'head.example:6379'")
    assert told.endswith("give --ray-address head.example:6379 if you know it")
    for address in ("head.example:6379", "local"):
        assert (
            flags("--config", str(scratch), "--ray-address", address).config.parallel.ray_address == address
        )
    for address in ("auto", "local"):
        scratch.write_text(f"parallel:\n  ray_address: {address}\n")
        assert flags("--config", str(scratch)).config.parallel.ray_address == address


def test_a_file_is_read_no_further_than_it_may_go(tmp_path: Path):
    (tmp_path / "endless").symlink_to("/dev/zero")
    assert "is not YAML" in refused("--config", str(tmp_path / "endless"))


@pytest.mark.parametrize(("argv", "expected"), [
    (["--expert-hidden-size", "8", "16"], {"expert_hidden_size": (8, 16)}),
    (["--devices", "0,2"], {"devices": (0, 2)}),
    (["--devices", "0", "2"], {"devices": (0, 2)}),
    (["--devices=0,2"], {"devices": (0, 2)}),
    (["--devices=3"], {"devices": (3,)}),
    (["--devices", "0,2", "--workers", "2"], {"devices": (0, 2), "workers": 2}),
    (["--devices", "0,1", "3", "--task", "a,b:C"], {"devices": (0, 1, 3), "task": "a,b:C"}),
    (["--workers", "auto"], {}),
    (["--sharding", "none", "--no-gradient-as-bucket-view"], {"sharding": "none", "gradient_as_bucket_view": False}),
    (["--ray_address", "10.0.0.1:6379"], {"ray_address": "10.0.0.1:6379"}),
    (["--trackers", "wandb,mlflow"], {"trackers": ("wandb", "mlflow")}),
    (["--expert-hidden-size=8,16"], {"expert_hidden_size": (8, 16)}),
    (["--trackers"], {"trackers": ()}),
    (["--trackers", "wandb", "mlflow"], {"trackers": ("wandb", "mlflow")}),
    (["--batch-size", "auto"], {"batch_size": "auto"}),
    (["--batch-size", "None"], {}),
    (["--no-auto"], {"auto": False}),
    (["--tf32", "on"], {"tf32": "on"}),
    (["--resume", "auto"], {"resume": "auto"}),
    (["--learning-rate", "3e-4"], {"learning_rate": 3e-4}),
    (["--parallel-strategy", "expert_parallel", "--gate=primary"], {"parallel_strategy": "expert_parallel", "gate": "primary"}),
    (["--placement", "a/b.json", "--exchange_chunks", "2"], {"placement": "a/b.json", "exchange_chunks": 2}),
    (["--no-normalise-weights", "--gate-scores", "sigmoid"], {"normalise_weights": False, "gate_scores": "sigmoid"}),
    (["--compile"], {"compile": "on"}),
    (["--compile", "--epochs", "3"], {"compile": "on", "epochs": 3}),
    (["--no-compile", "--tf32"], {"compile": "off", "tf32": "on"}),
    (["--compile", "auto", "--no_cudnn_benchmark"], {"cudnn_benchmark": "off"}),
    (["--compile=off"], {"compile": "off"}),
    (["--expert-kind", "ffn", "--capacity-factor", "1.25"], {"expert_kind": "ffn", "capacity_factor": 1.25}),
])  # fmt: skip
def test_flags_of_every_kind(argv: list[str], expected: dict[str, Any]):
    assert flags(*argv).config == Config.of(**expected)


@pytest.mark.parametrize(
    "argv", [("--profile", "true"), ("--profile=True",), ("--no-compile", "1"), ("--deterministic", "yes")]
)
def test_a_switch_with_a_value_is_told_how_to_write_it(argv: tuple[str, ...]):
    flag = argv[0].partition("=")[0].removeprefix("--no-").removeprefix("--")
    message = refused(*argv)
    assert "takes no value" in message
    assert message.endswith(f"write --{flag} or --no-{flag}")


@pytest.mark.parametrize("argv", [["--config"], ["--config", "--epochs", "3"]])
def test_config_without_a_path(argv: list[str]):
    assert refused(*argv) == "--config needs the path of a YAML file"


def test_a_verbs_own_flags_are_suggested_too():
    with pytest.raises(UserError, match=r"unknown flag --jsn \(did you mean --json\?\)"):
        read_flags(PlanOptions, ["--jsn"], "orchestrator plan")
    with pytest.raises(UserError, match=r"unknown flag --ful \(did you mean --full\?\)"):
        read_options(CheckOptions, ["--ful"], "orchestrator check")


def test_verbs_without_settings(tmp_path: Path):
    assert read_options(CheckOptions, ["--json"], "x") == CheckOptions(json=True)
    assert read_options(InitOptions, ["a.yaml", "--force"], "x", positional="path") == InitOptions(
        Path("a.yaml"), True
    )
    assert read_options(ReportOptions, ["--folder", "a"], "x", positional="folder") == ReportOptions(
        Path("a")
    )


# --- other forms


def test_absolute_leaves_absolute_paths_and_nothing_relative(tmp_path: Path):
    config = with_absolute_paths(Config.of(run_dir="a", data_dir="/b", init_from="c/d", epochs=3), tmp_path)
    assert config == Config.of(run_dir=tmp_path / "a", data_dir="/b", init_from=tmp_path / "c/d", epochs=3)
    assert with_absolute_paths(Config(), tmp_path) == Config()


def test_a_placement_file_and_a_checkpoint_are_paths_too(tmp_path: Path):
    assert with_absolute_paths(Config.of(placement="a.json", resume="b"), tmp_path) == Config.of(
        placement=str(tmp_path / "a.json"), resume=str(tmp_path / "b")
    )
    assert with_absolute_paths(Config.of(placement="/a.json"), tmp_path).parallel.placement == "/a.json"
    for word in ("auto", "round_robin"):
        assert with_absolute_paths(Config.of(placement=word, resume="auto"), tmp_path) == Config.of(
            placement=word, resume="auto"
        )


@settings(max_examples=30, deadline=None)
@given(config=configs())
def test_json_form_is_plain(config: Config):
    assert json.loads(json.dumps(to_json(config), allow_nan=False)) == to_json(config)
