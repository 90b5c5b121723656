"""Runs that earlier versions recorded are listed, shown, compared and opened.

The folders are as these versions wrote them, but for the host, the user, paths and logs.
"""

import re
import shutil
from pathlib import Path
from typing import Any

from console import ddp

import nbddp
from nbddp.extensions.runs.stored_run import StoredRun

HERE = Path(__file__).parents[2]
RECORDED = (HERE / "recorded_runs", HERE / "golden" / "recorded")
NAMES = ("loops", "resumed", "killed", "lr0.1", "slow", "fast")


def output_of(line: str) -> str:
    return re.sub(r"\b\d\d-\d\d \d\d:\d\d\b|\b\d\d:\d\d:\d\d\b", "TIME", ddp(line))


def test_recorded_runs_are_read_as_by_their_version(folder: Path, snapshot: Any) -> None:
    for run in RECORDED:
        shutil.copytree(run, folder / ".nbddp" / "runs", dirs_exist_ok=True)
    assert output_of("runs") == snapshot(name="list")
    for names in ("loops resumed killed lr0.1", "slow fast"):
        values, _, _ = output_of(f"compare {names}").partition("\n\ndiffers")
        assert values == snapshot(name=f"comparison of {names}")
    for name in NAMES:
        rows = nbddp.Run(name).metrics()
        metrics = StoredRun(nbddp.Run(name).path).metrics()
        curves = {each: metrics.curves(each) for each in metrics.names()}
        assert {
            "rows": len(rows["time"]),
            "columns": list(rows),
            "last": {each: metrics.last(each) for each in curves},
            "points": {
                metric: {rank: len(curve.steps) for rank, curve in by_rank.items()}
                for metric, by_rank in curves.items()
            },
        } == snapshot(name=f"numbers of {name}")
        assert " at last (ranks 0-1)\n" in output_of(f"show {name}")
