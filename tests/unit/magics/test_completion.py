"""Tab and Shift+Tab in the line of a magic."""

from unittest.mock import Mock

import pytest
from syrupy.assertion import SnapshotAssertion

from nbddp.extension.installed import own_backends
from nbddp.lifecycle.group_state import GroupState
from nbddp.magics.auto_mode import AutoMode
from nbddp.magics.completion import Completion
from nbddp.magics.parser import CELL, COMMANDS
from nbddp.sigint import Future
from nbddp.wire.request_messages import Complete


def answer(_rank: int, request: Complete) -> Future[Mock]:
    """Answer as a rank does that knows one name for each beginning."""
    code, answer = request.code, Future[Mock]()
    answer.set_result(Mock(content={"text": code, "matches": [f"{code}ing_rate"]}))
    return answer


@pytest.fixture
def completion() -> Completion:
    """Two ranks, which know a name."""
    group = Mock()
    group.life.all_ranks = (0, 1)
    group.session.life.state = GroupState.IDLE
    group.session.numbered.side_effect = lambda request: request
    group.session.send_request.side_effect = answer
    return Completion(group, AutoMode())


LINES = (
    *("%ddp nonsense ", "%ddp kill ", "%ddp kill 0 ", "%ddp view ", "%ddp pull learn"),
    *("%%ddp --backend ", "%%ddp --ranks 1,", "%%ddp --au", "%%ddp --env 'a b"),
    *("%ddp run --kee", "%ddp run train.py --k", "%ddp run -m pack.train --nproc "),
    "%ddp push x --ranks 0,",
)


def test_completions_of_magic_lines_and_their_kinds(
    completion: Completion, snapshot: SnapshotAssertion
) -> None:
    found = {line: completion.complete(line, 0, len(line))[0] for line in LINES}
    texts = {
        line: " ".join(sorted(each.text for each in fitting if each.text not in own_backends()))
        for line, fitting in found.items()
    }
    assert texts == snapshot
    kinds = {"%ddp ": "command", "%%ddp ": "option", "%ddp kill ": "rank"}
    kinds |= {"%ddp pull x": "name", "%ddp view ": "value"}
    for line, kind in kinds.items():
        assert {each.kind for each in completion.complete(line, 0, 99)[0]} == {kind}


def test_names_of_the_kernel_are_not_offered_while_no_rank_answers(completion: Completion) -> None:
    completion._group.session.life.state = GroupState.OFF
    for line, names in {
        "x = wor": ["world_size"],
        "print(isi": ["isinstance"],
        "learning_": ["learning_"],  # so that IPython adds none of the kernel
        "import nu": [],
        "from torch import n": [],
        "open('da": [],
        "torch.on": [],
        "1": [],
    }.items():
        found, begun = completion.complete(f"%%ddp\n{line}", 1, 99)
        assert ([each.text for each in found], line.endswith(begun)) == (names, True), line
    assert completion.complete("learning_", 0, 99) == ([], "")


def test_the_tooltip_of_a_magic_line_is_the_help_of_its_command(completion: Completion) -> None:
    assert completion.explain("%ddp kill 1", 11) == COMMANDS["kill"].format_help()
    assert completion.explain("%%ddp --nproc 2\nx", 8) == CELL.format_help()
    assert completion.explain("x = 1\n%ddp help", 12) == COMMANDS["help"].format_help()
    for code in ("%ddp", "%ddp nonsense", "print(1)"):
        assert completion.explain(code, len(code)) == ""
