"""What the extensions add together: commands, options and public names."""

import ast
from inspect import getsource
from pathlib import Path
from unittest.mock import Mock

from IPython.core.error import UsageError
from refusals import refusal
from runs_on_disk import make_run
from syrupy.assertion import SnapshotAssertion

from nbddp import WorkerGroup, extensions
from nbddp.extension.installed import public_targets
from nbddp.magics.auto_mode import AutoMode
from nbddp.magics.completion import Completion
from nbddp.magics.parser import CELL, COMMANDS, command_parser, help_text, parse_line

LINES = (
    *("%ddp fa", "%ddp help f", "%ddp check tr", "%%ddp --sw", "%%ddp --scale 1,2 --we"),
    *("%ddp show t", "%ddp compare one t", "%ddp compare one two --over "),
    *("%%ddp --publish ", "%ddp publish w", "%ddp publish wandb ", "%ddp publish wandb --"),
    *("%ddp fault ", "%ddp fault --rank ", "%ddp fault --rank=", "%ddp fault --rank 1 s"),
    *("%ddp fault kill --rank 1 ", "%ddp fault kill --step "),
)
REFUSED = (
    *("--trace 15:10", "--trace a:b", "--trace 1.5:4", "--trace 1:2:3", "--trace -1:3"),
    *("--trace :", "--trace 4:", "--trace 1:1000000000000", "--timeline --no-wait", "--no"),
)
REFUSED_COMMANDS = (
    *("nodes --port 65536", "nodes --nnodes 4:2", "fault", "trace --memory"),
    *("trace --off --steps 1", "bench --sizes 0", "bench --sizes 1X", "start --sweep lr=1"),
)


def test_completions_of_the_lines_of_extensions(folder: Path, snapshot: SnapshotAssertion) -> None:
    group = Mock()
    group.life.all_ranks = (0, 1)
    for name in ("one", "two"):
        make_run(folder, name)
    completion = Completion(group, AutoMode())
    found = {line: completion.complete(line, 0, len(line))[0] for line in LINES}
    assert snapshot == {
        line: " ".join(sorted(each.text for each in fitting)) for line, fitting in found.items()
    }
    assert {each.kind for each in completion.complete("%ddp show ", 0, 99)[0]} == {"run"}


def test_a_wrong_option_of_an_extension_is_refused(snapshot: SnapshotAssertion) -> None:
    reasons = {f"%%ddp {line}": refusal(UsageError, parse_line, CELL, line) for line in REFUSED}
    for line in REFUSED_COMMANDS:
        name, _, options = line.partition(" ")
        reasons[f"%ddp {line}"] = refusal(UsageError, parse_line, COMMANDS[name], options)
    assert reasons == snapshot
    assert [line for line, words in reasons.items() if "\n" in words] == []


def test_an_unknown_command_is_answered_with_known_ones(snapshot: SnapshotAssertion) -> None:
    words = ("checks", "sweep", "nonsense")
    assert {word: refusal(UsageError, command_parser, word) for word in words} == snapshot


def test_help_shows_an_option_of_a_cell() -> None:
    for name in ("sweep", "--sweep"):
        assert help_text(name).startswith("an option of %%ddp:\n  --sweep lr=0.1,0.01 ")
        assert "--scale" not in help_text(name)
    assert "else the newest)" in help_text("show")  # "last" is the name of no run


def test_the_words_of_a_note_may_have_a_number_sign() -> None:
    assert parse_line(COMMANDS["runs"], "note 'best # 1'").run == ["note", "best # 1"]


def test_the_worker_group_has_exactly_its_documented_public_names() -> None:
    assert [name for name in dir(WorkerGroup(nproc=2)) if not name.startswith("_")] == [
        *("alive", "close", "folder", "heal", "interrupt", "is_live", "kill", "pull", "push"),
        *("restart", "run", "run_script", "scale", "start", "stop", "sweep", "timeline", "trace"),
    ]


def test_the_list_of_types_has_the_public_names_of_all_manifests() -> None:
    listed = {
        name.asname: f"{node.module}:{name.name}"
        for node in ast.walk(ast.parse(getsource(extensions)))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("nbddp.")
        for name in node.names
        if name.asname == name.name
    }
    listed["faults"] = "nbddp.extensions.faults.arming"  # a module
    assert listed == public_targets()
