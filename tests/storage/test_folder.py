"""Contract of a remote folder, on each kind of storage that runs here, a real S3 server among them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from harness.storage.object_server import ObjectServer
from orchestrator.errors import UserError
from orchestrator.record.files.remote_record import holds_record
from orchestrator.storage import folder as storage_folder
from orchestrator.storage import local_files
from orchestrator.storage.folder import RemoteError, RemoteFolder, is_safe_name, open_folder
from orchestrator.storage.local_copy import local_copy, read_file

SCHEMES = ("file", "memory", "s3")


@pytest.fixture(params=SCHEMES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> RemoteFolder:
    if request.param == "s3":
        return RemoteFolder(request.getfixturevalue("s3").url(uuid4().hex))
    root = tmp_path if request.param == "file" else uuid4().hex
    return RemoteFolder(f"{request.param}://{root}/run 1")


def test_what_is_written_is_listed_and_read(folder: RemoteFolder, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(2**20 + 7))
    assert folder.files() == {}
    folder.upload(source, "a/large")
    folder.write("small", b"12345")
    assert set(folder.files()) == {"a/large", "small"}
    assert folder.read("small", 3) == b"123"
    assert folder.read("small", 100) == b"12345"
    assert folder.read("other", 3) is None
    assert folder.read("a", 3) is None
    folder.write("empty", b"")
    assert folder.read("empty", 3) == b""
    folder.remove(["empty"])
    assert (folder / "a").read("large", 2**21) == source.read_bytes()
    folder.download("a/large", tmp_path / "new" / "target")
    assert (tmp_path / "new" / "target").read_bytes() == source.read_bytes()


def test_a_file_on_a_drive_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RemoteFolder(f"file://{tmp_path}/run")
    source = tmp_path / "source"
    source.write_bytes(b"new")
    folder.write("a/x", b"old")

    def copy_half(_: Path, target: Path) -> None:
        target.write_bytes(b"ne")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(local_files.shutil, "copyfile", copy_half)
        with pytest.raises(RemoteError, match="No space left"):
            folder.upload(source, "a/x")
    assert folder.read("a/x", 9) == b"old"
    assert os.listdir(tmp_path / "run" / "a") == ["x"]
    folder.upload(source, "a/x")
    assert folder.read("a/x", 9) == b"new"


def test_a_file_on_a_drive_is_synced_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RemoteFolder(f"file://{tmp_path}/run")
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def traced_fsync(descriptor: int) -> None:
        calls.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def traced_replace(source: Path, target: Path) -> None:
        calls.append(f"rename to {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "replace", traced_replace)
    folder.write("a/x", b"content")
    assert calls == ["sync .partial-x", "rename to x", "sync a"]


def test_what_a_killed_upload_leaves_on_a_drive_is_no_object(tmp_path: Path) -> None:
    folder = RemoteFolder(f"file://{tmp_path}/run")
    folder.write("a/x", b"whole")
    (tmp_path / "run" / "a" / ".partial-y").write_bytes(b"half")
    assert set(folder.files()) == {"a/x"}
    folder.remove(["a/x"])
    assert not (tmp_path / "run" / "a").exists()


@pytest.mark.parametrize("gib", [0, 1, 156, 157, 1000, 5 * 1024, 48_000])
def test_no_file_has_more_parts_than_s3_takes(gib: int) -> None:
    part_bytes = storage_folder._part_bytes(gib * 2**30)
    assert -(-gib * 2**30 // part_bytes) <= 10_000
    assert part_bytes % 2**18 == 0, "GCS takes multiples of 256 KiB"
    assert (part_bytes == 2**24) == (gib <= 156)


@pytest.mark.extended
def test_a_large_file_is_uploaded_in_larger_parts(
    s3: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is that of an object store: 10,000 parts of a real one."""
    monkeypatch.setattr(storage_folder, "_MAX_PARTS", 2)
    source = tmp_path / "source"
    source.write_bytes(os.urandom(2**22) * 10)
    folder = RemoteFolder(s3.url(uuid4().hex))
    folder.upload(source, "large")
    # The mark of an object in parts ends with their number.
    assert folder.version("large").strip('"').endswith("-2")
    folder.download("large", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()


def refuse_reads(folder: RemoteFolder, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the storage answer with an error when it is asked for an object."""
    if folder.url.startswith("file"):
        path = Path(folder.url.removeprefix("file://")) / name
        path.unlink()
        path.symlink_to(path)  # root may read everything, except for a link to itself
        return

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("403 Forbidden")

    files = folder._files
    for method in ("info", "_info"):
        monkeypatch.setattr(files, method, refuse, raising=False)


def test_an_object_that_the_storage_refuses_is_not_taken_for_none(
    folder: RemoteFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write("events.jsonl", b"{}")
    refuse_reads(folder, "events.jsonl", monkeypatch)
    with pytest.raises(RemoteError, match=r"cannot read events\.jsonl of"):
        folder.read("events.jsonl", 1)
    with pytest.raises(RemoteError, match=r"cannot read events\.jsonl of"):
        holds_record(folder)


def test_a_folder_of_a_disk_that_cannot_be_listed_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RemoteFolder(f"file://{tmp_path}/run1")
    folder.write("checkpoints/x", b"1")
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("checkpoints"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(RemoteError, match=r"cannot list .*Permission denied"):
        folder.files()


def test_an_object_is_replaced_and_its_version_with_it(folder: RemoteFolder) -> None:
    folder.write("x", b"first")
    version = folder.files()["x"]
    folder.write("x", b"other")
    assert folder.read("x", 9) == b"other"
    if folder.url.startswith("s3"):
        assert folder.files()["x"] != version


def test_objects_are_removed_and_those_that_are_gone_are_no_error(folder: RemoteFolder) -> None:
    folder.write("a/x", b"1")
    folder.write("y", b"2")
    folder.remove(["a/x", "a/gone"])
    assert set(folder.files()) == {"y"}


def test_a_writable_folder_passes_the_check_and_stays_empty(folder: RemoteFolder) -> None:
    folder.check_writable()
    assert folder.files() == {}


def test_a_file_of_several_parts_arrives_whole(s3: ObjectServer, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(2**25 + 1234))
    folder = RemoteFolder(s3.url(uuid4().hex))
    folder.upload(source, "large")
    folder.download("large", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == source.read_bytes()


def test_a_missing_bucket_is_an_error_with_its_name(s3: ObjectServer) -> None:
    with pytest.raises(RemoteError, match=r"s3://no-such-bucket/run1.*bucket does not exist"):
        RemoteFolder("s3://no-such-bucket/run1").check_writable()


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RemoteError, match="cannot write"):
        RemoteFolder(f"file://{tmp_path}/file/run1").check_writable()


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "a//b", "", ".", "a/\n", "a\\b"])
def test_a_name_that_leads_elsewhere_is_not_safe(name: str) -> None:
    assert not is_safe_name(name)


def test_names_that_lead_elsewhere_are_not_listed(s3: ObjectServer) -> None:
    prefix = uuid4().hex
    s3.client().put_object(Bucket="runs", Key=f"{prefix}/../../evil", Body=b"x")
    s3.client().put_object(Bucket="runs", Key=f"{prefix}/good", Body=b"x")
    assert set(RemoteFolder(s3.url(prefix)).files()) == {"good"}


@pytest.mark.extended(but_first=1)
def test_data_is_copied_once_and_again_when_it_has_changed(
    folder: RemoteFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder.write("sub/a.txt", b"one")
    folder.write("b.txt", b"two")
    copy = local_copy("--data-dir", folder.url)
    assert {path.name: path.read_bytes() for path in copy.rglob("*.txt")} == {
        "a.txt": b"one",
        "b.txt": b"two",
    }
    assert local_copy("--data-dir", folder.url) == copy
    folder.write("b.txt", b"three")
    changed = local_copy("--data-dir", folder.url)
    assert changed != copy
    assert (changed / "b.txt").read_bytes() == b"three"


def test_the_address_of_a_file_is_copied_as_a_file(
    folder: RemoteFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder.write("book.txt", b"once upon a time")
    folder.write("other.txt", b"not asked for")
    copy = local_copy("--data-dir", f"{folder.url}/book.txt")
    assert copy.read_bytes() == b"once upon a time"
    assert [path.name for path in copy.parent.iterdir()] == ["book.txt"]
    assert read_file("--placement", f"{folder.url}/book.txt") == b"once upon a time"


def test_missing_data_is_refused(
    folder: RemoteFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"--data-dir .*nothing/here: there is nothing"):
        local_copy("--data-dir", f"{folder.url}/nothing/here")
    with pytest.raises(FileNotFoundError, match="there is no"):
        read_file("--placement", f"{folder.url}/placement.json")


def test_an_address_that_cannot_be_used_is_the_users_error() -> None:
    with pytest.raises(UserError, match="hdfs:// is not known"):
        open_folder("--data-dir", "hdfs://x/y")
