"""The folder of a helper's sockets goes with the process that made it, however that ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from drivers.inside import imported

from nbddp.launch.sockets_folder import AGE, SocketsFolder

MAKES_ONE = (
    f"{imported(SocketsFolder)}import time\n"
    "folder = SocketsFolder(); print(folder.ensure(), flush=True); time.sleep(600)"
)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def others(temporary: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process with a folder that is old enough."""
    assert tempfile.gettempdir() == str(temporary)
    with subprocess.Popen(
        [sys.executable, "-c", MAKES_ONE], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        (path / "listener").touch()
        age(path)
        yield process, path
        process.kill()


def age(path: Path) -> None:
    """As if it had been there for longer."""
    then = time.time() - 2 * AGE
    os.utime(path, (then, then))


def made() -> SocketsFolder:
    folder = SocketsFolder()
    folder.ensure()
    return folder


@pytest.mark.process
def test_a_folder_whose_process_was_killed_is_taken_away_by_the_next_one(
    others: tuple[subprocess.Popen[str], Path],
) -> None:
    process, path = others
    made().close()
    assert path.exists()  # its process lives
    process.kill()
    process.wait()
    made().close()
    assert not path.exists()


def test_what_is_not_such_a_folder_or_may_just_have_been_made_stays(temporary: Path) -> None:
    young, run, other = (temporary / name for name in ("nbddp_12345678", "nbddp-runs-abc", "x"))
    link = temporary / "nbddp_87654321"
    for path in (young, run, other):
        path.mkdir()
    for path in (run, other):
        age(path)
    link.symlink_to(other)
    made().close()
    assert sorted(temporary.iterdir()) == sorted([young, run, other, link])


def test_a_folder_that_somebody_has_taken_away_is_made_again(temporary: Path) -> None:
    folder = made()
    Path(folder.path).rmdir()
    assert Path(folder.ensure()).is_dir()
    folder.close()
    assert not list(temporary.iterdir())


def test_a_temporary_folder_that_is_too_long_for_a_socket_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = made()
    path = Path(folder.path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder.path}/listener-12345678")
    assert not list(long.iterdir())
    folder.close()
    assert not path.exists()
