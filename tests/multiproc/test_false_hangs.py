"""What takes long and is no hang, for minutes: nobody may say that it is one.

``pytest -m soak tests/multiproc/test_false_hangs.py``; ``NBDDP_SOAK_SECONDS=20`` for less.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
from drivers.ranks import Ranks

SECONDS = float(os.environ.get("NBDDP_SOAK_SECONDS", "120"))

pytestmark = [pytest.mark.multiproc, pytest.mark.soak, pytest.mark.timeout(4 * SECONDS + 120)]

SETUP = """
import hashlib, multiprocessing, os, queue, subprocess, sys, threading, time
def turns_in(seconds, compute, turns):
    began = time.monotonic()
    compute(turns)
    return int(turns * seconds / (time.monotonic() - began))
"""
EVALUATES = """
if rank == 0:
    for step in nbddp.track(range(1100), label="evaluation"):
        time.sleep(0.02)
        nbddp.log(step=step, accuracy=step)
dist.barrier()
"""
PRINTS = """
if rank == 0:
    for step in range(220):
        time.sleep(0.1)
        print("at", step)
dist.barrier()
"""
LOADS = """
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 6
    def __getitem__(self, index):
        time.sleep(4)
        return torch.ones(1) * index
for batch in torch.utils.data.DataLoader(Slow(), num_workers=1):
    dist.all_reduce(batch)
"""
LOADS_ALONE = """
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 6
    def __getitem__(self, index):
        time.sleep(4)
        return index
if rank == 0:
    for batch in torch.utils.data.DataLoader(Slow(), num_workers=1): pass
dist.barrier()
"""
PRINTS_IN_A_COMMAND = """
if rank == 0:
    !for i in 1 2 3 4 5; do sleep 4; echo $i; done
dist.barrier()
"""
WRITES_IN_A_PROCESS = """
if rank == 0:
    writes = "for i in 1 2 3 4 5; do sleep 4; echo $i >> written; done"
    subprocess.run(writes, shell=True, timeout=900)
dist.barrier()
"""
PRINTS_INTO_A_PIPE = """
if rank == 0:
    prints = "for i in 1 2 3 4 5; do sleep 4; echo $i; done"
    subprocess.run(prints, shell=True, capture_output=True, timeout=900)
dist.barrier()
"""
COMPUTES_IN_A_PROCESS = """
if rank == 0:
    computes = "import time\\nwhile time.process_time() < 20: pass"
    subprocess.run([sys.executable, "-c", computes], timeout=900)
dist.barrier()
"""
WAITS_FOR_THREADS = """
if rank == 0:
    done = queue.Queue()
    def make():
        for each in range(6):
            time.sleep(4)
            done.put(each)
    threading.Thread(target=make).start()
    for _ in range(6): done.get(timeout=900)
dist.barrier()
"""
ASKS_IN_A_LOOP = """
if rank == 0:
    slow = multiprocessing.get_context("fork").Process(target=time.sleep, args=(20,))
    slow.start()
    while slow.is_alive(): slow.join(timeout=0.5)
dist.barrier()
"""
COMPILES = """
began = time.monotonic()
count = 0
while rank == 0 and time.monotonic() - began < 25:
    torch._dynamo.reset()
    layers = [torch.nn.Linear(4 + count, 4 + count) for _ in range(20)]
    count += 1
    model = torch.compile(torch.nn.Sequential(*layers), backend="aot_eager")
    model(torch.ones(2, 3 + count)).sum().backward()
dist.barrier()
"""
SAVES = """
def drain(end):
    with open(end, "rb", buffering=0) as pipe:
        while pipe.read(1 << 16):
            time.sleep(0.01)
if rank == 0:
    read, write = os.pipe()
    reader = threading.Thread(target=drain, args=(read,))
    reader.start()
    with open(write, "wb") as slow:
        torch.save({"weights": torch.ones(30_000_000)}, slow)  # 120 MB at about 6 MB a second
    reader.join()
dist.barrier()
"""
COMPUTES = """
if rank == 0:
    def compute(turns):
        hashlib.pbkdf2_hmac("sha256", b"secret", b"salt", turns)
    compute(turns_in(25, compute, 2_000_000))
dist.barrier()
"""
HOLDS_THE_LOCK = """
if rank == 0:
    def compute(turns):
        sum(range(turns))
    compute(turns_in(20, compute, 20_000_000))  # Python has no say before it is over
dist.barrier()
"""


SOURCES = {
    "evaluates": EVALUATES,
    "prints": PRINTS,
    "loads": LOADS,
    "loads alone": LOADS_ALONE,
    "prints in a command": PRINTS_IN_A_COMMAND,
    "writes in a process": WRITES_IN_A_PROCESS,
    "prints into a pipe": PRINTS_INTO_A_PIPE,
    "computes in a process": COMPUTES_IN_A_PROCESS,
    "waits for threads": WAITS_FOR_THREADS,
    "asks in a loop": ASKS_IN_A_LOOP,
    "compiles": COMPILES,
    "saves": SAVES,
    "computes": COMPUTES,
    "holds the lock": HOLDS_THE_LOCK,
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_what_takes_long_is_not_called_a_hang(
    source: str, make_group: Callable[..., Ranks], capsys: pytest.CaptureFixture[str]
) -> None:
    group = make_group(2)
    group.run(SETUP)
    deadline = time.monotonic() + SECONDS
    took = []
    while time.monotonic() < deadline:
        began = time.monotonic()
        group.run(source, quiet=True)
        took.append(time.monotonic() - began)
    text = capsys.readouterr().out
    assert "no progress" not in text
    assert "no sign of life" not in text
    assert max(took) > 15  # long enough for a card that comes after ten seconds
