"""What may be written behind ``%%ddp`` and ``%ddp``: accepted, or refused in one clear line."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.error import UsageError

from nbddp.controller.spec import GroupSpec
from nbddp.errors import RequestError
from nbddp.magics.cell import CellMagics
from nbddp.magics.line import LineMagics
from nbddp.magics.options import (
    YEAR,
    asked_spec,
    check_unchanged,
    names,
    numbers,
    parse,
    positive_int,
    rank_number,
    seconds,
    variable,
)
from nbddp.wire.trace_messages import Steps

SECONDS = "expected seconds above 0 and up to a year"


def cell(line: str) -> Namespace:
    return parse(CellMagics.ddp, line)


def refusal(function: Callable[..., Any], line: str) -> str:
    """The one line that the user reads."""
    with pytest.raises(UsageError) as caught:
        parse(function, line)
    return str(caught.value)


# ---- accepted


def test_a_cell_needs_no_options() -> None:
    args = cell("")
    assert all(value in (None, False) for value in vars(args).values())


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--nproc 4", "nproc", 4),
        ("--nproc-per-node 4", "nproc", 4),
        ("--nproc=4", "nproc", 4),
        ("--backend auto", "backend", "auto"),
        ("--trace 10:15", "trace", Steps(first=10, last=15)),
        ("--trace 0", "trace", Steps(first=0, last=0)),
        ("--backend gloo", "backend", "gloo"),
        ("--backend nccl", "backend", "nccl"),
        ("--gpus 0,1", "gpus", (0, 1)),
        ("--gpus 0-2,5", "gpus", (0, 1, 2, 5)),
        ("--gpus GPU-8f2a-11,GPU-77", "gpus", ("GPU-8f2a-11", "GPU-77")),
        ("--gpus MIG-GPU-8f2a/1/0", "gpus", ("MIG-GPU-8f2a/1/0",)),
        ("--ranks 0,2", "ranks", (0, 2)),
        ("--name first", "name", "first"),
        ("--name 'my first'", "name", "my first"),
        ("--timeout 2.5", "timeout", 2.5),
        ("--grace 2", "grace", 2.0),
        ("--env A=1", "env", [("A", "1")]),
        ("--env A=1 --env B=x=y", "env", [("A", "1"), ("B", "x=y")]),
        ("--env A=", "env", [("A", "")]),
        ("--env 'A=two words'", "env", [("A", "two words")]),
        ("--threads 3", "threads", 3),
        ("--push a,b", "push", ("a", "b")),
        ("--out losses", "out", "losses"),
        ("--fresh", "fresh", True),
        ("--no-init", "no_init", True),
        ("--no-wait", "no_wait", True),
        ("--quiet", "quiet", True),
        ("--auto", "auto", True),
        ("--nproc 4  # as many as yesterday", "nproc", 4),
    ],
)
def test_an_option_of_a_cell_is_understood_and_changes_nothing_else(
    line: str, name: str, value: object
) -> None:
    args = vars(cell(line))
    assert args[name] == value
    assert {key: each for key, each in args.items() if key != name} == {
        key: each for key, each in vars(cell("")).items() if key != name
    }


@pytest.mark.parametrize(
    ("command", "line", "found"),
    [
        (LineMagics.kill, "1", {"rank": 1}),
        (LineMagics.logs, "1", {"rank": 1, "lines": 50}),
        (LineMagics.logs, "1 -n 5", {"rank": 1, "lines": 5}),
        (LineMagics.logs, "1 --lines 5", {"rank": 1, "lines": 5}),
        (LineMagics.push, "a b", {"names": ["a", "b"], "ranks": None}),
        (LineMagics.push, "a --ranks 0-1", {"names": ["a"], "ranks": (0, 1)}),
        (LineMagics.pull, "x", {"expression": "x", "rank": None}),
        (LineMagics.pull, "'x + 1' --rank 1", {"expression": "x + 1", "rank": 1}),
        (LineMagics.auto, "on", {"switch": "on"}),
        (LineMagics.auto, "off", {"switch": "off"}),
        (LineMagics.trace, "", {"steps": None, "memory": False, "off": False}),
        (LineMagics.stop, "", {}),
        (LineMagics.wait, "", {}),
        (LineMagics.interrupt, "", {}),
        (LineMagics.status, "", {}),
    ],
)
def test_a_command_is_understood(
    command: Callable[..., Any], line: str, found: dict[str, object]
) -> None:
    assert vars(parse(command, line)) == found


def test_what_is_a_scripts_own_is_left_as_it_is() -> None:
    args = parse(LineMagics.run, "--name -1 --quiet train.py --lr -1 --trace -1:3 -- -2")
    assert (args.name, args.script, args.trace) == ("-1", "train.py", None)
    assert args.script_args == ["--lr", "-1", "--trace", "-1:3", "--", "-2"]


@pytest.mark.parametrize("command", [LineMagics.start, LineMagics.restart])
def test_a_start_takes_the_options_that_say_how(command: Callable[..., Any]) -> None:
    args = vars(parse(command, "--nproc 3 --backend gloo --env A=1 --grace 1"))
    assert (args["nproc"], args["backend"], args["env"], args["grace"]) == (
        3,
        "gloo",
        [("A", "1")],
        1.0,
    )
    assert "ranks" not in args


# ---- refused


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "--nproc 0",
            "argument --nproc/--nproc-per-node: expected a whole number above 0, got '0'",
        ),
        (
            "--nproc two",
            "argument --nproc/--nproc-per-node: expected a whole number above 0, got 'two'",
        ),
        (
            "--nproc=-1",
            "argument --nproc/--nproc-per-node: expected a whole number above 0, got '-1'",
        ),
        ("--nproc", "argument --nproc/--nproc-per-node: expected one argument"),
        ("--threads 0", "argument --threads: expected a whole number above 0, got '0'"),
        ("--threads 1.5", "argument --threads: expected a whole number above 0, got '1.5'"),
        ("--timeout 0", f"argument --timeout: {SECONDS}, got '0'"),
        (
            "--timeout nan",
            f"argument --timeout: {SECONDS}, got 'nan'",
        ),
        (
            "--timeout inf",
            f"argument --timeout: {SECONDS}, got 'inf'",
        ),
        (
            "--timeout soon",
            f"argument --timeout: {SECONDS}, got 'soon'",
        ),
        ("--grace 0", f"argument --grace: {SECONDS}, got '0'"),
        *(
            (
                f"--gpus {text}",
                "argument --gpus: expected GPUs like 0,2 or 0-3, or names like GPU-8f2a or "
                f"MIG-3b1c, got {text!r}",
            )
            for text in ("a", "0,GPU-8f2a", "GPU-", "MIG-1;rm")
        ),
        ("--ranks 1,", "argument --ranks: expected numbers like 0,2 or 0-3, got '1,'"),
        ("--ranks=-1", "argument --ranks: expected numbers like 0,2 or 0-3, got '-1'"),
        ("--ranks 3-1", "argument --ranks: expected numbers like 0,2 or 0-3, got '3-1'"),
        ("--env A", "argument --env: expected NAME=VALUE, got 'A'"),
        ("--env =1", "argument --env: expected NAME=VALUE, got '=1'"),
        ("--env 1A=1", "argument --env: expected NAME=VALUE, got '1A=1'"),
        ("--push a-b", "argument --push: expected names like a,b, got 'a-b'"),
        ("--push a,", "argument --push: expected names like a,b, got 'a,'"),
        ("--out", "argument --out: expected one argument"),
        ("--no", "ambiguous option: --no could match --no-wait, --no-init"),
        *(
            (
                f"--trace {text}",
                "argument --trace: expected steps like 10:15, or one like 10, "
                f"got {text!r}: {what}",
            )
            for text, what in {
                "15:10": "the first step comes after the last",
                "a:b": "these are no whole numbers",
                "1.5:4": "these are no whole numbers",
                "1:2:3": "these are no whole numbers",
                "-1:3": "steps are counted from 0",
                ":": "both ends are wanted",
                "4:": "both ends are wanted",
                "1:1000000000000": "no step has such a number",
            }.items()
        ),
        ("--ranks -1", "argument --ranks: expected numbers like 0,2 or 0-3, got '-1'"),
        (
            "--name it's",
            'No closing quotation in "--name it\'s"; what has a quotation mark in it stands '
            'between others: "it\'s the best"',
        ),
    ],
)
def test_a_wrong_option_of_a_cell_is_one_line_that_says_what_is_allowed(
    line: str, words: str
) -> None:
    assert refusal(CellMagics.ddp, line) == words


@pytest.mark.parametrize("unknown", ["--nosuch 3", "surplus"])
def test_an_unknown_option_is_refused_with_those_that_there_are(unknown: str) -> None:
    said, _, listed = refusal(CellMagics.ddp, unknown).partition("; the options are: ")
    known = {f"--{name.replace('_', '-')}" for name in vars(cell(""))} - {"--auto"}
    assert said == f"unrecognized arguments: {unknown}"
    assert set(listed.split(", ")) == known


def test_a_backend_that_does_not_exist_is_refused_with_those_that_do() -> None:
    said = refusal(CellMagics.ddp, "--backend mpi").replace("'", "")  # quoted until Python 3.12
    assert said == "argument --backend: invalid choice: mpi (choose from auto, gloo, nccl)"


@pytest.mark.parametrize(
    ("command", "line", "words"),
    [
        (LineMagics.kill, "", "the following arguments are required: rank"),
        (LineMagics.kill, "one", "argument rank: expected a rank like 0, got 'one'"),
        (
            LineMagics.logs,
            "0 -n 0",
            "argument -n/--lines: expected a whole number above 0, got '0'",
        ),
        (LineMagics.pull, "", "the following arguments are required: expression"),
        (LineMagics.pull, "x --rank -1", "argument --rank: expected a rank like 0, got '-1'"),
        (LineMagics.push, "", "the following arguments are required: names"),
        (LineMagics.stop, "now", "unrecognized arguments: now; the options are: none"),
        (LineMagics.push, "a --to 1", "unrecognized arguments: --to 1; the options are: --ranks"),
    ],
)
def test_a_wrong_option_of_a_command_is_one_line_too(
    command: Callable[..., Any], line: str, words: str
) -> None:
    assert refusal(command, line) == words


# ---- the types


@given(st.lists(st.integers(0, 50), min_size=1))
def test_numbers_come_back_in_their_order_each_once(found: list[int]) -> None:
    assert numbers(",".join(map(str, found))) == tuple(dict.fromkeys(found))


@given(st.integers(0, 50), st.integers(0, 50))
def test_a_range_has_both_its_ends(low: int, length: int) -> None:
    assert numbers(f"{low}-{low + length}") == tuple(range(low, low + length + 1))


@given(st.integers(0, 50), st.integers(1, 50))
def test_a_range_backwards_is_refused(low: int, length: int) -> None:
    with pytest.raises(ArgumentTypeError):
        numbers(f"{low + length}-{low}")


def complaint(kind: Callable[[str], Any], text: str) -> str:
    """What a type says against a text, or nothing when it takes it."""
    try:
        kind(text)
    except ArgumentTypeError as error:
        return str(error)
    return ""


@given(st.text(alphabet="0123456789,- a\u00b2\u0661", max_size=5))
def test_numbers_are_some_numbers_or_refused(text: str) -> None:
    if said := complaint(numbers, text):
        assert said == f"expected numbers like 0,2 or 0-3, got {text!r}"
        return
    found = numbers(text)
    assert found
    assert all(number >= 0 for number in found)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (positive_int, "expected a whole number above 0, got {!r}"),
        (rank_number, "expected a rank like 0, got {!r}"),
        (seconds, SECONDS + ", got {!r}"),
        (names, "expected names like a,b, got {!r}"),
        (variable, "expected NAME=VALUE, got {!r}"),
    ],
)
@given(text=st.text(max_size=6) | st.sampled_from(["\u00b2", "-1", "1e999", "nan", "a,b", "A=1"]))
def test_every_type_takes_a_text_or_refuses_it_in_its_own_words(
    kind: Callable[[str], Any], message: str, text: str
) -> None:
    assert complaint(kind, text) in ("", message.format(text))


@given(st.integers(1, YEAR))
def test_a_whole_number_above_nought_is_taken(number: int) -> None:
    assert positive_int(str(number)) == rank_number(str(number)) == number
    assert seconds(str(number)) == number


def test_names_may_have_spaces_after_their_commas() -> None:
    assert names("a, b") == ("a", "b")


# ---- from options to a spec


def test_what_is_not_said_stays_as_it_was() -> None:
    base = GroupSpec(nproc=3, backend="gloo", gpus=(1,), env={"A": "1"}, threads=2, name="x")
    assert asked_spec(cell(""), base) == base


def test_what_is_said_takes_the_place_of_what_was() -> None:
    asked = asked_spec(
        cell("--nproc 4 --backend gloo --gpus 0,1 --timeout 9 --threads 2 --name x --grace 3"),
        GroupSpec(),
    )
    assert asked == GroupSpec(
        nproc=4, backend="gloo", gpus=(0, 1), timeout=9.0, threads=2, name="x", grace=3.0
    )


def test_variables_are_added_to_those_there_were_and_win_over_them() -> None:
    asked = asked_spec(cell("--env B=2 --env C=3"), GroupSpec(env={"A": "1", "B": "1"}))
    assert asked.env == {"A": "1", "B": "2", "C": "3"}


def test_options_that_the_group_has_already_pass() -> None:
    current = GroupSpec(nproc=4, env={"A": "1"})
    check_unchanged(asked_spec(cell("--nproc 4 --env A=1"), current), current)


def test_whether_ranks_join_a_group_may_change_from_cell_to_cell() -> None:
    check_unchanged(GroupSpec(joins_group=False), GroupSpec(joins_group=True))


@pytest.mark.parametrize(
    ("line", "runs_with", "flags"),
    [
        ("--nproc 8", "nproc 4", "--nproc 8"),
        ("--backend nccl", "backend gloo", "--backend nccl"),
        ("--gpus 0,1", "gpus none", "--gpus 0,1"),
        ("--threads 2", "threads 1", "--threads 2"),
        ("--name b", "name a", "--name b"),
        ("--env 'A=x y'", "env none", "--env 'A=x y'"),
        ("--nproc 8 --gpus 0,1", "nproc 4, gpus none", "--nproc 8 --gpus 0,1"),
    ],
)
def test_an_option_that_needs_a_new_start_is_refused_with_the_way_to_it(
    line: str, runs_with: str, flags: str
) -> None:
    current = GroupSpec(nproc=4, backend="gloo", threads=1, name="a")
    with pytest.raises(RequestError) as caught:
        check_unchanged(asked_spec(cell(line), current), current)
    assert str(caught.value) == (
        f"the worker group runs with {runs_with}; `%ddp restart {flags}` restarts it "
        "with the new options (its names are lost), and so does --fresh in the cell"
    )


@pytest.mark.parametrize(
    "line",
    [
        "--nproc 8",
        "--timeout 60",
        "--grace 2.5",
        "--gpus 0,2",
        "--name 'two words'",
        "--env 'A=x y' --env B=2",
    ],
)
def test_the_command_that_the_refusal_offers_does_what_was_asked(line: str) -> None:
    current = GroupSpec(name="a", threads=1)
    asked = asked_spec(cell(line), current)
    with pytest.raises(RequestError) as caught:
        check_unchanged(asked, current)
    offered = str(caught.value).split("`%ddp restart ")[1].split("`")[0]
    assert asked_spec(parse(LineMagics.restart, offered), current) == asked
