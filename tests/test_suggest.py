"""What fits in the line of a magic, and what its words mean."""

from __future__ import annotations

from argparse import ArgumentParser

import pytest
from syrupy.assertion import SnapshotAssertion

from nbddp.magics.cell import CellMagics
from nbddp.magics.line import LineMagics
from nbddp.magics.suggest import Live, Suggestion, explain, suggestions
from nbddp.train.kinds import KINDS

LIVE = Live(
    ranks=lambda: [Suggestion("0", "rank"), Suggestion("1", "rank")],
    runs=lambda: [Suggestion("20260102-030405-one"), Suggestion("20260102-030405-two")],
    cells=lambda run: [Suggestion(f"7{run}", "cell")],
    names=lambda word: [Suggestion(f"{word}ing_rate")],
    scripts=lambda word: [Suggestion(f"{word}.py", "script")],
)
COMMANDS = LineMagics.__dict__


PARSED = "check compare fault help kill publish pull push run runs show view status"


@pytest.fixture(scope="module")
def parsers() -> dict[str, ArgumentParser]:
    commands = {name: COMMANDS[name].parser for name in PARSED.split()}
    return {"%%ddp": CellMagics.ddp.parser, **commands}


@pytest.mark.parametrize(
    ("line", "fitting"),
    [
        ("%ddp fa", ["fault"]),
        ("%ddp nonsense ", []),
        ("%ddp help f", ["fault"]),
        ("%ddp kill ", ["0", "1"]),
        ("%ddp check --explain ND10", [f"ND10{number}" for number in (1, 2, 3, 4, 5, 7)]),
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


def test_a_word_is_explained(
    parsers: dict[str, ArgumentParser], snapshot: SnapshotAssertion
) -> None:
    words = {
        "%%ddp ": ("--nproc", "--backend", "--fresh"),
        "%ddp ": ("kill", "nonsense"),
        "%ddp fault ": ("hang", "nothing"),
        "": ("%ddp",),
    }
    said = {line + word: explain(line, word, parsers) for line in words for word in words[line]}
    assert {name: text.split("\n\n")[:2] for name, text in said.items()} == snapshot
