"""A stop while a `%ddp` command works is one line, or nothing; the group stays usable."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest
from notebook import Notebook
from syrupy.assertion import SnapshotAssertion

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]
SHARES_KERNEL = True

READY = "%%ddp --nproc 2\nkept = rank"
COMMANDS = [
    "status",
    "start",
    "restart",
    "restart --replay",
    "stop",
    "interrupt",
    "kill 1",
    "fault raise --rank 0 --step 1000000",
    "logs 0",
    "push numbers",
    "pull kept",
    "wait",
    "auto off",
    "view text",
    "help",
]
IN_GATE = ("restart --replay", "stop", "push", "pull")
ONE_LINE = re.compile(r"`%ddp \w+` was interrupted; [^\n]+")


@pytest.mark.gate_runs(*IN_GATE)
@pytest.mark.parametrize("presses", [2, pytest.param(5, marks=pytest.mark.full)])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_stop_at_a_random_moment_of_a_command_is_one_line_or_nothing(
    notebook: Notebook, command: str, presses: int
) -> None:
    chance = random.Random(command)
    notebook.run("numbers = list(range(1_000_000))")
    for _ in range(presses):
        if notebook.run(READY).status != "ok":
            assert notebook.run("%ddp restart").status == "ok"
        seconds = chance.choice([0.003, 0.006, 0.01, 0.02, 0.05, chance.random() * 0.3])
        reply = notebook.run_and_stop(f"%ddp {command}", seconds)
        where = f"{command} after {seconds:.3f} s: {reply.text}{reply.traceback}"
        assert "nbddp/" not in reply.traceback, where
        if reply.error.startswith("CommandInterruptedError"):
            assert ONE_LINE.fullmatch(reply.traceback), where
        assert "Traceback" not in reply.text, where
    if notebook.run(READY).status != "ok":
        assert notebook.run("%ddp restart --nproc 2").status == "ok"
    reply = notebook.run("%%ddp\nx = torch.ones(1)\ndist.all_reduce(x)\nx.item()")
    assert reply.text.endswith("Out [ranks 0-1] 2.0\n")


MARKS = ("mark0", "mark1")


def marking(notebook: Notebook) -> str:
    """Code with which a rank says that it came so far."""
    return f"open('{notebook.folder}/mark' + __import__('os').environ['RANK'], 'w')"


SLOW = """
class Slow:
    def __reduce__(self):
        return eval, ({code!r},)
slow = Slow()
"""


@pytest.mark.parametrize("command", ["push slow", "pull slow()"])
def test_a_push_or_pull_that_is_stopped_says_what_became_of_it(
    notebook: Notebook, snapshot: SnapshotAssertion, command: str
) -> None:
    code = f"{marking(notebook)}.close() or __import__('time').sleep(5)"
    notebook.run(f"{READY}\ndef slow(): return {code}")
    notebook.run(SLOW.format(code=code))
    reply = notebook.run_and_stop_at(f"%ddp {command}", *MARKS)
    assert reply.traceback == snapshot
    assert notebook.run("%%ddp\nkept").text.endswith("Out [rank 0] 0\nOut [rank 1] 1\n")


@contextmanager
def no_ranks_can_be_forked(kernel: int) -> Iterator[None]:
    """The kernel's helper stands still, so that a start takes as long as the test likes."""
    children = psutil.Process(kernel).children()
    [helper] = [each for each in children if "multiprocessing.forkserver" in str(each.cmdline())]
    helper.suspend()
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            helper.resume()


def does_not_end(notebook: Notebook) -> str:
    """Code of a rank which SIGTERM does not hurry: it says that it was asked to end."""
    asked = f"lambda *_: {marking(notebook)}.close()"
    return f"import signal\nsignal.signal(signal.SIGTERM, {asked})"


def test_a_start_or_restart_that_is_stopped_says_what_is_so(
    fresh_notebook: Notebook, snapshot: SnapshotAssertion
) -> None:
    notebook = fresh_notebook
    with no_ranks_can_be_forked(notebook.pid):
        reply = notebook.run_and_stop_at("%ddp start --nproc 2", ".nbddp/runs")
    assert reply.traceback == snapshot
    notebook.run(READY)
    notebook.run(f"%%ddp\n{does_not_end(notebook)}")
    notebook.run("%%ddp --no-wait\nimport time\nwhile True: time.sleep(0.1)")
    reply = notebook.run_and_stop_at("%ddp restart", *MARKS)
    assert reply.traceback.splitlines()[-1] == snapshot


def test_a_replay_whose_restart_is_stopped_says_that_nothing_was_done_again(
    notebook: Notebook,
) -> None:
    notebook.run(READY)
    notebook.run("words = ['a']")
    notebook.run("%%ddp --push words\nimport signal")
    notebook.run(f"%%ddp --once\n{does_not_end(notebook)}")
    notebook.run("%%ddp --once --no-wait\nimport time\nwhile True: time.sleep(0.1)")
    reply = notebook.run_and_stop_at("%ddp restart --replay", *MARKS)
    assert re.search(r"\bcells [\d,-]+, .* words; `%ddp restart --replay`", reply.text)
    assert notebook.run("%ddp restart --replay").status == "ok"
    assert notebook.run("%%ddp\nkept, words").text == (
        "Out [rank 0] (0, ['a'])\nOut [rank 1] (1, ['a'])\n"
    )


def test_a_pull_that_never_ends_is_stopped_in_the_ranks_too(notebook: Notebook) -> None:
    notebook.run(
        f"{READY}\nimport time\ndef ever():\n    {marking(notebook)}.close()\n"
        "    while True: time.sleep(0.1)"
    )
    reply = notebook.run_and_stop_at("%ddp pull ever()", *MARKS)
    assert reply.error.startswith("CommandInterruptedError: `%ddp pull` ")
    after = notebook.run("%%ddp\nprint(kept)")
    assert [after.lines(rank) for rank in range(2)] == [["0"], ["1"]]


def test_a_pull_that_exits_costs_no_name(notebook: Notebook) -> None:
    notebook.run(READY)
    assert "rank 0: SystemExit" in notebook.run("%ddp pull exit()").text
    assert notebook.run("%ddp pull kept").result == "[0, 1]"


STOP_IN_MATPLOTLIB = """
import os, signal, sys, time
class Stop:
    def find_spec(self, name, *_):
        if name == "matplotlib.colors":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
assert "matplotlib.colors" not in sys.modules
sys.meta_path.insert(0, Stop())
"""


@pytest.mark.full
@pytest.mark.parametrize("command", ["compare first second", "timeline"])
def test_a_stop_while_pictures_are_prepared_breaks_none_that_follow(
    fresh_notebook: Notebook, command: str
) -> None:
    cell = "%%ddp --nproc 1 --quiet --name {}\ndist.barrier()\nnbddp.log(x=1)"
    fresh_notebook.run(cell.format("first"))
    fresh_notebook.run("%ddp stop")
    fresh_notebook.run(cell.format("second"))
    assert fresh_notebook.run(STOP_IN_MATPLOTLIB).status == "ok"
    stopped = fresh_notebook.run(f"%ddp {command}")
    assert stopped.error.startswith("CommandInterruptedError: ")
    reply = fresh_notebook.run(f"%ddp {command}")
    assert reply.status == "ok", reply.traceback
    assert "image/png" in reply.displays[0]
