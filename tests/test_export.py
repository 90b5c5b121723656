"""Cells as a script: plain Python, in a function, whole, and looked through."""

from __future__ import annotations

import ast
import pickle
import subprocess
import textwrap
from pathlib import Path

import pytest

from nbddp.errors import RequestError
from nbddp.export import Item, Left, Plan, Program, Pulled, Sent, sbatch, write_program
from nbddp.export.edits import indented
from nbddp.export.layout import to_body
from nbddp.export.names import undefined_names
from nbddp.export.plain import to_plain
from nbddp.record.cell import CellRequest
from nbddp.record.names import bound_names


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
            "# get_ipython().run_line_magic('matplotlib', 'inline')  # left out: a script has no "
            "page: plt.savefig() writes a figure\nx = 1\n",
            "%matplotlib inline: a script has no page: plt.savefig() writes a figure",
        ),
        (
            "if x:\n    %who\ny = 1",
            "if x:\n    # get_ipython().run_line_magic('who', '')  # left out: %who has no "
            "equivalent in a script\n    pass\ny = 1\n",
            "%who: %who has no equivalent in a script",
        ),
        (
            "y = 1\nx = await g(\n  1)",
            "y = 1\n# x = await g(  # left out: await needs a loop: asyncio.run() has one\n"
            "#   1)\n",
            "x = await g(: await needs a loop: asyncio.run() has one",
        ),
        (
            "%%writefile a.txt\nsome text",
            "# left out: %%writefile has no equivalent in a script\n# %%writefile a.txt\n"
            "# some text",
            "%%writefile a.txt: %%writefile has no equivalent in a script",
        ),
    ],
)
def test_what_has_none_becomes_a_comment_with_the_reason(
    source: str, text: str, left_out: str
) -> None:
    plain = to_plain(source)
    assert plain.text == text
    assert plain.left_out == (left_out,)


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
count + 1
'''


def test_a_cell_does_in_a_function_what_it_does_by_itself() -> None:
    body = to_body(CELL, show="show({})")
    assert body.imports == ("import os, sys", "from math import pi")
    names = sorted(body.names)
    assert names == ["Box", "count", "f", "json", "other", "text"]
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
            if rank in (0,):
                show(x + 1, 'values')

        # %% pulled
            if rank in (1,):
                show(x, 'x')

        # %% cell [6]
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
    assert program.command == "torchrun --standalone --nproc-per-node=2 train.py"
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


def test_nothing_done_is_nothing_to_export() -> None:
    with pytest.raises(RequestError, match=r"^no cell has gone well since the ranks started"):
        export(Left("cell [1]", "it did not go well"))


@pytest.mark.parametrize("source", ["", "# only words", "import os", "pass", "%matplotlib inline"])
def test_a_cell_without_code_is_exported_too(source: str) -> None:
    for ranks in (None, (0,)):
        ast.parse(export(cell(source, ranks=ranks)).text)


def test_the_sbatch_file_is_one_that_a_shell_can_read(tmp_path: Path) -> None:
    text = sbatch("train", "train.py", nproc=4, has_gpus=True)
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
