"""A push is kept as it was sent, whole or not at all, and in no one's memory."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from nbddp.errors import RequestError
from nbddp.record import pushes as room
from nbddp.record.pushes import Pushed, Pushes


@pytest.fixture
def pushes() -> Iterator[Pushes]:
    pushes = Pushes()
    yield pushes
    pushes.close()


def size_of(pushes: Pushes) -> int:
    assert pushes._file is not None
    return os.fstat(pushes._file.fileno()).st_size


def test_what_was_kept_comes_out_as_it_was_sent(pushes: Pushes, tmp_path: Path) -> None:
    kept = [
        pushes.keep(["x"], None, bytes([number]) * number, tmp_path) for number in range(1, 100)
    ]
    assert [each.data() for each in kept] == [bytes([n]) * n for n in range(1, 100)]
    assert kept[0] == Pushed(("x",), None, kept[0].kept)
    assert pushes.keep("ab", [1, 0], b"data", tmp_path).ranks == (1, 0)
    assert {each.remark for each in kept} == {""}


def test_no_file_is_seen_in_the_folder_and_the_folder_may_go(
    pushes: Pushes, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    kept = pushes.keep(["x"], None, b"data", folder)
    assert list(folder.iterdir()) == []
    folder.rmdir()
    assert kept.data() == b"data"


def test_the_space_of_what_nobody_holds_any_more_is_used_again(
    pushes: Pushes, tmp_path: Path
) -> None:
    for _ in range(5):
        kept = pushes.keep(["x"], None, b"x" * 1000, tmp_path)
        del kept
        gc.collect()
    assert size_of(pushes) == 1000
    first = pushes.keep(["x"], None, b"x" * 10, tmp_path)
    second = pushes.keep(["x"], None, b"y" * 10, tmp_path)
    assert size_of(pushes) == 20
    del first
    assert second.data() == b"y" * 10


def test_what_is_too_much_is_not_kept_and_that_is_said_at_once_and_in_a_replay(
    pushes: Pushes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setattr(room, "MAX_KEPT", 100)
    small = pushes.keep(["a"], None, b"x" * 60, tmp_path)
    large = pushes.keep(["b", "c"], None, b"y" * 60, tmp_path)
    assert large.remark == snapshot(name="remark")
    with pytest.raises(RequestError) as caught:
        large.data()
    assert str(caught.value) == snapshot(name="replay")
    assert small.data() == b"x" * 60


def test_a_full_disk_keeps_nothing_of_a_push_and_all_of_those_before(
    pushes: Pushes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = pushes.keep(["a"], None, b"a" * 10, tmp_path)
    written = os.pwrite

    def write(fd: int, data: bytes, at: int) -> int:
        if at > 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(fd, data[:5], at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", write)
        lost = pushes.keep(["b"], None, b"b" * 10, tmp_path)
    assert lost.remark.endswith("No space left on device")
    assert size_of(pushes) == 10
    after = pushes.keep(["c"], None, b"c" * 10, tmp_path)
    assert [before.data(), after.data()] == [b"a" * 10, b"c" * 10]


def test_a_folder_that_is_not_there_is_said(pushes: Pushes, tmp_path: Path) -> None:
    lost = pushes.keep(["x"], None, b"data", tmp_path / "none")
    assert lost.remark.endswith("No such file or directory")


def test_after_the_end_nothing_can_be_had(pushes: Pushes, tmp_path: Path) -> None:
    kept = pushes.keep(["x"], None, b"data", tmp_path)
    pushes.close()
    with pytest.raises(RequestError, match="closed"):
        kept.data()
    again = pushes.keep(["x"], None, b"other", tmp_path)
    assert again.data() == b"other"
