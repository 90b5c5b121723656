"""What the user reads of a failure: the message first, once, and no more frames than help."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest
from drivers.ranks import Ranks
from limits import set_limits
from notebook import Notebook

import nbddp

pytestmark = pytest.mark.multiproc
SHARES_KERNEL = True

LOADER = """class Images(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i):
        raise ValueError(f"image {i} is broken")
for x in torch.utils.data.DataLoader(Images(), num_workers=1):
    pass"""
TOLD = {
    "x = torch.ones(3)\nassert x.sum() == 4": "AssertionError: assert x.sum() == 4, line 2",
    LOADER: "ValueError: Caught ValueError in DataLoader worker process 0., line 5",
}
CPP = """print('before')
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(5, 1))
model(torch.ones(2, 4))"""


@pytest.fixture(autouse=True)
def nobody_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever raises what another rank has raised has time for it."""
    set_limits(monkeypatch, peers_patience=30.0)


@pytest.mark.parametrize("source", TOLD, ids=["assertion", "loader"])
def test_the_headline_has_the_users_message_and_line(shared_group: Ranks, source: str) -> None:
    error = shared_group.failure_of(source)
    assert str(error) == f"ranks 0-1: {TOLD[source]}"
    assert f"{Path(nbddp.__file__).parent}/" not in error.report


def test_torchs_frames_are_folded_and_the_log_has_the_whole_traceback(
    group: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    error = group.failure_of(CPP)
    assert re.fullmatch("ranks 0-1: RuntimeError: .*shapes.*, line 3", str(error))
    assert re.search(r"^ +\.\.\. \d+ frames in torch$", error.report, re.MULTILINE)
    assert "model(torch.ones(2, 4))" in error.report
    group.run("print('after')")
    shown = capsys.readouterr().out
    assert "return F.linear(" not in shown
    assert shown.count("[rank 0] before\n") == shown.count("[rank 0] after\n") == 1
    for rank in range(2):
        log = group.log(rank).read_text()
        assert log.index("before\n") < log.index("return F.linear(") < log.index("after\n")


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
