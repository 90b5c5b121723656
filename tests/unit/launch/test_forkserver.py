"""The folder of the helper's sockets."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path

import pytest

from nbddp.launch.forkserver import Forkserver
from nbddp.wire.rank_start import SOCKET_FOLDER_VARIABLE


@pytest.mark.parametrize("name", ["short", "x" * 100])
def test_the_socket_folder_has_a_short_path_and_is_removed_at_the_end(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        temporary = Path(base, name)
        temporary.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        server = Forkserver()
        folder = socket_folder(server)
        assert (folder.parent == temporary) is (name == "short")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "listener-12345678"))
        assert socket_folder(server) == folder
        shutil.rmtree(folder)
        assert socket_folder(server).is_dir()
        server.close()
        assert not Path(server._folder).exists()


def socket_folder(server: Forkserver) -> Path:
    with server._own_socket_folder():
        return Path(os.environ[SOCKET_FOLDER_VARIABLE])
