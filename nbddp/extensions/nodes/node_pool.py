"""Run ranks on several machines: listen for nodes, tell the user how to start them, list them."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue

from nbddp.controller.session import Session
from nbddp.controller.surviving_group import SurvivingGroup
from nbddp.errors import RequestError
from nbddp.extensions.nodes import LOOPBACK, ORPHAN_TIMEOUT
from nbddp.extensions.nodes.join_file import JoinFile
from nbddp.extensions.nodes.listener import Node, NodeListener
from nbddp.extensions.nodes.local_agents import SINGLE_NODE_OPTIONS, LocalAgents
from nbddp.extensions.nodes.node_connection import FrameType
from nbddp.extensions.nodes.remote_launcher import RemoteLauncher
from nbddp.extensions.nodes.stale_files import LockedPath, remove_stale_files
from nbddp.formatting import format_ranks, format_seconds, plural
from nbddp.launch.local_launcher import Launcher
from nbddp.lifecycle.events import LogCopyFailed, NodeJoined, NodeLost
from nbddp.topology import TORCHRUN
from nbddp.ui.wording import align_columns
from nbddp.wire.group_spec import GroupSpec

_COLUMNS = ("node", "address", "ranks", "GPUs", "cores", "here for", "clock")
POLL_INTERVAL = 0.1  # seconds between two checks for ended agents on this machine


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesSpec:
    """The nodes that the user wants.

    Attributes:
        host: the address of this machine at which the listener accepts nodes.
        port: the port of the listener; 0 for any free port.
        min_nodes: a cell needs at least this many nodes.
        max_nodes: a cell uses at most this many nodes; more wait as spares.
        nproc_per_node: ranks on each node.
        orphan_timeout: seconds for which nodes and ranks wait after the loss of their notebook.
        is_kept: whether the nodes are on this machine, and wait after each end of the notebook.
    """

    host: str = LOOPBACK
    port: int = 0
    min_nodes: int = 1
    max_nodes: int = 1
    nproc_per_node: int = 1
    orphan_timeout: float = ORPHAN_TIMEOUT
    is_kept: bool = False


class NodePool:
    """Runs the ranks of a session on nodes, until it is closed.

    Args:
        session: the session of a worker group that is not started.
        spec: how many nodes are wanted, and where they join.
        join: the join file of a listener that another notebook left open.
        active: returns the session of the cell or script that is running or ran last.

    Raises:
        RequestError: the group runs on this machine, the listener cannot bind its address, or the
            join file cannot be written.
    """

    def __init__(
        self,
        session: Session,
        spec: NodesSpec,
        join: JoinFile | None = None,
        *,
        active: Callable[[], Session] | None = None,
    ) -> None:
        if session.life.state.is_live:
            raise RequestError(
                "the ranks run on this machine: end them with `%ddp stop` and try again"
            )
        self.spec = spec
        self._session = session
        self._active_session = active or (lambda: session)
        self._is_open = False  # nodes of an earlier listener may join at once
        self._changes: SimpleQueue[Node] = SimpleQueue()  # an interrupt cannot leave it locked
        self.listener = NodeListener(
            spec.host,
            spec.port,
            join=join,
            on_change=self._on_node_change,
            on_copy_failed=self._on_log_lost,
        )
        remove_stale_files(Path.home())
        try:
            self.join_file = self.listener.join.path if join else self.listener.join.save()
            self._join_lock = LockedPath(self.join_file)
        except BaseException:
            self.listener.close()
            raise
        self._agents = self._new_agents()
        self._previous_launcher: Launcher = session.launcher
        self.launcher = RemoteLauncher(
            self.listener,
            min_nodes=spec.min_nodes,
            max_nodes=spec.max_nodes,
            how_to_join=self._how_to_join,
        )
        session.use_launcher(self.launcher)
        self._is_open = True

    @property
    def is_kept(self) -> bool:
        """Whether the nodes and their ranks wait after each end of the notebook."""
        return self.spec.is_kept

    def _how_to_join(self) -> str:
        """Return how more nodes can join. Nodes that start on this machine only need time."""
        if starting := self._agents.pending:
            return f"{starting} starting on this machine: `%ddp nodes --wait 60` waits for them"
        return f"on each machine: `{self.command}`"

    def _new_agents(self) -> LocalAgents:
        return LocalAgents(
            self._agent_arguments(str(self.join_file)),
            self.join_file.parent.parent / "agents" / self.listener.join.run,
        )

    def _on_node_change(self, node: Node) -> None:
        """Handle a joined or lost node. Runs on the listener's thread, so it must not block."""
        self._changes.put(node)
        if not self._is_open:
            return
        if not node.lost_reason:
            self._agents.on_node_joined(node)
            self._active_session().on_node_event(NodeJoined(name=node.name, nproc=node.nproc))
            return
        event = NodeLost(
            name=node.name,
            address=node.address,
            reason=node.lost_reason,
            ranks=tuple(self.launcher.ranks_of(node)),
        )
        self._active_session().on_node_event(event)

    def _on_log_lost(self, folder: Path, error: OSError) -> None:
        self._active_session().on_node_event(
            LogCopyFailed(folder=str(folder), reason=str(error.strerror))
        )

    # ---- texts for the user

    @property
    def command(self) -> str:
        """The line that the user types on each machine."""
        return " ".join([shlex.join(TORCHRUN), *self._agent_arguments(self._file)])

    @property
    def _file(self) -> str:
        with suppress(ValueError):
            return f"~/{self.join_file.relative_to(Path.home())}"
        return str(self.join_file)

    def _agent_arguments(self, join_file: str) -> Sequence[str]:
        """Return the arguments of ``torchrun`` that start a node agent."""
        seconds = self.spec.orphan_timeout
        more: list[str] = []
        if self.spec.is_kept or seconds != ORPHAN_TIMEOUT:
            more.append(f"--orphan-timeout={seconds:g}")
        if self.spec.is_kept:
            more.append("--keep")
        ranks = f"--ranks={self.spec.nproc_per_node}"
        return (*SINGLE_NODE_OPTIONS, "-m", "nbddp.nodes", "--join", join_file, ranks, *more)

    def instructions(self) -> str:
        """Return how to start nodes."""
        join = self.listener.join
        lines = [
            f"waiting for nodes at {join.address}:{join.port}. Run this line on each machine, "
            "with the same versions of nbddp, Python and torch (change Python's path if it "
            "differs):",
            "",
            f"    {self.command}",
            "",
        ]
        if join.address == LOOPBACK:
            lines.append(
                "Only this machine can reach that address. To add another machine, "
                f"run `ssh -R {join.port}:{LOOPBACK}:{join.port} HOST` here and the line above on "
                "HOST, or listen at an address of this machine with `%ddp nodes --host ADDRESS`."
            )
        lines.append(
            f"{self._file} holds the secret, and only you can read it. Copy it (scp -p) to "
            "machines that do not share your home folder."
        )
        return "\n".join([*lines, self._describe_need()])

    def _describe_need(self) -> str:
        joined = len(self.listener.nodes)
        min_nodes, max_nodes = self.spec.min_nodes, self.spec.max_nodes
        if self.launcher.lost_assignments:
            restart = (
                "continues on the nodes that are left"
                if joined >= min_nodes
                else f"needs {plural(min_nodes, 'node')}, and {joined} joined"
            )
            return (
                f"`%ddp heal` replaces them when free nodes have joined; `%ddp restart` {restart}."
            )
        if joined >= min_nodes:
            spares = (
                f" and keeps {plural(joined - max_nodes, 'spare')}" if joined > max_nodes else ""
            )
            return f"A %%ddp cell uses {plural(min(joined, max_nodes), 'node')}{spares}."
        starting = self._agents.pending
        more = f", {starting} starting on this machine" if starting else ""
        return f"A %%ddp cell needs {plural(min_nodes, 'node')}; {joined} joined{more}."

    def table(self) -> str:
        """Return the nodes that have joined, as a table."""
        nodes = self.launcher.selected_nodes()
        nodes += [node for node in self.listener.nodes if node not in nodes]
        join = self.listener.join
        head = f"{plural(len(nodes), 'node')} at {join.address}:{join.port}"
        if self.listener.refused:
            head += f" · {plural(self.listener.refused, 'connection')} refused"
        lines = align_columns([_COLUMNS, *map(self._table_row, nodes)])
        gone = [
            f"{format_ranks(list(slot.ranks))} gone with node {slot.node.name}: "
            f"{slot.node.lost_reason}"
            for slot in self.launcher.lost_assignments
        ]
        return "\n".join([head, *(lines if nodes else []), *gone, self._describe_need()])

    def _table_row(self, node: Node) -> tuple[str, ...]:
        ranks = self.launcher.ranks_of(node)
        numbers = format_ranks(ranks).removeprefix("rank ").removeprefix("ranks ")
        clock = node.clock
        offset = f"{1000 * clock.offset:+.1f} ± {1000 * clock.error:.1f} ms"
        return (
            node.name,
            node.address,
            numbers if ranks else f"({node.nproc})",
            str(node.facts["gpus"] or ""),
            str(node.facts["cores"]),
            f"{time.time() - node.since:.0f} s",
            offset if clock.error < float("inf") else "",
        )

    # ---- requests of the user

    def fit(self, spec: GroupSpec) -> GroupSpec:
        """Return the spec with the number of ranks that the joined nodes can hold.

        Raises:
            RequestError: too few nodes have joined.
        """
        return replace(spec, nproc=self.launcher.capacity())

    def start_local(self, count: int) -> None:
        """Start node agents on this machine, to learn and to test with.

        Raises:
            RequestError: an agent cannot be started.
        """
        try:
            self._agents.start(count)
        except OSError as error:
            raise RequestError(f"cannot start a node on this machine: {error}") from error

    def wait(self, seconds: float) -> str:
        """Wait for as many nodes as a cell needs, and for all agents on this machine.

        Args:
            seconds: the timeout.

        Returns:
            The nodes that have joined, in one line.

        Raises:
            RequestError: too few nodes joined in time, or an agent on this machine ended. The
                listener stays open.
        """
        began = time.monotonic()
        while missing := self._missing_count:
            remaining = began + seconds - time.monotonic()
            if failed := self._agents.pop_failures():
                raise RequestError(f"{failed}; {self._describe_nodes()}")
            if remaining <= 0:
                refused = self.listener.refusal
                parts = [
                    f"{plural(missing, 'node')} missing after {format_seconds(seconds)}",
                    self._describe_nodes(),
                    f"the last refused node: {refused}" if refused else "",
                    f"on each machine: `{self.command}`",
                ]
                raise RequestError("; ".join(filter(None, parts)))
            self._wait_for_change(remaining)
        return f"{self._describe_nodes()}, after {format_seconds(time.monotonic() - began)}"

    def _wait_for_change(self, seconds: float) -> None:
        with suppress(Empty):
            self._changes.get(timeout=min(seconds, POLL_INTERVAL))

    @property
    def _missing_count(self) -> int:
        """The number of nodes that have not joined yet."""
        return max(self.spec.min_nodes - len(self.listener.nodes), self._agents.pending)

    def _describe_nodes(self) -> str:
        nodes = self.listener.nodes
        names = ", ".join(f"{node.name} ({plural(node.nproc, 'rank')})" for node in nodes)
        return f"{plural(len(nodes), 'node')} joined{': ' if nodes else ''}{names}"

    def rejoin(self, seconds: float, is_stopped: Callable[[], bool]) -> SurvivingGroup | None:
        """Wait for the ranks that another notebook left, and continue the session with them.

        Args:
            seconds: how long to wait for missing ranks.
            is_stopped: returns whether to stop waiting.

        Returns:
            The ranks and nodes that are back; None if only nodes without ranks are back.

        Raises:
            RequestError: no node is back; call :meth:`abandon`.
            KeyboardInterrupt: the wait was stopped; call :meth:`abandon`.
        """
        deadline = time.monotonic() + seconds
        while not self._all_ranks_are_back() and (remaining := deadline - time.monotonic()) > 0:
            self._wait_for_change(remaining)
            if is_stopped():
                raise KeyboardInterrupt
        self.listener.accepts_rejoin = False
        nodes = self.listener.nodes
        if not nodes:
            what, again = "no node has rejoined", "`%ddp nodes --rejoin --wait 60`"
            if self.is_kept:
                what, again = "the ranks have not come back", "`%ddp rejoin`"
            refused = self.listener.refusal
            parts = [
                f"{what} within {format_seconds(seconds)}",
                f"the last refused node: {refused}" if refused else "",
                f"{again} tries again",
            ]
            raise RequestError("; ".join(filter(None, parts)))
        survivors = self.launcher.rejoin() if any(node.survivors for node in nodes) else None
        sizes = [each.nproc for each in (self.launcher.assignments if survivors else nodes)]
        max_nodes = max(self.spec.max_nodes, len(sizes))
        self.spec = replace(self.spec, max_nodes=max_nodes, nproc_per_node=max(sizes))
        self.launcher.max_nodes = max_nodes
        self._agents = self._new_agents()
        return survivors

    def describe_rejoined(self, survivors: SurvivingGroup | None) -> str:
        """Return which ranks and nodes are back."""
        if survivors is None:
            return f"{self._describe_nodes()}, which had no ranks; the next cell starts them"
        ranks, world_size = len(self._session.life.alive), survivors.world_size
        missing = "" if ranks == world_size else "; `%ddp heal` replaces the others"
        joined = "" if self.is_kept else f"; {self._describe_nodes()}"
        return f"{ranks} of {world_size} ranks are back with their variables{joined}{missing}"

    def _all_ranks_are_back(self) -> bool:
        if not any(node.survivors for node in self.listener.nodes):
            return False
        survivors = self.launcher.surviving_group()
        return len(survivors.ranks) == survivors.world_size

    def release(self, name: str) -> str:
        """Release a node: its ranks end and it leaves the group.

        Returns:
            The released node and its ranks, in one line.

        Raises:
            RequestError: no node has this name.
        """
        for node in self.listener.nodes:
            if node.name == name:
                ranks = self.launcher.ranks_of(node)
                node.is_leaving = True  # so that a start right after this does not use the node
                self.listener.send(node, FrameType.LEAVE, reason="")
                return f"node {name} is released" + (
                    f", and {format_ranks(ranks)}" if ranks else ""
                )
        names = ", ".join(node.name for node in self.listener.nodes) or "none"
        raise RequestError(f"there is no node {name!r}; the nodes are: {names}")

    def detach(self) -> None:
        """Close the listener, and leave the nodes and their ranks to the next notebook."""
        self._is_open = False
        self.listener.close(releases_nodes=False)
        self._join_lock.close()

    def abandon(self) -> None:
        """Undo the attempt to rejoin: later ranks run on this machine again."""
        self.detach()
        self._session.use_launcher(self._previous_launcher)

    def close(self) -> None:
        """Release all nodes. Later ranks run on this machine again."""
        self._is_open = False
        self._session.use_launcher(self._previous_launcher)
        self.listener.close()
        with suppress(FileNotFoundError):
            self.join_file.unlink()
        self._join_lock.close()
        self._agents.close()
