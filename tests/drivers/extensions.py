"""What tests of extensions ask of real ranks."""

from drivers.ranks import Ranks

from nbddp.extensions.checks.facts import RankFacts
from nbddp.extensions.checks.notebook import check_cell
from nbddp.extensions.checks.registry import Finding
from nbddp.extensions.nodes.node_pool import NodePool, NodesSpec
from nbddp.extensions.nodes.notebook import open_nodes
from nbddp.extensions.timeline.collective_timeline import Timeline
from nbddp.extensions.timeline.notebook import timeline_of
from nbddp.extensions.trace import TraceSteps
from nbddp.extensions.trace import notebook as trace
from nbddp.extensions.trace.group_methods import options_for_ranks
from nbddp.extensions.trace.merge import Trace
from nbddp.record.cell import CellHandle, CellRequest, CellResult


def findings_of(group: Ranks, result: CellResult, source: str) -> list[Finding]:
    facts = {rank: RankFacts.from_reported(each.facts) for rank, each in result.reports.items()}
    return check_cell(
        CellRequest(source=source),
        facts,
        world_size=group.world_size,
        is_ok=True,
        is_asked=False,
    )


def open_pool(group: Ranks, spec: NodesSpec) -> NodePool:
    return open_nodes(group.rank_group, spec)


def begin_traced(group: Ranks, source: str, asked: TraceSteps) -> CellHandle:
    return group.begin(source, options=options_for_ranks(asked))


def collect_trace(group: Ranks, result: CellResult, asked: TraceSteps) -> Trace:
    return trace.collect_trace(group.session, result, asked)


def timeline_of_last(group: Ranks, last: int | None = None) -> Timeline:
    return timeline_of(group.scripts.last_session, last)
