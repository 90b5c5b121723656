"""Golden walks through failures: death, heal, restart, a suspended machine."""

import re
import time
from contextlib import suppress

import psutil
import pytest
from golden.walks import KEEP, all_text, are_gone, assert_ranks_work, pids
from limits import limit
from notebook import Notebook
from processes import wait_until

pytestmark = pytest.mark.multiproc
SHARES_KERNEL = True


def test_ranks_that_die_are_healed_and_restarted_with_their_names(notebook: Notebook) -> None:
    notebook.run(f"%%ddp --nproc 3\n{KEEP}")
    first = pids(notebook, range(3))

    reply = notebook.run(
        "%%ddp\nimport os\nif rank == 1:\n    print('last words', flush=True)\n"
        "    os.kill(os.getpid(), 9)\ndist.barrier()"
    )
    assert reply.status == "error"
    assert re.search(r"\brank 1\b.*SIGKILL", reply.error), all_text(reply)
    assert reply.lines(1) == ["last words"]
    assert "%ddp heal" in reply.traceback

    reply = notebook.run("%%ddp\npass")
    assert reply.status == "error"
    for words in ("rank 1", "SIGKILL", "%ddp heal", "%ddp restart", "%%ddp --ranks 0,2"):
        assert words in reply.text

    reply = notebook.run("%%ddp --ranks 0,2\nprint(kept)")
    assert [reply.lines(rank) for rank in range(3)] == [["0"], [], ["20"]], all_text(reply)

    reply = notebook.run("%ddp heal")
    assert reply.status == "ok", all_text(reply)
    assert "rank 1" in reply.text
    healed = pids(notebook, range(3))
    assert [healed[0], healed[2]] == [first[0], first[2]]
    assert healed[1] != first[1]
    assert_ranks_work(notebook, 3)

    assert notebook.run("%ddp kill 2").status == "ok"
    assert "rank 2" in notebook.run("%%ddp\npass").text
    assert notebook.run("%ddp restart --replay").status == "ok"
    assert are_gone(healed)
    assert_ranks_work(notebook, 3)


def test_heal_replaces_the_given_rank_from_the_given_donor(notebook: Notebook) -> None:
    notebook.run(f"%%ddp --nproc 3\n{KEEP}\nweights = torch.full((2,), float(rank))")
    first = pids(notebook, range(3))
    assert notebook.run("%ddp kill 1").status == "ok"

    reply = notebook.run("%ddp heal --rank 0")
    assert reply.status == "error"
    assert "rank 0" in reply.text
    assert notebook.run("%ddp heal --rank 1 --from 2").status == "ok"
    healed = pids(notebook, range(3))
    assert [healed[0], healed[2]] == [first[0], first[2]]
    assert healed[1] != first[1]
    # a tensor is the donor's, a small value is the dead rank's
    assert (
        notebook.run("%ddp pull weights.tolist()").result == "[[0.0, 0.0], [2.0, 2.0], [2.0, 2.0]]"
    )
    assert_ranks_work(notebook, 3)


SLEEPING = "%%ddp\nimport os, time\nopen(f'begun{rank}', 'w').close()\n"


@pytest.mark.full
@pytest.mark.parametrize(
    "cell",
    [
        "while not os.path.exists('go_on'): time.sleep(0.01)",
        "while rank == 1 and not os.path.exists('go_on'): time.sleep(0.01)\ndist.barrier()",
    ],
    ids=["all ranks sleep", "one rank waits for the other"],
)
def test_machine_suspended_during_a_cell_continues(fresh_notebook: Notebook, cell: str) -> None:
    notebook, folder = fresh_notebook, fresh_notebook.folder
    notebook.run(f"%%ddp --nproc 2\n{KEEP}")
    before = pids(notebook, range(2))
    request = notebook.begin(f"{SLEEPING}{cell}\nprint('done')")
    assert wait_until(lambda: all((folder / f"begun{rank}").exists() for rank in range(2)))
    stand_still(notebook)
    time.sleep(limit("rank_silent_after"))  # a false alarm would be raised in this time
    (folder / "go_on").touch()
    reply = notebook.finish(request)
    assert reply.status == "ok", all_text(reply)
    assert sorted(reply.text.splitlines()) == ["[rank 0] done", "[rank 1] done"]  # and no hang
    assert pids(notebook, range(2)) == before
    assert_ranks_work(notebook)


@pytest.mark.full
def test_machine_suspended_between_cells_continues(fresh_notebook: Notebook) -> None:
    fresh_notebook.run(f"%%ddp --nproc 2\n{KEEP}")
    before = pids(fresh_notebook, range(2))
    stand_still(fresh_notebook)
    assert_ranks_work(fresh_notebook)
    assert pids(fresh_notebook, range(2)) == before


def stand_still(notebook: Notebook) -> None:
    """Stop the kernel and all its processes for longer than a rank may be silent or hang."""
    kernel = psutil.Process(notebook.pid)
    processes = [kernel, *kernel.children(recursive=True)]
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # the forkserver has short-lived children
            process.suspend()
    time.sleep(limit("rank_silent_after") + limit("hang_after"))
    for process in reversed(processes):  # the kernel last: it would see its children stopped
        with suppress(psutil.NoSuchProcess):
            process.resume()
