"""Cells as a script: plain Python, where they stood, behind a guard where that is needed."""

import ast
import pickle
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from refusals import refusal
from syrupy.assertion import SnapshotAssertion

from nbddp.errors import RequestError
from nbddp.extensions.export.ipython_syntax import translate_cell
from nbddp.extensions.export.items import ExportLog
from nbddp.extensions.export.main_guard import indent, split_by_guard, undefined_names
from nbddp.extensions.export.script import (
    ExportedScript,
    Item,
    Omitted,
    PulledValue,
    PushedValues,
    write_script,
)
from nbddp.extensions.export.slurm import script_job
from nbddp.record.cell import CellRequest
from nbddp.record.replay_log import assigned_names
from nbddp.wire.group_spec import GroupSpec

AGENT = f"{shlex.quote(sys.executable)} -m torch.distributed.run"
TWO_RANKS = GroupSpec(nproc=2, threads=1)


def cell(source: str, number: int = 1, **options: Any) -> CellRequest:
    return CellRequest(source=source, execution_count=number, **options)


def export(
    *items: Item, path: str = "train.py", spec: GroupSpec = TWO_RANKS, ports: Sequence[int] = ()
) -> ExportedScript:
    script = write_script(items, Path(path), spec, ports)
    ast.parse(script.text)
    return script


def cells_of(script: ExportedScript) -> str:
    return script.text[script.text.index("# %%") : script.text.rindex("# %%")].rstrip()


# ---- IPython's syntax

TRANSLATED = (
    "x = 1  # kept",
    "async def f():\n    await g()",
    "%time x = f(1)",
    "%%time\nx = 1",
    "!ls -l",
    "!ls {folder}",
    "!awk '{print $1}'",
    "!echo $HOME",
    "names = !ls",
    "%env A=1",
    "%env A={a}",
    "%cd -q /tmp",
    "if rank == 0:\n    %cd /\nelse:\n    %env A=1",
    "%%bash\nls",
    "%%writefile -a {name}.txt\none\ntwo",
    "%matplotlib inline\nx = 1",
    "if x:\n    %who\ny = 1",
    "%%html\n<b>text</b>",
    "names = %who_ls\nx = 1",
)


def test_magics_become_python_or_comments_with_the_reason(snapshot: SnapshotAssertion) -> None:
    found = {source: translate_cell(source) for source in TRANSLATED}
    for plain in found.values():
        ast.parse(plain.text)
    assert {source: (plain.text, plain.remarks) for source, plain in found.items()} == snapshot


# ---- code outside of the guard


def parts(text: str) -> list[tuple[bool, str]]:
    return list(split_by_guard(text, {"torch"}))


OUTSIDE = {
    "import": "import json",
    "star": "from math import *",
    "function": "# what it does\ndef f(x: int = len('ab'), *, t: torch.Tensor = None): later + x",
    "class": "class Net(torch.nn.Module):\n    kinds = ('a',)\n    both = kinds * 2\n"
    "    def forward(self, x): return f(x) * SCALE",
    "data": "import dataclasses as d\n@d.dataclass(order=True)\nclass D:\n    x: list = d.field()",
    "cached": "from functools import lru_cache as c\n@c()\n@torch.no_grad()\ndef g(): 1",
    "property": "class P:\n    @property\n    def x(self): 1\n    @x.setter\n    def x(self, v): 1",
    "lambda": "def f(y=lambda a: later): return y",
    "constant": "SCALE = SIZE = (2, 'a')",
}


@pytest.mark.parametrize("text", OUTSIDE.values(), ids=OUTSIDE)
def test_definitions_that_need_no_guarded_name_stay_outside_the_main_guard(text: str) -> None:
    assert parts(f"{text}\nlater = []") == [(False, text), (True, "later = []")]


INSIDE = (
    "x = 1",
    "X = [1]",
    "x.y = 1",
    "def f(y=x): return y",
    "def f(y: x): return y",
    "@decorated\ndef f(): pass",
    "class F(Base): pass",
    "class F:\n    y = x",
    "import json; x = [1]",
    "if True:\n    import json",
)


@pytest.mark.parametrize("text", INSIDE)
def test_computations_and_uses_of_guarded_names_go_inside_the_main_guard(text: str) -> None:
    assert parts(text) == [(True, text)]


def test_split_parts_keep_their_order_comments_and_strings() -> None:
    first, last = "# first\nimport os\n\n\n", "# about f\ndef f(): pass\n# end"
    text = f'{first}# about x\nx = """a\n  b"""\ny = 1\n{last}'
    assert parts(text) == [
        (False, "# first\nimport os"),
        (True, '# about x\nx = """a\n  b"""\ny = 1'),
        (False, "# about f\ndef f(): pass\n# end"),
    ]
    assert indent('x = """a\n  b"""\ny') == '    x = """a\n  b"""\n    y'
    assert parts("# only words") == [(False, "# only words")]
    assert parts("") == []
    assert list(split_by_guard("import os", set(), is_for_all=False)) == [(True, "import os")]


def test_assigned_names_finds_names_in_every_kind_of_binding() -> None:
    source = (
        "for a in b: pass\nwith c as d: pass\ntry: pass\nexcept E as e: pass\n(f, *g) = h\n"
        "import i.j"
    )
    assert assigned_names(source) == {"a", "d", "e", "f", "g", "i"}
    assert undefined_names(f"{source}\ndef k(): global l; l = m") == ["E", "b", "c", "h", "m"]


# ---- a cell


def test_an_exported_cell_shows_its_last_value_if_it_has_one(snapshot: SnapshotAssertion) -> None:
    sources = ["x = 1\nx", "x;", "print(x)", "None", "x = 1", "(x +\n y)  # both", "x, y"]
    sources += ["(x, 1), y", "*x, y  # both", "(x := 1)", "!ls"]
    found = {source: cells_of(export(cell(source))) for source in sources}
    assert found == snapshot
    for source in ("", "# only words", "import os", "pass", "%matplotlib inline"):
        for ranks in (None, (0,)):
            export(cell(source, ranks=ranks))


CELL = '''
import os, sys  # kept beside
from math import pi
text = """first
  second
third"""
count: int = 3
def f():
    """A docstring
    of two lines."""
    return f"""{pi}
inner"""
global other
other = 1
if count:
    global more
    more: int = 5
exec("made = 6",)
looked = ("made" in locals(), "made" in vars(), "made" in dir())
count + 1
'''


def test_an_exported_cell_gives_the_same_results_as_the_original() -> None:
    alone: dict[str, Any] = {}
    exec(CELL, alone)
    shown: list[object] = []
    found: dict[str, Any] = {"__name__": "__main__", "_print_value": shown.append}
    exec(cells_of(export(cell("other = 0"), cell(CELL, 2))).replace("_wait_for_all()", ""), found)
    assert shown == [4]
    for name in ("text", "count", "more", "made", "looked", "other"):
        assert found[name] == alone[name]
    assert (found["f"](), found["f"].__doc__) == (alone["f"](), alone["f"].__doc__)


PRINTS = """
from pprint import pprint as print
repr, mine = str, 'mine'
display(mine)
mine
"""


def test_a_cell_may_rebind_print_and_the_names_of_the_script(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = export(cell(PRINTS), PulledValue("mine * 2"))
    functions = [each for each in ast.parse(script.text).body if isinstance(each, ast.FunctionDef)]
    shown = [each for each in functions if each.name in ("_print_value", "display")]
    start = ast.unparse(ast.Module(shown, []))
    exec(f"_RANK = 1\n{start}\n{cells_of(script)}", {"__name__": "__main__"})
    out = "'mine'\n[rank 1] Out 'mine'\n[rank 1] mine * 2 'minemine'\n"
    assert capsys.readouterr().out == out


# ---- the whole


def test_an_exported_script_has_all_parts_in_order(snapshot: SnapshotAssertion) -> None:
    many = {"many": list(range(999)), "n": None, "runs": Path("runs")}
    script = export(
        PushedValues({"rate": 0.5, "folder_name": "a b", "flag": True, **many}),
        PushedValues({"rate": 0.25}),
        PushedValues({"mine": 3}, ranks=(1,)),
        cell("import json\nx = rank, rate, folder_name, flag, many, n, mine, runs", 3),
        Omitted("cell [4]", "it cannot\nbe opened"),
        cell("x + (1,)", 5, ranks=(0,), output_name="values"),
        PulledValue("x", 1),
        cell("from __future__ import annotations\ny = 2", 6, needs_group=False),
        cell("dist.destroy_process_group()", 7),
        spec=GroupSpec(nproc=2, timeout=60.0, backend="gloo", threads=3),
    )
    assert script.text == snapshot
    assert script.command == f"{AGENT} --standalone --nnodes=1 --nproc-per-node=2 train.py"
    assert len(script.remarks) == 1
    assert pickle.loads(script.pickled) == {"0 many": many["many"]}


def test_a_backend_that_torchrun_lacks_becomes_gloo() -> None:
    script = export(cell("x = rank"), spec=GroupSpec(nproc=2, backend="shm"))
    assert "dist.init_process_group('gloo')" in script.text


SCRIPTS: dict[str, list[Item]] = {
    "a pulled value of several parts is one": [
        cell("x = 1"),
        *(PulledValue(each) for each in ("x, rank", "x[0, 1]", "[sum(y) + rank for y in x]")),
    ],
    "what was shown before is not there": [cell("3"), PulledValue("_ + Out[1]")],
    "what was displayed is printed": [cell("display(3)\nget_ipython()")],
    "what awaits is left out, and what needs it": [
        cell("x = await f()\nx"),
        cell("y = x + 1", 2),
        PulledValue("y"),
        cell("x = 1", 3),
        cell("x", 4),
    ],
    "a store of the notebook is left out, and what needs it": [
        PushedValues({"port": 4711, "url": "tcp://127.0.0.1:4711", "lr": 0.1}),
        cell("x = port"),
        cell("lr", 2),
    ],
    "names of a cell that is left out are left out with those that read them": [
        cell("old = 1"),
        Omitted("cell [2]", "it is marked --once", "new = old = 2\ndef f(): pass"),
        Omitted("cell [3]", "it failed", "x = ("),
        cell("x = new + 1", 4),
        cell("f()", 5),
        cell("y = old", 6),
    ],
    "a cell that assigns a name of the script is left out": [
        cell("def _print_value(value): pass\nx = 1"),
        cell("y = x", 2),
        cell("z = 1\nz", 3),
    ],
    "names that no cell defines are said first": [
        Omitted("cell [1]", "it is marked --once"),
        cell("x = missing + len(y)", 2),
    ],
    "names that a module may define": [cell("from nowhere import *\nx = one")],
    "names that exec() may define": [cell("exec('two = 2')\nx = two")],
    "a pushed name that the parser has is no option": [PushedValues({"help": 3}), cell("help")],
    "names of cells are not the script's own": [
        cell("import torch.distributions as dist\nos = rank = 1\ndef main(): return rank"),
        cell("main()", 2, ranks=(0,)),
        cell("x = 1", 3, needs_group=False),
    ],
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_exported_scripts_and_their_remarks(name: str, snapshot: SnapshotAssertion) -> None:
    script = export(*SCRIPTS[name], ports=[4711])
    assert {"remarks": script.remarks, "cells": cells_of(script)} == snapshot
    for remark in script.remarks:
        assert f"# - {remark}" in script.text
    assert ("def display(" in script.text) is ("display" in name)


def test_a_value_that_is_pushed_again_is_still_an_option() -> None:
    again = [{"a": 1, "b": 1, "c": None}, {"a": 1, "b": 2, "c": None}, {"a": True, "b": 1}]
    text = export(*map(PushedValues, again), cell("a, b, c")).text
    found = " ".join(re.findall(r" ([abc] = .+)", text))
    first, second = "a = _args.a b = _args.b c = None", "a = _args.a b = 2 c = None"
    assert found == f"{first} {second} a = True b = _args.b"


def test_an_exported_script_has_nbddp_and_settings_of_trainers_only_if_used(
    snapshot: SnapshotAssertion,
) -> None:
    script = export(cell("x = 1"), path="my runs/train.py")
    assert script.command.endswith(" --nproc-per-node=2 'my runs/train.py'")
    assert "import nbddp" not in script.text
    assert "import nbddp" in export(cell("def train():\n    nbddp.log(step=1, loss=2)")).text
    assert refusal(RequestError, export, Omitted("cell [1]", "it failed")) == snapshot
    line = 'os.environ.setdefault("ACCELERATE_USE_CPU", "true")'
    text = export(cell("from trl import SFTTrainer")).text
    assert text.index("device = ") < text.index(line) < text.index("SFTTrainer")
    assert line not in export(cell("x = 1")).text


def test_the_sbatch_file_is_valid_shell(tmp_path: Path) -> None:
    for has_gpus, wants in ((True, "--gpus-per-node=4"), (False, "--cpus-per-task=4")):
        text = script_job("train", "train.py", nnodes=2, nproc=4, has_gpus=has_gpus)
        assert f"\nsrun {AGENT} \\\n" in text
        assert f"#SBATCH {wants}" in text
    path = tmp_path / "job"
    path.write_text(text)
    subprocess.run(["bash", "-n", path], check=True)


def test_the_code_of_a_command_is_left_out_under_the_name_of_the_command() -> None:
    entries = [cell("x = 1"), cell("nbddp.faults.clear()  # %ddp fault off", command="fault off")]
    session = Mock(**{"life.attempt": 1, "replay_log.all_entries": entries})
    assert ExportLog(session).items() == [entries[0], Omitted("%ddp fault off", "a fault")]


def test_the_port_of_a_store_is_known_after_the_notebook_has_dropped_the_store() -> None:
    no_session: Any = None
    log = ExportLog(no_session)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    log.record_store_ports({"store": store, "rate": 0.1})
    log.record_store_ports({"rate": 0.1})
    assert log.store_ports == {store.port}
