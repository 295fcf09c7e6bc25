"""Expert hosts are killed while they train: the run goes on, and its losses are those of a quiet run.

python examples/chaos.py
"""

import os
import signal
from pathlib import Path

from orchestrator import Callback, Config, Trainer, read_run

RESULTS = Path("results")


class KillHosts(Callback):
    """Kills a host when the run reaches a step, and shows what follows.

    Callbacks run in the driver, so they outlive the hosts."""

    def __init__(self, run_dir: Path, victims: dict[int, int]) -> None:
        self.run_dir = run_dir
        self.victims = victims
        """The host to kill, by the step."""

    def on_step(self, step) -> None:
        due = [number for number in self.victims if step.step >= number]
        for number in due:
            host = self.victims.pop(number)
            process = int((self.run_dir / "logs" / f"worker_{host}.pid").read_text())
            print(f"step {step.step}: killing host {host} (process {process})")
            os.kill(process, signal.SIGKILL)

    def on_failure(self, failure) -> None:
        print(f"noticed: {failure.message}")


def train(name: str, victims: dict[int, int]) -> list[float]:
    run_dir = RESULTS / name
    config = Config.of(
        task="digits",
        width=16,
        layers=1,
        experts=7,
        expert_hidden_size=[16],
        evolution="off",
        parallel_strategy="expert_parallel",
        workers=2,
        spares=1,
        deterministic=True,
        global_batch_size=50,
        max_steps=120,
        epochs=100,
        snapshot_every=5,
        checkpoint_every=1000,
        log_every=1,
        run_dir=run_dir,
    )
    Trainer(config=config, callbacks=[KillHosts(run_dir, victims)]).fit()
    return read_run(run_dir)["loss"].tolist()


def main() -> None:
    quiet = train("chaos-quiet", {})
    killed = train("chaos-killed", {20: 1, 60: 0})
    print(read_run(RESULTS / "chaos-killed", "recoveries").to_string(max_cols=8))
    print("losses equal to the bit:", quiet == killed)


if __name__ == "__main__":
    main()
