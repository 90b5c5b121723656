"""Cells as a script: plain Python, in a function, whole, and looked through."""

from __future__ import annotations

import ast
import pickle
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from refusals import refusal
from syrupy.assertion import SnapshotAssertion

from nbddp.errors import RequestError
from nbddp.export import Item, Left, Plan, Program, Pulled, Sent, sbatch, write_program
from nbddp.export.edits import indented
from nbddp.export.layout import to_body
from nbddp.export.names import undefined_names
from nbddp.export.plain import to_plain
from nbddp.record.cell import CellRequest
from nbddp.record.names import bound_names

AGENT = f"{shlex.quote(sys.executable)} -m torch.distributed.run"


def cell(source: str, number: int = 1, **options: Any) -> CellRequest:
    return CellRequest(source=source, execution_count=number, **options)


def export(*items: Item, path: str = "train.py", **options: Any) -> Program:
    program = write_program(Plan(items=items, nproc=2, **options), Path(path))
    ast.parse(program.text)
    return program


# ---- IPython's syntax


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("x = 1  # kept", "x = 1  # kept\n"),
        ("%time x = f(1)", "x = f(1)\n"),
        ("%%time\nx = 1", "# %%time\nx = 1\n"),
        ("!ls -l", "subprocess.run('ls -l', shell=True, check=False)\n"),
        ("!ls {folder}", "subprocess.run(f'ls {folder}', shell=True, check=False)\n"),
        (
            "names = !ls",
            "names = subprocess.run('ls', shell=True, check=False, capture_output=True, "
            "text=True).stdout.splitlines()\n",
        ),
        ("%env A=1", "os.environ['A'] = '1'\n"),
        ("%cd -q /tmp", "os.chdir('/tmp')\n"),
        (
            "if rank == 0:\n    !ls\nelse:\n    %cd /",
            "if rank == 0:\n    subprocess.run('ls', shell=True, check=False)\nelse:\n"
            "    os.chdir('/')\n",
        ),
        ("async def f():\n    await g()", "async def f():\n    await g()\n"),
        ("x = await g()", "x = await g()\n"),
        ("%env A={a}", "os.environ['A'] = f'{a}'\n"),
        ("%cd {folder}", "os.chdir(f'{folder}')\n"),
        ("%cd ~/runs", "os.chdir(os.path.expanduser('~/runs'))\n"),
        (
            "!echo \"{d['k']}\"",
            "subprocess.run('echo \"' + str(d['k']) + '\"', shell=True, check=False)\n",
        ),
        ("!awk '{print $1}'", "subprocess.run(\"awk '{print $1}'\", shell=True, check=False)\n"),
        # a shell's own variables are left to it: IPython expands all of it or nothing
        ("!echo $name", "subprocess.run(f'echo {name}', shell=True, check=False)\n"),
        ("!echo $name $HOME", "subprocess.run('echo $name $HOME', shell=True, check=False)\n"),
        ("%%bash\nls", "subprocess.run(['bash'], input='ls', text=True, check=True)\n"),
        (
            "%%writefile -a {name}.txt\none\ntwo",
            "print((\n    'one\\n'\n    'two'\n), end='', "
            "file=pathlib.Path(f'{name}.txt').open('a', encoding='utf-8'))\n",
        ),
    ],
)
def test_what_has_an_equivalent_becomes_it(source: str, text: str) -> None:
    plain = to_plain(source, {"name"} if "$" in source else None)
    assert plain.text == text
    assert not plain.left_out


def test_what_has_none_becomes_a_comment_with_the_reason(snapshot: SnapshotAssertion) -> None:
    sources = ["%matplotlib inline\nx = 1", "if x:\n    %who\ny = 1", "%%html\n<b>text</b>"]
    found = {source: to_plain(source) for source in sources}
    for plain in found.values():
        assert ast.unparse(ast.parse(plain.text)) in ("x = 1", "if x:\n    pass\ny = 1", "")
    assert {source: (plain.text, plain.left_out) for source, plain in found.items()} == snapshot


# ---- a cell in a function

CELL = '''
import os, sys  # kept beside
from math import pi
text = """first
  second
third"""
count: int = 3
late: int
def f():
    """A docstring
    of two lines."""
    return f"""{pi}
inner"""
class Box:
    value = """a
b"""
if count:
    import json
global other
other = 1
if count:
    global more
    more: int = 5
    never: int
exec("made = 6",)
looked = ("made" in locals(), "made" in vars(), "made" in dir())
count + 1
'''


def run_as_function(source: str, **given: Any) -> dict[str, Any]:
    """The names that a cell leaves behind."""
    body = to_body(source, show="show({})")
    head = "\n".join(body.imports)
    text = f"{head}\ndef main():\n    global {', '.join(sorted(body.names))}\n{indented(body.text)}"
    exec(f"{text}\nmain()", given)
    return given


def test_a_cell_does_in_a_function_what_it_does_by_itself() -> None:
    body = to_body(CELL, show="show({})")
    assert body.imports == ("import os, sys", "from math import pi")
    assert body.names == {"Box", "count", "f", "json", "looked", "more", "other", "text"}
    shown: list[object] = []
    alone: dict[str, Any] = {}
    exec(CELL, alone)
    found = run_as_function(CELL, show=shown.append)
    assert shown == [4]
    for each in (found, alone):
        each["values"] = each["f"](), each["Box"].value, each["f"].__qualname__, each["f"].__doc__
    for name in ("text", "values", "json", "more", "made", "looked"):
        assert found[name] == alone[name]
    assert found["looked"] == (True, True, True)


def test_nothing_beside_what_is_left_out_goes_with_it() -> None:
    found = run_as_function("a = 1; global b; b = 2\nif a: c: int; d = 3\ne: int = 4; f: str")
    assert (found["a"], found["b"], found["d"], found["e"]) == (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("x = 1\nx", "x = 1\nshow(x)"),
        ("x;", "x;"),
        ("print(x)", "print(x)"),
        ("None", "None"),
        ("x = 1", "x = 1"),
        ("(x,\n y)  # both", "show((x,\n y))  # both"),
        ("[x\n for x in y]", "show([x\n for x in y])"),
        ("x, y", "show((x, y))"),
        ("(x, 1), y", "show(((x, 1), y))"),
        ("*x, y  # both", "show((*x, y))  # both"),
        ("*x,", "show((*x,))"),
        ("(x := 1)", "show((x := 1))"),
        ("locals()", "show(globals())"),
    ],
)
def test_the_last_value_is_shown_as_in_the_notebook(source: str, shown: str) -> None:
    assert to_body(source, show="show({})").text == shown


def test_names_are_found_wherever_they_are_bound() -> None:
    source = (
        "for a in b: pass\nwith c as d: pass\ntry: pass\nexcept E as e: pass\n(f, *g) = h\n"
        "import i.j"
    )
    assert bound_names(source) == {"a", "d", "e", "f", "g", "i"}
    assert undefined_names(f"{source}\ndef k(): global l; l = m") == ["E", "b", "c", "h", "m"]


# ---- what goes up

ABOVE = {
    "import": "import json",
    "function": "# what it does\ndef f(x: int = len('ab'), *, t: torch.Tensor = None): later + x",
    "class": "class Net(torch.nn.Module):\n    kinds = ('a',)\n    both = kinds * 2\n"
    "    def forward(self, x): return f(x) * SCALE",
    "before a star": "def f(): return later\nfrom nowhere import *",
    "constant": "SCALE = 3",
    "data": "import dataclasses as d\n@d.dataclass(order=True)\nclass D:\n    x: list = d.field()",
    "cached": "from functools import lru_cache as c\n@c()\n@torch.no_grad()\ndef g(): 1",
    "property": "class P:\n    @property\n    def x(self): 1\n    @x.setter\n    def x(self, v): 1",
}


@pytest.mark.parametrize("name", ABOVE)
def test_a_spawned_process_finds_what_can_stand_above(name: str) -> None:
    uses = "class Uses:\n    def use(self): return SCALE"
    text = export(cell(f"{ABOVE[name]}\nlater = []"), cell(uses, 2)).text
    above = text[: text.index("def main():")]
    lines = [each for each in ABOVE[name].splitlines() if "*" not in each]
    assert lines[0] in above
    assert lines[-1] in above
    assert "    later = []" in text


STAYS = {
    "two of a name": ("def f(): return 1", "def f(): return 2"),
    "a name that is bound again": ("def f(): return 1", "f = 3"),
    "a name that is taken away": ("def f(): return 1", "del f"),
    "a name that a function binds": ("def f(): return 1", "def g(): global f; f = 1"),
    "a default that is computed": ("x = [1]\ndef f(y=x): return y",),
    "a default that calls": ("def f(y=torch.rand(1)): return y",),
    "random numbers of a class": ("class f:\n    y = torch.rand(1)",),
    "a place": ("def f(y=rank): return y",),
    "the environment": ("import os\ndef f(y=os.environ['A']): return y",),
    "a decorator of a cell": ("def w(g): return g\n@w\ndef f(): return w",),
    "a base that looks around": ("class B:\n    def __init_subclass__(c): 1\nclass f(B): 1",),
    "a name of a class that is a cell's": ("y = [1]\nclass f:\n    y = y",),
    "all names of a module": ("from nowhere import *\ndef f(): pass",),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_would_mean_something_else_above_stays(name: str) -> None:
    text = export(*(cell(each, number) for number, each in enumerate(STAYS[name]))).text
    main = text[text.index("def main():") :]
    assert "    def f(" in main or "    class f" in main


@pytest.mark.parametrize(
    ("before", "statement", "above"),
    [
        ("x = 1", "import json", True),
        ("from time import time\nx = time()", "import time", False),
        ("json = 1", "import json", False),
        ("import sys\nsys.path.insert(0, 'src')", "import json", False),
        ("%cd src", "import json", False),
        ("%env A=1", "from json import (\n    dumps,\n)", False),
        ("%%writefile own.py\nx = 1", "import own", False),
        ("import os.path\nimport json", "import os", True),
        ("from math import *\nx = pi", "from math import tau", False),
        ("def f():\n    global json\n    json = 1", "import json", False),
    ],
)
def test_an_import_stays_where_it_matters_where_it_stands(
    before: str, statement: str, *, above: bool
) -> None:
    text = export(cell(before), cell(f"{statement}\ny = 2", 2)).text
    first = ast.unparse(ast.parse(statement)) if above else statement.splitlines()[0]
    main = text.index("def main():")
    assert (f"\n{first}\n" in text[:main]) == above
    assert (f"    {first}\n" in text[main:]) != above


def test_all_names_of_a_module_are_there_where_they_were_asked_for() -> None:
    above = export(cell("from cmath import *\nx = pi"))
    assert "\nfrom cmath import *\n" in above.text
    assert above.remarks == ()
    text = export(cell("pi = 3"), cell("from math import *\nx = pi", 2)).text
    assert "    exec('from math import *', globals())\n    x = pi" in text


# ---- the whole


def test_a_script_has_its_parts_in_their_order(snapshot: SnapshotAssertion) -> None:
    many = {"many": list(range(99)), "n": None, "runs": Path("runs")}
    program = export(
        Sent({"rate": 0.5, "folder_name": "a b", "flag": True, **many}),
        Sent({"rate": 0.25}),
        Sent({"mine": 3}, ranks=(1,)),
        cell("import json\nx = rank, rate, folder_name, flag, many, n, mine, runs", 3),
        Left("cell [4]", "it cannot\nbe opened"),
        cell("x + 1", 5, ranks=(0,)),
        Pulled("x", 1),
        cell("y = 2", 6, needs_group=False),
        above={3: "# A title\n\nand text"},
        out={5: "values"},
        timeout=60.0,
        backend="gloo",
        threads=3,
    )
    assert program.text == snapshot
    assert program.command == f"{AGENT} --standalone --nnodes=1 --nproc-per-node=2 train.py"
    assert len(program.remarks) == 1
    assert pickle.loads(program.pickled) == {"0 many": many["many"]}


PROGRAMS: dict[str, list[Item]] = {
    "names of cells are not the script's own": [
        Sent({"arguments": 1, "pushed": [object]}),
        cell("def show(): return record\nrecord = main = 1\nform_group = arguments\nshow()"),
        cell("x = 1", needs_group=False),
    ],
    "modules are called by the names of others": [
        cell("import torch.distributions as dist\nos = record = rank = 1\ndef main(): pass"),
        cell("x = 1", 2, ranks=(0,)),
        cell("main()", 3),
    ],
    "what is asked for is the cell's own": [cell("3", 4), cell("for _ in [1]: x = _", 5)],
    "a pulled value of several parts is one": [
        cell("x = 1"),
        *(Pulled(each) for each in ("x, rank", "x[0, 1]", "[sum(y) + rank for y in x]")),
    ],
    "what may be there is printed": [cell("globals()['x'] = 1"), Pulled("x")],
    "so are names of a module": [cell("from there import *"), Pulled("x")],
    "what only a left out cell has made is not printed": [
        cell("x = 1"),
        Left("cell [2]", "it is run once, in this notebook"),
        Pulled("seconds", 0),
        Pulled("[seconds + i for i in x]"),
    ],
    "what was displayed is printed": [cell("display(3)\nget_ipython()")],
    "a cell that awaits does so on one loop": [
        cell("x = await f()\nx"),
        cell("async def f(): return 1", 2),
    ],
    "a cell that asks the user is named": [
        cell("x = 1"),
        cell("name = input('? ')", 2),
        cell("breakpoint()\ny = 2", 3),
    ],
    "names that no cell defines are said first": [
        Left("cell [1]", "it is marked --once"),
        cell("x = missing + len(y)", 2),
    ],
    "names that a module may define": [cell("from nowhere import *\nx = one")],
    "names that exec() may define": [cell("exec('two = 2')\nx = two")],
    "a pushed name that the parser has is no argument": [Sent({"help": 3}), cell("help")],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_and_what_is_remarked_of_it(name: str, snapshot: SnapshotAssertion) -> None:
    program = export(*PROGRAMS[name])
    head, _, cells = program.text.partition("  # as in")
    assert {"remarks": program.remarks, "cells": cells} == snapshot
    for remark in program.remarks:
        assert f"# - {remark}" in head


def test_what_was_shown_or_displayed_has_what_it_needs() -> None:
    shown = export(cell("3", 4), cell("x = _ + Out[4] + _4", 5)).text
    assert 'names["_"], value' in shown
    assert "    show(3, number=4)" in shown
    assert "show(_ + Out[1], " in export(cell("3"), Pulled("_ + Out[1]")).text
    assert "def display(*values" in export(*PROGRAMS["what was displayed is printed"]).text
    others = export(*PROGRAMS["modules are called by the names of others"]).text
    for line in ("import torch.distributed as dist_", "import os as os_", "@record_\ndef main_():"):
        assert f"\n{line}\n" in others


def test_a_store_that_the_notebook_kept_is_kept_by_rank_0() -> None:
    pushed = Sent({"port": 4711, "url": "tcp://127.0.0.1:4711", "lr": 0.1})
    again = Sent({"port": 4712}, (1,))
    program = export(pushed, cell("x = port"), again, ports=frozenset({4711, 4712}))
    for line in (
        "keep_store(4711)",
        "port = ports[4711]",
        "url = 'tcp://127.0.0.1:' + str(ports[4711])",
        "lr = arguments.lr",
        "if rank in (1,):\n        port = ports[4712]",
    ):
        assert f"    {line}\n" in program.text
    assert program.text.index("    keep_store(4712)\n") < program.text.index("if rank in (1,)")
    assert program.text.index("    dist.barrier()") < program.text.index("    dist.destroy")
    assert program.remarks[0].startswith("port: ")
    assert "keep_store" not in export(cell("x = 1")).text


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (torch.ones(3), "value = pushed['0 value']"),
        (numpy.ones((2, 2)), "value = pushed['0 value']"),
        ([torch.ones(2), 1], "value = pushed['0 value']"),
        (float("inf"), "value = float('inf')"),
        ([float("nan")], "value = pushed['0 value']"),
        ({"a": (1, None, "b")}, "value = {'a': (1, None, 'b')}"),
    ],
)
def test_whatever_is_pushed_can_be_exported(value: object, line: str) -> None:
    program = export(Sent({"value": value}), cell("value"))
    assert f"    {line}\n" in program.text
    assert program.remarks == ()


def test_it_is_run_where_it_lies() -> None:
    program = export(cell("x = 1"), path="my runs/train.py")
    assert program.command.endswith(" --nproc-per-node=2 'my runs/train.py'")
    assert "torchrun" in program.text.splitlines()[2]


def test_it_says_how_to_be_free_of_nbddp(snapshot: SnapshotAssertion) -> None:
    program = export(cell("for i in nbddp.track(range(2)): nbddp.log(x=i)"), is_plain=True)
    assert program.remarks == snapshot
    assert "import nbddp" in program.text
    assert "import nbddp" not in export(cell("x = 1")).text
    only_inside = export(cell("def train():\n    nbddp.log(step=1, loss=2)"))
    assert "import nbddp" in only_inside.text
    assert not only_inside.remarks


def test_nothing_done_is_nothing_to_export(snapshot: SnapshotAssertion) -> None:
    left = Left("cell [1]", "it did not go well")
    assert refusal(RequestError, export, left) == snapshot


@pytest.mark.parametrize("source", ["", "# only words", "import os", "pass", "%matplotlib inline"])
def test_a_cell_without_code_is_exported_too(source: str) -> None:
    for ranks in (None, (0,)):
        export(cell(source, ranks=ranks))


def test_the_sbatch_file_is_one_that_a_shell_can_read(tmp_path: Path) -> None:
    text = sbatch("train", "train.py", nproc=4, has_gpus=True)
    assert f"\nsrun {AGENT} \\\n" in text
    assert "#SBATCH --gpus-per-node=4" in text
    assert "#SBATCH --cpus-per-task=4" in sbatch("train", "train.py", nproc=4, has_gpus=False)
    path = tmp_path / "job"
    path.write_text(text)
    subprocess.run(["bash", "-n", path], check=True)
