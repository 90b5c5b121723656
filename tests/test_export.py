"""Cells as a script: plain Python, in a function, whole, and looked through."""

from __future__ import annotations

import ast
import pickle
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy
import pytest
import torch

from nbddp.errors import RequestError
from nbddp.export import Item, Left, Plan, Program, Pulled, Sent, sbatch, write_program
from nbddp.export.edits import indented
from nbddp.export.layout import to_body
from nbddp.export.names import undefined_names
from nbddp.export.plain import to_plain
from nbddp.record.cell import CellRequest
from nbddp.record.names import bound_names

AGENT = f"{shlex.quote(sys.executable)} -m torch.distributed.run"


def cell(source: str, number: int = 1, **options: object) -> CellRequest:
    return CellRequest(source=source, execution_count=number, **options)  # type: ignore[arg-type]


def export(*items: Item, **options: object) -> Program:
    plan = Plan(items=items, nproc=2, **options)  # type: ignore[arg-type]
    program = write_program(plan, Path("train.py"))
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
        ("%%bash\nls", "subprocess.run(['bash'], input='ls', text=True, check=True)\n"),
        (
            "%%writefile -a {name}.txt\none\ntwo",
            "print((\n    'one\\n'\n    'two'\n), end='', "
            "file=pathlib.Path(f'{name}.txt').open('a', encoding='utf-8'))\n",
        ),
    ],
)
def test_what_has_an_equivalent_becomes_it(source: str, text: str) -> None:
    plain = to_plain(source)
    assert plain.text == text
    assert not plain.left_out


@pytest.mark.parametrize(
    ("source", "text", "left_out"),
    [
        (
            "%matplotlib inline\nx = 1",
            "# %matplotlib inline  # left out: a script has no page: plt.savefig() writes a "
            "figure\nx = 1\n",
            "%matplotlib inline: a script has no page: plt.savefig() writes a figure",
        ),
        (
            "if x:\n    %who\ny = 1",
            "if x:\n    # %who  # left out: %who has no equivalent in a script\n    pass\ny = 1\n",
            "%who: %who has no equivalent in a script",
        ),
        (
            "%%html\n<b>text</b>",
            "# left out: %%html has no equivalent in a script\n# %%html\n# <b>text</b>",
            "%%html: %%html has no equivalent in a script",
        ),
    ],
)
def test_what_has_none_becomes_a_comment_with_the_reason(
    source: str, text: str, left_out: str
) -> None:
    plain = to_plain(source)
    assert plain.text == text
    assert plain.left_out == (left_out,)


def test_a_shells_own_variables_are_left_to_it() -> None:
    known = to_plain("!echo $name", {"name"}).text
    assert known == "subprocess.run(f'echo {name}', shell=True, check=False)\n"
    mixed = to_plain("!echo $name $HOME", {"name"}).text  # IPython expands all of it or nothing
    assert mixed == "subprocess.run('echo $name $HOME', shell=True, check=False)\n"


def test_nothing_beside_what_is_left_out_goes_with_it() -> None:
    body = to_body("a = 1; global b; b = 2\nif a: c: int; d = 3\ne: int = 4; f: str")
    found: dict[str, object] = {}
    exec(f"def main():\n    global {', '.join(body.names)}\n{indented(body.text)}\nmain()", found)
    assert (found["a"], found["b"], found["d"], found["e"]) == (1, 2, 3, 4)


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


def test_a_cell_does_in_a_function_what_it_does_by_itself() -> None:
    body = to_body(CELL, show="show({})")
    assert body.imports == ("import os, sys", "from math import pi")
    names = sorted(body.names)
    assert names == ["Box", "count", "f", "json", "looked", "more", "other", "text"]
    head = "\n".join(body.imports)
    source = f"{head}\ndef main():\n    global {', '.join(names)}\n{indented(body.text)}\nmain()"
    shown: list[object] = []
    found: dict[str, object] = {"show": shown.append}
    alone: dict[str, object] = {}
    exec(source, found)
    exec(CELL, alone)
    assert shown == [4]
    assert (found["text"], found["f"](), found["Box"].value) == (  # type: ignore[operator,attr-defined]
        alone["text"],
        alone["f"](),  # type: ignore[operator]
        alone["Box"].value,  # type: ignore[attr-defined]
    )
    assert (found["f"].__qualname__, found["f"].__doc__) == ("f", alone["f"].__doc__)
    assert found["json"] is alone["json"]
    for name in ("more", "made", "looked"):
        assert found[name] == alone[name]
    assert found["looked"] == (True, True, True)


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("x = 1\nx", "x = 1\nshow(x)"),
        ("x;", "x;"),
        ("print(x)", "print(x)"),
        ("None", "None"),
        ("x = 1", "x = 1"),
        ("(x,\n y)  # both", "show(x,\n y)  # both"),
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
    expected = shown.replace("show(x,\n y)", "show((x,\n y))")
    assert to_body(source, show="show({})").text == expected


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
    assert [each for each in ABOVE[name].splitlines() if "*" not in each][-1] in above
    assert ABOVE[name].splitlines()[0] in above
    assert "    later = []" in text


STAYS = {
    "two of a name": ("def f(): return 1", "def f(): return 2"),
    "a name that is bound again": ("def f(): return 1", "f = 3"),
    "a name that is taken away": ("def f(): return 1", "del f"),
    "a name that a function binds": (
        "def f(): return 1",
        "def g(): global f; f = 1",
    ),
    "a default that is computed": ("x = [1]\ndef f(y=x): return y", ""),
    "a default that calls": ("def f(y=torch.rand(1)): return y", ""),
    "random numbers of a class": ("class f:\n    y = torch.rand(1)", ""),
    "a place": ("def f(y=rank): return y", ""),
    "the environment": ("import os\ndef f(y=os.environ['A']): return y", ""),
    "a decorator of a cell": ("def w(g): return g\n@w\ndef f(): return w", ""),
    "a base that looks around": (
        "class B:\n    def __init_subclass__(c): 1\nclass f(B): 1",
        "",
    ),
    "a name of a class that is a cell's": ("y = [1]\nclass f:\n    y = y", ""),
    "all names of a module": ("from nowhere import *\ndef f(): pass", ""),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_would_mean_something_else_above_stays(name: str) -> None:
    sources = [each for each in STAYS[name] if each]
    text = export(*(cell(each, number) for number, each in enumerate(sources))).text
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
    unknown = export(cell("from nowhere import *\nx = one"))
    assert unknown.remarks == ("nobody defines one, unless from nowhere import * does",)
    made = export(cell("exec('two = 2')\nx = two"))
    assert made.remarks == ("nobody defines two, unless exec() does",)


# ---- the whole


def test_it_runs_with_its_parts_in_their_order() -> None:
    program = export(
        cell("import json\nx = rank", 3),
        Left("cell [4]", "it did not go well"),
        cell("x + 1", 5, ranks=(0,)),
        Pulled("x", 1),
        cell("y = 2", 6, needs_group=False),
        above={3: "# A title\n\nand text"},
        out={5: "values"},
        timeout=60.0,
        backend="gloo",
        threads=3,
    )
    lines = program.text.splitlines()
    expected = textwrap.dedent(
        """\
        # %% [markdown]
        # # A title
        #
        # and text

        # %% cell [3]
            x = rank

        # cell [4]: left out: it did not go well

        # %% cell [5]
            dist.barrier()
            if rank in (0,):
                show(x + 1, 'values')

        # %% pulled
            if rank in (1,):
                show(x, 'x')

        # %% cell [6]
            dist.barrier()
            dist.destroy_process_group()  # this cell makes its own
            y = 2
            form_group(2)
        """
    )
    assert expected in program.text
    assert "import json" in lines
    assert "    dist.init_process_group(backend, store=fresh, **place, timeout=timedelta(se" in (
        program.text
    )
    assert "    torch.set_num_threads(3)  # as in the notebook" in lines
    assert program.command == f"{AGENT} --standalone --nnodes=1 --nproc-per-node=2 train.py"
    assert "\n    torchrun --standalone --nnodes=1 --nproc-per-node=2 train.py\n" in program.text
    assert program.remarks == ("cell [4]: left out: it did not go well",)
    assert not program.pickled


def test_pushed_values_become_arguments_text_or_a_file() -> None:
    values = {"rate": 0.5, "folder_name": "a b", "flag": True, "many": list(range(99)), "n": None}
    values |= {"runs": Path("runs")}
    program = export(
        Sent(values),
        Sent({"rate": 0.25}),
        Sent({"mine": 3}, ranks=(1,)),
        cell("rate, folder_name, flag, many, n, mine"),
    )
    lines = [line.strip() for line in program.text.splitlines()]
    assert "parser.add_argument('--rate', dest='rate', type=float, default=0.5)" in lines
    assert "parser.add_argument('--folder-name', dest='folder_name', type=str, default='a b')" in (
        lines
    )
    assert "parser.add_argument('--runs', dest='runs', type=Path, default='runs')" in lines
    assert "from pathlib import Path" in lines
    for line in ("rate = arguments.rate", "flag = True", "n = None", "rate = 0.25", "mine = 3"):
        assert line in lines
    assert "many = pushed['0 many']" in lines
    assert pickle.loads(program.pickled) == {"0 many": list(range(99))}
    assert "if rank in (1,):" in lines


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
    assert program.remarks[0] == (
        "port: the notebook kept a store there: rank 0 keeps one in its place"
    )
    assert "keep_store" not in export(cell("x = 1")).text


def test_names_of_cells_are_not_the_scripts_own() -> None:
    program = export(
        Sent({"arguments": 1, "pushed": [object]}),
        cell("def show(): return record\nrecord = main = 1\nform_group = arguments\nshow()"),
        cell("x = 1", needs_group=False),
    )
    assert "    show_(show())" in program.text
    assert "    arguments = arguments_.arguments" in program.text
    assert "    pushed = pushed_['0 pushed']" in program.text
    assert "    form_group_(2)" in program.text
    assert program.remarks == ()


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


def test_a_pushed_name_that_the_parser_has_is_no_argument() -> None:
    assert "    help = 3\n" in export(Sent({"help": 3}), cell("help")).text


def test_modules_that_cells_call_by_the_names_of_others() -> None:
    program = export(
        cell("import torch.distributions as dist\nos = record = rank = 1\ndef main(): pass"),
        cell("x = 1", 2, ranks=(0,)),
        cell("main()", 3),
    )
    for line in (
        "import torch.distributed as dist_",
        "import os as os_",
        "    dist_.destroy_process_group()",
        "    import torch.distributions as dist",
        "    if int(os_.environ['RANK']) in (0,):",
        "@record_",
        "def main_():",
        "    main_()",
    ):
        assert f"\n{line}\n" in program.text
    assert program.remarks == ()


def test_what_was_shown_is_there_to_be_asked_for() -> None:
    text = export(cell("3", 4), cell("x = _ + Out[4] + _4", 5)).text
    assert "    show(3, number=4)" in text
    assert 'names["_"], value' in text
    assert (
        "number"
        not in export(cell("3", 4), cell("for _ in [1]: x = _", 5)).text.partition("show(3")[2]
    )


def test_a_pulled_value_of_several_parts_is_one() -> None:
    text = export(cell("x = 1"), Pulled("x, rank")).text
    assert "    show((x, rank), 'x, rank')" in text
    assert "    show(x[0, 1], 'x[0, 1]')" in export(cell("x = 1"), Pulled("x[0, 1]")).text


def test_what_only_a_left_out_cell_has_made_is_not_printed() -> None:
    left = Left("cell [2]", "it is run once, in this notebook")
    program = export(cell("x = 1"), left, Pulled("seconds", 0), Pulled("[seconds + i for i in x]"))
    reason = "left out: seconds came from what is left out"
    assert program.remarks[1:] == (
        f"%ddp pull seconds: {reason}",
        f"%ddp pull [seconds + i for i in x]: {reason}",
    )
    assert "show(" not in program.text
    compile(program.text, "train.py", "exec")


@pytest.mark.parametrize(
    ("source", "expression"),
    [
        ("globals()['x'] = 1", "x"),
        ("from there import *", "x"),
        ("3", "_ + Out[1]"),
        ("x = 1", "[sum(y) + rank for y in x]"),
    ],
)
def test_what_may_be_there_is_printed(source: str, expression: str) -> None:
    assert f"show({expression}, " in export(cell(source), Pulled(expression)).text


def test_what_was_displayed_is_printed() -> None:
    program = export(cell("display(3)\nget_ipython()"))
    assert "def display(*values" in program.text
    assert program.remarks == ("get_ipython: IPython has it, a script has not",)


def test_a_cell_that_awaits_does_so_on_one_loop() -> None:
    program = export(cell("x = await f()\nx"), cell("async def f(): return 1", 2))
    expected = textwrap.dedent(
        """\
        # %% cell [1]
            async def cell():
                global x
                x = await f()
                show(x)

            loop.run_until_complete(cell())
        """
    )
    assert expected in program.text
    assert "    loop = asyncio.new_event_loop()" in program.text
    assert program.remarks == ()


def test_it_is_run_where_it_lies() -> None:
    plan = Plan(items=[cell("x = 1")], nproc=2)
    program = write_program(plan, Path("my runs/train.py"))
    assert (
        program.command == f"{AGENT} --standalone --nnodes=1 --nproc-per-node=2 'my runs/train.py'"
    )
    assert program.text.startswith(
        '"""Exported by nbddp from the cells of a notebook.\n\n    torchrun'
    )


def test_a_reason_of_several_lines_stays_a_comment() -> None:
    program = export(Left("the push of x", "it cannot\nbe opened"), cell("y = 1"))
    assert "# - the push of x: left out: it cannot\n# be opened\n" in program.text


def test_names_that_nobody_defines_are_said_first() -> None:
    program = export(Left("cell [1]", "it is marked --once"), cell("x = missing + len(y)", 2))
    assert program.remarks[0] == "nobody defines missing, y: it came from what is left out"
    assert f"# - {program.remarks[0]}" in program.text


def test_it_says_how_to_be_free_of_nbddp() -> None:
    program = export(cell("for i in nbddp.track(range(2)): nbddp.log(x=i)"), is_plain=True)
    assert program.remarks == (
        "nbddp.log: print(), or whatever collects your metrics",
        "nbddp.track: the loop itself, or tqdm on rank 0",
    )
    assert "import nbddp" in program.text
    assert "import nbddp" not in export(cell("x = 1")).text
    only_inside = export(cell("def train():\n    nbddp.log(step=1, loss=2)"))
    assert "import nbddp" in only_inside.text
    assert not only_inside.remarks


def test_nothing_done_is_nothing_to_export() -> None:
    with pytest.raises(RequestError, match=r"^no cell has gone well since the ranks started"):
        export(Left("cell [1]", "it did not go well"))


@pytest.mark.parametrize("source", ["", "# only words", "import os", "pass", "%matplotlib inline"])
def test_a_cell_without_code_is_exported_too(source: str) -> None:
    for ranks in (None, (0,)):
        ast.parse(export(cell(source, ranks=ranks)).text)


def test_the_sbatch_file_is_one_that_a_shell_can_read(tmp_path: Path) -> None:
    text = sbatch("train", "train.py", nproc=4, has_gpus=True)
    assert f"\nsrun {AGENT} \\\n" in text
    assert "#SBATCH --gpus-per-node=4" in text
    assert "#SBATCH --cpus-per-task=4" in sbatch("train", "train.py", nproc=4, has_gpus=False)
    path = tmp_path / "job"
    path.write_text(text)
    subprocess.run(["bash", "-n", path], check=True)


def test_a_cell_that_asks_the_user_is_named() -> None:
    program = export(cell("x = 1"), cell("name = input('? ')", 2), cell("breakpoint()\ny = 2", 3))
    assert program.remarks == (
        "cell [2]: it asks the user; torchrun's ranks cannot",
        "cell [3]: it asks the user; torchrun's ranks cannot",
    )
