"""Real ranks for tests: only this file of the tests uses the internals of a group."""

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from nbddp import CellFailedError, WorkerGroup
from nbddp.controller.session import Session
from nbddp.group.display import TextDisplay
from nbddp.group.find_script import find_script
from nbddp.group.rank_group import RankGroup
from nbddp.group.recovery import Recovery, show_cell
from nbddp.group.script_ranks import ScriptRanks
from nbddp.launch.local_launcher import Launcher, LocalLauncher
from nbddp.lifecycle.group_state import Life
from nbddp.record.cell import CellHandle, CellRequest, CellResult, ReplayEntry
from nbddp.record.collectives.collective_matcher import Straggler
from nbddp.record.notices import Notice
from nbddp.record.run_events import RunEvent
from nbddp.record.snapshot import Snapshot
from nbddp.ui.frontend import StreamTarget
from nbddp.ui.text_view import TextView
from nbddp.wire.group_spec import GroupSpec
from nbddp.wire.request_messages import JoinGroup, Pull


def new_launcher(start_method: str = "") -> LocalLauncher:
    """Return a launcher with a new forkserver, which no other test has used."""
    return LocalLauncher(start_method)


class WarmLauncher(LocalLauncher):
    """A launcher whose forkserver serves all tests of this run."""

    def close(self) -> None:
        """Keep the forkserver for the next test."""

    def end(self) -> None:
        super().close()


WAIT_FOR_COPIES = """
def wait():
    import gc, time
    [found] = [each for each in gc.get_objects() if type(each).__name__ == "ShardCopies"]
    while found._busy.locked() or not found._copies:
        time.sleep(0.01)
wait()
del wait
"""


class Ranks(WorkerGroup):
    """A worker group with further properties and methods for tests."""

    def __init__(self, *, launcher: Launcher | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._group = RankGroup(self._group.spec, Session(launcher, colors="nocolor"))

    @property
    def session(self) -> Session:
        return self._group.session

    @property
    def scripts(self) -> ScriptRanks:
        return self._group.scripts

    @property
    def life(self) -> Life:
        return self._group.life

    @property
    def spec(self) -> GroupSpec:
        return self._group.spec

    @spec.setter
    def spec(self, spec: GroupSpec) -> None:
        self._group.spec = spec

    @property
    def nodes(self) -> Any:
        """Return what the extension of nodes keeps with the group."""
        return self._group.nodes

    @property
    def rank_group(self) -> RankGroup:
        return self._group

    # ---- state

    @property
    def pids(self) -> dict[int, int]:
        return self.session.actor.state.pids()

    @property
    def helper_pid(self) -> int:
        launcher: Any = self.session.launcher
        return int(launcher.forkserver.pid)

    @property
    def attempt(self) -> int:
        """Return the number of starts, 1 after the first."""
        return self.life.attempt

    @property
    def world_size(self) -> int:
        """Return the number of ranks, dead ranks included."""
        return len(self.life.ranks)

    @property
    def dead(self) -> Sequence[int]:
        return self.life.gone

    @property
    def ranks_in_cell(self) -> Collection[int]:
        return set() if self.life.cell is None else self.life.cell.waiting

    @property
    def state(self) -> str:
        """Return the state of the group, in the words of ``%ddp status``."""
        return self.life.state.value

    # ---- cells

    def begin(self, source: str, **request: Any) -> CellHandle:
        """Start a cell and return; the keywords are fields of the request."""
        return self.session.submit(CellRequest(source=source, **request))

    def begin_script(self, path: Path | str) -> CellHandle:
        """Start a script, as ``%ddp run`` does, and return."""
        session = self.scripts.open()
        self.scripts.start(self.spec)
        return session.submit(
            CellRequest(source=str(path), needs_group=False, script=find_script(str(path), []))
        )

    def finish(self, handle: CellHandle) -> CellResult:
        """Print the output of a cell or a script until it ends. Return its result."""
        session = self.scripts.last_session
        result = show_cell(session, handle, TextView(StreamTarget()))
        if handle.request.has_own_ranks:
            self.scripts.end(session, result)
        return result

    def run_cell(self, source: str, **request: Any) -> CellResult:
        """Run a cell with options that :meth:`run` does not have; raise its failure."""
        result = self.finish(self.begin(source, **request))
        result.raise_for_failure()
        return result

    def evaluate(self, source: str, **request: Any) -> list[Any]:
        """Run a cell, show nothing, and return the value of its last line on each rank."""
        return self.run(source, quiet=True, wants_value=True, **request).values()

    def failure_of(self, source: str, **request: Any) -> CellFailedError:
        with pytest.raises(CellFailedError) as caught:
            self.run(source, **request)
        return caught.value

    def assert_works(self) -> None:
        sums = self.evaluate("x = torch.ones(1)\ndist.all_reduce(x)\nint(x.item())")
        assert sums == [self.world_size] * self.world_size

    def run_and_act(
        self, source: str, wanted: Callable[[str], bool], act: Callable[[], object]
    ) -> None:
        """Run a cell, call a function once its output matches, and raise its failure."""

        class Watching(TextView):
            text = ""
            has_acted = False

            def _show_notice(self, notice: Notice) -> None:
                super()._show_notice(notice)
                self.text += getattr(notice, "text", "")
                if not self.has_acted and wanted(self.text):
                    self.has_acted = True
                    act()

        view = Watching(StreamTarget())
        show_cell(self.session, self.begin(source), view).raise_for_failure()

    def around_joins(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        before: Callable[[int], None],
        after: Callable[[int], None],
    ) -> None:
        """Call functions with the rank before and after each rank is sent ``JoinGroup``."""
        link = self.session.require_link()
        send = link.send

        def send_between(rank: int, command: Any) -> None:
            if not isinstance(command, JoinGroup):
                return send(rank, command)
            before(rank)
            send(rank, command)
            return after(rank)

        monkeypatch.setattr(link, "send", send_between)

    def wait_for_copies(self) -> None:
        """Wait until all ranks have exchanged a copy of their shards."""
        self.run(WAIT_FOR_COPIES, quiet=True)

    def begin_pull(self, rank: int, expression: str) -> None:
        self.session.send_request(rank, self.session.numbered(Pull(expression=expression)))

    @property
    def replay_log(self) -> Sequence[ReplayEntry]:
        return self.session.replay_log.entries

    def replay(self, entries: Sequence[ReplayEntry]) -> None:
        assert Recovery(self.session, TextDisplay()).replay(entries) is None

    # ---- observation

    def hang_after(self, seconds: float) -> None:
        self.session.rank_monitor.hangs.hang_after = seconds

    @property
    def last_step(self) -> float | None:
        return self.session.rank_monitor.last_step

    def straggler(self) -> Straggler | None:
        return self.session.rank_monitor.collectives.straggler()

    def snapshot(self, handle: CellHandle | None = None) -> Snapshot:
        return self.session.snapshot(handle)

    def metrics(self, *, most: int) -> Any:
        """Return the curves that the panel draws, at most this many."""
        return self.session.rank_monitor.metrics.snapshot(most=most)

    def events(self) -> tuple[RunEvent, ...]:
        return self.session.event_log.since(0.0)

    # ---- the run folder

    @property
    def run_folder(self) -> Path:
        assert self.folder is not None
        return self.folder

    def read_lines(self, name: str) -> list[dict[str, Any]]:
        """Return the objects of ``metrics.jsonl`` or ``events.jsonl``."""
        return [json.loads(line) for line in (self.run_folder / name).read_text().splitlines()]

    def log(self, rank: int) -> Path:
        return self.run_folder / f"rank{rank}.log"

    # ---- the store

    @property
    def secret(self) -> bytes:
        """Return the secret that signs the messages of ranks and controller."""
        return self.session.require_link().secret

    @property
    def store(self) -> Any:
        link: Any = self.session.require_link()
        return link._sender


MakeRanks = Callable[..., Ranks]
Capture = pytest.CaptureFixture[str]
Write = Callable[..., Path]
Lines = Callable[..., list[str]]
