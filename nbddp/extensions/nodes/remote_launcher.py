"""Start ranks on the nodes that have joined, with the interface of the local launcher."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

from nbddp.controller.surviving_group import SurvivingGroup
from nbddp.errors import RequestError
from nbddp.extensions.nodes.listener import Node, NodeListener, placeholder_node, sort_nodes
from nbddp.launch.local_launcher import Launcher, RankHandle
from nbddp.topology import Topology
from nbddp.wire.rank_start import RankStart


@dataclass(slots=True)
class NodeAssignment:
    """Consecutive ranks on one node; if the node is lost, another node can get them."""

    node: Node
    first: int
    nproc: int

    @property
    def ranks(self) -> range:
        """The assigned ranks."""
        return range(self.first, self.first + self.nproc)


@dataclass(eq=False, repr=False)
class RemoteLauncher(Launcher):
    """Starts ranks on nodes, in the order of :func:`nbddp.extensions.nodes.listener.sort_nodes`.

    Args:
        listener: accepts the nodes.
        min_nodes: nodes that are required for a start.
        max_nodes: nodes that get ranks; further nodes are spares.
        how_to_join: returns the instructions for the error about missing nodes.
    """

    is_local = False

    listener: NodeListener
    min_nodes: int = 1
    max_nodes: int = sys.maxsize
    how_to_join: Callable[[], str] = str
    assignments: list[NodeAssignment] = field(init=False, default_factory=list)
    _capacity: int = field(init=False, default=0)  # capacity at the last assignment

    @property
    def base_env(self) -> Mapping[str, str]:
        """An empty environment: each rank starts with its node's own, which is not known here."""
        return {}

    def selected_nodes(self) -> list[Node]:
        """Return the nodes that get ranks, in the order of their ranks.

        Choose the nodes that joined first, so that a later spare node does not renumber the ranks.
        """
        return sort_nodes(self.listener.available_nodes[: self.max_nodes])

    def capacity(self) -> int:
        """Return how many ranks the selected nodes can run.

        Raises:
            RequestError: too few nodes have joined.
        """
        selected = self.selected_nodes()
        if len(selected) < self.min_nodes:
            are = "has" if 1 in (len(selected), self.min_nodes) else "have"
            nodes = "node" if self.min_nodes == 1 else "nodes"
            raise RequestError(
                f"{len(selected)} of {self.min_nodes} {nodes} {are} joined; {self.how_to_join()}"
            )
        return sum(node.nproc for node in selected)

    def world_size(self, asked: int) -> int:
        """Return the world size of a restart.

        If the last start used all capacity, it is all capacity now; else it is at most ``asked``.

        Raises:
            RequestError: too few nodes have joined.
        """
        capacity = self.capacity()
        return capacity if asked == self._capacity else min(asked, capacity)

    def has_free_capacity(self) -> bool:
        """Return whether a restart would give more ranks."""
        ranks, selected = sum(each.nproc for each in self.assignments), self.selected_nodes()
        is_all = 0 < ranks == self._capacity and len(selected) >= self.min_nodes
        return is_all and sum(node.nproc for node in selected) > ranks

    def assign(self, world_size: int) -> None:
        """Assign ranks to nodes, for a new attempt.

        Raises:
            RequestError: the nodes cannot run that many ranks.
        """
        assignments: list[NodeAssignment] = []
        remaining = world_size
        for node in self.selected_nodes():
            if remaining:
                assignments.append(
                    NodeAssignment(node, world_size - remaining, min(remaining, node.nproc))
                )
                remaining -= assignments[-1].nproc
        if remaining:
            raise RequestError(
                f"{world_size} ranks were requested, but the joined nodes have room for "
                f"{world_size - remaining}; `%ddp nodes` lists them"
            )
        self.assignments = assignments
        self._capacity = sum(node.nproc for node in self.selected_nodes())

    def surviving_group(self) -> SurvivingGroup:
        """Return the ranks of an earlier notebook that can be rejoined.

        Raises:
            RequestError: there are none.
        """
        living = [each for node in self.listener.nodes for each in node.survivors]
        return SurvivingGroup.newest(living, self.listener.set_store_port)

    def rejoin(self) -> SurvivingGroup:
        """Return the surviving ranks, assigned to their nodes; the ranks of missing nodes are dead.

        Raises:
            RequestError: there are none.
        """
        nodes = self.listener.nodes
        survivors = self.surviving_group()
        assignments: dict[int, NodeAssignment] = {}
        for node in nodes:
            for survivor in node.survivors:
                place = survivor.topology
                if survivors.ranks.get(place.rank) is survivor:
                    first = place.rank - place.local_rank
                    assignments[first] = NodeAssignment(node, first, place.local_world_size)
        rank, world_size = 0, survivors.world_size
        while rank < world_size:  # ranks of missing nodes get a placeholder
            if rank not in assignments:
                end = min((first for first in assignments if first > rank), default=world_size)
                assignments[rank] = NodeAssignment(placeholder_node(end - rank), rank, end - rank)
            rank += assignments[rank].nproc
        self.assignments = [assignments[first] for first in sorted(assignments)]
        self._capacity = world_size
        return survivors

    def reassign(self, ranks: Sequence[int]) -> None:
        """Assign the ranks of lost nodes to spare nodes.

        Raises:
            RequestError: there are too few spare nodes; nothing has changed.
        """
        lost = [each for each in self.lost_assignments if any(rank in each.ranks for rank in ranks)]
        taken = [each.node for each in self.assignments]
        found: list[Node] = []
        for assignment in lost:
            found.append(self._spare_for(assignment, [*taken, *found]))
        for assignment, node in zip(lost, found, strict=True):
            assignment.node = node

    def topologies(self, world_size: int, *, master_port: int) -> list[Topology]:
        """Return the topology of each rank."""
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
        """Return the assignment of a rank."""
        return next(each for each in self.assignments if rank in each.ranks)

    def ranks_of(self, node: Node) -> list[int]:
        """Return the ranks that are assigned to a node."""
        return [rank for each in self.assignments if each.node is node for rank in each.ranks]

    def nodes(self) -> Mapping[int, str]:
        """Return the node name of each rank."""
        return {rank: each.node.name for each in self.assignments for rank in each.ranks}

    def clock_offset(self, rank: int) -> tuple[float, float]:
        """Return the offset of the node's clock and its error; 0 before it is measured."""
        clock = self.assignment_of(rank).node.clock
        return (clock.offset, clock.error) if clock.error < float("inf") else (0.0, 0.0)

    def cores(self, place: Topology) -> int:
        """Return the cores of the rank's node."""
        return int(self.assignment_of(place.rank).node.facts["cores"])

    def launch(self, start: RankStart) -> RankHandle:
        """Start a rank on its node, or a replacement for it.

        Raises:
            RequestError: the node was lost.
        """
        assignment = self.assignment_of(start.topology.rank)
        self.listener.set_store_port(start.store_port)
        spec = replace(start.spec, backend=self._backend(start.spec.backend))
        return self.listener.launch(assignment.node, replace(start, spec=spec))

    def _spare_for(self, assignment: NodeAssignment, taken: Sequence[Node]) -> Node:
        for node in self.listener.available_nodes:
            if node not in taken and node.nproc >= assignment.nproc:
                return node
        gone = assignment.node
        raise RequestError(
            f"node {gone.name} is gone ({gone.lost_reason}), and no other has room for its ranks; "
            "try again when a node has joined, or `%ddp restart` with the joined nodes"
        )

    def _backend(self, asked: str) -> str:
        """Choose here: each node would choose by its own GPUs, but all ranks must agree."""
        if asked != "auto":
            return asked
        if not all(int(each.node.facts["gpus"]) >= each.nproc for each in self.assignments):
            return "gloo"
        backends = {str(each.node.facts["gpu_backend"]) for each in self.assignments}
        return backends.pop() if len(backends) == 1 else "gloo"

    def share(self) -> RemoteLauncher:
        """Return a launcher for a second worker group on the same nodes."""
        shared = copy(self)
        shared.assignments, shared._capacity = [], 0
        return shared

    @property
    def lost_assignments(self) -> Sequence[NodeAssignment]:
        """The assignments whose node was lost."""
        return [each for each in self.assignments if each.node.lost_reason]
