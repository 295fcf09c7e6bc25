"""Uploads an exported folder to the Hugging Face hub.

The token is that of ``huggingface_hub``: of ``hf auth login``, or its environment variable. It is in no
message."""

from __future__ import annotations

from pathlib import Path

from orchestrator.errors import UserError

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
        # Of the answer, not of the option: an id without organisation gets that of the token.
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
