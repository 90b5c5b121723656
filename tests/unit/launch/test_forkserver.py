"""The helper's sockets and answers, spawned ranks, and the limit of open files."""

import os
import resource
import shutil
import socket
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import process, spawn
from pathlib import Path
from types import ModuleType

import pytest
from refusals import refusal
from syrupy.assertion import SnapshotAssertion

from nbddp.errors import RequestError
from nbddp.launch import forkserver, local_launcher
from nbddp.launch.file_limit import raise_file_limit
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


def test_a_forkserver_that_never_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "ANSWER_TIMEOUT", 0.0)
    monkeypatch.setattr(forkserver, "RESUME_INTERVAL", 0.0)
    reader, writer = os.pipe()
    with pytest.raises(TimeoutError, match=r"^process None, .* did not answer for 0 s; restart"):
        Forkserver().wait_for_answer(reader)
    os.close(writer)
    Forkserver().wait_for_answer(reader)  # its end is an answer
    os.close(reader)


def test_a_spawned_rank_does_not_run_the_users_script(monkeypatch: pytest.MonkeyPatch) -> None:
    script = ModuleType("__main__")
    script.__file__ = __file__
    monkeypatch.setitem(sys.modules, "__main__", script)
    before = dict(vars(script))
    with local_launcher._hidden_main():
        assert not {*spawn.get_preparation_data("rank")} & {
            "init_main_from_path",
            "init_main_from_name",
        }
    assert vars(script) == before


def test_the_limit_of_open_files_is_raised_or_the_ranks_are_refused(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    limits: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(os, "listdir", lambda _path: ["1"] * 40)
    monkeypatch.setattr(resource, "setrlimit", lambda *limit: limits.append(limit))
    for hard, ranks in ((4096, 4), (4096, 24), (resource.RLIM_INFINITY, 80)):
        monkeypatch.setattr(resource, "getrlimit", lambda _kind, hard=hard: (256, hard))
        raise_file_limit(ranks)
    kind = resource.RLIMIT_NOFILE
    assert limits == [(kind, (296, 4096)), (kind, (744, resource.RLIM_INFINITY))]
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (256, 256))
    assert refusal(RequestError, raise_file_limit, 24) == snapshot
