"""Long work is never reported as a hang, repeated for minutes.

``pytest -m soak tests/multiproc/test_false_hangs.py``; ``NBDDP_SOAK_SECONDS=20`` for less.
"""

from __future__ import annotations

import os
import time

import pytest
from drivers.ranks import Capture, Ranks
from multiproc.long_work import waits_for, works

SECONDS = float(os.environ.get("NBDDP_SOAK_SECONDS", "120"))
LONG = 20.0  # seconds: a card comes after ten without progress

pytestmark = [pytest.mark.multiproc, pytest.mark.soak, pytest.mark.timeout(4 * SECONDS + 120)]

LOADS = """class Slow(torch.utils.data.Dataset):
    def __len__(self): return 6
    def __getitem__(self, index):
        time.sleep(4)
        return index
for batch in torch.utils.data.DataLoader(Slow(), num_workers=1): pass
"""
WORKS = works(LONG) | {"a loader": LOADS}
WORKS.pop("torch.compile")  # it takes its own time


@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
def test_long_work_is_not_reported_as_a_hang(group: Ranks, capsys: Capture, work: str) -> None:
    deadline = time.monotonic() + SECONDS
    took = []
    while time.monotonic() < deadline:
        began = time.monotonic()
        group.run(waits_for(work, LONG), quiet=True)
        took.append(time.monotonic() - began)
    assert "no progress" not in {each.kind for each in group.events()}
    assert "%ddp kill" not in capsys.readouterr().out  # the way out where a rank gives no sign
    assert max(took) > 15  # long enough for a card that comes after ten seconds
