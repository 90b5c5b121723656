"""What the user reads of a failure: the message first, once, and no more frames than help."""

from __future__ import annotations

import html
import re
import sys
from pathlib import Path

import pytest
import torch
from drivers.ranks import Ranks
from limits import set_limits
from notebook import Notebook

from nbddp import CellFailedError

pytestmark = pytest.mark.multiproc
SHARES_KERNEL = True

LOADER = """class Images(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i):
        raise ValueError(f"image {i} is broken")
for x in torch.utils.data.DataLoader(Images(), num_workers=1):
    pass"""
CHAINED = """def load(path):
    try:
        return int("x1")
    except ValueError as error:
        raise RuntimeError(f"cannot load {path}") from error
load("a.csv")"""
GROUPED = """errors = []
for kind in (ValueError, TypeError):
    try: raise kind("bad")
    except Exception as error: errors.append(error)
raise ExceptionGroup("two failed", errors)"""
CAUSES = """def read():
    raise OSError("disk is full")
def load():
    try: read()
    except OSError as error: raise ValueError("not loaded") from error
try: load()
except ValueError as error: raise RuntimeError("no data") from error"""
SAVE = """import torch.distributed.checkpoint as dcp
class Unsendable:
    def __reduce__(self): raise TypeError("kept by rank 1")
value = Unsendable() if rank == 1 else 2
dcp.save({f"value{rank}": value}, checkpoint_id="saved")"""
CPP = """model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(5, 1))
model(torch.ones(2, 4))"""


def words_of_torch() -> str:
    """Return the message of the error in ``CPP``; torch 2.15 puts "addmm: " before it."""
    try:
        torch.nn.Linear(5, 1)(torch.ones(2, 4))
    except RuntimeError as error:
        return str(error)
    raise AssertionError("torch multiplied shapes that do not fit")


TOLD = {
    LOADER: "ValueError: image 0 is broken (in DataLoader worker process 0), line 4",
    CHAINED: (
        "RuntimeError: cannot load a.csv (caused by ValueError: invalid literal for int() with "
        "base "
        "10: 'x1'), line 5"
    ),
    GROUPED: (
        "ExceptionGroup: two failed: ValueError: bad (line 3); TypeError: bad (line 3), line 5"
    ),
    CPP: f"RuntimeError: {words_of_torch()}, line 2",
    CAUSES: "RuntimeError: no data (caused by OSError: disk is full), line 7",
    SAVE: "TypeError: kept by rank 1 (on rank 1) in save, line 3",
    "x = torch.ones(3)\nassert x.sum() == 4": "AssertionError: assert x.sum() == 4, line 2",
}


@pytest.fixture(autouse=True)
def nobody_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever raises what another rank has raised has time for it."""
    set_limits(monkeypatch, peers_patience=30.0)


def failure_of(group: Ranks, source: str) -> CellFailedError:
    with pytest.raises(CellFailedError) as caught:
        group.run(source)
    return caught.value


@pytest.mark.parametrize(
    ("source", "headline"),
    TOLD.items(),
    ids=["loader", "chained", "group", "C++", "causes", "checkpoint", "assertion"],
)
def test_the_headline_has_the_users_message_and_line(
    group: Ranks, source: str, headline: str
) -> None:
    if source is GROUPED and sys.version_info < (3, 11):
        pytest.skip("groups came with Python 3.11")
    error = failure_of(group, source)
    assert str(error) == f"ranks 0-1: {headline}"
    assert "site-packages" not in error.report
    assert "<ipython-input" not in error.report


def test_torchs_frames_are_folded_and_the_log_has_the_whole_traceback(
    group: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    source = f"print('before')\n{CPP}"
    report = failure_of(group, source).report
    assert re.search(r"^ +\.\.\. \d+ frames in torch$", report, re.MULTILINE)
    assert "model(torch.ones(2, 4))" in report
    group.run("print('after')")
    shown = capsys.readouterr().out
    assert "return F.linear(" not in shown
    assert shown.count("[rank 0] before\n") == shown.count("[rank 0] after\n") == 1
    folder = Path(str(group.folder))
    for rank in range(2):
        log = (folder / f"rank{rank}.log").read_text()
        assert log.index("before\n") < log.index("return F.linear(") < log.index("after\n")


def test_torchs_trace_of_c_is_folded(make_group: object) -> None:
    group = make_group(1, env={"TORCH_SHOW_CPP_STACKTRACES": "1"})  # type: ignore[operator]
    error = failure_of(group, CPP)
    assert str(error) == f"rank 0: {TOLD[CPP]}"
    assert len(error.report.splitlines()) < 25


NEEDLE = "%%ddp --nproc 4\nsay = 'nee' + 'dle'; dist.barrier()\nraise ValueError(say)"


def test_the_same_error_of_all_ranks_is_shown_once_as_text(notebook: Notebook) -> None:
    reply = notebook.run(NEEDLE)
    assert reply.text == ""
    headline, *lines = reply.traceback.splitlines()
    assert headline == "ranks 0-3: ValueError: needle, line 3"
    assert [line for line in lines if "needle" in line] == ["ValueError: needle"]


def test_the_same_error_of_all_ranks_is_shown_once_in_a_record(notebook: Notebook) -> None:
    notebook.run("%ddp view panel")
    reply = notebook.run(NEEDLE)
    notebook.run("%ddp view auto")
    shown = [each.get("text/html", "") for each in reply.updates + reply.displays]
    record = [page for page in shown if "needle" in page][-1]
    text = html.unescape(re.sub(r"<[^>]+>", "", re.sub(r"(?s)<style.*?</style>", "", record)))
    assert text.count("needle") == 2, "the headline, and the end of its traceback"
    assert "ranks 0-3: failed" in text
