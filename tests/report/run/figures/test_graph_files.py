"""Tests of the files and objects of the graph of experts."""

import json
import subprocess
import sys

import pytest

import orchestrator
from harness.fakes.fake_evolution import evolving_record, write_evolving_run
from harness.fakes.fake_run import run_record, write_run
from orchestrator.errors import UserError
from orchestrator.report.run.figures import graph_files
from orchestrator.report.run.figures.graph_files import read_expert_graph, write_graph_files
from orchestrator.report.run.page import draw_report


def test_each_epoch_has_a_picture(tmp_path):
    written = write_graph_files(evolving_record(tmp_path), tmp_path)
    assert [path.name for path in written] == [
        *(f"knowledge_graph_epoch_{epoch}.png" for epoch in (1, 2, 3, 4)),
        "expert_graph.json",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written[:-1])
    assert len(json.loads(written[-1].read_text())["graphs"]) == 6


@pytest.mark.extended
def test_the_files_are_part_of_the_report(tmp_path):
    names = [path.name for path in draw_report(write_evolving_run(tmp_path))]
    assert "knowledge_graph_epoch_4.png" in names
    assert "expert_graph.json" in names
    assert names[-1] == "report.html"


@pytest.mark.extended
def test_the_same_record_gives_the_same_picture(tmp_path):
    first, second = (
        write_graph_files(evolving_record(tmp_path / name), tmp_path / name)[1].read_bytes() for name in "ab"
    )
    assert first == second


@pytest.mark.extended
def test_of_many_epochs_some_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(graph_files, "MAX_PICTURES", 2)
    written = write_graph_files(evolving_record(tmp_path), tmp_path)
    assert [path.name for path in written[:-1]] == [
        "knowledge_graph_epoch_1.png",
        "knowledge_graph_epoch_4.png",
    ]


def test_without_graphs_nothing_is_written(tmp_path):
    assert write_graph_files(run_record(tmp_path), tmp_path) == []


def test_the_graph_of_an_epoch_is_public(tmp_path):
    folder = write_evolving_run(tmp_path)
    assert orchestrator.read_expert_graph(str(folder)).graph["step"] == 120
    graph = read_expert_graph(folder, epoch=2)
    assert (graph.graph["epoch"], graph.graph["step"]) == (2, 60)
    assert sorted(expert for layer, expert in graph.nodes if layer == 0) == [1, 2, 4, 5]


def test_missing_graphs_are_refused_in_words(tmp_path):
    with pytest.raises(UserError, match="no graph of epoch 7; it has 1, 2, 3, 4"):
        read_expert_graph(write_evolving_run(tmp_path / "a"), epoch=7)
    with pytest.raises(UserError, match="recorded no graph of its experts"):
        read_expert_graph(write_run(tmp_path / "b"))


def test_networkx_is_imported_late(tmp_path):
    folder = write_run(tmp_path)
    code = (
        "import sys, pathlib; from orchestrator.report.run.page import page, read_run_record; "
        f"page(read_run_record(pathlib.Path({str(folder)!r}))); assert 'networkx' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
