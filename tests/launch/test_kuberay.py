"""Tests of KubeRay manifests: they fit the schema of their resource, and say what the options say."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from orchestrator.launch.files import file_text
from orchestrator.launch.launch import Kind, Launch, LaunchOptions
from tests.launch.manifests import check_manifest, cluster_of, gpus, manifest, network_policy, pods

KINDS: tuple[Kind, ...] = ("kuberay", "kuberay-cluster")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"workers": 16, "gpus_per_node": 8, "spot": True},
        {"workers": 3, "gpus_per_node": 0},
        {"workers": 1, "run_dir": Path("s3://bucket/run1")},
        {"workers": 5, "gpus_per_node": 2, "run_dir": Path("/data/mine/run1"), "storage": "claim"},
    ],
    ids=str,
)
def test_manifests_fit_the_schema(kind: Kind, options: dict[str, Any]) -> None:
    manifest(LaunchOptions(kind, **options))


@pytest.mark.parametrize(
    ("place", "value"), [("entrypint", "x"), ("backoffLimit", "3"), ("rayClusterSpec", {"rayVersion": "2"})]
)
def test_the_schema_refuses_planted_mistakes(place: str, value: object) -> None:
    content = manifest(LaunchOptions("kuberay"))
    content["spec"][place] = value
    with pytest.raises(jsonschema.ValidationError):
        check_manifest(content)


def test_workers_fill_nodes_and_the_head_has_no_gpu() -> None:
    content = manifest(LaunchOptions("kuberay", workers=16, gpus_per_node=8))
    head, workers = pods(content)
    (group,) = cluster_of(content)["workerGroupSpecs"]
    assert (gpus(head), gpus(workers)) == (0, 8)
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (2, 2, 2)
    assert cluster_of(content)["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}


def test_five_workers_on_nodes_of_two_gpus_take_three_nodes() -> None:
    content = manifest(LaunchOptions("kuberay", workers=5, gpus_per_node=2))
    assert cluster_of(content)["workerGroupSpecs"][0]["replicas"] == 3


def test_one_node_is_the_head_itself() -> None:
    content = manifest(LaunchOptions("kuberay", workers=4, gpus_per_node=4))
    (head,) = pods(content)
    assert gpus(head) == 4
    assert "num-cpus" not in cluster_of(content)["headGroupSpec"]["rayStartParams"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_token_comes_from_a_secret_alone(kind: Kind) -> None:
    content = manifest(LaunchOptions(kind))
    assert cluster_of(content)["authOptions"] == {"mode": "token", "secretName": "ray-token"}
    assert "RAY_AUTH_TOKEN" not in yaml.safe_dump(content)


@pytest.mark.parametrize("kind", KINDS)
def test_pods_accept_connections_of_their_own_cluster_and_to_the_dashboard_alone(kind: Kind) -> None:
    options = LaunchOptions(kind, name="mine")
    cluster = cluster_of(manifest(options))
    policy = network_policy(options)
    assert (policy["apiVersion"], policy["kind"]) == ("networking.k8s.io/v1", "NetworkPolicy")
    selected = policy["spec"]["podSelector"]["matchLabels"]
    assert set(selected.values()) == {"mine"}, "another cluster of the namespace is not selected"
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert selected.items() <= group["template"]["metadata"]["labels"].items()
    of_cluster, to_dashboard = policy["spec"]["ingress"]
    assert of_cluster == {"from": [{"podSelector": {"matchLabels": selected}}]}
    assert [port["port"] for port in to_dashboard["ports"]] == [8265], "it asks for the token"
    assert policy["spec"]["policyTypes"] == ["Ingress"], "workers may reach storage and the head"


@pytest.mark.parametrize(
    ("flags", "ports"),
    [
        (("--epochs", "3", "--metrics-port", "9400", "--metrics-address", "0.0.0.0"), [8265, 9400]),
        (("--metrics-port=9400",), [8265, 9400]),
        (("--metrics-port", "9400", "--metrics-port=9500"), [8265, 9500]),
        (("--metrics-port", "0"), [8265]),
    ],
)
def test_prometheus_may_reach_the_port_of_the_metrics(flags: tuple[str, ...], ports: list[int]) -> None:
    _, from_outside = network_policy(LaunchOptions("kuberay"), *flags)["spec"]["ingress"]
    assert [port["port"] for port in from_outside["ports"]] == ports


@pytest.mark.parametrize("kind", KINDS)
def test_pods_have_no_root_rights_and_equal_limits(kind: Kind) -> None:
    for pod in pods(manifest(LaunchOptions(kind))):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        (container,) = pod["containers"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["resources"]["requests"] == container["resources"]["limits"]


def test_spot_nodes_are_tolerated_by_workers_only_and_on_request() -> None:
    head, workers = pods(manifest(LaunchOptions("kuberay", spot=True)))
    _, without = pods(manifest(LaunchOptions("kuberay")))
    keys = {entry["key"] for entry in workers["tolerations"]}
    assert {"cloud.google.com/gke-spot", "kubernetes.azure.com/scalesetpriority"} < keys
    assert "tolerations" not in head
    assert [entry["key"] for entry in without["tolerations"]] == ["nvidia.com/gpu"]


def test_all_pods_mount_the_claim_where_the_run_folder_is() -> None:
    options = LaunchOptions("kuberay", run_dir=Path("/data/mine/run1"), storage="claim")
    for pod in pods(manifest(options)):
        assert pod["containers"][0]["volumeMounts"] == [{"name": "runs", "mountPath": "/data/mine"}]
        assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "claim"}


def test_a_run_in_an_object_store_gets_credentials_from_a_secret() -> None:
    address = Path("s3://bucket/run1")
    several = pods(manifest(LaunchOptions("kuberay", run_dir=address)))
    (alone,) = pods(manifest(LaunchOptions("kuberay", run_dir=address, workers=1)))
    for pod in (*several, alone):
        (source,) = pod["containers"][0]["envFrom"]
        assert source["secretRef"]["name"] == "storage-credentials"
        # Each worker uploads its own files: the pods need no folder that they share.
        assert pod["volumes"] == [{"name": "runs", "emptyDir": {}}]


def test_storage_that_is_given_is_mounted_also_for_a_run_in_an_object_store() -> None:
    options = LaunchOptions("kuberay", run_dir=Path("s3://bucket/run1"), storage="claim")
    for pod in pods(manifest(options)):
        assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "claim"}


def test_the_entry_point_quotes_flags_for_the_shell() -> None:
    hostile = "a b; rm -rf $HOME 'x' \"y\"\nkind: Pod"
    content = manifest(LaunchOptions("kuberay"), "--data-dir", hostile)
    assert content["kind"] == "RayJob"
    words = shlex.split(content["spec"]["entrypoint"])
    assert words[:4] == ["cd", "/runs", "&&", "exec"]
    assert words[4:8] == ["python", "-m", "orchestrator", "train"]
    assert words[-2:] == ["--data-dir", hostile]


def test_the_same_command_begins_and_continues_a_run() -> None:
    content = manifest(LaunchOptions("kuberay", name="mine"))
    words = shlex.split(content["spec"]["entrypoint"])
    assert words[words.index("--resume") + 1] == "auto"
    assert words[words.index("--run-dir") + 1] == "/runs/mine"
    assert content["spec"]["backoffLimit"] > 0


def test_the_version_of_ray_is_the_pinned_one() -> None:
    version = cluster_of(manifest(LaunchOptions("kuberay")))["rayVersion"]
    assert f"ray=={version}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")


def test_the_first_line_is_the_command_that_writes_the_file() -> None:
    options = LaunchOptions("kuberay", workers=4, run_dir=Path("s3://bucket/run1"), spot=True)
    first = file_text(Launch(options, ("--task", "text"))).splitlines()[0]
    command = "orchestrator launch kuberay --workers 4 --run-dir s3://bucket/run1 --spot -- --task text"
    assert first == f"# Written by: {command}"
