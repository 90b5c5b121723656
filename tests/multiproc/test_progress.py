"""Ranks wait for one that works: nothing is wrong, and no card comes; it comes when it is idle."""

from __future__ import annotations

import re
import shutil
import sys

import pytest
from drivers.ranks import MakeRanks, Ranks
from hangs import SHORT, said_of_a_hang
from limits import set_limits

pytestmark = pytest.mark.multiproc

WORK = 2.3 * SHORT
Capture = pytest.CaptureFixture[str]

BEGIN = f"""import hashlib, subprocess, sys, threading, time
def grind(seconds):
    rounds, began = 300_000, time.monotonic()
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", rounds)
    rounds *= seconds / (time.monotonic() - began)
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", int(rounds))
end = time.monotonic() + {WORK}
"""

WORKS = {
    "bars and logs": (
        "for i in nbddp.track(range(50)):\n    time.sleep(.14)\n    nbddp.log(step=i, loss=i)"
    ),
    "prints": "while time.monotonic() < end:\n    time.sleep(.5)\n    print('.')",
    "Python": "while time.monotonic() < end: sum(range(1000))",
    "a busy wait": "while time.monotonic() < end: pass",
    "short sleeps": "while time.monotonic() < end: time.sleep(.7)",
    "one call of C": f"grind({WORK})",
    "many matmuls": "x = torch.ones(500, 500)\nwhile time.monotonic() < end: x @ x",
    "a thread": f"it = threading.Thread(target=grind, args=[{WORK}])\nit.start()\nit.join()",
    "a child": (
        "subprocess.run([sys.executable, '-c', 'import time\\n'\n"
        f"    'while time.process_time() < {WORK / 2}: pass'], check=True)"
    ),
    "a thread that prints": (
        "def say():\n    while time.monotonic() < end: print('.'); time.sleep(.5)\n"
        "it = threading.Thread(target=say)\nit.start()\nit.join()"
    ),
    "a checkpoint": (
        "import os\nx = torch.ones(10_000_000)\n"
        "while time.monotonic() < end:\n"
        "    with open('big.pt', 'wb') as f:\n"
        "        torch.save(x, f)\n        os.fsync(f.fileno())"
    ),
}
# a child that shares what is left of its parent's time: until it ends the parent waits, in state
# "D", as it does for a disk
DISK = f"""import ctypes, signal
libc = ctypes.CDLL(None)
stack = ctypes.create_string_buffer(1 << 16)
top = ctypes.c_void_p((ctypes.addressof(stack) + (1 << 16)) & ~15)
CLONE_VFORK = 0x4000
libc.clone(libc.usleep, top, CLONE_VFORK | signal.SIGCHLD, ctypes.c_void_p({int(WORK * 1e6)}))
"""
COMPILES = (
    "import os, tempfile\n"
    "os.environ['TORCHINDUCTOR_CACHE_DIR'] = tempfile.mkdtemp(dir='.')\n"
    "layers = [torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64)] * 4\n"
    "torch.compile(torch.nn.Sequential(*layers))(torch.ones(8, 64)).sum().backward()"
)
WORKS |= {"a disk": DISK, "torch.compile": COMPILES}
MARKS = {
    "a disk": [pytest.mark.skipif(sys.platform != "linux", reason="the state of a thread")],
    "torch.compile": [
        pytest.mark.timeout(300),  # the compiler alone takes 40 s of a core
        pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler"),
    ],
}
EACH = [pytest.param(work, id=name, marks=MARKS.get(name, ())) for name, work in WORKS.items()]


@pytest.fixture
def hasty(make_group: MakeRanks) -> Ranks:
    """A group of two in which a hang is one after ``SHORT`` seconds."""
    group = make_group(2)
    group.hang_after(SHORT)
    return group


def said_while(group: Ranks, work: str, capsys: Capture) -> str:
    """What is said while rank 0 works and the other waits for it."""
    body = "\n".join(f"    {line}" for line in work.splitlines())
    group.run(f"{BEGIN}if rank == 0:\n{body}\ndist.barrier()")
    return "\n".join(line for line in capsys.readouterr().out.splitlines() if "nbddp:" in line)


@pytest.mark.gate_runs("one call of C", "a child", "a thread that prints")
@pytest.mark.parametrize("work", EACH)
def test_a_rank_that_works_is_waited_for(hasty: Ranks, capsys: Capture, work: str) -> None:
    assert said_while(hasty, work, capsys) == ""


@pytest.mark.full
def test_a_rank_whose_loader_is_slow_is_waited_for(hasty: Ranks, capsys: Capture) -> None:
    hasty.hang_after(7.0)  # torch looks for its workers every 5 s
    hasty.run(
        "import time\nclass Slow(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 2\n"
        "    def __getitem__(self, i):\n"
        "        end = time.monotonic() + 8\n"
        "        while time.monotonic() < end: sum(range(1000))\n"
        "        return i"
    )
    loader = "list(torch.utils.data.DataLoader(Slow(), num_workers=1))"
    assert said_while(hasty, loader, capsys) == ""


def test_a_rank_that_computes_with_pythons_lock_is_waited_for(
    hasty: Ranks, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, rank_silent_after=SHORT)
    work = (
        "began = time.monotonic()\nsum(range(20_000_000))\n"
        f"sum(range(int(20_000_000 * {WORK} / (time.monotonic() - began))))"
    )
    assert said_while(hasty, work, capsys) == ""


IDLE = {
    "a lock": "lock = threading.Lock()\n    lock.acquire()\n    lock.acquire()",
    "a socket": "import socket\n    a, b = socket.socketpair()\n    a.recv(1)",
    "an idle child": "subprocess.run(['sleep', '60'])",
}


@pytest.mark.gate_runs("a lock")
@pytest.mark.parametrize("idle", IDLE.values(), ids=IDLE)
def test_a_rank_that_is_idle_is_named(hasty: Ranks, capsys: Capture, idle: str) -> None:
    talk = "def talk():\n    while time.monotonic() < end + 60: print('.'); time.sleep(.3)"
    source = (
        f"{BEGIN}{talk}\nif rank == 0:\n    {idle}\n"
        "threading.Thread(target=talk, daemon=True).start()\n"  # beside who waits
        "dist.barrier()"
    )
    said = said_of_a_hang(hasty, source, capsys)
    assert re.search("^nbddp: .* 3 s: rank ", said, re.MULTILINE)
    assert re.search("^  rank 1 .*barrier #1", said, re.MULTILINE)
