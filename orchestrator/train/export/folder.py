"""The folder of an export, which appears when all of it is written, and its upload to the Hugging Face hub.

The hub's token is that of ``huggingface_hub``: of ``hf auth login``, or its environment variable. It is in no
message."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.errors import UserError
from orchestrator.storage.local_files import sync


def check_target(target: Path) -> None:
    """Raise ``UserError`` unless the folder is new or empty."""
    try:
        is_used = target.exists() and (not target.is_dir() or any(target.iterdir()))
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}; choose another folder") from None
    if is_used:
        raise UserError(f"{target} exists and is not empty; choose another folder, or remove it")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to write to, which gets the target's name at the end of the block."""
    check_target(target)
    partial = _new_partial(target)
    yield partial
    _publish(partial, target)


def _new_partial(target: Path) -> Path:
    """Create the folder that is written, in place of that of an export that was killed."""
    partial = target.absolute().with_name(f".exporting-{target.name}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot write beside {target}: {error.strerror}; choose another folder") from None
    return partial


def _publish(partial: Path, target: Path) -> None:
    """Give a complete folder its name."""
    for path in partial.iterdir():
        sync(path)
    sync(partial)
    if target.exists():
        target.rmdir()  # it is empty
    os.rename(partial, target)
    sync(target.absolute().parent)


_HIDDEN = "***"


def check_push(repo: str) -> None:
    """Raise UserError for an id that the hub refuses, and without a token: before hours of export."""
    from huggingface_hub import get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f"--push {repo}: {error}; give organisation/name") from None
    if get_token() is None:
        raise UserError(
            f"--push {repo}: the Hugging Face hub needs a token, and there is none; "
            "run hf auth login, or set HF_TOKEN"
        )


def push(folder: Path, repo: str, content: str) -> str:
    """Upload a folder as one commit and return the address of the model. A new model is private."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        created = api.create_repo(repo, private=True, exist_ok=True)
        # Take the id from the answer: the hub adds the token's user to an id without organisation.
        api.upload_folder(repo_id=created.repo_id, folder_path=folder, commit_message=f"Upload {content}")
    except (OSError, ValueError) as error:  # errors of the hub are OSErrors
        raise UserError(
            f"--push {repo}: the upload failed: {_without_token(error)}. The export is complete in {folder}: "
            f"try again with hf upload {repo} {folder}"
        ) from None
    return str(created)


def _without_token(error: Exception) -> str:
    from huggingface_hub import get_token

    text = str(error).strip() or type(error).__name__
    token = get_token()
    return (text.replace(token, _HIDDEN) if token else text).splitlines()[0]
