"""Waits outside collectives are reported as hangs, can be interrupted, and have a timeout."""

from __future__ import annotations

import re
import time

import pytest
from conditions import interrupt_at, output_of_hang
from drivers.ranks import Capture, MakeRanks, Ranks

from nbddp import CellFailedError

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("lasting_group")]


@pytest.mark.full
def test_rendezvous_with_missing_ranks_is_explained(make_group: MakeRanks, capsys: Capture) -> None:
    group = make_group(2, init=False)
    group.run("kept = rank")
    text = output_of_hang(group, "if rank == 0:\n    dist.init_process_group()", capsys)
    assert re.search(r"rank 0 .*\binit_process_group, line 2$", text, re.MULTILINE)
    group.run("pass")
    assert group.pull("kept") == [0, 1]


def test_interrupt_ends_an_await_at_once(group: Ranks) -> None:
    source = (
        "import asyncio, pathlib\ntry:\n"
        "    asyncio.get_running_loop().call_later(0.1, pathlib.Path(f'waits{rank}').touch)\n"
        "    await asyncio.sleep(300)\nfinally:\n    cleaned = True"
    )
    group.run("kept, cleaned = rank, False")
    began = time.monotonic()
    interrupt_at(group, group.begin(source), "waits0", "waits1")
    assert time.monotonic() - began < 40  # it takes a second, not 60
    assert group.pull("kept") == [0, 1]
    assert group.pull("cleaned") == [True, True]
    group.run("import asyncio\nawait asyncio.sleep(0)\ndist.barrier()")


def test_timeout_applies_to_a_receive(make_group: MakeRanks) -> None:
    group = make_group(2, timeout=4.0)  # the barrier below has no more time
    source = "import time\nif rank: time.sleep(60)\nelse: dist.recv(torch.ones(1), src=1)"
    began = time.monotonic()
    with pytest.raises(CellFailedError, match=r"rank 0: .*[Tt]imed out waiting 4000ms"):
        group.run(source)
    assert time.monotonic() - began < 30  # the group was made with 60
    group.run("dist.barrier()")
