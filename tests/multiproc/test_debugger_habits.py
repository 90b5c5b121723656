"""What people do with a debugger besides looking: other ways in, other ways out, odd places."""

from __future__ import annotations

import re
import time

import pytest
from notebook import Notebook
from syrupy.assertion import SnapshotAssertion

pytestmark = pytest.mark.multiproc
SHARES_KERNEL = True

ONE = "%%ddp --nproc 2 --ranks 0\n"
F = "def f(a):\n    b = a + 1\n    return b\n"


def test_commands_that_go_elsewhere_come_back_to_the_cell(notebook: Notebook) -> None:
    debugs = f"{ONE}{F}breakpoint()\nx = f(1)\nprint(x)"
    reply = notebook.converse(debugs, "debug f(5)", "s", "c", "c")
    assert "ENTERING RECURSIVE DEBUGGER" in reply.text
    assert reply.lines(0)[-1] == "2"

    reply = notebook.converse(debugs, "r", "r", "c")
    assert "Internal StopIteration" not in reply.text
    assert "run_ast_nodes" not in reply.text
    assert reply.lines(0)[-1] == "2"


@pytest.mark.parametrize("last", ["breakpoint()", "if x: breakpoint()", "y = breakpoint()"])
def test_a_breakpoint_on_the_last_line_stops_there(notebook: Notebook, last: str) -> None:
    source = f"{ONE}x = 3\n{last}"
    reply = notebook.converse(source, "p x * 7", "s")
    assert f"----> 3 {last}" in reply.text
    assert "[rank 0] 21\n" in reply.text
    assert "nbddp" not in reply.text
    assert (reply.status, len(reply.asked)) == ("ok", 2)


def test_a_step_into_a_function_of_nbddp_goes_over_it(notebook: Notebook) -> None:
    source = f"{ONE}breakpoint()\nnbddp.log(step=1, loss=0.5)\nx = 1\ny = 2"
    reply = notebook.converse(source, "n", "s", "w", "s", "c")
    assert "----> 4 x = 1" in reply.text
    assert "----> 5 y = 2" in reply.text
    assert "nbddp/" not in reply.text
    assert "hidden" not in reply.text


@pytest.mark.parametrize("way_in", ["pdb", "IPython.core.debugger"])
def test_every_set_trace_stops_in_the_cell(notebook: Notebook, way_in: str) -> None:
    source = f"{ONE}from {way_in} import set_trace\nset_trace()\nx = 1\ny = 2\nprint(x + y)"
    reply = notebook.converse(source, "n", "n", "p x", "c")
    assert "----> 5 y = 2" in reply.text
    assert "site-packages" not in reply.text
    assert reply.lines(0)[-1] == "3"


def test_breakpoints_can_be_turned_off(notebook: Notebook) -> None:
    notebook.run(f"{ONE}import os\nos.environ['PYTHONBREAKPOINT'] = '0'")
    reply = notebook.run(f"{ONE}breakpoint()\n1")
    assert (reply.status, reply.asked) == ("ok", [])
    notebook.run(f"{ONE}del os.environ['PYTHONBREAKPOINT']")
    assert notebook.converse(f"{ONE}breakpoint()\nx = 1", "c").status == "ok"


def test_a_debugged_statement_leaves_no_names(notebook: Notebook) -> None:
    notebook.converse(f"{ONE}%debug x = 1", "n", "c")
    notebook.converse(f"{ONE}breakpoint()\nint('x')", "n", "n", "c")
    reply = notebook.run(
        f"{ONE}print([name for name in globals() if name in NAMES])".replace(
            "NAMES", "('__return__', '__exception__')"
        )
    )
    assert reply.lines(0) == ["[]"]


def test_workers_and_threads_of_a_rank_are_told_that_they_cannot_ask(notebook: Notebook) -> None:
    reply = notebook.converse(
        f"{ONE}class Data(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, i):\n        breakpoint()\n        return i\n"
        "for batch in torch.utils.data.DataLoader(Data(), num_workers=2): print(batch)",
    )
    assert "process or thread" in reply.traceback
    assert reply.text == "", "no place is shown where nobody can look"
    assert notebook.converse(f"{ONE}breakpoint()\nx = 1", "c").status == "ok"


def test_whoever_stops_the_cell_has_not_left_the_debugger(notebook: Notebook) -> None:
    meet = "dist.barrier(); x = rank; breakpoint()"
    source = f"%%ddp --nproc 2 --break-ranks all\n{meet}\ndist.barrier()"
    stopped = notebook.converse(source, notebook.interrupt)
    asked = stopped.asked[0][0][6]  # the other rank may still be in the first barrier
    assert re.search("interrupted( in barrier #1)?, line 2", stopped.error)
    assert "left the debugger" not in stopped.error
    assert f"----> 2 {meet}" in notebook.converse(f"%ddp debug --rank {asked}", "q").text
    left = notebook.converse(source, "q")
    asked = left.asked[0][0][6]
    assert left.error == f"CellInterruptedError: rank {asked} left the debugger, line 2"


@pytest.mark.full
def test_a_stop_while_the_debugger_prints_is_not_lost(notebook: Notebook) -> None:
    notebook.run(
        f"{ONE}import time\nclass Slow:\n"
        "    def __repr__(self):\n        time.sleep(3)\n        return 'slow'\n"
        "def f():\n    breakpoint()\n    return Slow()"
    )

    def stop_in_repr() -> None:
        notebook.client.input("r")
        time.sleep(1)
        notebook.interrupt()

    reply = notebook.converse(f"{ONE}f()\ntime.sleep(30)", stop_in_repr)
    assert "interrupted, line" in reply.error
    assert reply.seconds < 20


def test_nothing_has_failed_before_something_did(
    notebook: Notebook, snapshot: SnapshotAssertion
) -> None:
    notebook.run("%%ddp --nproc 2\n1 / 0")
    notebook.run("%ddp restart")
    reply = notebook.run("%ddp debug")
    assert reply.status == "error"
    assert not reply.asked
    one = notebook.run("%ddp debug --rank 1")
    assert one.lines(1) == snapshot
    assert one.status == "ok"
    notebook.run("%%ddp\nif rank == 1: raise ValueError(3)")
    assert notebook.converse("%%ddp --ranks 0\nbreakpoint()\nx = 1", "q").status == "error"
    reply = notebook.converse("%ddp debug", "q")
    assert reply.asked == [("[rank 1] ipdb> ", False)], "leaving a debugger is no failure"


@pytest.mark.gate_runs("%debug")
@pytest.mark.parametrize("source", ["%debug", "import pdb; pdb.pm()"])
def test_ranks_that_were_interrupted_skip_the_debugger_and_can_be_looked_into_by_name(
    notebook: Notebook, source: str
) -> None:
    notebook.run("%%ddp --nproc 3\nif rank == 1: raise ValueError\nimport time\ntime.sleep(60)")
    reply = notebook.converse(f"%%ddp\n{source}", "p rank", "q")
    assert {prompt[:8] for prompt, _ in reply.asked} == {"[rank 1]"}
    assert [len(reply.lines(rank)) for rank in (0, 2)] == [1, 1]
    one = notebook.converse("%ddp debug --rank 2", "p rank + 40", "q")
    assert "[rank 2] 42\n" in one.text


@pytest.mark.gate_runs("%debug")
@pytest.mark.parametrize("source", ["%debug", "import pdb; pdb.pm()"])
def test_ranks_on_which_nothing_failed_skip_the_debugger(notebook: Notebook, source: str) -> None:
    notebook.run("%%ddp --nproc 2\nkept = rank * 21\nif rank == 1: raise ValueError(kept)")

    def outlast_the_grace() -> None:
        time.sleep(4)  # a failure of another rank would end the debugger after 1.3 s
        notebook.client.input("p rank")

    reply = notebook.converse(f"%%ddp\n{source}", outlast_the_grace, "p kept", "q")
    assert {prompt[:8] for prompt, _ in reply.asked} == {"[rank 1]"}
    assert len(reply.lines(0)) == 1
    assert "[rank 1] 21\n" in reply.text
    assert reply.status == "ok"


def test_a_rank_that_was_asked_is_looked_into_at_its_own_line(notebook: Notebook) -> None:
    notebook.converse(f"{ONE}x = 1\ninput('?')", notebook.interrupt)
    reply = notebook.converse("%ddp debug", "q")
    assert "----> 3 input('?')" in reply.text
    assert "threading" not in reply.text
    notebook.run(f"{ONE}breakpoint()\nhere = 1")  # where nobody can type
    reply = notebook.converse("%ddp debug --rank 0", "q")
    assert "----> 2 breakpoint()" in reply.text
    assert "debugger.py" not in reply.text


def test_what_an_error_came_from_is_looked_into_too(notebook: Notebook) -> None:
    notebook.run(
        f"{ONE}def f():\n    inner = 5\n    raise ValueError\n"
        "try: f()\nexcept ValueError as error: raise RuntimeError('outer') from error"
    )
    for _ in range(2):
        reply = notebook.converse("%ddp debug", "exceptions 0", "p inner * 2", "q")
        assert "[rank 0] 10\n" in reply.text
        assert "nbddp" not in reply.text
