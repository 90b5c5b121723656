"""A stop while a `%ddp` command works is one line, or nothing; the group stays usable."""

from __future__ import annotations

import random
import re

import pytest
from notebook import Notebook

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(180)]
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
PRESSES = 5
ONE_LINE = re.compile(r"`%ddp \w+` was interrupted; [^\n]+")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_stop_at_a_random_moment_of_a_command_is_one_line_or_nothing(
    notebook: Notebook, command: str
) -> None:
    chance = random.Random(command)
    notebook.run("numbers = list(range(1_000_000))")
    for _ in range(PRESSES):
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


SLOW = (
    "class Slow:\n"
    "    def __reduce__(self):\n"
    "        return eval, ('__import__(\"time\").sleep(1.5)',)\n"
    "slow = Slow()"
)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "push slow",
            "`%ddp push` was interrupted; the values may have come to some ranks only: push them "
            "again; every rank keeps its names; the next cell works",
        ),
        (
            "pull __import__('time').sleep(1.5)",
            "`%ddp pull` was interrupted; nothing was fetched; every rank keeps its names; the "
            "next cell works",
        ),
    ],
)
def test_a_push_or_pull_that_is_stopped_says_what_became_of_it(
    notebook: Notebook, command: str, words: str
) -> None:
    notebook.run(READY)
    notebook.run(SLOW)
    reply = notebook.run_and_stop(f"%ddp {command}", 0.5)
    assert reply.traceback == words
    assert notebook.run("%%ddp\nkept").text.endswith("Out [rank 0] 0\nOut [rank 1] 1\n")


def test_a_start_or_restart_that_is_stopped_says_what_is_so(fresh_notebook: Notebook) -> None:
    notebook = fresh_notebook  # its helper still imports torch: a start takes its time
    reply = notebook.run_and_stop("%ddp start --nproc 2", 0.1)
    assert reply.traceback == (
        "`%ddp start` was interrupted; there are no ranks; the next cell starts them"
    )
    notebook.run(READY)
    notebook.run("%%ddp\nimport signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)")
    notebook.run("%%ddp --no-wait\nimport time\nwhile True: time.sleep(0.1)")
    reply = notebook.run_and_stop("%ddp restart", 0.5)  # which SIGTERM does not hurry
    assert reply.traceback.endswith(
        "`%ddp restart` was interrupted; all ranks are stopped, their names are gone; the next "
        "cell starts new ones"
    )


def test_a_replay_whose_restart_is_stopped_says_that_nothing_was_done_again(
    notebook: Notebook,
) -> None:
    notebook.run(READY)
    notebook.run("words = ['a']")
    notebook.run("%%ddp --push words\nimport signal")
    notebook.run("%%ddp --once\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)")
    notebook.run("%%ddp --once --no-wait\nimport time\nwhile True: time.sleep(0.1)")
    reply = notebook.run_and_stop("%ddp restart --replay", 0.5)
    assert re.search(
        r"the replay did not come to its end; done again: nothing; not done again: cells [\d,-]+, "
        r"the push of words; `%ddp restart --replay` does all of it again\n",
        reply.text,
    )
    assert notebook.run("%ddp restart --replay").status == "ok"
    assert notebook.run("%%ddp\nkept, words").text == (
        "Out [rank 0] (0, ['a'])\nOut [rank 1] (1, ['a'])\n"
    )


def test_a_pull_that_never_ends_is_stopped_in_the_ranks_too(notebook: Notebook) -> None:
    notebook.run(f"{READY}\nimport time")
    reply = notebook.run_and_stop("%ddp pull [time.sleep(0.1) for _ in iter(int, 1)]", 0.5)
    assert reply.error.startswith("CommandInterruptedError: `%ddp pull` was interrupted")
    after = notebook.run("%%ddp\nprint(kept)", timeout=20)
    assert [after.lines(rank) for rank in range(2)] == [["0"], ["1"]]


def test_a_pull_that_exits_costs_no_name(notebook: Notebook) -> None:
    notebook.run(READY)
    assert "rank 0: SystemExit" in notebook.run("%ddp pull exit()").text
    assert notebook.run("%ddp pull kept").result == "[0, 1]"
