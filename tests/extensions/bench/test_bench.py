"""What ``%ddp bench`` shows, and whom it refuses."""

from types import SimpleNamespace

import numpy as np
from console import refused
from syrupy.assertion import SnapshotAssertion

from nbddp.extensions.bench.figure import draw_speeds
from nbddp.extensions.bench.speeds import Speeds
from nbddp.extensions.bench.view import speed_report
from nbddp.ui.report.render import render_text

TIMES = {"all_reduce": [130e-6, 0.02], "broadcast": [80e-6, 0.01], "memcpy": [1e-6, 0.01]}
SPEEDS = Speeds("gloo", 4, [1024, 32 << 20], TIMES)


def test_the_table_and_the_chart_have_each_collective(snapshot: SnapshotAssertion) -> None:
    assert render_text(speed_report(SPEEDS)) == snapshot
    times, bandwidths = draw_speeds(SPEEDS).axes
    assert [line.get_label() for line in times.lines] == [*TIMES]
    assert [np.max(line.get_ydata()) for line in times.lines] == [20_000, 10_000, 10_000]
    expected = [SPEEDS.bandwidths(name) for name in TIMES]
    assert [np.asarray(line.get_ydata()).tolist() for line in bandwidths.lines] == expected


def test_a_single_rank_is_refused() -> None:
    group = SimpleNamespace(life=SimpleNamespace(ranks=[0]))
    assert refused("bench", group=group) == (
        "a single rank sends nothing: `%ddp restart --nproc 2` starts two"
    )
