"""Ten secrets of every kind, a task that tells them all, and a search for them."""

from __future__ import annotations

import json
from pathlib import Path

PASSWORD = "canary-n1ne-of-ten"
URL = f"s3://me:{PASSWORD}@storage.example/bucket"
ENVIRONMENT = {
    "WANDB_API_KEY": "canary0ne0123456789abcdef0123456789abcdef",
    "AWS_SECRET_ACCESS_KEY": "canary/tw0+xyz/ABCDEFGHIJKLMNOP",
    "HF_TOKEN": "hf_canaryThree",
    "DB_PASSWORD": "canary 'f0ur' \"quoted\" \\ <&>",
    "CLIENT_SECRET": "canary-fünf-ß",
    "SIGNING_KEY": "-----BEGIN CANARY-----\ncanarySixcanarySixcanarySix\n-----END CANARY-----",
    "SHORT_PASSWORD": "c4n4r7",
    "GITHUB_PAT": "ghp_canaryEight",
    "DATABASE_URL": f"postgres://me:{PASSWORD}@db.example/x",
    "lower_case_token": "canary-ten-lower",
}
CANARIES = [value for name, value in ENVIRONMENT.items() if name not in ("DATABASE_URL", "SIGNING_KEY")]
CANARIES += ["canarySixcanarySixcanarySix", PASSWORD]
assert len(CANARIES) == 10

_TASK = """
import os, sys, warnings
from dataclasses import replace
from orchestrator.tasks.synthetic import Synthetic

NAMES = {names!r}
URL = os.environ["DATABASE_URL"]

def everything():
    return " | ".join(os.environ[name] for name in NAMES)

class Leaky(Synthetic):
    def __init__(self, config):
        super().__init__(config)
        print("printed", everything(), flush=True)
        warnings.warn("warned " + everything())
        self.steps = 0

    def loss(self, model, batch):
        self.steps += model.training and next(iter(model.parameters())).device.type != "meta"
        if {past} and "worker_" in os.readlink("/proc/self/fd/1"):
            os.system("echo past python $HF_TOKEN $DATABASE_URL")
        if {raises} and self.steps > 6:
            sys.stderr.write("on the way " + everything())
            raise RuntimeError("cannot log in at " + URL + " with " + everything())
        made = super().loss(model, batch)
        return replace(made, metrics={{**made.metrics, **{{os.environ[name]: made.sum.detach() for name in NAMES}}}})
"""


def leaky_task(folder: Path, raises: bool, past: bool = False) -> None:
    """``leaky:Leaky`` in a folder. ``raises``: in the midst of it; ``past``: a program of its own writes too."""
    (folder / "leaky.py").write_text(_TASK.format(names=list(ENVIRONMENT), raises=raises, past=past), encoding="utf-8")


def assert_none_in(where: Path | str) -> None:
    """Neither as they are, nor as JSON writes them."""
    texts = {"the text": where.encode()} if isinstance(where, str) else {str(p): p.read_bytes() for p in where.rglob("*") if p.is_file()}
    forms = {form for canary in CANARIES for form in (canary, json.dumps(canary)[1:-1])}
    found = [(name, form) for name, text in texts.items() for form in forms if form.encode() in text]
    assert not found, found
