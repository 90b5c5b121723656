"""What cells do that IPython has its own ways with, in a real kernel."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from drivers.ranks import Ranks
from notebook import Notebook
from processes import wait_until

from nbddp import CellFailedError

pytestmark = pytest.mark.multiproc
SHARES_KERNEL = True

BOOM = "def f():\n    raise ValueError('boom')\nf()\n"


@pytest.mark.parametrize(
    "options",
    [
        "",
        "-i ",
        pytest.param("-p ", marks=pytest.mark.until_cut),
        pytest.param("-t ", marks=pytest.mark.until_cut),
        "-m ",
    ],
)
def test_a_script_that_raises_fails_the_cell(notebook: Notebook, options: str) -> None:
    notebook.run(f"%%writefile boom.py\n{BOOM}")
    name = "boom" if "-m" in options else "boom.py"
    reply = notebook.run(f"%%ddp --nproc 2\nx = 1\n%run {options}{name}\nprint('after')")
    assert reply.error == "CellFailedError: ranks 0-1: ValueError: boom, line 3"
    assert "boom.py:2, in f()" in reply.traceback
    assert "nbddp/" not in reply.traceback
    assert "after" not in reply.text
    assert notebook.run("%%ddp\nx").text == "Out [ranks 0-1] 1\n"


def test_a_notebook_that_raises_fails_the_cell(notebook: Notebook) -> None:
    notebook.run(f"%%writefile boom.ipy\n{BOOM}")
    reply = notebook.run("%%ddp --nproc 1\n%run boom.ipy")
    assert reply.error.startswith("CellFailedError: rank 0: ValueError: boom")


def test_a_script_that_raises_restarts_the_ranks(notebook: Notebook) -> None:
    notebook.run(
        "%%writefile once.py\nimport os\nfrom pathlib import Path\n"
        "mark = Path(f\"mark{os.environ['RANK']}\")\n"
        "if not mark.exists():\n    mark.touch()\n    raise ValueError('boom')\n"
    )
    reply = notebook.run("%%ddp --nproc 2 --max-restarts 1\n%run once.py\nprint('came through')")
    assert reply.status == "ok"
    assert "ValueError: boom" in reply.text + reply.traceback
    assert reply.lines(1)[-1] == "came through"


def test_a_script_that_cannot_be_read_fails_the_cell(notebook: Notebook) -> None:
    reply = notebook.run("%%ddp --nproc 1\nget_ipython().safe_execfile('none.py', {})")
    assert "FileNotFoundError" in reply.error


def test_a_scripts_exit_code_is_said_and_0_is_no_failure(notebook: Notebook) -> None:
    notebook.run("%%writefile three.py\nimport sys\nsys.exit(3)")
    notebook.run("%%writefile zero.py\nimport sys\nmade = 5\nsys.exit(0)")
    reply = notebook.run("%%ddp --nproc 1\n%run three.py")
    assert reply.error == "CellFailedError: rank 0: SystemExit: 3, line 2"
    assert "three.py:2" in reply.traceback
    assert notebook.run("%%ddp\n%run -p three.py").error.startswith(
        "CellFailedError: rank 0: SystemExit: 3"
    )
    assert notebook.run("%%ddp\n%run -e three.py").status == "ok"
    assert notebook.run("%%ddp\n%run zero.py\nmade").text == "Out [rank 0] 5\n"


def test_an_error_that_is_captured_fails_the_cell_with_its_line(notebook: Notebook) -> None:
    reply = notebook.run("%%ddp --nproc 2\n%%capture said\nprint('before')\n1 / 0")
    assert reply.error == "CellFailedError: ranks 0-1: ZeroDivisionError: division by zero, line 4"
    assert "----> 4 1 / 0" in reply.traceback
    assert notebook.run("%%ddp\nsaid.stdout").text == "Out [ranks 0-1] 'before\\n'\n"


def test_a_cell_within_the_cell_fails_the_cell_and_leaves_its_value(notebook: Notebook) -> None:
    reply = notebook.run("%%ddp --nproc 1\nget_ipython().run_cell('1 / 0')\nprint('after')")
    assert reply.error.startswith("CellFailedError: rank 0: ZeroDivisionError: division by zero")
    assert reply.lines(0) == ["after"]
    notebook.run("%%ddp --out kept\nget_ipython().run_cell('1 + 1')\n41")
    assert notebook.run("kept").result == "[41]"


def test_of_two_errors_the_later_ends_the_cell_and_the_other_is_shown(notebook: Notebook) -> None:
    reply = notebook.run("%%ddp --nproc 1\nget_ipython().run_cell('1 / 0')\nint('x')")
    assert "ValueError: invalid literal" in reply.error
    assert "ZeroDivisionError: division by zero" in reply.text


def test_a_timed_cell_fails_with_its_own_lines(notebook: Notebook) -> None:
    reply = notebook.run("%%ddp --nproc 1\n%%time\na = 1\n1 / 0")
    assert reply.error == "CellFailedError: rank 0: ZeroDivisionError: division by zero, line 4"
    assert "----> 4 1 / 0" in reply.traceback


@pytest.mark.parametrize(
    "source",
    [
        "%tb",
        "try:\n    int('x')\nexcept ValueError:\n    get_ipython().showtraceback()",
    ],
)
def test_a_traceback_that_is_asked_for_is_output(notebook: Notebook, source: str) -> None:
    notebook.run("%%ddp --nproc 1\nint('x')")
    reply = notebook.run(f"%%ddp\n{source}\nprint('after')")
    assert (reply.status, reply.error) == ("ok", "")
    assert "ValueError: invalid literal for int()" in reply.text
    assert reply.lines(0)[-1] == "after"


def test_a_value_that_cannot_be_shown_as_it_wishes_says_why_and_fails_nothing(
    notebook: Notebook,
) -> None:
    reply = notebook.run(
        "%%ddp --nproc 1\nclass Thing:\n    def _repr_html_(self): raise KeyError('nothing')\n"
        "Thing()"
    )
    assert reply.status == "ok"
    assert "KeyError: 'nothing'" in reply.text


@pytest.mark.parametrize("source", ["exit()", "quit()", "exit", "import sys\nsys.exit()"])
def test_an_exit_ends_the_cell_without_a_word(notebook: Notebook, source: str) -> None:
    reply = notebook.run(f"%%ddp --nproc 1\n{source}")
    assert (reply.status, reply.text) == ("ok", "")
    reply = notebook.run("%%ddp\nif True: exit()\nprint('not here')")
    assert (reply.status, reply.text) == ("ok", "")


@pytest.mark.parametrize("source", ["exit(4)", "quit(4)", "raise SystemExit(4)"])
def test_an_exit_with_a_code_is_a_failure_that_says_it(notebook: Notebook, source: str) -> None:
    reply = notebook.run(f"%%ddp --nproc 1\n{source}")
    assert reply.error == "CellFailedError: rank 0: SystemExit: 4, line 2"
    assert f"----> 2 {source}" in reply.traceback
    assert reply.text == ""


def test_an_exit_within_captured_code_ends_the_whole_cell(notebook: Notebook) -> None:
    reply = notebook.run("%%ddp --nproc 1\n%%capture\nimport sys\nsys.exit(5)")
    assert reply.error == "CellFailedError: rank 0: SystemExit: 5, line 4"


def test_figures_come_after_matplotlib_inline(notebook: Notebook) -> None:
    reply = notebook.run(
        "%%ddp --nproc 2\n%matplotlib inline\nimport matplotlib.pyplot as plt\n_ = plt.plot([1, 2])"
    )
    assert (reply.status, reply.error) == ("ok", "")
    assert sum("image/png" in data for data in reply.displays) == 2
    reply = notebook.run("%%ddp\n%config InlineBackend.figure_format = 'svg'\n_ = plt.plot([1, 2])")
    assert sum("image/svg+xml" in data for data in reply.displays) == 2


def test_figures_still_come_after_a_script_that_failed(notebook: Notebook) -> None:
    notebook.run(f"%%writefile boom.py\n{BOOM}")
    assert notebook.run("%%ddp --nproc 1\n%matplotlib inline\n%run boom.py").status == "error"
    reply = notebook.run("%%ddp\nimport matplotlib.pyplot as plt\n_ = plt.plot([1, 2])")
    assert sum("image/png" in data for data in reply.displays) == 1


@pytest.mark.parametrize("kind", ["notebook", "widget", "qt"])
def test_a_kind_of_figure_that_no_rank_has_is_a_picture(notebook: Notebook, kind: str) -> None:
    reply = notebook.run(
        f"%%ddp --nproc 1\n%matplotlib {kind}\nimport matplotlib.pyplot as plt\n"
        "_ = plt.plot([1, 2])"
    )
    assert reply.status == "ok"
    assert reply.lines(0)[0] == (
        f"nbddp: %matplotlib {kind}: a rank has no window; figures come as pictures, "
        "as with %matplotlib inline"
    )
    assert sum("image/png" in data for data in reply.displays) == 1


def test_a_widget_is_a_line_that_says_what_to_use(notebook: Notebook) -> None:
    reply = notebook.run(
        "%%ddp --nproc 1\nimport ipywidgets\ndisplay(ipywidgets.HBox([]))\nipywidgets.IntSlider()"
    )
    hint = (
        "a widget of a rank cannot be shown; use nbddp.track and nbddp.log, or make it in a cell "
        "of the notebook's own"
    )
    assert reply.text.splitlines() == [
        f"[rank 0] nbddp: HBox: {hint}",
        f"Out [rank 0] nbddp: IntSlider: {hint}",
    ]
    assert reply.displays == []


@pytest.mark.parametrize(
    "statement",
    [
        "from tqdm.notebook import tqdm\nbar = tqdm(range(20), display=True)",
        "from tqdm.auto import tqdm\nbar = tqdm(range(20))",
        "from tqdm.notebook import trange\nbar = trange(20)",
        "import tqdm.notebook\nbar = tqdm.notebook.tqdm_notebook(range(20))",
    ],
)
def test_a_notebooks_bar_is_one_of_text_and_ends_full(notebook: Notebook, statement: str) -> None:
    reply = notebook.run(f"%%ddp --nproc 2\n{statement}\nfor _ in bar: pass")
    for rank in (0, 1):
        assert len(reply.lines(rank)) == 1
        assert "20/20" in reply.lines(rank)[0]


def test_a_debugger_at_every_error_is_refused(notebook: Notebook) -> None:
    reply = notebook.run("%%ddp --nproc 1\n%pdb on")
    assert "UsageError: %pdb stays off: after a failure, `%ddp debug` looks into it" in reply.error
    assert "ZeroDivisionError" in notebook.run("%%ddp\n1 / 0").error


def test_nothing_in_a_rank_says_that_somebody_types(group: Ranks) -> None:
    assert group.pull("hasattr(__import__('sys'), 'ps1')") == [False, False]


ODD = "class Odd(Exception):\n    def __str__(self): raise RuntimeError('inner')\n"


def test_an_exception_without_a_text_ends_the_cell_under_its_own_name(
    make_group: Callable[..., Ranks],
) -> None:
    group = make_group(1)
    with pytest.raises(CellFailedError) as caught:
        group.run(f"{ODD}raise Odd")
    assert str(caught.value) == (
        "rank 0: Odd: its text cannot be had: __str__() raised RuntimeError, line 3"
    )
    assert "Odd: <exception str() failed>" in caught.value.report
    with pytest.raises(CellFailedError) as caught:
        group.run("try:\n    raise Odd\nexcept Odd as inner:\n    int('x')")
    assert "ValueError: invalid literal" in str(caught.value)
    assert group.run("1 + 1").is_ok


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups came with Python 3.11")
def test_the_members_of_an_exception_group_are_in_the_report(
    make_group: Callable[..., Ranks], capsys: pytest.CaptureFixture[str]
) -> None:
    group = make_group(1)
    with pytest.raises(CellFailedError) as caught:
        group.run("raise ExceptionGroup('several', [ValueError('one'), TypeError('two')])")
    assert str(caught.value) == (
        "rank 0: ExceptionGroup: several: ValueError: one; TypeError: two, line 1"
    )
    assert "ValueError: one" in caught.value.report
    assert "TypeError: two" in caught.value.report
    assert "ValueError: one" not in capsys.readouterr().out


def test_code_that_captures_is_interrupted_as_any_other(notebook: Notebook) -> None:
    request = notebook.begin(
        "%%ddp --nproc 1\n%%capture\nimport time\nfrom pathlib import Path\n"
        "Path('begun').touch()\ntime.sleep(60)"
    )
    begun = notebook.folder / "begun"
    assert wait_until(begun.exists)
    notebook.interrupt()
    reply = notebook.finish(request)
    assert reply.error.startswith("CellInterruptedError: rank 0 interrupted")
    assert reply.seconds < 30


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("input('x? ')", "input()"),
        ("import getpass; getpass.getpass()", "getpass()"),
        ("breakpoint()\nx = 1", "the debugger"),
        ("%debug", "the debugger"),
    ],
)
def test_what_waits_for_somebody_to_type_says_what_to_do(
    notebook: Notebook, source: str, what: str
) -> None:
    notebook.run("%%ddp --nproc 1\nint('x')")
    reply = notebook.run(f"%%ddp\n{source}")
    said = f"RuntimeError: {what} is not supported: nobody can type here: ask in a notebook's page"
    assert reply.error.startswith(f"CellFailedError: rank 0: {said}")
    assert "nbddp/" not in reply.traceback
    assert "Error" not in reply.text


@pytest.mark.parametrize(
    "command", ["!{}", "%pip --version; {}", "names = !{}", 'import os; os.system("{}")']
)
def test_a_command_that_asks_shows_its_prompt_and_gets_the_end_of_file(
    notebook: Notebook, command: str
) -> None:
    asks = "printf 'Proceed? '; read x; printf 'and? '; read y || echo end"
    reply = notebook.run(f"%%ddp --nproc 1\n{command.format(asks)}\nprint('after')")
    assert reply.status == "ok"
    shown = reply.text if "names" not in command else notebook.run("%%ddp\nnames").text
    assert "Proceed? and? end" in shown
    assert reply.lines(0)[-1] == "after"


def test_a_command_writes_to_a_terminal_and_leaves_its_exit_code(notebook: Notebook) -> None:
    reply = notebook.run(
        '%%ddp --nproc 1\ntext = "it\'s"\n!test -t 1 && echo "{text}" grüße\n'
        "codes = []\nfor command in ('exit 3', 'kill -9 $$', 'exit 200', 'true'):\n"
        "    !{command}\n    codes.append(_exit_code)\nprint(codes)"
    )
    assert reply.lines(0) == ["it's grüße", "[3, -9, -72, 0]"]


@pytest.mark.parametrize(
    "command", ["!{}", "names = !{}", "%system {}", "import os; os.system('{}')"]
)
def test_a_stop_ends_a_loop_of_commands(notebook: Notebook, command: str) -> None:
    notebook.run("%%ddp --nproc 2\nkept = rank")
    sleeps = command.format("touch begun$RANK; exec sleep 60")
    reply = notebook.run_and_stop_at(f"%%ddp\nfor _ in range(9):\n    {sleeps}", "begun0", "begun1")
    assert reply.error == "CellInterruptedError: ranks 0-1 interrupted, line 3"
    assert notebook.run("%%ddp\nkept").text.count("Out") == 2


def test_a_very_deep_recursion_is_told_in_a_moment(notebook: Notebook) -> None:
    assert notebook.run("%%ddp --nproc 1\ndef call(n): return call(n + 1)").status == "ok"
    reply = notebook.run("%%ddp\ncall(0)")
    assert reply.error.startswith("CellFailedError: rank 0: RecursionError: maximum recursion")
    assert "more times]" in reply.traceback
    assert reply.seconds < 4


@pytest.mark.parametrize(
    "source",
    [
        "sys.stdout.close()",
        "sys.stdout.detach()",
        "sys.stdout.buffer.detach()",
        "sys.stdout = None",
        "os.close(1)",
    ],
)
def test_output_that_a_cell_closed_is_open_in_the_next(notebook: Notebook, source: str) -> None:
    assert notebook.run(f"%%ddp --nproc 1\nimport os, sys\n{source}").status == "ok"
    reply = notebook.run("%%ddp\nprint('heard')\n!echo a child too")
    assert reply.status == "ok"
    assert reply.lines(0) == ["heard", "a child too"]


@pytest.mark.parametrize("fd", [1, 2])
def test_output_that_a_failed_cell_redirected_comes_back(
    make_group: Callable[..., Ranks], capsys: pytest.CaptureFixture[str], fd: int
) -> None:
    group = make_group(1)
    with pytest.raises(CellFailedError, match="rank 0: ValueError: own, line 3"):
        group.run(
            "import os, sys\n"
            f"os.dup2(os.open('elsewhere.txt', os.O_WRONLY | os.O_CREAT), {fd})\n"
            "raise ValueError('own')"
        )
    group.run(f"print('python', file=sys.{'stdout' if fd == 1 else 'stderr'})")
    group.run(f"_ = os.system('echo child >&{fd}')")
    assert capsys.readouterr().out == "[rank 0] python\n[rank 0] child\n"
    assert not Path("elsewhere.txt").read_text()


def test_numbers_in_a_chart_stay_numbers(notebook: Notebook) -> None:
    reply = notebook.run(
        "%%ddp --nproc 1\nimport numpy\nclass Chart:\n"
        "    def _repr_mimebundle_(self, **_):\n"
        "        values = [numpy.float32(0.5), numpy.arange(2), torch.ones(1)]\n"
        "        return {'application/vnd.plotly.v1+json': {'y': values}}\nChart()"
    )
    chart = reply.displays[0]["application/vnd.plotly.v1+json"]
    assert chart == {"y": [0.5, [0, 1], [1.0]]}


def test_loading_nbddp_in_a_rank_says_that_it_is_loaded(notebook: Notebook) -> None:
    reply = notebook.run("%%ddp --nproc 2\n%load_ext nbddp")
    said = "nbddp: it is loaded in the notebook; this is one of its ranks"
    assert (reply.status, reply.lines(0), reply.lines(1)) == ("ok", [said], [said])


@pytest.mark.parametrize(
    "source", ["%ddp status", "x = 1\n%%ddp\ny = 2", "%%local\nx = 1", "# first\n%%local\nx = 1"]
)
def test_a_rank_says_that_commands_of_the_notebook_do_not_work_there(
    notebook: Notebook, source: str
) -> None:
    reply = notebook.run(f"%%ddp --nproc 2\n{source}")
    assert "Move the command to a separate cell" in reply.error
    assert "not found" not in reply.error + reply.text + reply.traceback


@pytest.mark.parametrize("magic", ["%%ddp --nproc 2", "%%local"])
def test_a_comment_above_a_cell_magic_is_explained(notebook: Notebook, magic: str) -> None:
    reply = notebook.run(f"# train\n{magic}\nx = 1")
    assert "must be on the first line of a cell" in reply.text + reply.error
    assert "not found" not in reply.text + reply.error


@pytest.mark.parametrize("source", ['nbddp.check_answer("00.1", 12)', "print(rank)"])
def test_a_cell_of_the_notebook_that_is_meant_for_the_ranks_is_explained(
    notebook: Notebook, source: str
) -> None:
    reply = notebook.run(f"%reset_selective -f ^nbddp$\n{source}")
    assert reply.error.startswith("NameError")
    assert "on the ranks, not in the notebook. Start the cell with `%%ddp`" in reply.text
    assert "on the ranks" not in notebook.run("no_such_name").text


def test_loading_nbddp_a_second_time_says_nothing(notebook: Notebook) -> None:
    assert notebook.run("%load_ext nbddp").text == ""
    assert notebook.run("%load_ext autoreload\n%load_ext autoreload").text.startswith(
        "The autoreload extension is already loaded."
    )
    assert notebook.run("%reload_ext nbddp\n%load_ext nbddp").text == ""
    notebook.run("%unload_ext nbddp")
    assert (
        "nbddp" not in notebook.run("get_ipython().find_line_magic('load_ext').__module__").result
    )
    assert notebook.run("%load_ext nbddp").text == ""
    assert notebook.run("%%ddp --nproc 1\n'here'").text == "Out [rank 0] 'here'\n"


@pytest.mark.parametrize(
    ("source", "handled"),
    [("import sys; sys.exit(3)", "x.py"), ("int('x')", "x.py"), ("int('x')", "x.ipy")],
)
def test_what_a_cell_catches_of_a_script_is_no_failure(
    notebook: Notebook, source: str, handled: str
) -> None:
    notebook.run(f"%%writefile {handled}\n{source}")
    reply = notebook.run(
        f"%%ddp --nproc 1\ntry:\n    %run {handled}\nexcept (ValueError, SystemExit):\n"
        "    print('caught')"
    )
    assert (reply.status, reply.lines(0)[0]) == ("ok", "caught")
