"""The folder of the helper's sockets."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import process
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


def test_servers_that_start_at_the_same_time_use_their_own_folders() -> None:
    servers = [Forkserver() for _ in range(3)]

    def folders_seen(server: Forkserver) -> set[str]:
        with server._own_socket_folder():
            before = os.environ[SOCKET_FOLDER_VARIABLE]
            time.sleep(0.01)  # so that the other threads can interleave
            return {before, os.environ[SOCKET_FOLDER_VARIABLE], config["tempdir"]}

    config = process.current_process()._config  # type: ignore[attr-defined]
    tempdir = config.get("tempdir")
    with ThreadPoolExecutor(3) as threads:
        seen = [*threads.map(folders_seen, servers)]
    assert seen == [{server._folder} for server in servers]
    assert len({server._folder for server in servers}) == 3
    assert config.get("tempdir") == tempdir
    assert SOCKET_FOLDER_VARIABLE not in os.environ
    for server in servers:
        server.close()


def socket_folder(server: Forkserver) -> Path:
    with server._own_socket_folder():
        return Path(os.environ[SOCKET_FOLDER_VARIABLE])
