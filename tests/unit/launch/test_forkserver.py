"""The folder of the helper's sockets."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import pytest

from nbddp.launch.forkserver import _Server


@pytest.mark.parametrize("name", ["short", "x" * 100])
def test_the_socket_folder_has_a_short_path_and_is_removed_at_the_end(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        temporary = Path(base, name)
        temporary.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        assert_folder(temporary, is_short=name == "short")


def assert_folder(temporary: Path, *, is_short: bool) -> None:
    server = _Server()
    folder = Path(server.ensure_folder())
    assert (folder.parent == temporary) is is_short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "listener-12345678"))
    assert server.ensure_folder() == str(folder)
    server.remove_folder()
    assert not folder.exists()
    assert Path(server.ensure_folder()).is_dir()  # the folder was already removed
    server.remove_folder()
