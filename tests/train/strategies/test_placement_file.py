"""Tests of the file of ``--placement``: an invalid one is refused before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.fakes.inventories import model
from orchestrator import Trainer
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.runtime.cluster import session
from orchestrator.train.strategies.placement_file import check_placement_file, placement_file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "mine.json cannot be read .*No such file.*; give auto, round_robin or a JSON file"),
        ("{", "mine.json: the placement file is not JSON"),
        ('{"hosts": []}', r"mine.json: the placement file has the keys \['hosts'\]"),
        (
            '{"host_of": [0, 2]}',
            "mine.json: layer 0 .* puts expert 1 on host 2; hosts are whole numbers from 0 to 1",
        ),
    ],
)
def test_an_invalid_file_is_refused_before_a_cluster_is_started(
    text: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_cluster(*_: Any) -> None:
        pytest.fail("a cluster was started first")

    monkeypatch.setattr(session, "session", start_cluster)
    file = tmp_path / "mine.json"
    if text is not None:
        file.write_text(text)
    config = Config.of(parallel_strategy="expert_parallel", workers=2, placement=str(file))
    with pytest.raises(UserError, match=message):
        Trainer(config=config, quiet=True).fit()


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_bytes(b"\xff\xfe\x00")
    config = Config.of(parallel_strategy="expert_parallel", placement=str(file))
    with pytest.raises(
        UserError, match=r"mine.json cannot be read .*; give auto, round_robin or a JSON file"
    ):
        check_placement_file(config)


def test_hosts_are_those_of_the_run(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"host_of": [0, 1, 2]}')
    config = Config.of(parallel_strategy="expert_parallel", placement=str(file))
    facts = model(expert_weights=((8, 8, 8), (8, 8, 8)))
    assert placement_file(config, facts, 3) == [(0, 1, 2)] * 2
    message = "hosts are whole numbers from 0 to 1; change the file, or give --placement auto"
    with pytest.raises(UserError, match=message):
        placement_file(config, facts, 2)


def test_hosts_are_not_checked_while_the_number_of_workers_is_unknown(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"host_of": [0, 7]}')
    check_placement_file(Config.of(parallel_strategy="expert_parallel", placement=str(file)))
