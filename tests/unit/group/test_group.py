"""The API of a group for scripts, and its errors; without a process."""

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import FakeLauncher, FakeLink, fake_session
from refusals import refusal
from syrupy.assertion import SnapshotAssertion

from nbddp import ArgumentError, RequestError, WorkerGroup
from nbddp.group.rank_group import RankGroup
from nbddp.wire.messages import Shutdown


@pytest.fixture
def link() -> FakeLink:
    return FakeLink()


@pytest.fixture
def group(link: FakeLink, folder: Path) -> Iterator[WorkerGroup]:  # noqa: ARG001 - of its run
    group = WorkerGroup(nproc=2)
    group._group = RankGroup(group._group.spec, fake_session(FakeLauncher(), link))
    group.start()
    yield group
    group.close()


def test_a_group_has_its_living_ranks_and_its_run_folder(group: WorkerGroup) -> None:
    assert group.alive == [0, 1]
    assert group.folder is not None
    assert (group.folder / "run.json").exists()
    group.kill(1)
    assert group.alive == [0]
    group.stop()
    assert (group.alive, group.folder) == ([], None)


def test_an_empty_list_of_ranks_and_a_rank_out_of_range_are_refused(
    group: WorkerGroup, link: FakeLink, snapshot: SnapshotAssertion
) -> None:
    texts = [
        refusal(RequestError, group.run, "x = 1", ranks=[]),
        refusal(RequestError, group.push, {"x": 1}, ranks=[]),
    ]
    assert texts == snapshot
    [text] = {
        refusal(ArgumentError, group.run, "x = 1", ranks=[0, 7]),
        refusal(ArgumentError, group.push, {"x": 1}, ranks=[7]),
        refusal(ArgumentError, group.pull, "x", rank=7),
        refusal(ArgumentError, group.kill, 7),
    }
    assert "rank 7" in text
    assert not link.sent
    assert group._group.session.replay_log.entries == ()


def test_values_of_a_group_without_ranks_are_not_an_empty_list(
    group: WorkerGroup, link: FakeLink, snapshot: SnapshotAssertion
) -> None:
    group.kill(0)
    group.kill(1)
    reasons = {"dead": refusal(RequestError, group.pull, "x")}
    refusal(RequestError, group.push, {"x": 1})
    assert not [command for _, command in link.sent if not isinstance(command, Shutdown)]
    group.stop()
    reasons["stopped"] = refusal(RequestError, group.pull, "x")
    assert reasons == snapshot


ARGUMENTS = {"kill": (0,), "pull": ("rank",), "push": ({"x": 1},), "run": ("pass",)}
PROPERTIES = ("alive", "folder", "is_live")
METHODS = ("__enter__", "close", "interrupt", "restart", "start", "stop", *ARGUMENTS)


def said_by(group: WorkerGroup, name: str) -> str:
    try:
        found = getattr(group, name)
        return repr(found(*ARGUMENTS.get(name, ())) if name in METHODS else found)
    except RequestError as error:
        return str(error)


def test_a_group_used_in_a_forked_process_raises_an_error_that_names_its_owner(
    group: WorkerGroup, snapshot: SnapshotAssertion
) -> None:
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads
        pid = os.fork()
    if pid == 0:
        try:
            group.__exit__(None, None, None)  # closes nothing of the other's
            texts = {name: said_by(group, name) for name in (*PROPERTIES, *METHODS)}
            os.write(writer, json.dumps(texts).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        texts = json.loads(pipe.read())
    os.waitpid(pid, 0)
    [text] = set(texts.values())
    assert text.replace(str(os.getpid()), "PID") == snapshot
    assert group.is_live


def test_the_error_of_a_group_that_was_not_started_names_start(snapshot: SnapshotAssertion) -> None:
    group = WorkerGroup(nproc=2)
    texts = {
        refusal(RequestError, group.run, "x = 1"),
        refusal(RequestError, group.push, {"x": 1}),
        refusal(RequestError, group.pull, "x"),
        refusal(RequestError, group.kill, 0),
    }
    assert texts == snapshot
