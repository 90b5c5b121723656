"""Breakpoints, post-mortem debugging and ``input`` on ranks, answered in the notebook."""

import os
import re
import signal
import statistics
import time

import psutil
import pytest
from conditions import wait_until_blocked
from golden.walks import pids
from notebook import Notebook
from syrupy.assertion import SnapshotAssertion

SHARES_KERNEL = True

PAIR = "%%ddp --nproc 2\n"
ONE = "%%ddp --nproc 2 --ranks 0\n"
WORKS = "%%ddp\nassert kept == rank\ndist.barrier()"


def values(text: str) -> list[str]:
    """Return what ranks have shown as their last values, sorted."""
    return sorted(line.rpartition(" ")[2] for line in text.splitlines() if "Out" in line)


def test_input_prompts_one_rank_at_a_time_and_getpass_hides_the_text(notebook: Notebook) -> None:
    reply = notebook.converse(f"{PAIR}name = input('name? ')\nname", "anna", "bert")
    assert sorted(reply.asked) == [("[rank 0] name? ", False), ("[rank 1] name? ", False)]
    assert values(reply.text) == ["'anna'", "'bert'"]
    reply = notebook.converse(
        "%%ddp\nfrom getpass import getpass\nif rank == 1: print(len(getpass('token: ')))", "abc"
    )
    assert reply.asked == [("[rank 1] token: ", True)]
    assert reply.lines(1) == ["3"]


def test_breakpoint_stops_the_first_rank_and_steps_through_the_cell(notebook: Notebook) -> None:
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


F = "def f(a):\n    b = a + 21\n    return b\n"
NUMBERS = "x = 1\ny = 2\nx + y"
SESSIONS = {  # a cell, what the user types, and words of the output
    "interact": (
        f"{F.replace('return', 'breakpoint(); return')}f(0)",
        ["interact", "b * 2", "\x04", "!b = 9", "c"],
        ["[rank 0] 42\n", "Out [rank 0] 9\n"],
    ),
    "debug": (
        f"{F}breakpoint()\nx = f(1)\nx",
        ["debug f(5)", "s", "c", "c"],
        ["ENTERING RECURSIVE DEBUGGER", "Out [rank 0] 22\n"],
    ),
    "return": (f"{F}breakpoint()\nx = f(1)\nx", ["r"], ["Out [rank 0] 22\n"]),
    "last line": ("x = 3\nbreakpoint()", ["p x * 7", "s"], ["--> 3 breakpoint()", " 21\n"]),
    "condition": ("x = 3\nif x: breakpoint()", ["p x * 7", "s"], ["--> 3 if x: ", " 21\n"]),
    "assignment": ("x = 3\ny = breakpoint()", ["p x * 7", "s"], ["--> 3 y = ", " 21\n"]),
    "step": (
        f"breakpoint()\nnbddp.log(step=1, loss=0.5)\n{NUMBERS}",
        ["n", "s", "w", "s", "c"],
        ["--> 4 x = 1", "--> 5 y = 2"],
    ),
    **{
        f"set_trace of {module}": (
            f"from {module} import set_trace\nset_trace()\n{NUMBERS}",
            ["n", "n", "p x", "c"],
            ["--> 5 y = 2", "Out [rank 0] 3\n"],
        )
        for module in ("pdb", "IPython.core.debugger")
    },
}
OTHERS_CODE = ("nbddp/", "nbddp:", "site-packages", "hidden", "run_ast_nodes", "StopIteration")


@pytest.mark.parametrize("name", SESSIONS)
def test_debugger_commands_stay_in_the_cell(notebook: Notebook, name: str) -> None:
    source, typed, shown = SESSIONS[name]
    reply = notebook.converse(f"{ONE}{source}", *typed)
    assert (reply.status, len(reply.asked)) == ("ok", len(typed))
    assert [words for words in shown if words not in reply.text] == []
    text = reply.text.replace("nbddp: loss 0.5\n", "")  # the metric that one session logs
    assert [words for words in OTHERS_CODE if words in text] == []


def test_q_ends_the_cell_on_all_ranks_and_keeps_every_name(notebook: Notebook) -> None:
    notebook.run(f"{PAIR}kept = rank")
    reply = notebook.converse("%%ddp\nbreakpoint()\nimport time\ntime.sleep(60)", "q")
    asked = reply.asked[0][0][6]
    assert reply.error == f"CellInterruptedError: rank {asked} left the debugger, line 2"
    assert reply.seconds < 20
    assert notebook.run(WORKS).status == "ok"


def test_interrupt_during_input_ends_the_cell_and_keeps_all_names(notebook: Notebook) -> None:
    notebook.run(f"{PAIR}kept = rank")
    for source in ("input('?')", "breakpoint()\nx = 1", "import pdb; pdb.set_trace()\nx = 1"):
        reply = notebook.converse(f"%%ddp\n{source}\ndist.barrier()", notebook.interrupt)
        assert reply.error.startswith("CellInterruptedError")
        assert notebook.run(WORKS).status == "ok"


@pytest.mark.full
def test_waiting_in_the_debugger_uses_no_cpu_and_pauses_the_timeout(notebook: Notebook) -> None:
    notebook.run("%ddp restart --nproc 2 --timeout 5")
    waiting = psutil.Process(pids(notebook, [0])[0])
    used: list[float] = []

    def wait_and_continue() -> None:
        before = sum(waiting.cpu_times()[:2])
        time.sleep(12)
        used.append(sum(waiting.cpu_times()[:2]) - before)
        notebook.client.input("c")

    source = "%%ddp --break-ranks 0\nbreakpoint()\ndist.barrier()\nrank"
    reply = notebook.converse(source, wait_and_continue)
    assert reply.status == "ok"
    assert "no progress" not in reply.text
    assert used[0] < 3
    late = notebook.run("%%ddp\nimport time\nif rank: time.sleep(60)\ndist.barrier()")
    assert late.status == "error", "the timeout holds again"
    notebook.run("%ddp restart --timeout 1800")


def test_break_ranks_stops_the_given_ranks_in_turn(notebook: Notebook) -> None:
    source = "%%ddp --nproc 2 --break-ranks all\nx = rank\nbreakpoint()\ndist.barrier()"
    reply = notebook.converse(source, "p x * 10", "c", "p x * 10", "c")
    ranks = [prompt[:8] for prompt, _ in reply.asked]
    assert ranks in (["[rank 0]"] * 2 + ["[rank 1]"] * 2, ["[rank 1]"] * 2 + ["[rank 0]"] * 2)
    one = notebook.converse("%%ddp --break-ranks 1\nbreakpoint()\nx = 1", "c")
    assert [prompt for prompt, _ in one.asked] == ["[rank 1] ipdb> "]
    assert "rank 2" in notebook.run("%%ddp --break-ranks 2\n1").text


@pytest.mark.parametrize("line", ["%ddp debug", "%debug"])
def test_ddp_debug_opens_the_first_cause(notebook: Notebook, line: str) -> None:
    notebook.run(f"{PAIR}def f(a):\n    b = a * 2\n    raise ValueError(b)\nif rank == 1: f(21)")
    reply = notebook.converse(line, "p a, b", "u", "p rank", "q")
    assert {prompt for prompt, _ in reply.asked} == {"[rank 1] ipdb> "}
    assert "(21, 42)" in reply.text
    assert reply.status == "ok"
    assert notebook.run("%%ddp\ndist.barrier()").status == "ok"
    other = notebook.converse("%ddp debug --rank 0", "q")
    assert {prompt for prompt, _ in other.asked} <= {"[rank 0] ipdb> "}


def test_input_without_an_input_box_fails_at_once(notebook: Notebook) -> None:
    for source in (
        "input('?')",
        "import getpass; getpass.getpass()",
        "breakpoint()\nx = 1",
        "import pdb; pdb.set_trace()\nx = 1",
    ):
        reply = notebook.run(f"{PAIR}{source}")
        assert "a console" in reply.error
        assert "nbddp/" not in reply.traceback
        assert reply.seconds < 40  # with the ranks' start; it would wait for ever
    background = notebook.run("%%ddp --no-wait\ninput()").text + notebook.run("%ddp wait").error
    assert "background" in background
    notebook.run("%%ddp\nkept = rank; dist.barrier()\n1 / 0")
    reply = notebook.run("%ddp debug --rank 0 -c 'p kept'")  # then it waits for input
    assert "[rank 0] ipdb> p kept\n[rank 0] 0\n" in reply.text
    assert "a console" in reply.error
    assert notebook.run(WORKS).status == "ok"


def test_reply_to_a_stale_input_box_answers_no_other_prompt(notebook: Notebook) -> None:
    notebook.run(f"{PAIR}import os")
    ranks = pids(notebook, [0, 1])
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


def test_debugger_opens_an_interrupted_rank_at_the_cell_line(notebook: Notebook) -> None:
    notebook.run(f"{PAIR}kept = 1")
    ranks = pids(notebook, [0, 1])
    request = notebook.begin(
        "%%ddp\nnbddp.faults.at(step=3, rank=1, kind='hang')\n"
        "for step in range(8):\n    dist.barrier(); print('at', step)\n    nbddp.log(step=step)\n"
        "print('through')"
    )
    notebook.finish(request, until="at 3\n", times=2)
    assert wait_until_blocked(ranks)
    notebook.interrupt()
    assert notebook.finish(request).error.startswith("CellInterruptedError")
    reply = notebook.run("%ddp debug --rank 1 -c 'p step' -c \"p 'a' + 'b'\" -c q")
    assert "----> 5     nbddp.log(step=step)" in reply.text
    assert "[rank 1] ipdb> p step\n[rank 1] 3\n" in reply.text
    assert "'ab'" in reply.text
    assert reply.status == "ok"


def test_breakpoints_can_be_turned_off(notebook: Notebook) -> None:
    notebook.run(f"{ONE}import os\nos.environ['PYTHONBREAKPOINT'] = '0'")
    reply = notebook.run(f"{ONE}breakpoint()\n1")
    assert (reply.status, reply.asked) == ("ok", [])
    notebook.run(f"{ONE}del os.environ['PYTHONBREAKPOINT']")
    assert notebook.converse(f"{ONE}breakpoint()\nx = 1", "c").status == "ok"


def test_a_debugged_statement_leaves_no_names(notebook: Notebook) -> None:
    notebook.converse(f"{ONE}%debug x = 1", "n", "c")
    notebook.converse(f"{ONE}breakpoint()\nint('x')", "n", "n", "c")
    names = "('__return__', '__exception__')"
    reply = notebook.run(f"{ONE}print([name for name in {names} if name in globals()])")
    assert reply.lines(0) == ["[]"]


def test_breakpoint_in_a_loader_worker_or_thread_is_refused(notebook: Notebook) -> None:
    reply = notebook.converse(
        f"{ONE}class Data(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, i):\n        breakpoint()\n        return i\n"
        "for batch in torch.utils.data.DataLoader(Data(), num_workers=2): print(batch)",
    )
    assert "process or thread" in reply.traceback
    assert reply.text == "", "no place is shown where nobody can look"
    assert notebook.converse(f"{ONE}breakpoint()\nx = 1", "c").status == "ok"


def test_interrupt_is_not_reported_as_leaving_the_debugger(notebook: Notebook) -> None:
    meet = "dist.barrier(); x = rank; breakpoint()"
    source = f"%%ddp --nproc 2 --break-ranks all\n{meet}\ndist.barrier()"
    stopped = notebook.converse(source, notebook.interrupt)
    asked = stopped.asked[0][0][6]  # the other rank may still be in the first barrier
    assert re.search("interrupted( in barrier #1)?, line 2", stopped.error)
    assert "left the debugger" not in stopped.error
    assert f"----> 2 {meet}" in notebook.converse(f"%ddp debug --rank {asked}", "q").text


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


def test_ddp_debug_needs_a_failed_rank(notebook: Notebook, snapshot: SnapshotAssertion) -> None:
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
def test_ranks_without_their_own_error_skip_the_debugger(notebook: Notebook, source: str) -> None:
    notebook.run(
        "%%ddp --nproc 3\nkept = rank * 21\nif rank == 1: raise ValueError(kept)\n"
        "import time\nif rank == 2: time.sleep(60)"
    )

    def outlast_other_failures() -> None:
        time.sleep(4)  # a failure of another rank would end the debugger after 1.3 s
        notebook.client.input("p rank")

    reply = notebook.converse(f"%%ddp\n{source}", outlast_other_failures, "p kept", "q")
    assert {prompt[:8] for prompt, _ in reply.asked} == {"[rank 1]"}
    assert [len(reply.lines(rank)) for rank in (0, 2)] == [1, 1]
    assert "[rank 1] 21\n" in reply.text
    assert reply.status == "ok"
    if source == "%debug":  # else they have failed in `pdb.pm()`
        one = notebook.converse("%ddp debug --rank 2", "p rank + 40", "q")
        assert "[rank 2] 42\n" in one.text


def test_debugger_opens_a_rank_that_asked_for_input_at_the_cell_line(notebook: Notebook) -> None:
    notebook.converse(f"{ONE}x = 1\ninput('?')", notebook.interrupt)
    reply = notebook.converse("%ddp debug", "q")
    assert "----> 3 input('?')" in reply.text
    assert "threading" not in reply.text
    notebook.run(f"{ONE}breakpoint()\nhere = 1")  # without an input box
    reply = notebook.converse("%ddp debug --rank 0", "q")
    assert "----> 2 breakpoint()" in reply.text
    assert "debugger.py" not in reply.text


def test_debugger_can_open_the_cause_of_an_exception(notebook: Notebook) -> None:
    notebook.run(
        f"{ONE}def f():\n    inner = 5\n    raise ValueError\n"
        "try: f()\nexcept ValueError as error: raise RuntimeError('outer') from error"
    )
    for _ in range(2):
        reply = notebook.converse("%ddp debug", "exceptions 0", "p inner * 2", "q")
        assert "[rank 0] 10\n" in reply.text
        assert "nbddp" not in reply.text


TYPED = """%%ddp --nproc 2
from getpass import getpass
first, z = input('first? '), 0
breakpoint()
token, last = getpass('token? '), input('last? ')"""


def test_replay_repeats_the_input_of_the_user(notebook: Notebook) -> None:
    """In a debugger, too: the same rank stops again, and its assignments are repeated."""
    asked: list[str] = []  # either rank can reach the breakpoint first

    def answer() -> None:
        asked.append(str(notebook.asked["content"]["prompt"]))
        debugged = "c" if asked.count(asked[-1]) > 1 else "z = 7"
        rank, first_letter = asked[-1][6], asked[-1][9]
        notebook.client.input(debugged if "ipdb" in asked[-1] else rank + first_letter)

    assert notebook.converse(TYPED, *[answer] * 8).status == "ok"
    show = "%%ddp\nprint(first, z, token, last)"
    before = [notebook.run(show).lines(rank) for rank in (0, 1)]
    assert sorted("7" in line[0] for line in before) == [False, True]
    for _ in range(2):
        again = notebook.run("%ddp restart --replay")
        assert (again.status, again.asked) == ("ok", [])
        after = notebook.run(show)
        assert [after.lines(rank) for rank in (0, 1)] == before
