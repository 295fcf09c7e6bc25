"""Tests of predictions on the screen: the step time of ``plan``, and the table of ``plan --cluster``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import RenderableType
from rich.status import Status

from harness.fakes.cost_machines import device
from orchestrator.cli.main import main
from orchestrator.cli.planning.prediction import cluster_figures, make_tracer
from orchestrator.config.settings import Config
from orchestrator.measure.tracing.model_facts import model_facts
from orchestrator.plan.compute import with_memory_settings
from orchestrator.plan.cost.calibration import VERSION, Calibration, Profile, write_calibration
from orchestrator.plan.cost.cluster_spec import parse_cluster
from orchestrator.plan.cost.machine import Interconnect, Link
from orchestrator.plan.inventory.hardware import inventory
from orchestrator.tasks.load import load_task
from orchestrator.tasks.synthetic import Synthetic
from orchestrator.tasks.task import TensorData

SMALL = (
    "--task", "digits", "--width", "16", "--layers", "1",
    "--experts", "4", "--batch-size", "8", "--gpu-mode", "cpu",
)  # fmt: skip


def make_calibration(machine: str | None = None) -> Calibration:
    hardware = inventory()
    links = Interconnect(*[Link("shared memory", 1e-3, 1e9)] * 2)
    profiles = (
        Profile(1, hardware.cores, device(asynchronous=False)),
        Profile(2, 1, device(asynchronous=False), links),
    )
    return Calibration(
        VERSION,
        "2026-11-15T00:00:00",
        machine or f"{hardware.cpu_name}, {hardware.cores} cores",
        hardware.cores,
        1.0,
        0.0,
        profiles,
    )


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_without_a_calibration_plan_says_how_to_get_a_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL]) == 0
    assert "orchestrator bench --calibrate" in " ".join(capsys.readouterr().out.split())


def test_plan_predicts_from_the_calibration_of_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_calibration(make_calibration(), tmp_path / "results" / "calibration.json")
    assert main(["plan", *SMALL]) == 0
    assert "limited by" in capsys.readouterr().out
    assert main(["plan", *SMALL, "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)["predicted"]
    assert predicted["step_seconds"] == pytest.approx(sum(predicted["parts"].values()))
    assert predicted["samples"] == 8


@pytest.mark.extended
def test_groups_of_hosts_are_predicted_with_their_experts_and_the_sum_of_the_copies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_calibration(make_calibration(), tmp_path / "results" / "calibration.json")

    def predicted(replicas: int) -> dict[str, Any]:
        hosts = ["--workers", "2", "--parallel-strategy", "expert_parallel", "--evolution", "off"]
        assert main(["plan", *SMALL, *hosts, "--expert-replicas", str(replicas), "--json"]) == 0
        return json.loads(capsys.readouterr().out)["predicted"]

    divided = predicted(1)
    copied = predicted(2)
    assert copied["memory"]["parameters"] > divided["memory"]["parameters"], "all experts are on each host"
    assert divided["parts"]["exchange"] > copied["parts"]["exchange"] == 0, "tokens stay on their host"
    assert copied["parts"]["gradients"] > divided["parts"]["gradients"]


def test_a_calibration_of_another_machine_is_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_calibration(make_calibration("another CPU, 64 cores"), tmp_path / "other.json")
    assert main(["plan", *SMALL, "--calibration", "other.json"]) == 0
    assert "not predicted" in capsys.readouterr().out


def test_a_damaged_calibration_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.json").write_text("{")
    assert main(["plan", *SMALL, "--calibration", "bad.json"]) == 2
    assert "is damaged" in capsys.readouterr().err


def test_the_scaling_table_has_a_row_for_each_number_of_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "--cluster", "nodes=2,gpus=2,gpu=l4", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert {(row["kind"], row["strategy"], row["devices"]) for row in table["rows"]} == {
        (kind, strategy if devices > 1 else "single", devices)
        for kind in ("weak", "strong")
        for strategy in ("data_parallel", "expert_parallel")
        for devices in (1, 2, 4)
    }
    assert all(row["fits"] and 0 < row["efficiency"] < 2 for row in table["rows"])
    assert main(["plan", *SMALL, "--cluster", "gpus=2,gpu=h200"]) == 0
    shown = capsys.readouterr().out
    assert "weak scaling" in shown
    assert "host overhead" in shown


@pytest.mark.extended
def test_the_scaling_table_names_its_assumptions_and_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "--workers", "3", "--cluster", "nodes=2,gpus=4,gpu=l4", "--json"]) == 0
    notes = "; ".join(json.loads(capsys.readouterr().out)["notes"])
    assert "expert parallel has at most 4 devices: there are as many experts" in notes
    assert "the tables do not use --workers 3" in notes
    assert main(["plan", *SMALL, "--cluster", "nodes=2,gpus=2,gpu=l4,net=100gbit", "--json"]) == 0
    *_, last = notes = json.loads(capsys.readouterr().out)["notes"]
    assert len(notes) == 3
    assert last.startswith("host overhead is the time in which a host launches operations more slowly")


@pytest.mark.extended(but_first=2)
@pytest.mark.parametrize(
    ("cluster", "first"),
    [
        (
            "64x8xH100",
            "cluster: 64 × 8 H100, nvlink, 8 × 400 Gbit/s between nodes; the network is assumed "
            "(that of dgx-h100 nodes): for another add node=p5.48xlarge, node=a3-megagpu-8g, "
            "node=a3-highgpu-8g, node=nd96isr_h100_v5 or net=100gbit,nics=1 to --cluster",
        ),
        (
            "nodes=2,node=a3-highgpu-8g",
            "cluster: 2 × 8 H100, nvlink, 4 × 200 Gbit/s between nodes; "
            "the network is that of a3-highgpu-8g nodes",
        ),
        (
            "2x8xH100,net=10gbit",
            "cluster: 2 × 8 H100, nvlink, 10 Gbit/s between nodes; the network is as given",
        ),
        (
            "2x2xRTX4090",
            "cluster: 2 × 2 RTX4090, pcie, 100 Gbit/s between nodes; the network is assumed "
            "(no node with such GPUs is known): for another add net=100gbit,nics=1 to --cluster",
        ),
    ],
)
def test_the_first_line_names_the_network(
    cluster: str, first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *SMALL, "--cluster", cluster]) == 0
    assert capsys.readouterr().out.splitlines()[0] == first


def test_the_step_of_the_plan_and_the_table_have_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """The table's row for all devices is the step of the plan."""
    flags = ["plan", *SMALL[:-2], "--parallel-strategy", "data_parallel", "--cluster", "4xL4"]
    assert main([*flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    row = next(row for row in found["rows"] if (row["kind"], row["devices"]) == ("weak", 4))
    assert row["strategy"] == found["choices"]["strategy"]["value"]
    assert row["parts"] == found["predicted"]["parts"]
    assert row["parts"]["overhead"] < row["host_seconds"], "in part hidden behind the device"

    assert main(flags) == 0
    shown = " ".join(capsys.readouterr().out.split())
    step = re.search(r"samples/s: (.*?); limited by (.*?) \(predicted", shown)
    assert step is not None
    parts, limit = step.groups()
    assert limit == "host overhead, the launch of operations"
    assert f"{row['limited_by']} {parts}" in shown, "the columns of the table"
    predictions = [found["predicted"], *found["rows"]]
    shares = {f"{each['bounds']['overhead'] / each['step_seconds']:.0%}" for each in predictions}
    assert set(re.findall(r"overhead \(?(\d+%)", shown)) == shares, "no other figure has the name"


@pytest.mark.extended
def test_a_step_in_a_cuda_graph_is_said_to_have_one_launch(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["plan", *SMALL[:-2], "--evolution", "off", "--cluster", "1xH200"]
    for switch in ("on", "off"):
        assert main([*flags, "--cuda-graph", switch]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert ("; in a CUDA graph, which has one launch, it may be faster)" in shown) == (switch == "on")


@pytest.mark.extended
def test_weak_scaling_goes_on_where_the_data_ends(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--task synthetic --width 16 --layers 1 --experts 4 --samples 100"
    flags = ["plan", *sizes.split(), "--cluster", "2x8xL4", "--json"]

    def samples_of(*more: str) -> tuple[dict[str, list[float]], str]:
        assert main([*flags, *more]) == 0
        found = json.loads(capsys.readouterr().out)
        rows = [row for row in found["rows"] if row["strategy"] != "expert_parallel"]
        samples = {
            kind: [row["samples"] for row in rows if row["kind"] == kind] for kind in ("weak", "strong")
        }
        return samples, "; ".join(found["notes"])

    samples, notes = samples_of()
    assert samples == {"weak": [64, 128, 256, 512, 1024], "strong": [64] * 5}
    assert (
        "weak scaling on more than 1 device needs more data: "
        "each takes 64 samples of a step, and the data has 100" in notes
    )
    samples, notes = samples_of("--batch-size", "8")
    assert samples == {"weak": [8, 16, 32, 64, 128], "strong": [64] * 5}
    assert "weak scaling on more than 12 devices needs more data" in notes
    samples, notes = samples_of("--batch-size", "6")
    assert samples["weak"] == [6, 12, 24, 48, 96]
    assert "needs more data" not in notes
    samples, _ = samples_of("--batch-size", "150", "--global-batch-size", "150")
    assert samples == {"weak": [100, 200, 400, 800, 1600], "strong": [100, 100, 100, 96, 96]}


def test_a_wrong_cluster_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "--cluster", "gpu=h2000"]) == 2
    assert "did you mean 'h200'" in capsys.readouterr().err
    assert main(["plan", *SMALL, "--cluster", "gpu=h200,gpus=2,gpus=4"]) == 2
    assert "gpus is given twice, as 2 and as 4" in capsys.readouterr().err


def test_a_calibration_of_the_gpu_is_preferred_to_its_data_sheet(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    write_calibration(make_calibration("NVIDIA H200"), path)
    measured, known = (cluster_figures(parse_cluster(f"gpu={gpu}"), path) for gpu in ("h200", "h100"))
    assert "calibration of NVIDIA H200" in measured.source
    assert "data sheet" in known.source
    assert measured.machine.device.products != known.machine.device.products


@pytest.mark.extended
def test_predictions_count_the_same_state_as_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """One H200: copies of large experts in bf16, the moments of the optimizer, and an average."""
    sizes = "--task synthetic --width 512 --layers 2 --experts 8 --expert-hidden-size 1024 --vocabulary 64"
    flags = f"{sizes} --samples 64 --batch-size 64 --evolution off --cluster gpu=h200 --json".split()

    def of_plan_step_and_table(*more: str) -> list[dict[str, float]]:
        assert main(["plan", *flags, *more]) == 0
        found = json.loads(capsys.readouterr().out)
        table = next(row for row in found["rows"] if row["kind"] == "weak" and row["devices"] == 1)
        return [found["memory"], found["predicted"]["memory"], table["memory"]]

    plain = of_plan_step_and_table("--precision", "bf16")
    assert {memory["weight_copies"] for memory in plain} == {2 * 2 * 8 * 3 * 512 * 1024}
    assert {memory["average"] for memory in plain} == {0}
    assert of_plan_step_and_table("--precision", "fp8") == plain
    averaged = of_plan_step_and_table("--precision", "bf16", "--ema-decay", "0.99", "--optimizer", "sgd")
    for memory in averaged:
        assert memory["weight_copies"] == 0, "only our AdamW writes copies"
        assert memory["average"] > 0
        assert memory["optimizer"] == pytest.approx(memory["average"]), "SGD has one moment"
    recomputed = of_plan_step_and_table("--precision", "bf16", "--recompute-experts")
    for before, after in zip(plain, recomputed, strict=True):
        assert after["activations"] < before["activations"]


@pytest.mark.extended
def test_a_plan_for_a_cluster_that_is_too_small_names_one_that_would_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = "--width 4096 --layers 8 --experts 16 --expert-hidden-size 8192 --vocabulary 512"
    large = f"--task synthetic {sizes} --batch-size 1 --samples 64".split()
    assert main(["plan", *large, "--cluster", "2xL4", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    memory = found["memory"]
    missing = (memory["total"] - memory["limit"]) / 2**30
    assert f"{missing:.1f} GiB more than the usable" in found["shortage"]
    nearest = found["shortage"].partition("nearest configuration that fits: ")[2].split()
    assert nearest[0] == "--cluster"
    assert main(["plan", *large, *nearest, "--json"]) == 0
    enough = json.loads(capsys.readouterr().out)
    assert enough["shortage"] is None
    assert enough["predicted"]["step_seconds"] > 0
    assert enough["memory"]["total"] <= enough["memory"]["limit"]


@pytest.mark.extended
def test_a_batch_that_is_too_large_is_told_from_a_sample_that_is(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--task synthetic --width 256 --layers 2 --sequence-length 512 --experts 0 --samples 100000"
    given = ["plan", *sizes.split(), "--cluster", "8xL4", "--json"]
    assert main([*given, "--batch-size", "100000"]) == 3
    found = json.loads(capsys.readouterr().out)
    shortage = found["shortage"]
    assert shortage.startswith("a micro-batch of 12,500 samples needs")
    for name in ("eval_batch_size", "activation_checkpointing"):
        assert "fit" not in found["choices"][name]["reason"]
    advice = re.search(r"that fits: --batch-size (\d+) --global-batch-size (\d+)$", shortage)
    assert advice is not None, "more GPUs are no remedy for a batch that was asked for"
    most, samples = advice.groups()
    step = ["--global-batch-size", samples]
    assert main([*given, *step, "--batch-size", most]) == 0
    followed = json.loads(capsys.readouterr().out)["choices"]
    assert followed["global_batch_size"]["value"] == found["choices"]["global_batch_size"]["value"]
    assert main([*given, *step, "--batch-size", str(int(most) + 1)]) == 3, "one more does not fit"
    capsys.readouterr()
    assert main([*given, *step]) == 0, "without --batch-size the plan chooses one that fits"
    capsys.readouterr()
    assert main([*given, "--batch-size", "100000", "--accumulation-steps", "2"]) == 3
    accumulated = json.loads(capsys.readouterr().out)["shortage"]
    assert accumulated.endswith("--accumulation-steps None"), "two of the three sizes may be given"


@pytest.mark.parametrize(
    ("flags", "second"), [((), "predicting the step …"), (("--cluster", "2xL4"), "predicting the scaling …")]
)
def test_plan_says_what_it_is_doing(
    flags: tuple[str, ...], second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    class RecordedStatus(Status):
        def __init__(self, status: RenderableType, **options: Any) -> None:
            shown.append(str(status))
            super().__init__(status, **options)

        def update(self, status: RenderableType | None = None, **options: Any) -> None:
            shown.append(str(status))
            super().update(status, **options)

    monkeypatch.setattr("rich.status.Status", RecordedStatus)
    assert main(["plan", *SMALL[:-2], "--gpu-mode", "auto" if flags else "cpu", *flags]) == 0
    assert shown == ["tracing the model …", second]


@pytest.mark.extended
def test_a_plan_for_a_cluster_reads_data_in_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    generate = Synthetic.train_data

    def counted(task: Synthetic) -> TensorData:
        data = generate(task)
        reads.append(len(data))
        return data

    monkeypatch.setattr(Synthetic, "train_data", counted)
    sizes = "--task synthetic --width 16 --layers 1 --experts 4 --samples 64 --batch-size 8"
    assert main(["plan", *sizes.split(), "--cluster", "2xL4"]) == 0
    assert reads == [64]


def test_predictions_count_two_bytes_for_short_weights() -> None:
    config = Config.of(task="digits", width=16, layers=1, experts=4, weight_precision="bf16")
    task = load_task(config)
    facts = with_memory_settings(config, model_facts(task, "cuda", "bf16", short_weights=True))
    ops = make_tracer(task, facts, True, "bf16", grouped=True, recompute=False)(8, 1, 1, True)
    assert ops.trained == facts.parameters
    assert facts.weight_bytes == 2
