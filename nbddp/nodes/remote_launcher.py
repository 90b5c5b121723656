"""Starts ranks on the nodes that have come in, as the launcher of this machine does here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from nbddp.errors import RequestError
from nbddp.launch.local_launcher import Launcher, RankHandle
from nbddp.nodes.listener import Node, NodeListener, in_order, lost_node
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
    """Starts ranks on nodes, in the order of :func:`nbddp.nodes.listener.in_order`.

    Args:
        door: where the nodes come in.
        least: nodes without which none starts.
        most: nodes of which ranks are made; more wait as spares.
        way: says how one comes in, to who has too few.
    """

    def __init__(
        self,
        door: NodeListener,
        *,
        least: int = 1,
        most: int = sys.maxsize,
        way: Callable[[], str] = str,
    ) -> None:
        self.door = door
        self.least = least
        self.most = most
        self._way = way
        self.slots: list[NodeAssignment] = []
        self._room = 0  # for ranks when they were shared out

    @property
    def base_env(self) -> Mapping[str, str]:
        """What a rank's environment begins with: its node's own, which is not known here."""
        return {}

    def chosen(self) -> list[Node]:
        """Return the nodes that get ranks, in the order of their ranks.

        Choose the nodes that joined first, so that a later spare node does not renumber the ranks.
        """
        return in_order(self.door.staying[: self.most])

    def room(self) -> int:
        """Ranks that there are on the nodes that are here.

        Raises:
            RequestError: these are too few.
        """
        here = self.chosen()
        if len(here) < self.least:
            are = "is" if 1 in (len(here), self.least) else "are"
            nodes = "node" if self.least == 1 else "nodes"
            raise RequestError(f"{len(here)} of {self.least} {nodes} {are} here; {self._way()}")
        return sum(node.nproc for node in here)

    def world_size(self, asked: int) -> int:
        """All ranks that there are now, if those that were asked for were all then; else no more.

        Raises:
            RequestError: too few nodes are here.
        """
        room = self.room()
        return room if asked == self._room else min(asked, room)

    def has_free_capacity(self) -> bool:
        """Whether a restart would make more ranks than there are."""
        ranks, here = sum(slot.nproc for slot in self.slots), self.chosen()
        is_all = 0 < ranks == self._room and len(here) >= self.least
        return is_all and sum(node.nproc for node in here) > ranks

    def assign(self, world_size: int) -> None:
        """Give each node its ranks, for a new attempt.

        Raises:
            RequestError: the nodes that are here have not so many.
        """
        slots: list[NodeAssignment] = []
        left = world_size
        for node in self.chosen():
            if left:
                slots.append(NodeAssignment(node, world_size - left, min(left, node.nproc)))
                left -= slots[-1].nproc
        if left:
            raise RequestError(
                f"{world_size} ranks were asked for, and the nodes that are here have "
                f"{world_size - left}; `%ddp nodes` lists them"
            )
        self.slots = slots
        self._room = sum(node.nproc for node in self.chosen())

    def returned(self) -> SurvivingGroup:
        """The ranks of another notebook that are back.

        Raises:
            RequestError: none is.
        """
        living = [each for node in self.door.nodes for each in node.living]
        return SurvivingGroup.of(living, self.door.serve_store)

    def take_back(self) -> SurvivingGroup:
        """The ranks that are back; those whose node is not are gone with it.

        Raises:
            RequestError: none is.
        """
        nodes = self.door.nodes
        returned = self.returned()
        slots: dict[int, NodeAssignment] = {}
        for node in nodes:
            for each in node.living:
                place = each.place
                if returned.ranks.get(place.rank) is each:
                    first = place.rank - place.local_rank
                    slots[first] = NodeAssignment(node, first, place.local_world_size)
        rank, world_size = 0, returned.world_size
        while rank < world_size:  # ranks of nodes that have not come back are on one that is gone
            if rank not in slots:
                end = min((first for first in slots if first > rank), default=world_size)
                slots[rank] = NodeAssignment(lost_node(end - rank), rank, end - rank)
            rank += slots[rank].nproc
        self.slots = [slots[first] for first in sorted(slots)]
        self._room = world_size
        return returned

    def reassign(self, ranks: Sequence[int]) -> None:
        """Nodes that are here, and have no ranks, take the places of those that are gone.

        Raises:
            RequestError: too few are; nothing has changed.
        """
        lost = [slot for slot in self.lost if any(rank in slot.ranks for rank in ranks)]
        taken = [slot.node for slot in self.slots]
        found: list[Node] = []
        for slot in lost:
            found.append(self._spare_for(slot, [*taken, *found]))
        for slot, node in zip(lost, found, strict=True):
            slot.node = node

    def topologies(self, world_size: int, *, master_port: int) -> list[Topology]:
        """Each rank's place in the world."""
        return [
            Topology(
                rank=rank,
                local_rank=local_rank,
                node_rank=node_rank,
                world_size=world_size,
                local_world_size=slot.nproc,
                group_world_size=len(self.slots),
                master_addr=self.slots[0].node.address,
                master_port=master_port,
            )
            for node_rank, slot in enumerate(self.slots)
            for local_rank, rank in enumerate(slot.ranks)
        ]

    def slot_of(self, rank: int) -> NodeAssignment:
        """Where a rank is, or was."""
        return next(slot for slot in self.slots if rank in slot.ranks)

    def ranks_of(self, node: Node) -> list[int]:
        """The ranks that a node has, or had."""
        return [rank for slot in self.slots if slot.node is node for rank in slot.ranks]

    def nodes(self) -> Mapping[int, str]:
        """What each rank's node is called."""
        return {rank: slot.node.name for slot in self.slots for rank in slot.ranks}

    def clock_offset(self, rank: int) -> tuple[float, float]:
        """Its node's; 0 until it is measured, as it is before any rank starts."""
        clock = self.slot_of(rank).node.clock
        return (clock.offset, clock.error) if clock.error < float("inf") else (0.0, 0.0)

    def cores(self, place: Topology) -> int:
        """Those of the rank's node."""
        return int(self.slot_of(place.rank).node.facts["cores"])

    def launch(self, start: RankStart) -> RankHandle:
        """Have a rank's node start it, or another one in that one's place.

        Raises:
            RequestError: its node is gone.
        """
        slot = self.slot_of(start.topology.rank)
        self.door.serve_store(start.store_port)
        start = replace(start, backend=self._backend(start.backend))
        return self.door.launch(slot.node, start)

    def _spare_for(self, slot: NodeAssignment, taken: Sequence[Node]) -> Node:
        for node in self.door.staying:
            if node not in taken and node.nproc >= slot.nproc:
                return node
        gone = slot.node
        raise RequestError(
            f"node {gone.name} is gone ({gone.why_gone}), and no other has room for its ranks; "
            "when one has come, try again, or `%ddp restart` with the nodes that are here"
        )

    def _backend(self, asked: str) -> str:
        """Decided here: every node would choose by its own GPUs, and all ranks must agree."""
        if asked != "auto":
            return asked
        has_gpus = all(int(slot.node.facts["gpus"]) >= slot.nproc for slot in self.slots)
        return "nccl" if has_gpus else "gloo"

    def share(self) -> RemoteLauncher:
        """Return a launcher for a second worker group on the same nodes, with slots of its own."""
        return RemoteLauncher(self.door, least=self.least, most=self.most, way=self._way)

    @property
    def lost(self) -> Sequence[NodeAssignment]:
        """Those whose node is gone."""
        return [slot for slot in self.slots if slot.node.why_gone]
