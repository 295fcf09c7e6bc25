"""Tests of the values of flags: a wrong one is refused in one line, in the words of files and of Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.cli.check import CheckOptions
from orchestrator.cli.export import ExportOptions
from orchestrator.cli.report import ReportOptions
from orchestrator.config.reading.flags import read_options
from orchestrator.errors import UserError
from tests.config.helpers import flag_refusal, refusal

REFUSED = {
    ("--epochs",): "--epochs needs a value: a whole number",
    ("--epochs", "--seed", "3"): "--epochs needs a value: a whole number",
    ("--epochs", "many"): "--epochs is 'many'; a whole number was needed",
    ("--epochs", "0"): "--epochs is 0; it must be at least 1",
    ("--epochs", "3", "4"): "unexpected '4' after --epochs 3",
    ("--epochs=",): "--epochs is ''; a whole number was needed",
    (
        "--precision",
        "fp99",
    ): "--precision is 'fp99'; 'auto' or 'fp32' or 'bf16' or 'fp16' or 'fp8' was needed",
    ("--compile", "maybe"): "--compile is 'maybe'; 'auto' or 'on' or 'off' was needed",
    ("--devices", "0,b"): "--devices is ['0', 'b']; a list of whole numbers was needed",
    ("--debug", "7"): "unexpected '7' after --debug",
    ("--compile", "on", "off"): "unexpected 'off' after --compile on",
    ("--no-epochs",): "unknown flag --no-epochs: epochs is no switch; see orchestrator train --help",
    ("extra",): "unexpected 'extra'; see orchestrator train --help",
    ("--experts", "4", "--top-k", "9"): "--top-k is 9 but there are only 4 experts; "
    "lower --top-k or raise --experts",
    ("--max-steps", "None", "--seed", "x"): "--seed is 'x'; a whole number was needed",
}


@pytest.mark.parametrize(("argv", "message"), REFUSED.items())
def test_refused_flags_are_answered_in_one_line(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
):
    assert flag_refusal(*argv) == message
    output = capsys.readouterr()
    assert output.out + output.err == ""


def test_a_flag_and_a_file_are_refused_in_the_same_words(config_file: Path):
    in_file = refusal(config_file, "device:\n  precision: fp99\n")
    assert in_file.removeprefix("cfg.yaml:2: device.") == flag_refusal("--precision", "fp99")[2:]


def test_a_contradiction_between_flag_and_file_is_found(config_file: Path):
    config_file.write_text("run: {deterministic: true}\n")
    message = flag_refusal("--config", str(config_file), "--tf32", "on")
    assert message == (
        "deterministic and tf32 on contradict each other: it computes without tf32; leave one of them out"
    )


def test_verbs_without_settings_answer_alike():
    with pytest.raises(UserError, match=r"^--folders is missing; see orchestrator report --help$"):
        read_options(ReportOptions, [], "orchestrator report", positional="folders")
    with pytest.raises(UserError, match=r"^unexpected 'now'; see orchestrator check --help$"):
        read_options(CheckOptions, ["now"], "orchestrator check")


def test_help_is_not_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        read_options(CheckOptions, ["--help"], "orchestrator check")
    assert not caught.value.code
    assert "usage: orchestrator check" in capsys.readouterr().out


def test_help_shows_the_values_that_need_no_flag(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        read_options(ExportOptions, ["--help"], "orchestrator export", positional=("checkpoint", "folder"))
    assert "usage: orchestrator export [CHECKPOINT] [FOLDER] " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        read_options(ReportOptions, ["--help"], "orchestrator report", positional="folders")
    assert "usage: orchestrator report [FOLDERS ...] " in capsys.readouterr().out
