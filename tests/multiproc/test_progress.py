"""Ranks wait for one that works: nothing is wrong, and no card comes; it comes when it is idle."""

from __future__ import annotations

import re
import shutil
import sys

import pytest
from drivers.ranks import MakeRanks, Ranks
from hangs import SHORT, said_of_a_hang
from limits import set_limits
from multiproc.long_work import waits_for, works

pytestmark = pytest.mark.multiproc

WORK = 2.3 * SHORT
WORKS = works(WORK)
MARKS = {
    "a disk": [pytest.mark.skipif(sys.platform != "linux", reason="the state of a thread")],
    "torch.compile": [
        pytest.mark.timeout(300),  # the compiler alone takes 40 s of a core
        pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler"),
    ],
}
EACH = [pytest.param(name, id=name, marks=MARKS.get(name, ())) for name in WORKS]
LOADER = """class Slow(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, i):
        end = time.monotonic() + 8
        while time.monotonic() < end: sum(range(1000))
        return i
list(torch.utils.data.DataLoader(Slow(), num_workers=1))
"""

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def hasty(make_group: MakeRanks) -> Ranks:
    """A group of two in which a hang is one after ``SHORT`` seconds."""
    group = make_group(2)
    group.hang_after(SHORT)
    return group


def said_while(group: Ranks, work: str, capsys: Capture) -> list[str]:
    """Return what nbddp says while rank 0 works and the other waits for it."""
    group.run(waits_for(work, WORK))
    return re.findall("nbddp:.*", capsys.readouterr().out)


@pytest.mark.gate_runs("one call of C", "a child", "a thread that prints", "lock")
@pytest.mark.parametrize("name", EACH)
def test_a_rank_that_works_is_waited_for(
    hasty: Ranks, capsys: Capture, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name == "Python's lock":  # no sign of life comes then
        set_limits(monkeypatch, rank_silent_after=SHORT)
    assert said_while(hasty, WORKS[name], capsys) == []


@pytest.mark.full
def test_a_rank_whose_loader_is_slow_is_waited_for(hasty: Ranks, capsys: Capture) -> None:
    hasty.hang_after(7.0)  # torch looks for its workers every 5 s
    assert said_while(hasty, LOADER, capsys) == []


IDLE = {
    "a lock": "lock = threading.Lock()\nlock.acquire()\nlock.acquire()",
    "a socket": "import socket\na, b = socket.socketpair()\na.recv(1)",
    "an idle child": "subprocess.run(['sleep', '60'])",
}
TALKS = """def talk():
    while time.monotonic() < end + 60: print('.'); time.sleep(.3)
threading.Thread(target=talk, daemon=True).start()
"""


@pytest.mark.gate_runs("a lock")
@pytest.mark.parametrize("idle", IDLE.values(), ids=IDLE)
def test_a_rank_that_is_idle_is_named(hasty: Ranks, capsys: Capture, idle: str) -> None:
    # a thread that prints beside who waits is no progress
    source = waits_for(idle, WORK).replace("\ndist.barrier()", f"\n{TALKS}dist.barrier()")
    said = said_of_a_hang(hasty, source, capsys)
    assert re.search("^nbddp: .* 3 s: rank ", said, re.MULTILINE)
    assert re.search("^  rank 1 .*barrier #1", said, re.MULTILINE)
