"""``%%ddp --keep-alive``, ``%ddp keep-alive`` and ``%ddp rejoin``."""

from __future__ import annotations

from nbddp.errors import RequestError
from nbddp.extensions.keep_alive import (
    KeepAliveArguments,
    KeepAliveOptions,
    RejoinArguments,
)
from nbddp.extensions.keep_alive.kept import find_kept
from nbddp.extensions.nodes.join_file import JoinFile
from nbddp.extensions.nodes.node_pool import NodePool, NodesSpec
from nbddp.extensions.nodes.notebook import REJOIN_TIMEOUT, open_nodes, rejoin
from nbddp.formatting import format_seconds, plural
from nbddp.group.notebook_half import NotebookHalf
from nbddp.wire.group_spec import GroupSpec

AGENT_TIMEOUT = 120.0  # seconds until the agent has imported torch


class KeepAlive(NotebookHalf):
    """Starts ranks that outlive the kernel, and takes them back."""

    def keep_alive(self, args: KeepAliveArguments) -> None:
        """Start the agent of the next ranks."""
        self._start_agent(args.time, args.nproc or self.notebook.group.spec.nproc)

    def before_start(self, spec: GroupSpec, options: KeepAliveOptions) -> None:
        """Start the agent of the ranks that will start."""
        nodes, seconds = self.notebook.group.nodes, options.keep_alive
        if seconds is None:
            return
        if not isinstance(nodes, NodePool) or not nodes.is_kept:
            self._start_agent(seconds, spec.nproc)
        elif seconds != nodes.spec.orphan_timeout:
            kept = format_seconds(nodes.spec.orphan_timeout)
            raise RequestError(
                f"the ranks already outlive this kernel for {kept}: `%ddp stop` ends them, then "
                "another time can be set"
            )

    def _start_agent(self, seconds: float, nproc: int) -> None:
        """Start an agent on this machine that keeps its ranks.

        Raises:
            RequestError: ranks are running, or the agent could not start. Nothing has changed.
        """
        group = self.notebook.group
        spec = NodesSpec(nproc_per_node=nproc, orphan_timeout=seconds, is_kept=True)
        nodes = open_nodes(group, spec)
        try:
            nodes.start_local(1)
            nodes.wait(AGENT_TIMEOUT)
        except BaseException:
            group.nodes = None
            nodes.close()
            raise
        self.notebook.print_line(
            f"nbddp: the next {plural(nproc, 'rank')} outlive this kernel for "
            f"{format_seconds(seconds)}, until `%ddp stop`; `%ddp rejoin` takes them back"
        )

    def rejoin(self, args: RejoinArguments) -> None:
        """Take back ranks, and show their cell until it ends.

        Raises:
            RequestError: there are no such ranks, or their notebook is alive.
        """
        kept, group = find_kept(args.run), self.notebook.group
        if kept.has_notebook:
            raise RequestError(
                f"the notebook of run {kept.run.name} is alive: end it or restart its kernel, then "
                "its ranks can be taken back"
            )
        join = JoinFile.load(kept.join_file)
        spec = NodesSpec(
            host=join.address, port=join.port, orphan_timeout=kept.seconds, is_kept=True
        )
        self.notebook.print_line(f"nbddp: {rejoin(group, spec, join, REJOIN_TIMEOUT)}")
        cell = group.session.cell
        if cell is not None and not cell.notice_queue.is_drained:
            self.notebook.follow(cell)
