"""Ten secrets of every kind, a task that tells them all, and a search for them."""

from __future__ import annotations

import json
import shlex
from html import escape
from pathlib import Path
from urllib.parse import quote

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
PATH = "/data/" + "/".join(CANARIES)
"""As the path of some data."""

_TASK = """
import os, sys, warnings
from dataclasses import replace
from orchestrator.tasks.synthetic import Synthetic

NAMES = {names!r}
FOUND = [os.environ[name] for name in NAMES if name in os.environ]
SAID = []
URL = os.environ.get("DATABASE_URL", "")

def everything():
    return " | ".join(FOUND + SAID)

class Leaky(Synthetic):
    def __init__(self, config):
        super().__init__(config)
        SAID[:] = [str(config.data.data_dir)]
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
        return replace(made, metrics={{**made.metrics, **{{known: made.sum.detach() for known in FOUND}}}})
"""


def leaky_task(folder: Path, raises: bool, past: bool = False) -> None:
    """``leaky:Leaky`` in a folder: it tells what it finds in the environment and in its settings. ``raises``: in the midst of it;
    ``past``: a program of its own writes too."""
    (folder / "leaky.py").write_text(
        _TASK.format(names=list(ENVIRONMENT), raises=raises, past=past), encoding="utf-8"
    )


def _forms(canary: str) -> tuple[str, ...]:
    """As it is, and as JSON, Python, HTML, an address and a shell would write it."""
    return (
        *(
            canary,
            json.dumps(canary)[1:-1],
            json.dumps(canary, ensure_ascii=False)[1:-1],
            repr(canary)[1:-1],
            escape(canary),
        ),
        *(quote(canary), quote(canary, safe=""), shlex.quote(canary).strip("'")),
    )


def assert_none_in(where: Path | str) -> None:
    """In none of the forms in which something writes them."""
    texts = (
        {"the text": where.encode()}
        if isinstance(where, str)
        else {str(p): p.read_bytes() for p in where.rglob("*") if p.is_file()}
    )
    forms = {form for canary in CANARIES for form in _forms(canary)}
    found = [(name, form) for name, text in texts.items() for form in forms if form.encode() in text]
    assert not found, found
