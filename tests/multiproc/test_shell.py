"""IPython features in cells, in a real kernel."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from drivers.ranks import Capture, Ranks
from notebook import Notebook

from nbddp import CellFailedError

SHARES_KERNEL = True


FILES = {
    "boom.py": "def f():\n    raise ValueError('boom')\nf()",
    "boom.ipy": "raise ValueError('boom')",
    "three.py": "import sys\nsys.exit(3)",
    "zero.py": "import sys\nmade = 5\nsys.exit(0)",
}


@pytest.fixture(scope="module")
def notebook(kernel: Notebook) -> Iterator[Notebook]:
    """The kernel, with two ranks that stay for all tests of the file, and with files."""
    for name, source in FILES.items():
        (kernel.folder / name).write_text(source)
    assert kernel.run("%%ddp --nproc 2\npass").status == "ok"
    yield kernel
    assert kernel.run("%ddp stop").status == "ok"


FAILS = {  # a cell, its error, and words of its traceback
    "script": ("%run boom.py", "ValueError: boom, line 2", "boom.py line 2, in f\n"),
    "module": ("%run -m boom", "ValueError: boom, line 2", "boom.py line 2, in f\n"),
    "profiled": ("%run -p boom.py", "ValueError: boom, line 2", "boom.py line 2, in f\n"),
    "timed": ("%run -t boom.py", "ValueError: boom, line 2", "boom.py line 2, in f\n"),
    "cells": ("%run boom.ipy", "ValueError: boom.*", ""),
    "missing": ("%run none.py", "Exception: File `'none.py'` not found.*", ""),
    "exit code": ("%run three.py", "SystemExit: 3, line 2", "three.py line 2"),
    "%%capture": ("%%capture\n1 / 0", "ZeroDivisionError: .*, line 3", "----> 3 1 / 0"),
    "%%time": ("%%time\n1 / 0", "ZeroDivisionError: .*, line 3", "----> 3 1 / 0"),
    "exit": ("%%capture\nexit(4)", "SystemExit: 4, line 3", "----> 3 exit(4)"),
    "SystemExit": ("%%capture\nraise SystemExit(4)", "SystemExit: 4, line 3", "----> 3 raise"),
}


@pytest.mark.parametrize("name", FAILS)
def test_failing_script_or_cell_magic_fails_the_cell(notebook: Notebook, name: str) -> None:
    cell, error, place = FAILS[name]
    reply = notebook.run(f"%%ddp\n{cell}\nprint('after')")
    assert re.fullmatch(f"CellFailedError: ranks 0-1: {error}", reply.error)
    assert place in reply.traceback
    assert "nbddp/" not in reply.traceback
    assert "after" not in reply.text


def test_handled_failure_of_a_run_script_is_no_failure(notebook: Notebook) -> None:
    handled = "%%ddp\ntry:\n    %run {}\nexcept (ValueError, SystemExit):\n    print('caught')"
    for name in ("boom.py", "boom.ipy", "three.py"):
        reply = notebook.run(handled.format(name))
        assert (reply.status, reply.lines(0)[0]) == ("ok", "caught")
    assert notebook.run("%%ddp\n%run -e three.py").status == "ok"
    assert notebook.run("%%ddp\n%run zero.py\nmade").text == "Out [ranks 0-1] 5\n"


def test_names_and_captured_output_survive_an_error(notebook: Notebook) -> None:
    reply = notebook.run("%%ddp\n%%capture said\nx = 1\nprint('before')\n1 / 0")
    assert (reply.status, reply.text) == ("error", "")
    assert notebook.run("%%ddp\nx, said.stdout").text == "Out [ranks 0-1] (1, 'before\\n')\n"


def test_error_in_a_nested_run_cell_fails_the_outer_cell(notebook: Notebook) -> None:
    reply = notebook.run("%%ddp\nget_ipython().run_cell('1 / 0')\nprint('after')")
    assert reply.error.startswith("CellFailedError: ranks 0-1: ZeroDivisionError: ")
    assert reply.lines(0) == ["after"]
    notebook.run("%%ddp --out kept\nget_ipython().run_cell('1 + 1')\n41")
    assert notebook.run("kept").result == "[41, 41]"


def test_later_of_two_errors_fails_the_cell_and_both_are_shown(notebook: Notebook) -> None:
    reply = notebook.run("%%ddp\nget_ipython().run_cell('1 / 0')\nint('x')")
    assert "ValueError: invalid literal" in reply.error
    assert "ZeroDivisionError: division by zero" in reply.text


@pytest.mark.parametrize(
    "source", ["%tb", "try:\n    int('x')\nexcept ValueError:\n    get_ipython().showtraceback()"]
)
def test_traceback_magics_print_output(notebook: Notebook, source: str) -> None:
    notebook.run("%%ddp\nint('x')")
    reply = notebook.run(f"%%ddp\n{source}\nprint('after')")
    assert (reply.status, reply.error) == ("ok", "")
    assert "ValueError: invalid literal for int()" in reply.text
    assert reply.lines(0)[-1] == "after"


def test_exit_ends_the_cell_silently(notebook: Notebook) -> None:
    for source in ("exit()", "exit", "import sys\nsys.exit()", "if True: quit()\nprint('no')"):
        reply = notebook.run(f"%%ddp\n{source}")
        assert (reply.status, reply.text) == ("ok", ""), source


def pictures(notebook: Notebook, source: str, kind: str = "image/png") -> int:
    """Draw a figure on rank 0; the number of pictures that came."""
    reply = notebook.run(
        f"%%ddp --ranks 0\n{source}\nimport matplotlib.pyplot as plt\n_ = plt.plot([1, 2])"
    )
    assert (reply.status, reply.error) == ("ok", "")
    return sum(kind in data for data in reply.displays)


def test_matplotlib_figures_are_shown_as_images(notebook: Notebook) -> None:
    assert pictures(notebook, "%matplotlib inline") == 1
    format_svg = "%config InlineBackend.figure_format = 'svg'"
    assert pictures(notebook, format_svg, "image/svg+xml") == 1
    assert notebook.run("%%ddp\n%matplotlib inline\n%run boom.py").status == "error"
    assert pictures(notebook, format_svg.replace("svg", "png")) == 1
    for kind in ("widget", "qt"):  # which no rank has
        assert pictures(notebook, f"%matplotlib {kind}") == 1


def test_unsupported_features_of_a_rank_name_an_alternative(notebook: Notebook) -> None:
    reply = notebook.run("%%ddp --ranks 0\n%matplotlib notebook\n")
    assert "%matplotlib inline" in reply.lines(0)[0]
    reply = notebook.run(
        "%%ddp --ranks 0\nimport ipywidgets\ndisplay(ipywidgets.HBox([]))\nipywidgets.IntSlider()"
    )
    for line, name in zip(reply.text.splitlines(), ("HBox", "IntSlider"), strict=True):
        assert name in line
        assert "nbddp.track" in line
    assert reply.displays == []
    assert "`%ddp debug`" in notebook.run("%%ddp\n%pdb on").error
    assert "ZeroDivisionError" in notebook.run("%%ddp\n1 / 0").error
    reply = notebook.run("%%ddp\n%load_ext nbddp")
    assert (reply.status, len(reply.lines(0)), len(reply.lines(1))) == ("ok", 1, 1)


@pytest.mark.parametrize(
    "statement",
    [
        "from tqdm import tqdm\nbar = tqdm(range(20), mininterval=0)",
        "from tqdm.auto import trange\nbar = trange(20)",
        "import tqdm.notebook\nbar = tqdm.notebook.tqdm_notebook(range(20), display=True)",
    ],
    ids=["plain", "auto", "notebook"],
)
def test_progress_bar_prints_one_final_line(notebook: Notebook, statement: str) -> None:
    reply = notebook.run(f"%%ddp\n{statement}\nfor _ in bar: pass")
    for rank in (0, 1):
        assert len(reply.lines(rank)) == 1
        assert "20/20" in reply.lines(rank)[0]


def test_rank_is_not_an_interactive_session(shared_group: Ranks) -> None:
    assert shared_group.pull("hasattr(__import__('sys'), 'ps1')") == [False, False]


@pytest.mark.parametrize(
    "command",
    ["!{}", "%pip --version; {}", "names = !{}", 'import os; os.system("{}")'],
    ids=["!", "pip", "names", "system"],
)
def test_shell_command_that_reads_input_gets_end_of_file(notebook: Notebook, command: str) -> None:
    asks = "printf 'Proceed? '; read x; printf 'and? '; read y || echo end"
    reply = notebook.run(f"%%ddp --ranks 0\n{command.format(asks)}\nprint('after')")
    assert reply.status == "ok"
    shown = reply.text if "names" not in command else notebook.run("%%ddp --ranks 0\nnames").text
    assert "Proceed? and? end" in shown
    assert reply.lines(0)[-1] == "after"


def test_shell_command_writes_to_a_terminal_and_sets_exit_code(notebook: Notebook) -> None:
    reply = notebook.run(
        '%%ddp --ranks 0\ntext = "it\'s"\n!test -t 1 && echo "{text}" grüße\n'
        "codes = []\nfor command in ('exit 3', 'kill -9 $$', 'exit 200', 'true'):\n"
        "    !{command}\n    codes.append(_exit_code)\nprint(codes)"
    )
    assert reply.lines(0) == ["it's grüße", "[3, -9, -72, 0]"]


@pytest.mark.gate_runs("!", "names")
@pytest.mark.parametrize(
    "command",
    ["!{}", "names = !{}", "%system {}", "import os; os.system('{}')"],
    ids=["!", "names", "magic", "system"],
)
def test_interrupt_ends_a_loop_of_shell_commands(notebook: Notebook, command: str) -> None:
    notebook.run("%%ddp\nkept = rank")
    sleeps = command.format("touch begun$RANK; exec sleep 60")
    reply = notebook.run_and_stop_at(f"%%ddp\nfor _ in range(9):\n    {sleeps}", "begun0", "begun1")
    assert reply.error == "CellInterruptedError: ranks 0-1 interrupted, line 3"
    assert notebook.run("%%ddp\nkept").text.count("Out") == 2


def test_recursion_error_is_reported_quickly(notebook: Notebook) -> None:
    reply = notebook.run("%%ddp\ndef call(n): return call(n + 1)\ncall(0)")
    assert reply.error.startswith("CellFailedError: ranks 0-1: RecursionError: maximum recursion")
    assert "more times\n" in reply.traceback
    assert reply.seconds < 20


def test_stdout_closed_by_a_cell_is_open_in_the_next_cell(notebook: Notebook) -> None:
    for source in (
        "sys.stdout.close()",
        "sys.stdout.buffer.detach()",
        "sys.stdout = None",
        "os.close(1); print('shown')",
    ):
        reply = notebook.run(f"%%ddp --ranks 0\nimport os, sys\n{source}")
        assert reply.status == "ok", source
        lines = sorted(line[:7] for line in reply.lines(0))
        assert lines == (["nbddp: ", "shown"] if "shown" in source else []), source
        reply = notebook.run("%%ddp --ranks 0\nprint('heard')\n!echo a child too")
        assert reply.status == "ok", source
        assert reply.lines(0) == ["heard", "a child too"], source


@pytest.mark.parametrize("fd", [1, 2])
def test_stdout_redirected_by_a_failed_cell_is_restored(
    group_here: Ranks, capsys: Capture, fd: int
) -> None:
    with pytest.raises(CellFailedError, match="rank 0: ValueError: own, line 3"):
        group_here.run(
            "import os, sys\n"
            f"os.dup2(os.open('elsewhere.txt', os.O_WRONLY | os.O_CREAT), {fd})\n"
            "raise ValueError('own')",
            ranks=[0],
        )
    group_here.run(f"print('python', file=sys.{'stdout' if fd == 1 else 'stderr'})", ranks=[0])
    group_here.run(f"_ = os.system('echo child >&{fd}')", ranks=[0])
    assert capsys.readouterr().out == "[rank 0] python\n[rank 0] child\n"
    assert not Path("elsewhere.txt").read_text()


def test_custom_mime_bundles_and_repr_errors_are_shown(notebook: Notebook) -> None:
    reply = notebook.run(
        "%%ddp --ranks 0\nimport numpy\nclass Chart:\n"
        "    def _repr_mimebundle_(self, **_):\n"
        "        values = [numpy.float32(0.5), numpy.arange(2), torch.ones(1)]\n"
        "        return {'application/vnd.plotly.v1+json': {'y': values}}\nChart()"
    )
    chart = reply.displays[0]["application/vnd.plotly.v1+json"]
    assert chart == {"y": [0.5, [0, 1], [1.0]]}
    reply = notebook.run(
        "%%ddp\nclass Thing:\n    def _repr_html_(self): raise KeyError('nothing')\nThing()"
    )
    assert reply.status == "ok"
    assert "KeyError: 'nothing'" in reply.text


def test_ddp_commands_in_the_wrong_place_are_explained(notebook: Notebook) -> None:
    for source in ("%ddp status", "x = 1\n%%ddp\ny = 2", "%%local\nx = 1", "# first\n%%local\nx"):
        reply = notebook.run(f"%%ddp\n{source}")
        assert "separate cell" in reply.error, source
        assert "not found" not in reply.error + reply.text + reply.traceback
    for magic in ("%%ddp", "%%local"):
        reply = notebook.run(f"# train\n{magic}\nx = 1")
        assert "first line" in reply.text + reply.error, magic
        assert "not found" not in reply.text + reply.error


def test_ddp_cell_without_the_cell_magic_is_explained(notebook: Notebook) -> None:
    for source in ('nbddp.check_answer("1.1a", 12)', "print(rank)"):
        reply = notebook.run(f"%reset_selective -f ^nbddp$\n{source}")
        assert reply.error.startswith("NameError")
        assert "`%%ddp`" in reply.text
    assert "%%ddp" not in notebook.run("no_such_name").text
