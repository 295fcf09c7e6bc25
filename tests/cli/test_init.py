"""Test of ``orchestrator init``."""

from __future__ import annotations

import re
from pathlib import Path

from orchestrator.config.reading.reader import read_file
from orchestrator.config.settings import Config, flat_names
from tests.cli.helpers import Call


def test_init_writes_the_defaults_with_every_setting_explained(call: Call, tmp_path: Path):
    answer = call("init", "cfg.yaml")
    assert answer.code == 0
    assert "cfg.yaml" in answer.out
    text = (tmp_path / "cfg.yaml").read_text(encoding="utf-8")
    assert read_file(tmp_path / "cfg.yaml").config == Config()
    explained = re.findall(r"^ *(\w+): .*  # .{10,}$", text, re.MULTILINE)
    assert sorted(explained) == sorted(flat_names())
    assert "(here: " in text
    again = call("init", "cfg.yaml", "--force")
    assert again.code == 0
