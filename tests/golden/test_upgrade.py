"""Golden walk of an upgrade: this version opens the runs that version 0.1 has recorded.

``recorded/`` has two runs as the version wrote them; only the host, the user and paths are others.
A later version may write other folders, but it must read these.
"""

import re
import shutil
from pathlib import Path

import pytest
from golden.walks import KEEP, all_text, assert_ranks_work
from notebook import Notebook

pytestmark = pytest.mark.multiproc
SHARES_KERNEL = True

RECORDED = Path(__file__).parent / "recorded"
OPEN = """
import nbddp
slow, fast = nbddp.Run("slow"), nbddp.Run("fast")
assert [each.name[16:] for each in nbddp.runs()] == ["fast", "slow"]
assert (slow.config, fast.config) == ({"lr": 0.1}, {"lr": 0.5})
assert (slow.facts["world_size"], slow.facts["failures"], slow.facts["heals"]) == (2, 1, 1)
training, failed, last = slow.cells
assert failed.source.startswith("if rank == 1:")
assert "ValueError: no luck" in failed.outcome
assert [training.outcome, last.outcome, slow.outcome, fast.outcome] == ["ok"] * 4
assert min(slow.metrics()["loss"]) == 0.05
assert sorted(fast.metrics()["step"]) == sorted([*range(10)] * 2)
assert "healed" in [each["kind"] for each in slow.events]
"""


def test_runs_of_an_earlier_version_can_be_opened(notebook: Notebook, tmp_path: Path) -> None:
    shutil.copytree(RECORDED, tmp_path / ".nbddp" / "runs")
    notebook.run(f"%cd -q {tmp_path}")
    reply = notebook.run(OPEN)
    assert reply.status == "ok", all_text(reply)
    assert notebook.run(f"%%ddp --nproc 2 --name new\n{KEEP}\nnbddp.config(lr=0.3)").status == "ok"

    text = notebook.run("%ddp runs --sort lr").text
    assert re.findall(r"^\S*-(slow|fast|new)\b", text, re.MULTILINE) == ["slow", "new", "fast"]

    reply = notebook.run("%ddp show slow")
    assert reply.status == "ok", all_text(reply)
    for words in ("ValueError", "no luck", "rank 1", "first words of 0", "val/loss"):
        assert words in reply.text
    reply = notebook.run("%ddp show slow --cell 2")
    assert "no luck" in reply.text
    assert "first words" not in reply.text

    reply = notebook.run("%ddp compare slow fast")
    assert reply.status == "ok", all_text(reply)
    [shown] = reply.displays
    assert re.search(r"^.*\blr +0\.1 +0\.5$", shown["text/plain"], re.MULTILINE)
    assert "image/png" in shown

    assert_ranks_work(notebook)
