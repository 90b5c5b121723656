"""Holistic Trace Analysis reads the ranks' own files of a trace."""

import pytest
from drivers.extensions import begin_traced, collect_trace
from drivers.ranks import Ranks
from processes import wait_until

from nbddp.extensions.trace import TraceSteps

analysis = pytest.importorskip("hta.trace_analysis")
pytestmark = pytest.mark.filterwarnings("ignore")  # a pandas warning of HTA

TRAIN = """
import time
for step in range(8):
    time.sleep(0.03 if rank == 1 else 0.005)
    dist.all_reduce(torch.ones(100))
    nbddp.log(step=step, loss=1.0)
"""


def test_hta_reads_steps_and_collectives_of_all_ranks(group: Ranks) -> None:
    asked = TraceSteps(first=3, last=6)
    handle = begin_traced(group, TRAIN, asked)
    assert wait_until(lambda: handle.is_finished, timeout=60.0)
    assert handle.result is not None
    trace = collect_trace(group, handle.result, asked)
    read = analysis.TraceAnalysis(trace_dir=str(trace.folder)).t
    assert sorted(read.traces) == [0, 1]
    # it leaves the last one out, of which it cannot know whether it is whole
    assert [int(each) for each in read.get_iterations()] == [3, 4, 5]
    names = read.symbol_table.sym_table
    waited = {
        rank: sum(trace["dur"][[names[each] == "gloo:all_reduce" for each in trace["name"]]])
        for rank, trace in read.traces.items()
    }
    assert waited[0] > 3 * 20_000 > waited[1], "microseconds that rank 0 waits for rank 1"
