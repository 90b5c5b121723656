"""``%%ddp --scale``: the same cell on several world sizes, with real ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from notebook import Notebook, Reply

STEPS = """
import time
data = torch.arange(4096.0).reshape(-1, 1)
loader = nbddp.loader(torch.utils.data.TensorDataset(data), batch_size=32 // world_size)
model = nbddp.prepare(torch.nn.Linear(1, 1))
x = torch.ones(1)
for step in range(30):
    model(x).sum().backward()
    time.sleep(0.04 / world_size * (2 if rank == 1 else 1))
    nbddp.log(step=step, loss=1.0)
"""


def runs_in(base: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return run names, without the time, and the content of ``run.json``, in order."""
    paths = (base / ".nbddp" / "runs").glob("*/run.json")
    found = [(path.parent.name[16:], json.loads(path.read_text())) for path in paths]
    rounds = [(name, facts) for name, facts in found if "scale" in facts]
    return sorted(rounds, key=lambda each: (each[1]["scale"]["round"], each[1]["scale"]["ranks"]))


def table(reply: Reply) -> list[list[str]]:
    """The cells of the table, in columns that are two blanks apart."""
    lines = reply.displays[-1]["text/plain"].splitlines()
    rows = [re.split(r"\s{2,}", each.strip()) for each in lines]
    head = next(at for at, row in enumerate(rows) if row[0] == "ranks")
    return [row for row in rows[head + 1 :] if row[0].isdecimal()]


@pytest.mark.full
def test_scale_records_each_round_as_a_run_and_shows_a_table(
    notebook: Notebook, base: Path
) -> None:
    notebook.run("%%ddp --nproc 2\nkept = 7")
    reply = notebook.run(f"%%ddp --scale 1,2 --threads 1\nassert kept == 7{STEPS}")
    assert reply.status == "ok", reply.traceback
    found = runs_in(base)
    assert [name for name, _ in found] == [
        f"scale-{ranks}-round{each}" for each in (1, 2, 3) for ranks in ("1rank", "2ranks")
    ]
    assert [facts["world_size"] for _, facts in found] == [1, 2] * 3
    assert [facts["samples_per_step"] for _, facts in found] == [32] * 6
    assert re.search(r"^nbddp: .*\b3 of 6: ranks=1, round=2; 3\b", reply.text, re.MULTILINE)
    (one, two) = table(reply)
    assert one[:1] + one[3:5] == ["1", "1.00", "100 %"]
    # rank 1 sleeps as long as one rank alone, so that nothing is won, and rank 0 waits for it
    assert two[0] == "2"
    assert 0.3 < float(two[3]) < 1.7
    waiting = float(two[5].removesuffix(" %"))
    assert 5 < waiting <= 50  # half of rank 0's time is a quarter of all
    assert "strong scaling" in reply.displays[-1]["text/plain"]
    assert ["image/png" in each for each in reply.displays].count(True) == 1
    assert reply.displays[-1]["image/png"]
    assert notebook.run("%%ddp\nkept").text == "Out [ranks 0-1] 7\n"


def test_scale_continues_after_a_world_size_that_fails(notebook: Notebook, base: Path) -> None:
    reply = notebook.run("%%ddp --scale 1-3\nassert world_size != 2, 'no pairs'\n1")
    assert reply.status == "ok", reply.traceback
    assert [row[0] for row in table(reply)] == ["1", "3"]
    assert "scale of 9: 6 ok, 3 failed" in reply.text
    failure = "ranks=2, round=3: .*ranks 0-1: AssertionError: no pairs, line 2"
    assert re.search(failure, reply.text)
    assert len(runs_in(base)) == 9


def test_interrupt_ends_the_scale_and_shows_finished_rounds(notebook: Notebook, base: Path) -> None:
    request = notebook.begin(
        "%%ddp --scale 1,2\nimport time\nif world_size == 2:\n    print('here')\n    time.sleep(60)"
    )
    first = notebook.finish(request, until="[rank 1] here")
    notebook.interrupt()
    reply = notebook.finish(request, so_far=first)
    assert re.search("ended by you: scale of 6: 1 ok, 1 .*, 4 ", reply.error)
    [only] = table(reply)
    assert (only[0], only[-1]) == ("1", "0.0 % of 1")
    assert len(runs_in(base)) == 2
    assert notebook.run("%%ddp --nproc 2\nworld_size").text == "Out [ranks 0-1] 2\n"


@pytest.mark.usefixtures("base")
@pytest.mark.parametrize(
    "lose",
    [
        "for path in glob.glob('.nbddp/runs/*-scale-*/events.jsonl'): os.truncate(path, 0)\n"
        "nbddp.log(loss=1.0)",
        "if rank == 0:\n    [path] = glob.glob('.nbddp/runs/*-scale-*')\n    shutil.rmtree(path)\n"
        "dist.barrier()",
    ],
    ids=["record", "folder"],
)
def test_scale_uses_the_cell_time_if_a_round_has_no_record(notebook: Notebook, lose: str) -> None:
    notebook.run("%%ddp --nproc 2\nkept = 7")
    reply = notebook.run(f"%%ddp --scale 1,2\nimport glob, os, shutil\n{lose}")
    assert reply.status == "ok", reply.text + reply.traceback
    assert [row[0] for row in table(reply)] == ["1", "2"]
    assert notebook.run("%%ddp\nkept").text == "Out [ranks 0-1] 7\n"
