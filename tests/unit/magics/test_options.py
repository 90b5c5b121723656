"""What may be written behind ``%%ddp`` and ``%ddp``: accepted, or refused in one clear line."""

import re
import shlex
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.error import UsageError
from refusals import refusal
from syrupy.assertion import SnapshotAssertion

from nbddp.errors import RequestError
from nbddp.extension.installed import (
    command_name,
    installed,
    load,
    own_backends,
    owner_of_command,
)
from nbddp.magics.line_magic import HANDLERS
from nbddp.magics.parser import CELL, COMMANDS, command_parser, help_text, parse_line
from nbddp.magics.run_arguments import CellArguments, check_unchanged
from nbddp.wire.group_spec import GroupSpec
from nbddp.wire.options.option_values import (
    MAX_SECONDS,
    count,
    names,
    numbers,
    positive_int,
    seconds,
    variable,
)


def cell(line: str) -> CellArguments:
    return parse_line(CELL, line)


def command(line: str) -> Any:
    name, _, options = line.partition(" ")
    return parse_line(COMMANDS[name], options)


def given_in(arguments: object) -> dict[str, Any]:
    """Return the options and arguments of a line that differ from their defaults."""
    found = dict(vars(arguments))
    default = {item.name: item.default for item in fields(arguments)}
    for kind, options in found.pop("extensions", {}).items():
        found |= vars(options)
        default |= {item.name: item.default for item in fields(kind)}
    return found.pop("start", {}) | {
        name: value for name, value in found.items() if value != default.get(name)
    }


# ---- accepted


OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "--nproc 4": {"nproc": 4},
    "--nproc=4": {"nproc": 4},
    "--nproc 4  # as many as yesterday": {"nproc": 4},
    "--backend auto": {"backend": "auto"},
    "--backend nccl": {"backend": "nccl"},
    "--timeout 2.5": {"timeout": 2.5},
    f"--grace {MAX_SECONDS}": {"grace": MAX_SECONDS},
    "--gpus 0-2,5": {"gpus": (0, 1, 2, 5)},
    "--gpus GPU-8f2a-11,GPU-77": {"gpus": ("GPU-8f2a-11", "GPU-77")},
    "--gpus MIG-GPU-8f2a/1/0": {"gpus": ("MIG-GPU-8f2a/1/0",)},
    "--ranks 0,2": {"ranks": (0, 2)},
    "--name 'my first'": {"name": "my first"},
    "--out losses": {"out": "losses"},
    "--env A=1 --env B=x=y": {"env": {"A": "1", "B": "x=y"}},
    "--env A=": {"env": {"A": ""}},
    "--env 'A=two words'": {"env": {"A": "two words"}},
    "--push a,b": {"push": ("a", "b")},
    "--push 'a, b'": {"push": ("a", "b")},
    "--fresh": {"fresh": True},
    "--no-init": {"no_init": True},
    "--no-wait": {"no_wait": True},
    "--quiet": {"quiet": True},
    "--auto": {"auto": True},
}
COMMAND_LINES: dict[str, dict[str, Any]] = {
    "kill 1": {"rank": 1},
    "logs 1": {"rank": 1},
    "logs 1 --lines 5": {"rank": 1, "lines": 5},
    "push a b": {"names": ["a", "b"]},
    "push a --ranks 0-1": {"names": ["a"], "ranks": (0, 1)},
    "pull x": {"expression": "x", "line": "x"},
    "pull 'x + 1' --rank 1": {"expression": "x + 1", "rank": 1, "line": "'x + 1' --rank 1"},
    "auto on": {"switch": "on"},
    "stop": {},
}


def test_options_and_arguments_set_their_values() -> None:
    assert {line: given_in(cell(line)) for line in OPTIONS} == OPTIONS
    assert {line: given_in(command(line)) for line in COMMAND_LINES} == COMMAND_LINES
    args = command("run --name -1 --quiet train.py --lr -1 --trace -1:3 -- -2")
    assert (args.start, args.script, args.extensions) == ({"name": "-1"}, "train.py", {})
    assert args.script_args == ["--lr", "-1", "--trace", "-1:3", "--", "-2"]


WORDS = st.lists(st.text("ab#=- '\"\\%", max_size=6).filter(lambda word: word != "--"), max_size=4)


@given(words=WORDS, comment=st.sampled_from(["", " # don't", ' # "']))
def test_all_words_after_a_script_are_its_arguments_up_to_a_comment(
    words: list[str], comment: str
) -> None:
    args = command(f"run --nproc 2 s.py --n 4 {shlex.join(words)}{comment}")
    assert (args.start["nproc"], args.script, args.script_args) == (2, "s.py", ["--n", "4", *words])


def test_a_comment_begins_outside_of_quotes() -> None:
    assert cell("--name 'a # b' --env 'MSG=a # b' # c").start["env"] == {"MSG": "a # b"}
    assert command("pull losses --rank 0 # don't").expression == "losses"
    assert command(r"pull 'it\'s # 1'").expression == r"'it\'s # 1'"


# ---- refused

REFUSED = (
    *("--nproc 0", "--nproc two", "--nproc=-1", "--nproc", "--threads 0", "--threads 1.5"),
    *("--timeout 0", "--timeout nan", "--timeout inf", "--timeout soon", "--grace 0"),
    *("--gpus a", "--gpus 0,GPU-8f2a", "--gpus GPU-", "--gpus 'MIG-1;rm'"),
    *("--ranks 1,", "--ranks=-1", "--ranks -1", "--ranks 3-1", "--ranks 0-10000"),
    *("--env A", "--env =1", "--env 1A=1", "--push a-b", "--push a,"),
    *("--out", "--npro 2", "-np 4", "--name it's", "--out a-b", "--out x --no-wait"),
)
REFUSED_COMMANDS = (
    *("kill", "kill one", "logs 0 -n 0", "pull", "pull x --rank -1", "push", "push a --to 1"),
    "start --fresh",
    *("stop now", "view", "auto", "kill 1 2", "run", "run --kep train.py"),
)


def test_a_wrong_option_is_refused_with_the_allowed_values(snapshot: SnapshotAssertion) -> None:
    reasons = {f"%%ddp {line}": refusal(UsageError, cell, line) for line in REFUSED}
    reasons |= {f"%ddp {line}": refusal(UsageError, command, line) for line in REFUSED_COMMANDS}
    assert reasons == snapshot
    assert [line for line, words in reasons.items() if "\n" in words] == []


@pytest.mark.parametrize(
    ("unknown", "advice"),
    [
        ("--nosuch 3", "`%%ddp?` lists the options"),
        ("surplus", "put a value with spaces into quotes; `%%ddp?` lists the options"),
        ("-np 4", "did you mean --nproc?"),
        ("--nproc_per_node=4", "did you mean --nproc?"),
    ],
)
def test_the_error_for_an_unknown_option_names_the_near_ones(unknown: str, advice: str) -> None:
    reason = refusal(UsageError, cell, unknown)
    assert reason == f"unrecognized arguments: {unknown}; {advice}"


def test_an_unknown_command_or_backend_is_answered_with_known_ones(
    snapshot: SnapshotAssertion,
) -> None:
    words = ("hepl", "--nproc")
    assert {word: refusal(UsageError, command_parser, word) for word in words} == snapshot
    reason = refusal(UsageError, cell, "--backend mpi").replace("'", "")  # quoted until Python 3.12
    choices = ", ".join(["auto", "gloo", "nccl", *own_backends()])
    assert reason == f"argument --backend: invalid choice: mpi (choose from {choices})"


def test_every_command_has_a_handler_and_a_line_in_the_help() -> None:
    methods = {
        command_name(kind): (
            extension.name,
            getattr(load(extension.notebook), command_name(kind).replace("-", "_")),
        )
        for extension in installed().values()
        for kind in extension.commands
    }
    assert sorted([*HANDLERS, *methods]) == sorted(COMMANDS)
    for name, (extension, method) in methods.items():
        assert callable(method)
        assert owner_of_command(name) == extension
    for name in COMMANDS:
        assert f"\n    {name} " in help_text(None)


def test_help_shows_a_command_or_an_option_of_a_cell() -> None:
    assert help_text("kill") == COMMANDS["kill"].format_help()
    assert re.search("lose its variables.*%ddp heal.*%ddp restart --replay", help_text("kill"))
    for name in ("ranks", "--ranks"):
        assert help_text(name).startswith("an option of %%ddp:\n  --ranks ")
    assert "did you mean `%ddp kill`" in refusal(UsageError, help_text, "kil")


# ---- the types


@given(st.lists(st.integers(0, 50), min_size=1))
def test_a_list_of_numbers_keeps_its_order_without_duplicates(found: list[int]) -> None:
    assert numbers(",".join(map(str, found))) == tuple(dict.fromkeys(found))


def complaint(kind: Callable[[str], Any], text: str) -> str:
    try:
        kind(text)
    except ArgumentTypeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", [numbers, positive_int, count, seconds, names, variable])
@given(text=st.text(max_size=6) | st.sampled_from(["\u00b2", "-1", "1e999", "nan", "a,b", "A=1"]))
def test_option_types_accept_a_text_or_name_it(kind: Callable[[str], Any], text: str) -> None:
    reason = complaint(kind, text)
    assert not reason or reason.endswith(f", got {text!r}")


# ---- from options to a spec


def test_options_extend_a_spec_and_equal_ones_need_no_new_start() -> None:
    env = {"A": "1", "B": "1"}
    base = GroupSpec(nproc=3, backend="gloo", gpus=(1,), env=env, threads=2, name="x")
    assert cell("").spec(base) == base
    asked = cell("--env B=2 --env C=3").spec(base)
    assert asked == replace(base, env={"A": "1", "B": "2", "C": "3"})
    current = GroupSpec(nproc=4, env={"A": "1"}, name="first")
    asked = cell("--nproc 4 --env A=1 --name second").spec(current)
    check_unchanged(replace(asked, joins_group=False), current)


CHANGES = (
    *("--nproc 8", "--backend nccl", "--gpus 0,2", "--threads 2", "--timeout 60", "--grace 2.5"),
    *("--env 'A=x y' --env B=2", "--nproc 8 --gpus 0,1"),
)


def test_options_of_a_new_start_are_refused_with_its_command(snapshot: SnapshotAssertion) -> None:
    current = GroupSpec(nproc=4, backend="gloo", threads=1, name="a")
    reasons = {}
    for line in CHANGES:
        asked = cell(line).spec(current)
        reasons[line] = refusal(RequestError, check_unchanged, asked, current)
        offered = reasons[line].split("`%ddp restart ")[1].split("`")[0]
        assert command(f"restart {offered}").spec(current) == asked
    assert reasons == snapshot
    said_of_none = refusal(RequestError, check_unchanged, GroupSpec(threads=9), GroupSpec())
    assert said_of_none.startswith("the ranks run without --threads; ")
