"""Folders and files that another user has prepared in a shared folder."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from nbddp.private_files import (
    check_owner,
    is_private_folder,
    make_private_folders,
    open_new_file,
    open_private_file,
    open_private_folder,
    path_through,
)

WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Make all existing files belong to another user."""
    another = os.geteuid() + 1
    return lambda: monkeypatch.setattr(os, "geteuid", lambda: another)


def open_to(mode: int, path: Path) -> Path:
    path.mkdir(exist_ok=True)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    shared = open_to(mode, tmp_path / "run")
    with pytest.raises(PermissionError, match="other users can write to run"):
        open_private_file(shared / "run.json", WRITE)
    assert not is_private_folder(shared)
    os.close(open_private_file(open_to(0o755, shared) / "run.json", WRITE))


def test_a_folder_of_another_user_is_refused(tmp_path: Path, theirs: Callable[[], None]) -> None:
    folder = make_private_folders(tmp_path, "run")
    theirs()
    for refused in (
        lambda: open_private_file(folder / "run.json", WRITE),
        lambda: make_private_folders(tmp_path, "run", "traces"),
        lambda: check_owner(folder),
    ):
        with pytest.raises(PermissionError, match="run belongs to another user"):
            refused()
    assert not [*folder.iterdir()]


def test_no_link_is_followed(tmp_path: Path) -> None:
    folder, victim = make_private_folders(tmp_path, "run"), tmp_path / "victim"
    victim.write_text("kept")
    (folder / "rank0.log").symlink_to(victim)
    (tmp_path / "link").symlink_to(folder)
    for path in (folder / "rank0.log", tmp_path / "link" / "run.json"):
        with pytest.raises(OSError, match=path.name if path.parent == folder else "link"):
            open_private_file(path, WRITE)
    with os.fdopen(open_new_file(folder / "rank0.log"), "w") as file:
        file.write("new")
    assert (victim.read_text(), (folder / "rank0.log").read_text()) == ("kept", "new")


def test_an_older_folder_of_this_user_becomes_private(tmp_path: Path) -> None:
    made = open_to(0o775, tmp_path / "base")  # the umask 002 makes such folders
    open_to(0o775, made / ".nbddp")
    (made / "disk").mkdir(0o755)
    (made / ".nbddp" / "runs").symlink_to(made / "disk")  # this user's link
    runs = make_private_folders(made, ".nbddp", "runs", "first")
    assert [stat.S_IMODE(each.stat().st_mode) for each in (made, runs.parents[1], runs)] == [
        0o775,
        0o755,
        0o700,
    ]
    with open_private_folder(runs) as opened:
        shown = path_through(opened, runs)
        assert shown.samefile(runs)
        runs.rename(made / "moved")
        assert shown.is_dir() == (shown != runs)
