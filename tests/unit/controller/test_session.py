"""A session handles requests from any thread, in any state of its ranks; without a process."""

import signal
import threading
from collections.abc import Iterator
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from fakes import FakeLauncher, FakeLink, answer_commands, fake_session, with_threads
from processes import wait_until
from refusals import refusal
from syrupy.assertion import SnapshotAssertion

from nbddp.controller.session import Session
from nbddp.errors import RequestError, StartError
from nbddp.lifecycle.group_state import GroupState
from nbddp.record.cell import CellRequest
from nbddp.record.notices import OutputText
from nbddp.wire.group_spec import GroupSpec
from nbddp.wire.messages import EventReported, MessageBatch, Metrics, Output

TWO = GroupSpec(nproc=2)
HELLO = CellRequest(source="print('hello')")

pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def launcher() -> FakeLauncher:
    return FakeLauncher()


@pytest.fixture
def link() -> FakeLink:
    return FakeLink()


@pytest.fixture
def off(launcher: FakeLauncher, link: FakeLink) -> Iterator[Session]:
    session = fake_session(launcher, link)
    yield session
    session.close()


@pytest.fixture
def session(off: Session) -> Session:
    off.start(TWO)
    return off


def run(session: Session, request: CellRequest = HELLO) -> bool:
    handle = session.submit(request)
    for _ in handle.notices():
        pass
    return handle.result is not None and handle.result.is_ok


def test_every_message_of_a_batch_is_handled(session: Session, link: FakeLink) -> None:
    link.on_send = lambda *_sent: None  # the cell does not end by itself
    handle = session.submit(HELLO)
    text, row = Output(start=0, end=2, text="a\n"), [0.0, 3, {"loss": 0.5}]
    link.deliver(0, MessageBatch(messages=[text, Metrics(rows=[row]), EventReported(kind="mine")]))
    assert handle.notice_queue.get(5.0) == OutputText(0, "a\n")
    happened = partial(session.event_log.since, handle.began_at)
    assert wait_until(lambda: "mine" in [each.kind for each in happened()])
    assert session.rank_monitor.metrics.snapshot(most=1).curves["loss"][0].last == 0.5


def test_a_write_by_another_thread_is_noticed(
    session: Session, writes_by_other_threads: list[str]
) -> None:
    assert run(session)
    session.actor.state.newest_cell = 7
    assert writes_by_other_threads == ["newest_cell, by MainThread"]
    writes_by_other_threads.clear()


def test_nccl_needs_a_gpu_here_only_if_the_ranks_are_local(
    off: Session, launcher: FakeLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(RequestError, match="nccl needs a GPU"):
        off.start(GroupSpec(nproc=2, backend="nccl"))
    launcher.is_local = False
    off.start(GroupSpec(nproc=2, backend="nccl"))
    assert len(launcher.living()) == 2


def test_a_second_session_shares_the_launcher_and_the_store_and_closes_neither(
    session: Session, launcher: FakeLauncher, link: FakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_launcher, other_link = launcher.share(), link.create_sibling()
    answer_commands(other_launcher, other_link)
    monkeypatch.setattr(launcher, "share", lambda: other_launcher)
    monkeypatch.setattr(link, "create_sibling", lambda: other_link)
    second = session.create_sibling()
    second.start(GroupSpec(nproc=3))
    assert run(second)
    assert second.event_log.path != session.event_log.path
    second.close()
    assert not other_launcher.living()
    assert len(launcher.living()) == 2
    assert run(session)


def test_an_interrupt_while_the_launcher_still_imports_cancels_the_start(
    off: Session, launcher: FakeLauncher
) -> None:
    launcher.gate.clear()

    def interrupt() -> None:
        launcher.launch_began.wait(20)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        off.start(TWO)
    assert off.life.state is GroupState.OFF


def test_close_ends_a_launch_in_progress_and_the_group_can_be_started_again(
    off: Session, launcher: FakeLauncher
) -> None:
    launcher.gate.clear()
    off.request_restart(TWO)
    assert launcher.launch_began.wait(20)
    off.close()
    assert not launcher.living()
    assert not {each.name for each in threading.enumerate() if each.name.startswith("nbddp")}
    off.start(TWO)
    assert run(off)


def test_a_lost_link_ends_the_ranks_and_a_restart_makes_a_new_link(
    launcher: FakeLauncher, link: FakeLink
) -> None:
    links = [link, FakeLink()]
    session = Session(launcher, make_runtime=lambda: with_threads(links.pop(0)))
    answer_commands(launcher, link)
    session.start(TWO)
    answer_commands(launcher, links[0])
    link.fail(ConnectionError("the store is gone"))
    assert wait_until(lambda: session.life.state is GroupState.BROKEN)
    session.restart()
    assert run(session)
    session.close()


def test_a_link_that_cannot_be_made_is_one_clear_error_and_the_next_start_works(
    launcher: FakeLauncher, link: FakeLink, snapshot: SnapshotAssertion
) -> None:
    answer_commands(launcher, link)
    made = [OSError(24, "Too many open files"), with_threads(link)]
    session = Session(launcher, make_runtime=Mock(side_effect=made))
    assert refusal(StartError, session.start, TWO) == snapshot
    session.start(TWO)
    assert run(session)
    session.close()
