"""A session does what any thread asks, whatever becomes of its ranks; without a process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import FakeLauncher, FakeLink, make_willing, with_threads

from nbddp.controller.cell import CellRequest
from nbddp.controller.session import Session
from nbddp.controller.spec import GroupSpec
from nbddp.controller.states import GroupState

TWO = GroupSpec(nproc=2)
HELLO = CellRequest(source="print('hello')")

pytestmark = [pytest.mark.timeout(30), pytest.mark.usefixtures("folder")]


@pytest.fixture
def launcher() -> FakeLauncher:
    return FakeLauncher()


@pytest.fixture
def link(launcher: FakeLauncher) -> FakeLink:
    link = FakeLink()
    make_willing(launcher, link)
    return link


@pytest.fixture
def session(launcher: FakeLauncher, link: FakeLink, folder: Path) -> Iterator[Session]:  # noqa: ARG001
    session = Session(launcher, make_means=lambda: with_threads(link))
    yield session
    session.close()


def run(session: Session, request: CellRequest = HELLO) -> bool:
    """Run a cell to its end; whether all went well."""
    handle = session.run(request)
    for _ in handle.notices():
        pass
    return handle.result is not None and handle.result.is_ok


def test_a_group_starts_runs_a_cell_and_stops(session: Session, launcher: FakeLauncher) -> None:
    session.start(TWO)
    assert session.life.state is GroupState.IDLE
    assert len(launcher.living()) == 2
    assert run(session)
    session.stop()
    assert session.life.state is GroupState.OFF
    assert not launcher.living()


def test_a_restart_ends_the_ranks_and_starts_others(
    session: Session, launcher: FakeLauncher
) -> None:
    session.start(TWO)
    session.restart()
    assert sorted(launcher.handles) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert len(launcher.living()) == 2
    assert run(session)


def test_a_group_that_was_closed_can_be_started_again(
    session: Session, launcher: FakeLauncher
) -> None:
    session.start(TWO)
    session.close()
    assert not launcher.living()
    session.start(TWO)
    assert run(session)
