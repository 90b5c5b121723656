"""What fits in the line of a magic, and what its words mean."""

from __future__ import annotations

from argparse import ArgumentParser

import pytest

from nbddp.magics.cell import CellMagics
from nbddp.magics.line import LineMagics
from nbddp.magics.suggest import Live, Suggestion, explain, suggestions
from nbddp.train.kinds import KINDS
from nbddp.train.strikes import AIMS

LIVE = Live(
    ranks=lambda: [Suggestion("0", "rank"), Suggestion("1", "rank")],
    runs=lambda: [Suggestion("20260102-030405-one"), Suggestion("20260102-030405-two")],
    cells=lambda run: [Suggestion(f"7{run}", "cell")],
    names=lambda word: [Suggestion(f"{word}ing_rate")],
    scripts=lambda word: [Suggestion(f"{word}.py", "script")],
)
COMMANDS = LineMagics.__dict__


@pytest.fixture(scope="module")
def parsers() -> dict[str, ArgumentParser]:
    names = (
        "check",
        "compare",
        "fault",
        "help",
        "kill",
        "publish",
        "pull",
        "push",
        "run",
        "runs",
        "show",
        "view",
        "status",
    )
    return {"%%ddp": CellMagics.ddp.parser, **{name: COMMANDS[name].parser for name in names}}


@pytest.mark.parametrize(
    ("line", "fitting"),
    [
        ("%ddp fa", ["fault"]),
        ("%ddp nonsense ", []),
        ("%ddp help f", ["fault"]),
        ("%ddp kill ", ["0", "1"]),
        ("%ddp check --explain ND10", [f"ND10{number}" for number in range(1, 8)]),
        ("%ddp check tr", ["tr.py"]),
        ("%ddp run --keep tr", ["tr.py"]),
        ("%ddp run --kee", ["--keep"]),
        ("%%ddp --sw", ["--sweep"]),
        ("%%ddp --publish ", ["trackio", "wandb", "tensorboard", "mlflow"]),
        ("%ddp run --publish t", ["trackio", "tensorboard"]),
        ("%ddp publish w", ["wandb"]),
        ("%ddp publish wandb ", ["20260102-030405-one", "20260102-030405-two"]),
        ("%ddp publish wandb --", ["--again"]),
        ("%%ddp --sweep lr=1,2 --re", ["--repeat"]),
        ("%%ddp --scale 1,2 --we", ["--weak"]),
        ("%ddp run train.py --k", []),
        ("%ddp run -m pack.train --nproc ", []),
        ("%ddp kill 0 ", []),
        ("%ddp fault ", list(KINDS)),
        ("%ddp fault se", ["segfault"]),
        ("%ddp fault --rank ", ["0", "1"]),
        ("%ddp fault --rank 1 s", ["segfault", "stop", "slow", "skip"]),
        ("%ddp fault kill --rank 1 --s", ["--step"]),
        ("%ddp fault kill --rank 1 ", ["--step", "--factor"]),
        ("%ddp fault kill --step ", []),
        ("%ddp view ", ["auto", "panel", "text"]),
        ("%ddp show 20260102-030405-t", ["20260102-030405-two"]),
        ("%ddp show two --cell ", ["7two"]),
        ("%ddp compare 20260102-030405-one 20260102-030405-t", ["20260102-030405-two"]),
        ("%ddp compare one two --over ", ["step", "samples", "time"]),
        ("%ddp runs rm 20260102-030405-o", ["20260102-030405-one"]),
        ("%ddp pull learn", ["learning_rate"]),
        ("%ddp push x --ranks 0,", ["0,1"]),
        ("%%ddp --ra", ["--ranks"]),
        ("%%ddp --ranks 1,", ["1,0"]),
        ("%%ddp --nproc ", []),
        ("%%ddp --backend ", ["auto", "gloo", "nccl"]),
        ("%%ddp --au", []),
        ("%%ddp --env 'a b", []),
    ],
)
def test_what_fits_in_a_line(
    line: str, fitting: list[str], parsers: dict[str, ArgumentParser]
) -> None:
    begin, space, word = line.rpartition(" ")
    found = suggestions(begin + space, word, parsers, LIVE)
    assert sorted(each.text for each in found) == sorted(fitting)


def test_what_fits_comes_with_what_it_is(parsers: dict[str, ArgumentParser]) -> None:
    def kinds(line: str) -> set[str]:
        return {each.kind for each in suggestions(line, "", parsers, LIVE)}

    assert kinds("%ddp fault ") == {"fault"}
    assert kinds("%ddp kill ") == {"rank"}
    assert kinds("%ddp show one --cell ") == {"cell"}
    assert kinds("%ddp ") == {"command"}
    assert kinds("%%ddp ") == {"option"}


def test_every_kind_of_fault_has_a_meaning() -> None:
    assert tuple(AIMS) == KINDS


@pytest.mark.parametrize(
    ("line", "word", "text"),
    [
        ("%%ddp ", "--nproc", "--nproc, --nproc-per-node N\n\nranks on this machine (default: 2)"),
        ("%%ddp ", "--backend", "--backend {auto,gloo,nccl}\n\ncollectives: auto takes nccl when"),
        ("%%ddp ", "--fresh", "--fresh\n\nrestart the ranks first: empty namespaces"),
        ("%ddp ", "kill", "%ddp kill rank\n\nKill one rank, to see what happens."),
        ("%ddp fault ", "hang", "hang: it sleeps"),
        ("%ddp fault ", "nothing", "%ddp fault --rank R --step N"),
        ("%ddp ", "nonsense", ""),
        ("", "%ddp", ""),
    ],
)
def test_a_word_is_explained(
    line: str, word: str, text: str, parsers: dict[str, ArgumentParser]
) -> None:
    found = explain(line, word, parsers)
    assert found.startswith(text)
    assert bool(found) == bool(text)
