"""Tests of the file of foreign names: every answer names a setting that exists and a value that it takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, get_args

import pytest

from orchestrator.cli.train import TrainOptions
from orchestrator.config.names.aliases import Alias, Form, aliases, read_alias
from orchestrator.config.reading.flags import read_flags
from orchestrator.config.reading.reader import read_file
from orchestrator.config.settings import flat_names, foreign_name_advice
from orchestrator.errors import UserError

VALUES = (
    None,
    *["true", "no", "2", "8", "0.5", "bfloat16", "fp8", "cpu", "wandb", "inductor", "all", "0,2"],
    *[
        "cuda:1",
        "nccl",
        "ddp",
        "dp",
        "fsdp",
        "deepspeed_stage_2",
        "full_shard",
        "data_parallel",
        "distributed",
        "NO",
        "MULTI_GPU",
    ],
)
"""Values that people give to foreign names."""


@pytest.mark.parametrize(
    "entry", [{"seting": "epochs"}, {"setting": "epochs", "by_value": [{"values": ["x"], "nota": "y"}]}]
)
def test_a_misspelt_field_of_an_entry_is_found(entry: dict[str, Any]):
    with pytest.raises(ValueError, match="unknown fields"):
        read_alias(entry)


def test_an_entry_stands_for_every_way_to_say_yes_and_for_ranges_of_numbers():
    values = read_alias({"setting": "lora", "values": [{"any yes": "on", "2..4": "…"}, ["as it is"]]}).values
    assert values == dict.fromkeys(("", "true", "yes", "on", "1"), "on") | dict.fromkeys("234", "…") | {
        "as it is": "as it is"
    }


def all_aliases() -> list[tuple[str, Alias]]:
    """Return every foreign name with its alias, and with the aliases of single values."""
    by_name = list(aliases().items())
    return by_name + [(name, other) for name, alias in by_name for other in alias.by_value.values()]


def test_every_alias_names_a_setting_of_ours():
    assert [
        name for name, alias in all_aliases() if alias.name is not None and alias.name not in flat_names()
    ] == []


def test_values_of_other_settings_are_listed_in_lower_case():
    wrong = [
        (name, value)
        for name, alias in aliases().items()
        for value in alias.by_value
        if value != value.lower()
    ]
    assert wrong == []


def test_no_answer_says_that_there_is_one_device():
    answers = [
        foreign_name_advice(name, value, form) or ""
        for name in aliases()
        for value in VALUES
        for form in get_args(Form)
    ]
    assert [text for text in answers if "one device" in text] == []


def test_no_alias_is_a_setting_of_ours():
    assert aliases().keys().isdisjoint(flat_names())


def test_aliases_are_listed_in_the_form_of_the_lookup():
    assert [name for name in aliases() if name != name.lower().replace("-", "_")] == []


def test_an_alias_without_a_setting_says_what_to_do():
    assert [
        name for name, alias in aliases().items() if alias.name is None and "leave it out" not in alias.note
    ] == []


def advised(form: Form) -> list[str]:
    """Return every distinct answer to the values above, without its note."""
    answers = {foreign_name_advice(name, value, form) or "" for name in aliases() for value in VALUES}
    written = {
        re.sub(r" \(.*\)$", "", text.removeprefix("write ")) for text in answers if text.startswith("write ")
    }
    return sorted(text for text in written if "…" not in text and "|" not in text)


# A made-up number may be out of range; name, section and type must be right.
OUT_OF_RANGE = re.compile("it must|use letters|give --task lm as well|give --lora 16 as well")


@pytest.mark.slow
def test_every_advised_flag_is_accepted():
    assert len(advised("flag")) > 60
    for text in advised("flag"):
        refused = ""
        try:
            read_flags(TrainOptions, shlex.split(text), "orchestrator train")
        except UserError as error:
            refused = str(error)
        assert refused == "" or OUT_OF_RANGE.search(refused), text


@pytest.mark.parametrize("text", advised("yaml"))
def test_every_advised_line_is_accepted(tmp_path: Path, text: str):
    lines, _, section = text.removesuffix(":").rpartition(" under ")
    (tmp_path / "cfg.yaml").write_text(
        f"{section}:\n" + "".join(f"  {line}\n" for line in lines.split(" and "))
    )
    refused = ""
    try:
        read_file(tmp_path / "cfg.yaml")
    except UserError as error:
        refused = str(error)
    assert refused == "" or OUT_OF_RANGE.search(refused)
