"""A push is stored as it was sent, completely or not at all, and takes no memory."""

import errno
import gc
import os
from pathlib import Path

import pytest
from refusals import refusal
from syrupy.assertion import SnapshotAssertion

from nbddp.errors import RequestError
from nbddp.record.push_store import PushRecord, PushStore


@pytest.fixture
def store() -> PushStore:
    return PushStore()


def open_files() -> int:
    gc.collect()
    return len([*Path("/proc/self/fd").iterdir()])


def test_stored_pushes_are_read_without_their_folder(store: PushStore, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    stored = [store.add(["x"], None, bytes([n]) * n, folder) for n in range(1, 100)]
    assert stored[0] == PushRecord(("x",), None, stored[0].stored)
    assert store.add("ab", [1, 0], b"data", folder).ranks == (1, 0)
    folder.rmdir()  # it is empty
    assert [each.data() for each in stored] == [bytes([n]) * n for n in range(1, 100)]
    assert {each.notice for each in stored} == {""}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only Linux lists descriptors")
def test_pushes_share_a_file_that_is_freed_after_the_last(store: PushStore, tmp_path: Path) -> None:
    before = open_files()
    first, second = (store.add(["x"], None, data, tmp_path) for data in (b"1", b"2"))
    assert open_files() == before + 1
    del first
    store.free()
    assert second.data() == b"2"
    del second
    third = store.add(["x"], None, b"3", tmp_path)
    assert open_files() == before + 1
    assert third.data() == b"3"
    del third
    store.free()
    assert open_files() == before


def test_a_push_on_a_full_disk_is_not_stored_and_earlier_pushes_are_kept(
    store: PushStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    before = store.add(["a"], None, b"a" * 10, tmp_path)
    written = os.pwrite

    def write(fd: int, data: bytes, at: int) -> int:
        if at > 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(fd, data[:5], at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", write)
        lost = store.add(["b", "c"], None, b"b" * 10, tmp_path)
    assert before.stored is not None
    assert os.fstat(before.stored._file.fd).st_size == 10
    after = store.add(["d"], None, b"d" * 10, tmp_path)
    assert [before.data(), after.data()] == [b"a" * 10, b"d" * 10]
    assert {"remark": lost.notice, "replay": refusal(RequestError, lost.data)} == snapshot


def test_a_missing_folder_is_reported(store: PushStore, tmp_path: Path) -> None:
    lost = store.add(["x"], None, b"data", tmp_path / "none")
    assert lost.notice.endswith("No such file or directory")
