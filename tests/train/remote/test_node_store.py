"""Tests of checkpoints of nodes without a shared disk: hosts upload their files, the driver publishes."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

from harness.storage.folder_links import asking, no_requests
from orchestrator.checkpoint.files import HostPart, load, write_part
from orchestrator.checkpoint.hashed_file import Hashes
from orchestrator.checkpoint.progress import Progress
from orchestrator.errors import CheckpointDamaged
from orchestrator.record.files.log import SilentLog
from orchestrator.storage import folder as storage_folder
from orchestrator.storage.folder import RemoteError, RemoteFolder
from orchestrator.train.remote import mirror, node_store
from orchestrator.train.remote.checkpoints import RemoteCheckpoints
from orchestrator.train.remote.mirror import Mirror
from orchestrator.train.remote.node_store import NodeStore

HOSTS = 3


def nothing() -> None:
    pass


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(storage_folder, "_FIRST_WAIT_SECONDS", 0.001)


@pytest.fixture
def folder() -> RemoteFolder:
    return RemoteFolder(f"memory://{uuid4().hex}/run1")


@pytest.fixture
def driver(folder: RemoteFolder, tmp_path: Path) -> Iterator[Mirror]:
    """The driver's uploads. Its run folder is that of host 0."""
    uploads = Mirror(tmp_path / "host0", folder)
    uploads.start(SilentLog(), keep=1)
    yield uploads
    uploads.stop()


def store_of(tmp_path: Path, folder: RemoteFolder, host: int) -> NodeStore:
    """Return the store of a host on a node of its own."""
    node = tmp_path / f"node{host}" / "run"
    return NodeStore(tmp_path / f"host{host}" / "checkpoints", folder, node, asking(tmp_path / "host0"))


def part(host: int, step: int) -> HostPart:
    tensors = {"model": {f"w{host}": torch.full((4, host + 1), float(step))}}
    progress = vars(Progress(step=step, best_step=10))
    return HostPart(tensors, state={"progress": progress} if host == 0 else None)


def write_parts(
    stores: list[NodeStore], step: int, uploaded: int = HOSTS
) -> tuple[Path, Mapping[str, Hashes]]:
    """Let the hosts write their parts, and the first ``uploaded`` of them upload theirs."""
    begun = stores[0].begin(step)
    files: dict[str, Hashes] = {}
    for host, store in enumerate(stores):
        own = store.part_folder(begun.name)
        files |= write_part(own, host, part(host, step))
        if host < uploaded:
            store.store_part(own, nothing)
    return begun, files


def ask_and_leave(stores: list[NodeStore], step: int) -> None:
    """Let the main host ask the driver to publish, and leave its group before the answer."""
    begun, files = write_parts(stores, step)

    def leave() -> None:
        raise TimeoutError("the group was left")

    with pytest.raises(TimeoutError, match="the group was left"):
        stores[0].publish(begun, step, files, leave)


def save(stores: list[NodeStore], step: int) -> Path:
    begun, files = write_parts(stores, step)
    return stores[0].publish(begun, step, files)


def published(folder: RemoteFolder) -> list[int]:
    return [checkpoint.step for checkpoint in RemoteCheckpoints(folder / "checkpoints").newest_first()]


@pytest.fixture
def stores(tmp_path: Path, folder: RemoteFolder) -> list[NodeStore]:
    return [store_of(tmp_path, folder, host) for host in range(HOSTS)]


@pytest.mark.usefixtures("driver")
def test_parts_of_hosts_without_a_shared_disk_are_one_checkpoint_on_any_node(
    folder: RemoteFolder, stores: list[NodeStore], tmp_path: Path
) -> None:
    save(stores, 40)
    for host in range(HOSTS):
        assert not list(tmp_path.glob(f"host{host}/**/*.safetensors"))
        shutil.rmtree(tmp_path / f"host{host}", ignore_errors=True)
    reader = store_of(tmp_path, folder, 7)
    ((step, path),) = reader.newest_first()
    with reader.reading(path) as readable:
        contents = load(readable)
    assert step == 40
    assert {name: tuple(tensor.shape) for name, tensor in contents.tensors["model"].items()} == {
        "w0": (4, 1),
        "w1": (4, 2),
        "w2": (4, 3),
    }
    assert all(bool((tensor == 40.0).all()) for tensor in contents.tensors["model"].values())


def test_a_checkpoint_with_a_part_that_was_not_uploaded_is_never_published(
    driver: Mirror, folder: RemoteFolder, stores: list[NodeStore]
) -> None:
    save(stores, 20)
    begun, files = write_parts(stores, 40, uploaded=2)
    with pytest.raises(RemoteError, match=r"model_00002\.safetensors was not uploaded as a whole"):
        stores[0].publish(begun, 40, files)
    assert published(folder) == [20]
    save(stores, 60)
    driver.stop()
    assert published(folder) == [60]


def test_the_main_host_waits_until_the_driver_has_published(
    folder: RemoteFolder, stores: list[NodeStore], tmp_path: Path
) -> None:
    begun, files = write_parts(stores, 40)
    seen: list[list[int]] = []
    uploads = Mirror(tmp_path / "host0", folder)

    def start_driver() -> None:
        seen.append(published(folder))
        if len(seen) == 3:
            uploads.start(SilentLog(), keep=1)

    stores[0].publish(begun, 40, files, start_driver)
    uploads.stop()
    assert seen[:3] == [[], [], []]
    assert published(folder) == [40]


def test_a_host_whose_group_was_left_waits_no_longer(stores: list[NodeStore]) -> None:
    ask_and_leave(stores, 40)


@pytest.mark.usefixtures("driver")
def test_a_step_saved_again_has_a_folder_of_its_own(folder: RemoteFolder, stores: list[NodeStore]) -> None:
    """A host of a group that was left may still be uploading its part of the same step."""
    begun, _ = write_parts(stores, 40, uploaded=2)
    again = save(stores, 40)
    before = (folder / "checkpoints").files()
    own = stores[2].folder / begun.name
    own.mkdir()
    write_part(own, 2, part(2, 39))
    stores[2].store_part(own, nothing)
    assert all(
        before[name] == version
        for name, version in (folder / "checkpoints").files().items()
        if name in before
    )
    assert again.name != begun.name
    assert published(folder) == [40]


def test_the_driver_keeps_the_newest_and_the_best(
    driver: Mirror, folder: RemoteFolder, stores: list[NodeStore]
) -> None:
    for step in (10, 20, 30, 40):
        save(stores, step)
    driver.stop()
    assert published(folder) == [40, 10]


def test_files_of_a_later_step_stay_while_hosts_upload_them(
    folder: RemoteFolder, stores: list[NodeStore]
) -> None:
    checkpoints = RemoteCheckpoints(folder / "checkpoints")
    begun, files = write_parts(stores, 40)
    later, _ = write_parts(stores, 50, uploaded=1)
    again, _ = write_parts(stores, 40, uploaded=1)
    names = set((folder / "checkpoints").files())
    step, _, number = begun.name.removeprefix(".writing_").rpartition("_")
    checkpoints.publish(f"{step}.{number}", node_store.manifest_bytes(40, files), nothing)
    checkpoints.retain(1, best_step=None)
    assert names <= set((folder / "checkpoints").files()), (later, again)


def test_a_request_that_is_open_at_the_end_is_answered(
    folder: RemoteFolder, stores: list[NodeStore], tmp_path: Path
) -> None:
    """The group of the main host failed after it had asked, and the run ends without another one."""
    for step, finish in ((40, Mirror.finish_checkpoints), (60, Mirror.finish)):
        ask_and_leave(stores, step)
        finish(Mirror(tmp_path / "host0", folder))
        assert published(folder)[0] == step


@pytest.mark.usefixtures("driver")
def test_of_one_step_the_last_save_comes_first(
    folder: RemoteFolder, stores: list[NodeStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoteCheckpoints, "_remove", lambda *_: None)
    names = [save(stores, 40).name for _ in range(8)]
    newest_first = RemoteCheckpoints(folder / "checkpoints").newest_first()
    assert [checkpoint.name for checkpoint in newest_first] == names[::-1]


def fail_uploads(monkeypatch: pytest.MonkeyPatch, num_failures: int) -> None:
    upload = RemoteFolder.upload
    left = num_failures

    def fail(self: RemoteFolder, source: Path, name: str, *rest: Any) -> None:
        nonlocal left
        if left and name.endswith(".safetensors"):
            left -= 1
            raise RemoteError("the storage is down")
        upload(self, source, name, *rest)

    monkeypatch.setattr(RemoteFolder, "upload", fail)


@pytest.mark.usefixtures("driver")
def test_a_part_is_uploaded_again_after_failures(
    folder: RemoteFolder, stores: list[NodeStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_uploads(monkeypatch, 5)
    save(stores, 40)
    assert published(folder) == [40]


def test_a_part_that_cannot_be_uploaded_is_an_error(
    stores: list[NodeStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_uploads(monkeypatch, 10**6)
    with pytest.raises(RemoteError, match="the storage is down"):
        write_parts(stores, 40)


@pytest.mark.usefixtures("driver")
def test_the_processes_of_a_node_download_a_checkpoint_once(
    folder: RemoteFolder, stores: list[NodeStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(stores, 40)
    ((_, listed),) = stores[0].newest_first()
    downloads: list[str] = []
    download = RemoteFolder.download

    def count(self: RemoteFolder, name: str, target: Path) -> None:
        downloads.append(name)
        download(self, name, target)

    monkeypatch.setattr(RemoteFolder, "download", count)
    node = tmp_path / "node8" / "run"
    processes = [
        NodeStore(tmp_path / f"process{n}" / "checkpoints", folder, node, no_requests) for n in range(2)
    ]
    # The main host lists the path of its own node.
    paths: list[Path] = []

    def read(store: NodeStore) -> None:
        with store.reading(listed) as readable:
            paths.append(readable)

    threads = [threading.Thread(target=read, args=(store,)) for store in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1
    assert paths[0].is_relative_to(node)
    assert len(downloads) == len(set(downloads)) == HOSTS + 1
    # The next save needs no copy of it any more.
    processes[0].part_folder(".writing_step_00000060_00000001")
    assert not paths[0].exists()


def test_a_checkpoint_that_a_user_has_named_is_read_where_it_is(
    stores: list[NodeStore], tmp_path: Path
) -> None:
    for path in (tmp_path / "step_00000040", tmp_path / "other" / "checkpoints" / "step_00000040"):
        with stores[1].reading(path) as readable:
            assert readable == path


@pytest.mark.usefixtures("driver")
def test_a_damaged_checkpoint_is_found_and_unpublished(
    folder: RemoteFolder, stores: list[NodeStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoteCheckpoints, "retain", lambda *_: None)
    save(stores, 20)
    name = save(stores, 40).name
    folder.write(f"checkpoints/{name}/model_00001.safetensors", b"damaged")
    (_, newest), (_, older) = stores[2].newest_first()
    with pytest.raises(CheckpointDamaged), stores[2].reading(newest):
        pass
    with stores[2].reading(older) as readable:
        load(readable)
    waits: list[int] = []
    stores[0].set_aside_after(20, lambda: waits.append(1))
    assert waits, "the driver sees that the main host waits for it"
    assert published(folder) == [20]
    assert f"checkpoints/{name}/abandoned.json" in folder.files()
