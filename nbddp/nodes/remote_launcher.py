"""Starts ranks on the nodes that have come in, as the launcher of this machine does here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from nbddp.errors import RequestError
from nbddp.launch.local_launcher import Launcher, RankHandle
from nbddp.nodes.listener import Node, NodeListener, placeholder_node, sort_nodes
from nbddp.nodes.rejoin import SurvivingGroup
from nbddp.topology import Topology
from nbddp.wire.rank_start import RankStart


@dataclass(slots=True)
class NodeAssignment:
    """Ranks that are next to each other on one node; another node may take it over."""

    node: Node
    first: int
    nproc: int

    @property
    def ranks(self) -> range:
        """Its ranks."""
        return range(self.first, self.first + self.nproc)


class RemoteLauncher(Launcher):
    """Starts ranks on nodes, in the order of :func:`nbddp.nodes.listener.sort_nodes`.

    Args:
        listener: where the nodes come in.
        min_nodes: nodes without which none starts.
        max_nodes: nodes of which ranks are made; more wait as spares.
        how_to_join: says how one comes in, to who has too few.
    """

    def __init__(
        self,
        listener: NodeListener,
        *,
        min_nodes: int = 1,
        max_nodes: int = sys.maxsize,
        how_to_join: Callable[[], str] = str,
    ) -> None:
        self.listener = listener
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self._how_to_join = how_to_join
        self.assignments: list[NodeAssignment] = []
        self._capacity = 0  # for ranks when they were shared out

    @property
    def base_env(self) -> Mapping[str, str]:
        """What a rank's environment begins with: its node's own, which is not known here."""
        return {}

    def selected_nodes(self) -> list[Node]:
        """Return the nodes that get ranks, in the order of their ranks.

        Choose the nodes that joined first, so that a later spare node does not renumber the ranks.
        """
        return sort_nodes(self.listener.available_nodes[: self.max_nodes])

    def capacity(self) -> int:
        """Ranks that there are on the nodes that are here.

        Raises:
            RequestError: these are too few.
        """
        here = self.selected_nodes()
        if len(here) < self.min_nodes:
            are = "is" if 1 in (len(here), self.min_nodes) else "are"
            nodes = "node" if self.min_nodes == 1 else "nodes"
            raise RequestError(
                f"{len(here)} of {self.min_nodes} {nodes} {are} here; {self._how_to_join()}"
            )
        return sum(node.nproc for node in here)

    def world_size(self, asked: int) -> int:
        """All ranks that there are now, if those that were asked for were all then; else no more.

        Raises:
            RequestError: too few nodes are here.
        """
        capacity = self.capacity()
        return capacity if asked == self._capacity else min(asked, capacity)

    def has_free_capacity(self) -> bool:
        """Whether a restart would make more ranks than there are."""
        ranks, here = sum(each.nproc for each in self.assignments), self.selected_nodes()
        is_all = 0 < ranks == self._capacity and len(here) >= self.min_nodes
        return is_all and sum(node.nproc for node in here) > ranks

    def assign(self, world_size: int) -> None:
        """Give each node its ranks, for a new attempt.

        Raises:
            RequestError: the nodes that are here have not so many.
        """
        assignments: list[NodeAssignment] = []
        left = world_size
        for node in self.selected_nodes():
            if left:
                assignments.append(NodeAssignment(node, world_size - left, min(left, node.nproc)))
                left -= assignments[-1].nproc
        if left:
            raise RequestError(
                f"{world_size} ranks were asked for, and the nodes that are here have "
                f"{world_size - left}; `%ddp nodes` lists them"
            )
        self.assignments = assignments
        self._capacity = sum(node.nproc for node in self.selected_nodes())

    def surviving_group(self) -> SurvivingGroup:
        """The ranks of another notebook that are back.

        Raises:
            RequestError: none is.
        """
        living = [each for node in self.listener.nodes for each in node.survivors]
        return SurvivingGroup.newest(living, self.listener.set_store_port)

    def rejoin(self) -> SurvivingGroup:
        """The ranks that are back; those whose node is not are gone with it.

        Raises:
            RequestError: none is.
        """
        nodes = self.listener.nodes
        returned = self.surviving_group()
        assignments: dict[int, NodeAssignment] = {}
        for node in nodes:
            for each in node.survivors:
                place = each.topology
                if returned.ranks.get(place.rank) is each:
                    first = place.rank - place.local_rank
                    assignments[first] = NodeAssignment(node, first, place.local_world_size)
        rank, world_size = 0, returned.world_size
        while rank < world_size:  # ranks of nodes that have not come back are on one that is gone
            if rank not in assignments:
                end = min((first for first in assignments if first > rank), default=world_size)
                assignments[rank] = NodeAssignment(placeholder_node(end - rank), rank, end - rank)
            rank += assignments[rank].nproc
        self.assignments = [assignments[first] for first in sorted(assignments)]
        self._capacity = world_size
        return returned

    def reassign(self, ranks: Sequence[int]) -> None:
        """Nodes that are here, and have no ranks, take the places of those that are gone.

        Raises:
            RequestError: too few are; nothing has changed.
        """
        lost = [each for each in self.lost_assignments if any(rank in each.ranks for rank in ranks)]
        taken = [each.node for each in self.assignments]
        found: list[Node] = []
        for assignment in lost:
            found.append(self._spare_for(assignment, [*taken, *found]))
        for assignment, node in zip(lost, found, strict=True):
            assignment.node = node

    def topologies(self, world_size: int, *, master_port: int) -> list[Topology]:
        """Each rank's place in the world."""
        return [
            Topology(
                rank=rank,
                local_rank=local_rank,
                node_rank=node_rank,
                world_size=world_size,
                local_world_size=assignment.nproc,
                group_world_size=len(self.assignments),
                master_addr=self.assignments[0].node.address,
                master_port=master_port,
            )
            for node_rank, assignment in enumerate(self.assignments)
            for local_rank, rank in enumerate(assignment.ranks)
        ]

    def assignment_of(self, rank: int) -> NodeAssignment:
        """Where a rank is, or was."""
        return next(each for each in self.assignments if rank in each.ranks)

    def ranks_of(self, node: Node) -> list[int]:
        """The ranks that a node has, or had."""
        return [rank for each in self.assignments if each.node is node for rank in each.ranks]

    def nodes(self) -> Mapping[int, str]:
        """What each rank's node is called."""
        return {rank: each.node.name for each in self.assignments for rank in each.ranks}

    def clock_offset(self, rank: int) -> tuple[float, float]:
        """Its node's; 0 until it is measured, as it is before any rank starts."""
        clock = self.assignment_of(rank).node.clock
        return (clock.offset, clock.error) if clock.error < float("inf") else (0.0, 0.0)

    def cores(self, place: Topology) -> int:
        """Those of the rank's node."""
        return int(self.assignment_of(place.rank).node.facts["cores"])

    def launch(self, start: RankStart) -> RankHandle:
        """Have a rank's node start it, or another one in that one's place.

        Raises:
            RequestError: its node is gone.
        """
        assignment = self.assignment_of(start.topology.rank)
        self.listener.set_store_port(start.store_port)
        start = replace(start, backend=self._backend(start.backend))
        return self.listener.launch(assignment.node, start)

    def _spare_for(self, assignment: NodeAssignment, taken: Sequence[Node]) -> Node:
        for node in self.listener.available_nodes:
            if node not in taken and node.nproc >= assignment.nproc:
                return node
        gone = assignment.node
        raise RequestError(
            f"node {gone.name} is gone ({gone.lost_reason}), and no other has room for its ranks; "
            "when one has come, try again, or `%ddp restart` with the nodes that are here"
        )

    def _backend(self, asked: str) -> str:
        """Decided here: every node would choose by its own GPUs, and all ranks must agree."""
        if asked != "auto":
            return asked
        has_gpus = all(int(each.node.facts["gpus"]) >= each.nproc for each in self.assignments)
        return "nccl" if has_gpus else "gloo"

    def share(self) -> RemoteLauncher:
        """Return a launcher for a second worker group, which has its own assignments."""
        return RemoteLauncher(
            self.listener,
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            how_to_join=self._how_to_join,
        )

    @property
    def lost_assignments(self) -> Sequence[NodeAssignment]:
        """Those whose node is gone."""
        return [each for each in self.assignments if each.node.lost_reason]
