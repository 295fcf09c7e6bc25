"""Tests of addresses: those that a run can use, and what it says of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.storage import address
from orchestrator.storage.address import (
    as_url,
    check_address,
    location_text,
    refuse_address,
    upload_command,
)


@pytest.mark.parametrize(
    ("written", "url"),
    [
        ("s3://bucket/a/run1", "s3://bucket/a/run1"),
        ("S3://bucket/run1/", "s3://bucket/run1"),
        ("memory://run1", "memory://run1"),
        ("file:///mnt/x/run1", "file:///mnt/x/run1"),
    ],
)
def test_an_address_survives_its_way_through_a_path(written: str, url: str) -> None:
    assert as_url(written) == url
    assert as_url(Path(written)) == url
    assert location_text(Path(written)) == url


@pytest.mark.parametrize("local", ["results/run1", "/mnt/s3:/run1", "./run1", "c:/run1", "run:1", "", None])
def test_a_local_path_is_no_address(local: str | None) -> None:
    assert as_url(local) is None
    check_address("run_dir", local)


def test_an_unknown_scheme_is_refused_with_those_that_are_installed() -> None:
    with pytest.raises(UserError) as refused:
        Config.of(run_dir="hdfs://bucket/run1")
    message = str(refused.value)
    assert "run_dir is hdfs://bucket/run1" in message
    assert "Installed: file://, memory://, s3://" in message


def test_a_missing_library_is_refused_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = address.find_spec
    monkeypatch.setattr(address, "find_spec", lambda name: None if name == "s3fs" else found(name))
    with pytest.raises(ValueError, match=r"pip install 'expert-orchestrator\[s3\]'"):
        check_address("run_dir", "s3://bucket/run1")


@pytest.mark.parametrize("name", ["run_dir", "data_dir", "init_from", "resume", "placement"])
def test_every_setting_that_is_a_path_is_checked(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is ftp://host/x.json; ftp:// is not known"):
        Config.of(**{name: "ftp://host/x.json"})


@pytest.mark.parametrize(
    "url",
    ["s3://bucket/../other", "s3://bucket/a*", "s3://bucket/a?x=1", "s3://a::s3://b", "s3://", "s3://b/a\n"],
)
def test_names_that_a_storage_would_take_for_something_else_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="run_dir is"):
        check_address("run_dir", url)


def test_keys_in_an_address_are_refused_and_not_shown() -> None:
    with pytest.raises(UserError, match="must not hold keys") as refused:
        Config.of(run_dir="s3://AKIA123:topsecret123@bucket/run1")
    assert "topsecret123" not in str(refused.value)


def test_a_verb_that_needs_a_disk_refuses_an_address() -> None:
    refuse_address("--tuned", Path("results/sweep"))
    with pytest.raises(UserError, match="--tuned is s3://bucket/sweep; a folder on a disk was needed"):
        refuse_address("--tuned", Path("s3://bucket/sweep"))


@pytest.mark.parametrize(
    ("url", "command"),
    [
        ("s3://bucket/run1", "aws s3 sync 'results/run 1' s3://bucket/run1"),
        ("gs://bucket/run1", "gcloud storage rsync --recursive 'results/run 1' gs://bucket/run1"),
        ("file:///mnt/x/run1", "cp -r 'results/run 1'/. /mnt/x/run1"),
        ("memory://run1", None),
    ],
)
def test_a_folder_is_uploaded_by_a_command_of_its_storage(url: str, command: str | None) -> None:
    assert upload_command(Path("results/run 1"), url) == command
