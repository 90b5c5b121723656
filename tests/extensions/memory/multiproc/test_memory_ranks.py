"""``%ddp memory`` and ``%ddp free`` with real ranks."""

import re
from pathlib import Path

import psutil
from drivers.ranks import Ranks
from notebook import Notebook

from nbddp.extensions.memory.messages import PROCESS
from nbddp.extensions.memory.notebook import ask

SHARES_KERNEL = True
MIB = 1 << 20
FAILS = """%%ddp
def forward(x):
    hidden = x.expand(50 << 20).clone()
    raise MemoryError("no memory for the next layer")

forward(torch.ones(1))
"""


def test_free_gives_back_what_a_failed_cell_holds_and_keeps_all_variables(
    notebook: Notebook,
) -> None:
    notebook.run("%ddp restart --nproc 2\n%ddp view text")
    notebook.run("%%ddp\nkept = torch.ones(10 << 20)")
    pids = notebook.run("%%ddp\nimport os\nprint(os.getpid())")
    ranks = [psutil.Process(int(pids.lines(rank)[-1])) for rank in (0, 1)]
    for _ in range(3):
        assert notebook.run(FAILS).error.startswith("CellFailedError")
        before = [rank.memory_info().rss for rank in ranks]
        shown = notebook.run("%ddp memory").text
        assert re.search(r"hidden in forward\(\) +last error +200 MiB +200 MiB\n", shown)
        shown = notebook.run("%ddp free").text
        assert "last error" not in shown
        assert re.search(r"kept +tensors +40 MiB +40 MiB\n", shown)
        for rank, used in zip(ranks, before, strict=True):
            assert used - rank.memory_info().rss > 190 * MIB
    notebook.run("%%ddp --no-wait\nimport time\nwhile kept is not None: time.sleep(0.01)")
    assert "while a cell runs" in notebook.run("%ddp memory").text
    assert "a cell is still running" in notebook.run("%ddp free").text
    notebook.run("%ddp interrupt\n%ddp wait")


def test_shared_memory_is_counted_once(shared_group: Ranks, tmp_path: Path) -> None:
    before, _ = ask(shared_group.session, frees=True)
    shared_group.run(
        f"shared = torch.from_file({str(tmp_path / 'shared')!r}, shared=True, size=10 << 20)\n"
        "shared.sum()\ndist.barrier()"
    )
    after, _ = ask(shared_group.session, frees=True)
    grown = {rank: after[rank].used[PROCESS] for rank in after}
    for rank, used in grown.items():
        assert (PROCESS, "shared", "tensors", 40 * MIB) in map(tuple, after[rank].holders)
        assert used.total - before[rank].used[PROCESS].total > 35 * MIB
        assert abs(used.shared - before[rank].used[PROCESS].shared) < 20 * MIB
    share = sum(used.share - before[rank].used[PROCESS].share for rank, used in grown.items())
    assert 30 * MIB < share < 60 * MIB  # not 80
    shared_group.run("del shared")
