"""Ten secrets of every kind, a task that leaks them all, and a search for them."""

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
"""A data path that contains all of them."""

_TASK = """
import os, sys, warnings
from dataclasses import replace
from orchestrator.tasks.synthetic import Synthetic

NAMES = {names!r}
SECRETS = [os.environ[name] for name in NAMES if name in os.environ]
PATHS = []
URL = os.environ.get("DATABASE_URL", "")

def all_secrets():
    return " | ".join(SECRETS + PATHS)

class Leaky(Synthetic):
    def __init__(self, config):
        super().__init__(config)
        PATHS[:] = [str(config.data.data_dir)]
        print("printed", all_secrets(), flush=True)
        warnings.warn("warned " + all_secrets())
        self.steps = 0

    def loss(self, model, batch):
        self.steps += model.training and next(iter(model.parameters())).device.type != "meta"
        if {with_subprocess} and "worker_" in os.readlink("/proc/self/fd/1"):
            os.system("echo subprocess $HF_TOKEN $DATABASE_URL")
        if {raises} and self.steps > 6:
            sys.stderr.write("to stderr " + all_secrets())
            raise RuntimeError("cannot log in at " + URL + " with " + all_secrets())
        loss = super().loss(model, batch)
        leaked = {{secret: loss.sum.detach() for secret in SECRETS}}
        return replace(loss, metrics={{**loss.metrics, **leaked}})
"""


def leaky_task(folder: Path, raises: bool, with_subprocess: bool = False) -> None:
    """Write ``leaky:Leaky``, which prints, warns of and logs all secrets of its environment and settings.

    With ``raises`` it also fails after some steps; with ``with_subprocess`` a child process writes
    too.
    """
    (folder / "leaky.py").write_text(
        _TASK.format(names=list(ENVIRONMENT), raises=raises, with_subprocess=with_subprocess),
        encoding="utf-8",
    )


def _forms(canary: str) -> tuple[str, ...]:
    """Return a secret as it is, and as JSON, Python, HTML, an address and a shell would write it."""
    return (
        canary,
        json.dumps(canary)[1:-1],
        json.dumps(canary, ensure_ascii=False)[1:-1],
        repr(canary)[1:-1],
        escape(canary),
        quote(canary),
        quote(canary, safe=""),
        shlex.quote(canary).strip("'"),
    )


def assert_none_in(where: Path | str) -> None:
    """Check that a text, or the files of a folder, contain no secret in any form."""
    if isinstance(where, str):
        texts = {"the text": where.encode()}
    else:
        texts = {str(path): path.read_bytes() for path in where.rglob("*") if path.is_file()}
    forms = {form for canary in CANARIES for form in _forms(canary)}
    leaks = [(name, form) for name, text in texts.items() for form in forms if form.encode() in text]
    assert not leaks, leaks
