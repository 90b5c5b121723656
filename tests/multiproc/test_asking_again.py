"""Cells that asked the user are done again without him, as he answered them."""

from __future__ import annotations

import pytest
from notebook import Notebook

pytestmark = pytest.mark.multiproc
SHARES_KERNEL = True

SOURCE = (
    "%%ddp --nproc 2\n"
    "from getpass import getpass\n"
    "first, z = input('first? '), 0\n"
    "breakpoint()\n"
    "token, last = getpass('token? '), input('last? ')"
)


def test_a_replay_types_what_was_typed(notebook: Notebook) -> None:
    """In a debugger too: whoever was stopped is stopped again, and what was set there is set."""

    def typed(prompt: str) -> str:
        return "c" if "ipdb" in prompt else f"{prompt[6]}{prompt[9]}"

    # one rank comes to the breakpoint first; it is not known which
    asked: list[str] = []

    def answer() -> None:
        prompt = str(notebook.asked["content"]["prompt"])
        if "ipdb" in prompt and prompt not in asked:
            asked.append(prompt)
            notebook.client.input("z = 7")
        else:
            notebook.client.input(typed(prompt))

    reply = notebook.converse(SOURCE, *[answer] * 8)
    assert reply.status == "ok"
    show = "%%ddp\nprint(first, z, token, last)"
    before = [notebook.run(show).lines(rank) for rank in (0, 1)]
    assert sorted("7" in line[0] for line in before) == [False, True]
    for _ in range(2):
        again = notebook.run("%ddp restart --replay")
        assert again.status == "ok"
        assert not again.asked
        after = notebook.run(show)
        assert [after.lines(rank) for rank in (0, 1)] == before
