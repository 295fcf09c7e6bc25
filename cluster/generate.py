"""Write the files of this folder as ``orchestrator launch`` does with the options below.

    make cluster-files

``tests/launch/test_files.py`` checks that the committed files equal the generated text.
"""

from __future__ import annotations

from pathlib import Path

from orchestrator.launch.files import file_text
from orchestrator.launch.launch import Launch, LaunchOptions

FOLDER = Path(__file__).resolve().parent
FILES = {
    "kuberay/rayjob.yaml": LaunchOptions("kuberay", spot=True),
    "kuberay/raycluster.yaml": LaunchOptions("kuberay-cluster", spot=True),
    "slurm.sbatch": LaunchOptions("slurm"),
    "hosts.sh": LaunchOptions("ssh", hosts=("node1", "node2")),
    "ray-up/aws.yaml": LaunchOptions("ray-up", storage="fs-0123.efs.us-west-2.amazonaws.com:/", spot=True),
    "ray-up/gcp.yaml": LaunchOptions(
        "ray-up", cloud="gcp", project="my-project", storage="10.0.0.2:/runs", spot=True
    ),
    "ray-up/machines.yaml": LaunchOptions("ray-up", cloud="none", hosts=("ubuntu@10.0.0.11", "10.0.0.12")),
    "skypilot.yaml": LaunchOptions("skypilot", gpu="L4", storage="10.0.0.2:/runs", spot=True),
}


def main() -> None:
    for name, options in FILES.items():
        (FOLDER / name).parent.mkdir(exist_ok=True)
        (FOLDER / name).write_text(file_text(Launch(options, ())), encoding="utf-8")


if __name__ == "__main__":
    main()
