"""Tests that hostile configs, search spaces, placements and calibrations are refused in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.storage.forged_files import laughs, yaml_bomb
from tests.security.scene import DEEP, MARKUP, RUN, SMALL, Scene, call

CONFIGS = {
    "a tag for the task": (lambda scene: f"task: {yaml_bomb(scene.canary)}\n", "is not YAML"),
    "a tag for a name": (lambda scene: f"run:\n  name: {yaml_bomb(scene.canary)}\n", "is not YAML"),
    "aliases of aliases": (lambda _: laughs(), "stand for more than"),
    "merges of merges": (
        lambda _: (
            "a0: &a0 {x: 1}\n"
            + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12))
        ),
        "stand for more than",
    ),
    "an alias of itself": (lambda _: "run: &r\n  <<: *r\n", "what it is part of"),
    "deeply nested": (lambda _: "run: " + "[" * 5000, "nested too deeply"),
    "a name with the parent folder": (lambda _: 'run: {name: "../x"}\n', "name is '../x'"),
    "a name that is a path": (lambda _: 'run: {name: "/tmp/x"}\n', "name is '/tmp/x'"),
    "a name with a zero": (lambda _: 'run: {name: "a\\0b"}\n', "use letters, digits"),
    "a very long name": (lambda _: f"run: {{name: {'x' * 5000}}}\n", "at most 100"),
    "a folder with a zero": (lambda _: 'run: {run_dir: "a\\0b"}\n', "without control characters"),
    "a very long folder": (lambda _: f"run: {{run_dir: {'x' * 5000}}}\n", "at most 255"),
    "data with a zero": (lambda _: 'data: {data_dir: "a\\0b"}\n', "without control characters"),
    "a checkpoint with a zero": (lambda _: 'checkpoint: {resume: "a\\0b"}\n', "without control characters"),
    "a huge number": (lambda _: f"run: {{epochs: 0x{'f' * 6000}}}\n", "of at most 63"),
    "a task that is a path": (lambda _: 'task: "../../x:Y"\n', "is no name of a task"),
    "no text": (lambda _: "\x00", "is not YAML"),
    "a very long text": (lambda _: "#" * 2_000_000 + "\n", "longer than 1,000,000 characters"),
    "a foreign cluster": (
        lambda _: "parallel: {ray_address: 'evil.example:6379'}\n",
        "give --ray-address evil.example:6379 if",
    ),
    "a foreign cluster, merged in": (
        lambda _: "parallel: {<<: {ray_address: '127.0.0.1:6379', workers: 2}}\n",
        "a run shows your token to the cluster that it joins",
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_hostile_config_is_refused(scene: Scene, name: str) -> None:
    text, message = CONFIGS[name]
    Path("c.yaml").write_text(text(scene), encoding="utf-8")
    code, output = call("train", "--config", "c.yaml", "--max-steps", "1", "--gpu-mode", "cpu", "--trackers")
    assert code == 2, output
    assert message in output
    assert not Path("results").exists()


SPACES = {
    "a tag": lambda scene: f"batch_size: {yaml_bomb(scene.canary)}\n",
    "aliases of aliases": lambda _: laughs(),
    "deeply nested": lambda _: "batch_size: " + "[" * 5000,
    "a huge number": lambda _: "batch_size: [1" + "0" * 6000 + "]\n",
    "a folder to sweep over": lambda _: "run_dir: [/tmp/a, /tmp/b]\n",
    "a cluster to sweep over": lambda _: "ray_address: ['evil.example:6379']\n",
    "keys that are lists": lambda _: "? [a]\n: 1\n",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", SPACES)
def test_a_hostile_space_is_refused(scene: Scene, name: str) -> None:
    Path("space.yaml").write_text(SPACES[name](scene), encoding="utf-8")
    code, output = call("sweep", "--space", "space.yaml", "--gpu-mode", "cpu")
    assert code == 2, output
    assert "space.yaml" in output


PLACEMENTS = {
    "deeply nested": DEEP,
    "a negative host": '{"host_of": [-1, 0]}',
    "a huge host": '{"host_of": [0, 99999999999999999999]}',
    "a boolean host": '{"host_of": [true, 0]}',
    "a text for hosts": '{"host_of": "00"}',
    "markup": json.dumps({MARKUP: [0, 0]}),
    "layers without lists": '{"layers": [1, 2]}',
    "a huge number": '{"host_of": [' + "9" * 5000 + "]}",
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_hostile_placement_is_refused(scene: Scene, name: str) -> None:
    Path("p.json").write_text(PLACEMENTS[name], encoding="utf-8")
    flags = ("--workers", "2", "--parallel-strategy", "expert_parallel", "--placement", "p.json")
    code, output = call("train", *RUN, *flags)
    assert code == 2, output
    assert "p.json" in output


CALIBRATIONS = {
    "deeply nested": DEEP,
    "a list": "[1]",
    "figures of the wrong type": '{"version": 1, "made": [], "machine": {}, "profiles": "x"}',
    "markup": json.dumps({"version": MARKUP}),
    "no text": "\udcff",
}


@pytest.mark.parametrize("name", CALIBRATIONS)
def test_a_hostile_calibration_is_refused(scene: Scene, name: str) -> None:
    Path("c.json").write_text(CALIBRATIONS[name], encoding="utf-8", errors="surrogateescape")
    code, output = call("plan", *SMALL, "--gpu-mode", "cpu", "--calibration", "c.json")
    assert code == 2, output
    assert "c.json" in output
