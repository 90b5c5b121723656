"""A stop at any moment ends what runs, or is about to, and costs nobody a name.

The long walk: ``pytest -m soak``; another one: ``NBDDP_SOAK_SEED=7 NBDDP_SOAK_STEPS=1000``.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from drivers.ranks import Ranks
from notebook import Notebook
from processes import wait_until

from nbddp import CellFailedError, CellInterruptedError

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]
SHARES_KERNEL = True

MODEL = """%%ddp --nproc {nproc}
import os, time
kept, untouched = rank, torch.arange(4)
torch.manual_seed(0)
layers = [torch.nn.Linear({width}, {width}) for _ in range(3)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
"""
TRAIN = """%%ddp
while True:
    optimizer.zero_grad()
    model(torch.randn(2, model.module[0].in_features)).sum().backward()
    optimizer.step()
"""
ENDINGS = "CellInterruptedError|CommandInterruptedError|KeyboardInterrupt"
AFTER = "%%ddp\nx = torch.ones(1)\ndist.all_reduce(x)\nprint(kept, int(x), untouched.tolist())"
CELLS = {
    "train": TRAIN,
    "wait": "%%ddp\nif rank == 0: time.sleep(60)\ndist.barrier()",
    "deadlock": "%%ddp\nx = torch.ones(1)\ndist.recv(x, src=(rank + 1) % world_size)",
    "sleep": "%%ddp\ntime.sleep(60)",
    "python": "%%ddp\nwhile True: pass",
    "print": "%%ddp\nwhile True: print('x' * 100)",
    "group": "%%ddp\nif rank == 0: dist.new_group([0, 1])\ntime.sleep(60)",
    "await": "%%ddp\nimport asyncio\nawait asyncio.sleep(60)",
    "all_gather": "%%ddp\nwhile True: nbddp.all_gather([rank] * 1000)",
}


def check_names(notebook: Notebook, nproc: int) -> None:
    """Every rank has what it had, and they reach each other."""
    reply = notebook.run(AFTER)
    expected = [[f"{rank} {nproc} [0, 1, 2, 3]"] for rank in range(nproc)]
    assert [reply.lines(rank)[-1:] for rank in range(nproc)] == expected, reply.traceback


@pytest.mark.gate_runs("0.002")
@pytest.mark.parametrize("seconds", [0.002, 0.01, 0.02, 0.1, 0.5])
def test_stop_rerun_and_stop_again_with_fifty_million_parameters(
    notebook: Notebook, seconds: float
) -> None:
    notebook.run(MODEL.format(nproc=2, width=4096))
    request = notebook.begin(f"{TRAIN}    print('a step')")
    notebook.finish(request, until="a step")
    notebook.interrupt()
    assert notebook.finish(request).error.startswith("CellInterruptedError")
    reply = notebook.run_and_stop(TRAIN, seconds)  # the model is on its way to a new process group
    assert re.match(ENDINGS, reply.error)
    assert "lost" not in reply.traceback
    check_names(notebook, 2)


@pytest.mark.parametrize("press", range(12))
def test_a_stop_in_the_first_milliseconds_leaves_no_cell_running(
    notebook: Notebook, press: int
) -> None:
    if press == 0:
        notebook.run("%%ddp --nproc 2\nimport time")
    reply = notebook.run_and_stop("%%ddp --nproc 2\nimport time\ntime.sleep(30)", press * 0.0007)
    assert reply.status == "error"  # IPython may be struck itself, and then tells in its own way
    assert notebook.run("%%ddp --nproc 2\n1 + 1").text.endswith("Out [ranks 0-1] 2\n")


def test_a_stop_ends_a_replay(notebook: Notebook) -> None:
    notebook.run("%%ddp --nproc 2\nimport os, pathlib, time\nkept = rank")
    notebook.run(
        "%%ddp\nmark = pathlib.Path(f'came{rank}')\nif mark.exists():\n"
        "    pathlib.Path(f'again{rank}').touch()\n    time.sleep(60)\nmark.touch()"
    )
    notebook.run("%%ddp\nlast = 1")
    request = notebook.begin("%ddp restart --replay")
    folder = notebook.folder
    assert wait_until(lambda: (folder / "again0").exists() and (folder / "again1").exists())
    notebook.interrupt()
    reply = notebook.finish(request)
    assert reply.error.startswith("CellInterruptedError: ranks 0-1 interrupted, line 5")
    assert re.search(
        r"nbddp: the replay did not come to its end; done again: cell \d+; not done again: cells "
        r"\d+-\d+; `%ddp restart --replay` does all of it again",
        reply.text,
    )
    reply = notebook.run("%%ddp\nprint(kept, 'last' in globals())\ndist.barrier()")
    assert (reply.lines(0), reply.lines(1)) == (["0 False"], ["1 False"])
    for mark in folder.glob("came*"):
        mark.unlink()
    assert notebook.run("%ddp restart --replay").status == "ok"  # its two cells: another was run
    reply = notebook.run("%%ddp\nprint('last' in globals())")
    assert (reply.lines(0), reply.lines(1)) == (["False"], ["False"])


@pytest.mark.parametrize("moment", ["replay", "cell"])
def test_a_stop_ends_a_recovery(notebook: Notebook, moment: str) -> None:
    folder = notebook.folder
    place = f"pathlib.Path('{moment}' + str(rank))"
    notebook.run("%%ddp --nproc 2\nimport pathlib, time\nkept = rank")
    dwell = f"if {place}.exists():\n    {place}.with_suffix('.again').touch()\n    time.sleep(60)\n"
    notebook.run(f"%%ddp\n{dwell if moment == 'replay' else 'pass'}")
    request = notebook.begin(
        f"%%ddp --max-restarts 3\n{dwell if moment == 'cell' else ''}{place}.touch()\n"
        "dist.barrier()\nraise ValueError('on purpose')"
    )
    marks = [folder / f"{moment}{rank}.again" for rank in range(2)]
    assert wait_until(lambda: all(mark.exists() for mark in marks))
    notebook.interrupt()
    reply = notebook.finish(request)
    assert reply.error.startswith("CellInterruptedError: ranks 0-1 interrupted, line 4")
    assert reply.text.count("; restart 1 of 3") == 1
    assert "restart 2 of 3" not in reply.text
    reply = notebook.run("%%ddp\nprint(kept)\ndist.barrier()")
    assert (reply.lines(0), reply.lines(1)) == (["0"], ["1"])


def walk(notebook: Notebook, *, nproc: int, seed: int, steps: int) -> None:
    """Stop cells at random moments, one to three in a row; after each row all names are there."""
    chance = random.Random(seed)
    notebook.run(MODEL.format(nproc=nproc, width=256))
    for step in range(steps):
        for _ in range(chance.choice([1, 1, 2, 3])):
            name = chance.choice(list(CELLS))
            seconds = chance.choice([0.0, 0.005, 0.02, chance.random(), chance.random() * 0.3])
            reply = notebook.run_and_stop(CELLS[name], seconds)
            where = f"seed {seed}, step {step}: {name} after {seconds:.3f} s: {reply.text[-500:]}"
            assert reply.status == "error", where
            assert not reply.error or re.match(ENDINGS, reply.error), where
            assert ": killed" not in reply.text, where  # a warning that it may be is no harm
        check_names(notebook, nproc)


@pytest.mark.parametrize("nproc", [2, 4])
def test_stops_at_random_moments_of_random_cells(notebook: Notebook, nproc: int) -> None:
    walk(notebook, nproc=nproc, seed=nproc, steps=12)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("nproc", [2, 4])
def test_stops_at_many_random_moments_of_random_cells(notebook: Notebook, nproc: int) -> None:
    seed = int(os.environ.get("NBDDP_SOAK_SEED", "1"))
    walk(notebook, nproc=nproc, seed=seed, steps=int(os.environ.get("NBDDP_SOAK_STEPS", "100")))


@pytest.mark.timeout(400)
def test_one_of_64_ranks_dies_in_a_barrier_and_the_others_keep_their_names(
    make_group: Callable[..., Ranks], capsys: pytest.CaptureFixture[str]
) -> None:
    group = make_group(64)
    group.run("kept = rank\ndist.barrier()")
    with pytest.raises(CellFailedError) as caught:
        group.run("import os\nif rank == 3: os._exit(7)\ndist.barrier()")
    assert str(caught.value) == "rank 3 exited with code 7"
    report = caught.value.report.splitlines()
    assert len(report) < 8  # groups of ranks are named, not each of them
    assert report[-1].startswith(
        "Rank 3 lost all names, the other ranks keep theirs. `%ddp heal` replaces"
    )
    assert re.findall(r"nbddp: .*", capsys.readouterr().out) == ["nbddp: rank 3 exited with code 7"]
    alive = [rank for rank in range(64) if rank != 3]
    assert group.alive == alive
    kept = group.run("kept", ranks=alive, quiet=True, wants_value=True).values()
    assert kept == alive


def test_an_interrupt_that_comes_before_a_cell_is_for_that_cell(group: Ranks) -> None:
    group.run("kept = rank")
    group.before_next_cell(group.interrupt)  # nothing runs: nobody hears it
    with pytest.raises(CellInterruptedError, match="interrupted"):
        group.run("import time\ntime.sleep(60)")
    assert group.pull("kept") == [0, 1]


def press_soon(group: Ranks, seconds: float) -> threading.Timer:
    """Interrupt a group a little later."""
    timer = threading.Timer(seconds, group.interrupt)
    timer.start()
    return timer


def test_ranks_that_used_up_their_descriptors_can_be_stopped_and_go_on(
    make_group: Callable[..., Ranks],
) -> None:
    group = make_group(2)
    group.run(
        "import resource\nkept, opened = rank, []\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))\n"
        "try:\n    while True: opened.append(open('/dev/null'))\nexcept OSError: pass"
    )
    timer = press_soon(group, 0.7)
    with pytest.raises(CellInterruptedError):
        group.run("x = torch.ones(1)\ndist.recv(x, src=1 - rank)")
    timer.join()
    group.pull("[each.close() for each in opened]")  # a new process group wants some
    assert group.pull("kept") == [0, 1]
    group.run("dist.barrier()")


def test_a_stop_while_a_large_value_is_on_its_way_costs_no_name(
    make_group: Callable[..., Ranks],
) -> None:
    group = make_group(2)
    group.run(
        "kept = rank\nlarge = torch.ones(40_000_000)\n"
        "class Sent:\n    def __reduce__(self):\n"
        "        open(f'sends{rank}', 'w').close()\n        return list, ()\nsent = Sent()"
    )

    def press() -> None:
        """The cell's own code is over, as its value is pickled."""
        wait_until(lambda: all(Path(f"sends{rank}").exists() for rank in range(2)), timeout=60.0)
        group.interrupt()

    presser = threading.Thread(target=press)
    presser.start()
    result = group.run("sent, large", wants_value=True, quiet=True)
    presser.join()
    assert [len(large) for _, large in result.values()] == [40_000_000, 40_000_000]
    assert group.pull("kept") == [0, 1]


def test_a_rank_that_dies_while_the_group_forms_again_leaves_the_others_their_names(
    make_group: Callable[..., Ranks], capsys: pytest.CaptureFixture[str]
) -> None:
    group = make_group(3)
    group.run("kept = rank")
    timer = press_soon(group, 0.5)
    with pytest.raises(CellInterruptedError):
        group.run("while True: dist.barrier()")
    timer.join()
    os.kill(group.pids[0], signal.SIGSTOP)  # it never comes to meet the others

    def kill_later() -> None:
        wait_until(lambda: group.is_busy, timeout=30.0)
        time.sleep(0.5)  # the others are waiting for it by then, on most machines
        group.kill(0)

    killer = threading.Thread(target=kill_later)
    killer.start()
    with pytest.raises(CellFailedError):
        group.run("import time\nfor _ in range(50):\n    dist.barrier()\n    time.sleep(0.1)")
    killer.join()
    assert "frame #" not in capsys.readouterr().out
    assert group.alive == [1, 2]
    result = group.run("kept", ranks=[1, 2], quiet=True, wants_value=True)
    assert result.values() == [1, 2]
