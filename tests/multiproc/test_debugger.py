"""Ranks that ask: input(), breakpoint(), pdb and %debug, at the notebook's own input box."""

from __future__ import annotations

import os
import re
import signal
import statistics
import time

import psutil
import pytest
from moments import come_to_rest
from notebook import Notebook

pytestmark = pytest.mark.multiproc
SHARES_KERNEL = True

PAIR = "%%ddp --nproc 2\n"
WORKS = "%%ddp\nassert kept == rank\ndist.barrier()"


def pids(notebook: Notebook) -> list[int]:
    """The ranks' process ids, in their order."""
    reply = notebook.run("%%ddp\nimport os\nprint(os.getpid())")
    return [int(reply.lines(rank)[0]) for rank in (0, 1)]


def values(text: str) -> list[str]:
    """Return what ranks have shown as their last values, sorted."""
    return sorted(line.rpartition(" ")[2] for line in text.splitlines() if "Out" in line)


def test_each_rank_is_asked_in_its_turn_and_a_secret_is_hidden(notebook: Notebook) -> None:
    reply = notebook.converse(f"{PAIR}name = input('name? ')\nname", "anna", "bert")
    assert sorted(reply.asked) == [("[rank 0] name? ", False), ("[rank 1] name? ", False)]
    assert values(reply.text) == ["'anna'", "'bert'"]
    reply = notebook.converse(
        "%%ddp\nfrom getpass import getpass\nif rank == 1: print(len(getpass('token: ')))", "abc"
    )
    assert reply.asked == [("[rank 1] token: ", True)]
    assert reply.lines(1) == ["3"]


def test_breakpoint_stops_the_first_rank_that_comes_and_steps_through_the_cell(
    notebook: Notebook,
) -> None:
    source = f"{PAIR}y = 1\nbreakpoint()\nz = y + 1\nw = z * 10\ndist.barrier()\nw"
    reply = notebook.converse(source, "p y", "n", "n", "p z", "z = 7", "n", "c")
    assert len({prompt for prompt, _ in reply.asked}) == 1
    assert reply.asked[0][0].endswith("ipdb> ")
    assert reply.status == "ok"
    assert "----> 3 breakpoint()" in reply.text
    assert "----> 4 z = y + 1" in reply.text
    assert "----> 5 w = z * 10" in reply.text
    assert values(reply.text) == ["20", "70"]
    assert statistics.median(reply.waits[1:]) < 2  # 20 to 40 ms on a quiet machine


def test_interact_prints_what_it_evaluates(notebook: Notebook) -> None:
    source = f"{PAIR}def f(a):\n    b = a + 21\n    breakpoint()\n    return b\nf(0)"
    reply = notebook.converse(source, "interact", "b * 2", "\x04", "!b = 9", "c")
    assert reply.asked[1][0].endswith("] >>> ")
    assert " 42\n" in reply.text
    assert values(reply.text) == ["21", "9"]


def test_q_ends_the_cell_on_all_ranks_and_keeps_every_name(notebook: Notebook) -> None:
    notebook.run(f"{PAIR}kept = rank")
    reply = notebook.converse("%%ddp\nbreakpoint()\nimport time\ntime.sleep(60)", "q")
    assert re.fullmatch(r"CellInterruptedError: rank \d .*debugger, line 2", reply.error)
    assert reply.seconds < 20
    assert notebook.run(WORKS).status == "ok"


def test_a_stop_while_a_rank_is_asked_ends_the_cell_and_keeps_every_name(
    notebook: Notebook,
) -> None:
    notebook.run(f"{PAIR}kept = rank")
    for source in ("input('?')", "breakpoint()\nx = 1", "import pdb; pdb.set_trace()\nx = 1"):
        reply = notebook.converse(f"%%ddp\n{source}\ndist.barrier()", notebook.interrupt)
        assert reply.error.startswith("CellInterruptedError")
        assert notebook.run(WORKS).status == "ok"


@pytest.mark.full
def test_nothing_times_out_while_somebody_looks(notebook: Notebook) -> None:
    notebook.run("%ddp restart --nproc 2 --timeout 5")
    reply = notebook.converse(
        "%%ddp\nbreakpoint()\ndist.barrier()\nrank",
        lambda: (time.sleep(12), notebook.client.input("c")),
    )
    assert reply.status == "ok"
    assert "no progress" not in reply.text
    late = notebook.run("%%ddp\nimport time\nif rank: time.sleep(60)\ndist.barrier()")
    assert late.status == "error", "the timeout holds again"
    notebook.run("%ddp restart --timeout 1800")


def test_break_ranks_stops_those_one_after_the_other(notebook: Notebook) -> None:
    source = "%%ddp --nproc 2 --break-ranks all\nx = rank\nbreakpoint()\ndist.barrier()"
    reply = notebook.converse(source, "p x * 10", "c", "p x * 10", "c")
    ranks = [prompt[:8] for prompt, _ in reply.asked]
    assert ranks in (["[rank 0]"] * 2 + ["[rank 1]"] * 2, ["[rank 1]"] * 2 + ["[rank 0]"] * 2)
    one = notebook.converse("%%ddp --break-ranks 1\nbreakpoint()\nx = 1", "c")
    assert [prompt for prompt, _ in one.asked] == ["[rank 1] ipdb> "]
    assert "rank 2" in notebook.run("%%ddp --break-ranks 2\n1").text


@pytest.mark.parametrize("line", ["%ddp debug", "%debug"])
def test_ddp_debug_looks_into_the_first_cause(notebook: Notebook, line: str) -> None:
    notebook.run(f"{PAIR}def f(a):\n    b = a * 2\n    raise ValueError(b)\nif rank == 1: f(21)")
    reply = notebook.converse(line, "p a, b", "u", "p rank", "q")
    assert {prompt for prompt, _ in reply.asked} == {"[rank 1] ipdb> "}
    assert "(21, 42)" in reply.text
    assert reply.status == "ok"
    assert notebook.run("%%ddp\ndist.barrier()").status == "ok"
    other = notebook.converse("%ddp debug --rank 0", "q")
    assert {prompt for prompt, _ in other.asked} <= {"[rank 0] ipdb> "}


def test_where_nobody_can_type_it_is_said_at_once(notebook: Notebook) -> None:
    for source in ("input('?')", "breakpoint()\nx = 1", "import pdb; pdb.set_trace()\nx = 1"):
        reply = notebook.run(f"{PAIR}{source}")
        assert "a console" in reply.error
        assert reply.seconds < 40  # with the ranks' start; it would wait for ever
    background = notebook.run("%%ddp --no-wait\ninput()").text + notebook.run("%ddp wait").error
    assert "background" in background
    notebook.run("%%ddp\nkept = rank; dist.barrier()\n1 / 0")
    reply = notebook.run("%ddp debug --rank 0 -c 'p kept'")  # it goes on after that
    assert "[rank 0] ipdb> p kept\n[rank 0] 0\n" in reply.text
    assert "a console" in reply.error
    assert notebook.run(WORKS).status == "ok"


@pytest.mark.full
def test_a_rank_that_is_asked_uses_no_cpu(notebook: Notebook) -> None:
    notebook.run(f"{PAIR}import os")
    ranks = [psutil.Process(pid) for pid in pids(notebook)]
    used: list[float] = []

    def look() -> None:
        before = sum(sum(each.cpu_times()[:2]) for each in ranks)
        time.sleep(2)
        used.append(sum(sum(each.cpu_times()[:2]) for each in ranks) - before)
        notebook.client.input("x")

    notebook.converse("%%ddp --ranks 0\ninput()", look)
    assert used[0] < 0.5


def test_a_box_that_was_left_open_answers_nothing_else(notebook: Notebook) -> None:
    """Its rank is killed; whoever types in it later answers no other rank's question."""
    notebook.run(f"{PAIR}import os")
    ranks = pids(notebook)
    left_open: list[dict[str, object]] = []

    def kill() -> None:
        left_open.append(notebook.asked["header"])
        os.kill(ranks[1], signal.SIGKILL)

    def type_in_both() -> None:
        late = notebook.client.session.msg("input_reply", {"value": "late"}, parent=left_open[0])
        notebook.client.stdin_channel.send(late)
        notebook.client.input("bert")

    source = "%%ddp\nif rank == 1: input('one? ')"
    reply = notebook.converse(source, kill)
    assert re.search("rank 1 .*SIGKILL", reply.error)
    assert "input box" in reply.text
    notebook.run("%ddp restart")
    two = notebook.converse("%%ddp --ranks 0\nprint(input('two? '))", type_in_both)
    assert two.lines(0) == ["bert"]


def test_an_interrupted_rank_is_looked_into_from_its_own_line_on(notebook: Notebook) -> None:
    notebook.run(f"{PAIR}kept = 1")
    ranks = pids(notebook)
    request = notebook.begin(
        "%%ddp\nnbddp.faults.at(step=3, rank=1, kind='hang')\n"
        "for step in range(8):\n    dist.barrier(); print('at', step)\n    nbddp.log(step=step)\n"
        "print('through')"
    )
    notebook.finish(request, until="at 3\n", times=2)
    assert come_to_rest(ranks)
    notebook.interrupt()
    assert notebook.finish(request).error.startswith("CellInterruptedError")
    reply = notebook.run("%ddp debug --rank 1 -c 'p step' -c \"p 'a' + 'b'\" -c q")
    assert "----> 5     nbddp.log(step=step)" in reply.text
    assert "[rank 1] ipdb> p step\n[rank 1] 3\n" in reply.text
    assert "'ab'" in reply.text
    assert reply.status == "ok"
