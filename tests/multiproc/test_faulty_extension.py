"""An extension that fails in each hook changes neither the results of cells nor their record."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from notebook import Notebook
from packages_on_disk import install

from nbddp.extension.guard import MAX_FAILURES, SLOW

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

MANIFEST = """
import os, time
from pathlib import Path
from nbddp.extension.manifest import API, Extension
from nbddp.group.notebook_events import CellLeftOut, PushAsked, ValuePulled

EXTENSION = Extension(
    name="faulty",
    api=API,
    events=(CellLeftOut, PushAsked, ValuePulled),
    notebook="faulty.notebook:InNotebook",
    rank="faulty.rank:OnRank",
    cells="faulty.cells:OnCells",
)

def failing(name):
    def hook(self, *_):
        with (Path(os.environ["CALLS"]) / f"{os.getpid()}.{name}").open("a") as calls:
            calls.write("x")
        FAILURE

    hook.__name__ = name
    return hook
"""
FILES = {
    "faulty/notebook.py": """
from faulty import failing
from nbddp.group.notebook_half import NotebookHalf

class InNotebook(NotebookHalf):
    before_cell, on_event = failing("before_cell"), failing("on_event")
""",
    "faulty/rank.py": """
from faulty import failing
from nbddp.extension.rank_half import RankHalf

class OnRank(RankHalf):
    before_cell, after_cell = failing("before_cell"), failing("after_cell")
    facts, armed = failing("facts"), failing("armed")
""",
    "faulty/cells.py": """
from faulty import failing
from nbddp.controller.cell_hooks import CellHooks

class OnCells(CellHooks):
    run_facts = failing("run_facts")
""",
}
# with the hooks that are called in all processes, and whether a hook is off after three calls
FAILURES = {
    "raise ValueError('faulty')": (15, True),
    "return 3": (15, False),
    # the first cell on rank 1, which then dies, is interrupted: no other hook follows a slow one
    f"time.sleep({SLOW + 0.2})": (13, True),
}
TRAIN = """%%ddp
import time
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(rank)
model = DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
def train(first):
    for step in range(first, first + 3):
        loss = model(torch.full((4, 3), step * scale)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        nbddp.log(step=step, loss=loss)
train(0)
Path(f"trained{rank}").touch()
time.sleep(600)
"""
WAITING = {
    "waiting/__init__.py": """
from nbddp.extension.manifest import API, Extension
EXTENSION = Extension(name="waiting", api=API, rank="waiting.rank:Waiting")
""",
    "waiting/rank.py": """
import time
from pathlib import Path
from nbddp.extension.rank_half import RankHalf

class Waiting(RankHalf):
    def before_cell(self, cell):
        if cell.number == 2:
            Path("waits").touch()
            time.sleep(600)
""",
}


def train_and_heal(folder: Path) -> Any:
    """Train in a kernel, interrupt, heal and train on.

    Return the seconds that the interrupt took, then the results and the record.
    """
    folder.mkdir()
    with Notebook(folder) as notebook:
        for cell in ("scale = 0.1", "%ddp start --nproc 2", "%ddp push scale"):
            assert notebook.run(cell).status == "ok"
        interrupted = notebook.run_and_stop_at(TRAIN, "trained0", "trained1")
        for cell in ("%ddp kill 1", "%ddp heal", "%%ddp\ntrain(3)", *["%ddp push scale"] * 2):
            assert notebook.run(cell).status == "ok"
        for cell in ("%%ddp\nscale", "%%ddp\nscale", "%ddp stop"):
            assert notebook.run(cell).status == "ok"
    [path] = (folder / ".nbddp" / "runs").iterdir()
    events, rows = (
        [json.loads(line) for line in (path / name).read_text().splitlines()]
        for name in ("events.jsonl", "metrics.jsonl")
    )
    losses = sorted((row["step"], row["rank"], row["loss"]) for row in rows)
    kinds = [event["kind"] for event in events]
    facts = sorted(json.loads((path / "run.json").read_text()))
    return interrupted.seconds, interrupted.error, losses, kinds, facts


def test_a_faulty_extension_changes_neither_results_nor_the_record(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, *expected = train_and_heal(folder / "without")
    assert "ranks 0-1 interrupted" in expected[0]
    assert len(expected[1]) == 12  # steps 0 to 5 on two ranks
    calls = folder / "calls"
    monkeypatch.setenv("PYTHONPATH", str(folder / "site"), prepend=os.pathsep)
    monkeypatch.setenv("CALLS", str(calls))
    for number, (failure, (called, is_off)) in enumerate(FAILURES.items()):
        shutil.rmtree(calls, ignore_errors=True)
        calls.mkdir()
        files = FILES | {"faulty/__init__.py": MANIFEST.replace("FAILURE", failure)}
        install(folder / "site", "faulty", "faulty:EXTENSION", files)
        delayed, *found = train_and_heal(folder / str(number))
        assert found == expected, failure
        # a hook of 1.2 s delays it by 0.3 s in the notebook, and by 0.3 s on the ranks
        assert delayed < 5 * seconds, failure
        counts = {path.name: len(path.read_text()) for path in calls.iterdir()}
        assert len(counts) == called, counts  # in the notebook, on two ranks and a new one
        assert (max(counts.values()) == MAX_FAILURES) == is_off, counts


def test_an_interrupt_ends_a_hook_before_a_cell(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(folder / "site"), prepend=os.pathsep)
    install(folder / "site", "waiting", "waiting:EXTENSION", WAITING)
    with Notebook(folder) as notebook:
        assert notebook.run("%%ddp --nproc 2\nx = 1").status == "ok"
        error = notebook.run_and_stop_at("%%ddp\nx = 2", "waits").error
        assert "ranks 0-1 interrupted" in error
        assert "[ranks 0-1] 1" in notebook.run("%%ddp\nx").text


ASKING = {
    "asking/__init__.py": """
from nbddp.extension.manifest import API, Command, Extension
class Ask(Command, example="ask"):
    "Ask the ranks."
EXTENSION = Extension(
    name="asking", api=API, commands=(Ask,), notebook="asking.notebook:Asking",
    rank="asking.rank:Asked",
)
""",
    "asking/notebook.py": """
from nbddp.controller.rank_requests import ask_each
from nbddp.group.notebook_half import NotebookHalf
from nbddp.wire.request_messages import ExtensionMessage
class Asking(NotebookHalf):
    def ask(self, args):
        request = ExtensionMessage(extension="asking", content={})
        for rank, answer in ask_each(self.notebook.group.session, {0: request, 1: request}).items():
            self.notebook.print_line(f"rank {rank}: {answer}")
""",
    "asking/rank.py": """
from nbddp.extension.rank_half import RankAnswer, RankHalf
calls = []
class Asked(RankHalf):
    def answer(self, content):
        calls.append(0)
        if len(calls) == 1: raise ValueError("faulty")
        return [3, RankAnswer(content={"not json": object()})][len(calls) % 2]
""",
}


def test_a_faulty_answer_is_an_error_with_the_rank_and_cells_go_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(folder / "site"), prepend=os.pathsep)
    install(folder / "site", "asking", "asking:EXTENSION", ASKING)
    with Notebook(folder) as notebook:
        assert notebook.run("%%ddp --nproc 2\nx = torch.ones(1)").status == "ok"
        for _ in range(4):  # after three failures, the half is off
            text = notebook.run("%ddp ask").text
            assert len(re.findall(r"rank [01]: .*the extension asking ", text)) == 2, text
            assert notebook.run("%%ddp\ndist.all_reduce(x)").status == "ok"
        assert "16." in notebook.run("%%ddp\nx").text
