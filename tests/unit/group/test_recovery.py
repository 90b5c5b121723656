"""A replay repeats earlier cells until a cell fails or the user interrupts it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from fakes import FakeLauncher, FakeLink, fake_session
from syrupy.assertion import SnapshotAssertion

from nbddp.controller.session import Session
from nbddp.errors import CellInterruptedError, RequestError
from nbddp.group.display import TextDisplay
from nbddp.group.recovery import UNKNOWN_CELLS, Recovery
from nbddp.lifecycle.events import NodeJoined
from nbddp.lifecycle.group_state import GroupState
from nbddp.lifecycle.retries import Retries
from nbddp.record.cell import CellHandle, CellRequest, CellResult, Purpose
from nbddp.wire.group_spec import GroupSpec
from nbddp.wire.messages import CellEnded, Interrupt, MessageToRank, RunCell

TWO = GroupSpec(nproc=2)
ENTRIES = tuple(
    CellRequest(source=f"step {number}", execution_count=number + 4) for number in range(3)
)
FAILURE = {"name": "ValueError", "text": "no", "traceback": "ValueError: no", "at": 1.0}


def again(entries: tuple[CellRequest, ...]) -> tuple[CellRequest, ...]:
    return tuple(replace(entry, purpose=Purpose.REPLAY) for entry in entries)


class RecordingDisplay(TextDisplay):
    """A display that shows the cells of a play and records its messages."""

    has_record = False

    def __init__(self, play: Play) -> None:
        super().__init__()
        self.show = play.show  # type: ignore[assignment]
        self.print_line = play.printed.append  # type: ignore[assignment, method-assign]

    def view(self, _session: Session) -> Any:
        return self

    def continue_from(self, _before: Any) -> None:
        pass


class Play:
    """A session with fake ranks; a chosen cell of them hangs or fails.

    ``words`` are the exact texts that a test expects.
    """

    def __init__(self, words: SnapshotAssertion, launcher: FakeLauncher | None = None) -> None:
        self.words = words
        self.launcher: Any = launcher or FakeLauncher()
        self.link = FakeLink()
        self.session = fake_session(self.launcher, self.link)
        self.printed: list[str] = []
        self.sources: list[str] = []
        self.hung = threading.Event()
        self.hangs_in = self.fails_in = ""
        self.on_cell: Callable[[str], None] = lambda _source: None
        self.obey, self.link.on_send = self.link.on_send, self.receive
        self.recovery = Recovery(self.session, RecordingDisplay(self))
        self.session.start(TWO)

    @property
    def state(self) -> GroupState:
        return self.session.life.state

    @property
    def replay_log(self) -> tuple[Any, Any]:
        """Return the completed entries, and the entries that a replay left pending."""
        return self.session.replay_log.entries, self.session.replay_log.pending

    def train(self, **retries: Any) -> CellResult:
        return self.recovery.run(CellRequest(source="trains"), Retries(**retries))

    def when_it_hangs(self, act: Callable[[], object]) -> threading.Thread:
        def wait_and_act() -> None:
            self.hung.wait(20)
            act()

        thread = threading.Thread(target=wait_and_act)
        thread.start()
        return thread

    def interrupt_when_it_hangs(self) -> None:
        main = threading.main_thread().ident or 0
        self.when_it_hangs(lambda: signal.pthread_kill(main, signal.SIGINT))

    def receive(self, attempt: int, rank: int, command: MessageToRank) -> None:
        source = command.source if isinstance(command, RunCell) else None
        if source is not None and rank == 0:
            self.sources.append(source)
            self.on_cell(source)
        if source is not None and source == self.hangs_in:
            self.hung.set()
        elif isinstance(command, Interrupt) or source == self.fails_in:
            how = {"in_group": True, "is_interrupted": source is None, "failure": FAILURE}
            report = CellEnded(cell=command.cell, **how)
            self.link.deliver(rank, report, attempt=attempt)
        else:
            self.obey(attempt, rank, command)

    def show(self, handle: CellHandle) -> CellResult:
        for _ in handle.notices():
            pass
        assert handle.result is not None
        return handle.result


@pytest.fixture
def play(folder: Path, snapshot: SnapshotAssertion) -> Iterator[Play]:  # noqa: ARG001 - of the run
    play = Play(snapshot)
    yield play
    play.session.close()


def assert_interrupted(result: CellResult | None) -> None:
    assert result is not None
    with pytest.raises(CellInterruptedError):
        result.raise_for_failure()


def test_an_interrupt_during_a_replay_interrupts_the_ranks_and_ends_the_replay(play: Play) -> None:
    play.hangs_in = "step 1"
    play.interrupt_when_it_hangs()
    assert_interrupted(play.recovery.replay(ENTRIES))
    assert play.sources == ["step 0", "step 1"]
    assert play.state is GroupState.IDLE
    assert play.replay_log == (again(ENTRIES[:1]), ENTRIES[1:])
    assert play.printed == play.words
    play.hangs_in = ""
    assert play.show(play.session.submit(CellRequest(source="next"))).is_ok


def test_an_interrupt_between_two_cells_of_a_replay_is_not_lost(play: Play) -> None:
    play.on_cell = lambda source: play.session.interrupt() if source == "step 1" else None
    # too late for the cell itself: its ranks have ended it before they read the interrupt
    with pytest.raises(CellInterruptedError) as caught:
        play.recovery.replay(ENTRIES)
    assert caught.value.report == play.words
    assert play.state is GroupState.IDLE


def test_a_stop_during_a_replay_ends_it_and_the_ranks(play: Play) -> None:
    play.hangs_in = "step 1"
    stopping = play.when_it_hangs(play.session.stop)
    result = play.recovery.replay(ENTRIES)
    stopping.join()
    assert_interrupted(result)
    assert play.sources == ["step 0", "step 1"]
    assert play.state is GroupState.OFF


def test_a_cell_that_fails_in_a_replay_ends_it_and_the_next_replay_runs_the_rest(
    play: Play,
) -> None:
    play.fails_in = "step 1"
    result = play.recovery.replay(ENTRIES, restart=play.session.restart)
    assert result is not None
    assert not result.is_ok
    assert play.sources == ["step 0", "step 1"]
    assert play.printed == play.words
    assert play.replay_log == (again(ENTRIES[:1]), ENTRIES[1:])
    play.fails_in = ""
    play.recovery.replay(play.session.replay_log.all_entries, restart=play.session.restart)
    assert play.replay_log == (again(ENTRIES), ())
    assert play.sources[2:] == ["step 0", "step 1", "step 2"]


def test_a_recovery_after_a_failed_replay_replays_its_pending_entries_too(play: Play) -> None:
    play.fails_in = "step 1"
    play.recovery.replay(ENTRIES, restart=play.session.restart)
    play.sources.clear()
    play.fails_in = "trains"

    def succeed_from_now_on(source: str) -> None:
        play.fails_in = "" if source == "step 0" else play.fails_in

    play.on_cell = succeed_from_now_on
    assert play.train(restarts=1).is_ok
    assert play.sources == ["trains", "step 0", "step 1", "step 2", "trains"]


def test_a_restart_stopped_before_its_replay_leaves_all_entries_pending(play: Play) -> None:
    def stopped() -> None:
        play.session.restart()
        play.session.stop()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play.recovery.replay(ENTRIES, restart=stopped)
    assert play.printed == play.words
    assert play.replay_log == ((), ENTRIES)
    play.session.start(TWO)  # for a cell that misses their names
    assert play.replay_log == ((), ENTRIES)


def test_a_replay_after_a_rejoin_names_the_cells_that_it_cannot_know(play: Play) -> None:
    play.session.replay_log.is_rejoined = True
    for printed in ([UNKNOWN_CELLS], []):  # the cells of new ranks are all known
        play.printed.clear()
        assert play.recovery.replay((), restart=play.session.restart) is None
        assert play.printed == printed


def test_a_refused_restart_prints_nothing_about_a_replay(play: Play) -> None:
    refused = Mock(side_effect=RequestError("no"))
    with pytest.raises(RequestError):
        play.recovery.replay(ENTRIES, restart=refused)
    assert play.printed == []
    assert play.session.replay_log.pending == ()


def test_an_interrupt_during_a_recovery_prevents_further_restarts(play: Play) -> None:
    assert play.show(play.session.submit(ENTRIES[0])).is_ok
    play.fails_in = "trains"

    def hang_from_now_on(source: str) -> None:
        if source == "trains":
            play.hangs_in = "step 0"

    play.on_cell = hang_from_now_on
    play.interrupt_when_it_hangs()
    assert_interrupted(play.train(restarts=3))
    assert play.session.life.attempt == 2
    assert play.sources == ["step 0", "trains", "step 0"]
    assert play.state is GroupState.IDLE


def test_a_cell_that_fails_during_a_user_interrupt_is_not_retried(play: Play) -> None:
    play.fails_in = "trains"
    play.on_cell = lambda _source: play.session.interrupt()
    assert not play.train(restarts=3).is_ok
    assert play.printed == play.words
    assert play.session.life.attempt == 1


class Roomy(FakeLauncher):
    def __init__(self) -> None:
        super().__init__()
        self.ranks = 2
        self.on_node: Callable[[NodeJoined], None] = lambda _event: None

    def world_size(self, asked: int) -> int:
        return max(asked, self.ranks)

    def has_free_capacity(self) -> bool:
        return self.ranks > max((rank for _, rank in self.handles), default=1) + 1

    def bring(self, ranks: int) -> None:
        self.ranks = ranks
        coming = threading.Thread(target=self.on_node, args=[NodeJoined(name="far", nproc=ranks)])
        coming.start()
        coming.join()


@pytest.fixture
def with_capacity(folder: Path, snapshot: SnapshotAssertion) -> Iterator[Play]:  # noqa: ARG001
    play = Play(snapshot, Roomy())
    play.launcher.on_node = play.session.on_node_event
    assert play.show(play.session.submit(ENTRIES[0])).is_ok
    yield play
    play.session.close()


def test_an_elastic_cell_starts_on_nodes_that_joined_before_it(with_capacity: Play) -> None:
    with_capacity.launcher.bring(3)
    assert with_capacity.train(is_elastic=True).is_ok
    assert with_capacity.sources == ["step 0", "step 0", "trains"]
    assert with_capacity.printed == with_capacity.words
    assert with_capacity.session.life.alive == [0, 1, 2]


def test_an_elastic_cell_restarts_when_a_node_joins(with_capacity: Play) -> None:
    with_capacity.hangs_in = "trains"

    def come() -> None:
        with_capacity.hangs_in = ""
        with_capacity.launcher.bring(4)

    coming = with_capacity.when_it_hangs(come)
    assert with_capacity.train(is_elastic=True).is_ok
    coming.join()
    assert with_capacity.sources == ["step 0", "trains", "step 0", "trains"]
    assert with_capacity.printed == with_capacity.words
    assert with_capacity.session.end_requests == 0


def test_a_replay_for_one_node_is_not_interrupted_by_the_next_node(with_capacity: Play) -> None:
    with_capacity.hangs_in = "trains"

    def come(source: str) -> None:
        if source == "step 0" and with_capacity.sources.count(source) == 2:
            with_capacity.launcher.bring(4)
        elif source == "step 0":
            with_capacity.hangs_in = ""

    with_capacity.on_cell = come
    with_capacity.launcher.bring(3)
    assert with_capacity.train(is_elastic=True).is_ok
    assert with_capacity.printed == with_capacity.words
    assert with_capacity.sources == ["step 0", "step 0", "trains", "step 0", "trains"]


def test_an_elastic_cell_is_not_restarted_after_a_user_interrupt(with_capacity: Play) -> None:
    with_capacity.hangs_in = "trains"
    with_capacity.interrupt_when_it_hangs()
    assert_interrupted(with_capacity.train(is_elastic=True))
    assert with_capacity.sources == ["step 0", "trains"]


def test_a_cell_that_is_not_elastic_does_not_use_a_new_node(with_capacity: Play) -> None:
    with_capacity.launcher.bring(3)
    assert with_capacity.train().is_ok
    assert with_capacity.session.life.alive == [0, 1]
