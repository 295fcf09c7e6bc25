"""Tests of the files of ``ray up``, against the schema that Ray itself checks them with."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from orchestrator.errors import UserError
from orchestrator.launch.files import file_text
from orchestrator.launch.launch import Launch, LaunchOptions

NFS = "10.0.0.2:/runs"
GCP: dict[str, Any] = {"cloud": "gcp", "project": "my-project", "storage": NFS}
MACHINES: dict[str, Any] = {"cloud": "none", "hosts": ("me@10.0.0.1", "10.0.0.2")}


def content_of(**options: Any) -> dict[str, Any]:
    """Return the content of a file, after the check that ``ray up`` makes."""
    content = yaml.safe_load(file_text(Launch(LaunchOptions("ray-up", **options), ())))
    check_file(content)
    return content


def check_file(content: dict[str, Any]) -> None:
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    schema = Path(spec.origin).parent / "autoscaler" / "ray-schema.json"
    jsonschema.validate(content, json.loads(schema.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "options",
    [{"storage": NFS}, {"storage": NFS, "spot": True}, GCP, GCP | {"spot": True}, MACHINES],
    ids=str,
)
def test_files_fit_the_schema_of_ray(options: dict[str, Any]) -> None:
    content = content_of(**options)
    with pytest.raises(jsonschema.ValidationError):
        check_file(content | {"clustername": "a name that Ray does not know"})


@pytest.mark.parametrize("options", [{"storage": NFS}, GCP, MACHINES], ids=str)
def test_every_node_requires_the_token_of_this_machine(options: dict[str, Any]) -> None:
    content = content_of(**options)
    assert content["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}
    for commands in (content["head_start_ray_commands"], content["worker_start_ray_commands"]):
        assert all(command.startswith("RAY_AUTH_MODE=token ") for command in commands)


def test_the_head_of_a_cloud_does_not_train_and_is_no_spot_machine() -> None:
    types = content_of(storage=NFS, spot=True)["available_node_types"]
    assert types["head"]["resources"] == {"CPU": 0}
    assert "InstanceMarketOptions" not in types["head"]["node_config"]
    assert types["worker"]["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert (types["worker"]["min_workers"], types["worker"]["resources"]["GPU"]) == (2, 1)


def test_one_node_of_a_cloud_is_the_head_itself() -> None:
    content = content_of(workers=8, gpus_per_node=8, instance_type="p5.48xlarge", run_dir=Path("s3://b/r"))
    assert list(content["available_node_types"]) == ["head"]
    assert content["available_node_types"]["head"]["node_config"]["InstanceType"] == "p5.48xlarge"
    assert not any("nfs" in command for command in content["initialization_commands"])


def test_several_nodes_of_a_run_in_an_object_store_mount_nothing() -> None:
    content = content_of(workers=2, run_dir=Path("s3://b/r"))
    assert not any("nfs" in command for command in content["initialization_commands"])


def test_machines_of_ones_own_keep_the_ray_of_others() -> None:
    content = content_of(**MACHINES)
    assert content["provider"] == {"type": "local", "head_ip": "10.0.0.1", "worker_ips": ["10.0.0.2"]}
    assert content["auth"] == {"ssh_user": "me"}
    assert "ray stop" not in yaml.safe_dump(content)
    assert "docker" not in content


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "launch ray-up needs storage for the run folder"),
        ({"cloud": "gcp", "storage": NFS}, "needs the id of the project: --project ID"),
        ({"gpus_per_node": 8, "workers": 8, "storage": NFS}, "name a machine that has as many"),
        ({"cloud": "none"}, "--hosts names 0 machines; 2 workers need 2"),
        ({"cloud": "none", "hosts": ("a@x", "b@y")}, "--hosts has the users a, b"),
    ],
)
def test_missing_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        content_of(**options)
