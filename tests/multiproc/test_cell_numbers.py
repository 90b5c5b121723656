"""The number in a traceback is the one that the notebook's prompt shows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from notebook import Notebook, Reply

pytestmark = pytest.mark.multiproc
SHARES_KERNEL = True

FAILS = {
    "a cell": "%%ddp --nproc 2\n1/0",
    "the next cell": "%%ddp\ndef f():\n    1/0\nf()",
    "a magic within": "%%ddp\n%%time\n1/0",
    "a cell within": "%%ddp\n%%capture\n1/0",
    "a line magic within": "%%ddp\n%time 1/0",
    "quiet": "%%ddp --quiet\n1/0",
    "below other code": "x = 1\nget_ipython().run_cell_magic('ddp', '', '1/0')",
    "a script": "%run fails.ipy",
    "a cell of the notebook within": "%%local\nget_ipython().run_cell_magic('ddp', '', '1/0')",
    "later": "%%ddp --no-wait\nimport time; time.sleep(0.2)\n1/0",
}


def numbers(text: str) -> set[int]:
    """The numbers of the cells that a text names."""
    return {int(number) for number in re.findall(r"cell \[(\d+)\]", text)}


def shown(reply: Reply) -> str:
    return reply.text + reply.traceback


def test_the_number_is_that_of_the_prompt(notebook: Notebook) -> None:
    notebook.run("open('fails.ipy', 'w').write('%%ddp\\n1/0')")
    for name, cell in FAILS.items():
        reply = notebook.run(cell)
        said = shown(reply)
        if "--no-wait" in cell:
            said += shown(notebook.run("%ddp wait"))
        assert len(reply.counts) == 1, "the prompt has one number"
        assert numbers(said) == reply.counts, name
    notebook.run("%ddp auto on")
    reply = notebook.run("1/0")
    assert numbers(shown(reply)) == reply.counts


def test_a_function_of_an_earlier_cell_keeps_its_number(notebook: Notebook) -> None:
    first = notebook.run("%%ddp --nproc 2\ndef f(): 1/0")
    second = notebook.run("%%ddp\nf()")
    assert numbers(shown(second)) == first.counts | second.counts


SAYS = """%%ddp --nproc 2 --ranks 0
import faulthandler, sys, threading, warnings
def call():
    warnings.warn("warned")
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    faulthandler.dump_traceback(all_threads=False)
    breakpoint()
    return 1
call();"""


def test_debugger_threads_warnings_and_faulthandler_name_the_cell(notebook: Notebook) -> None:
    reply = notebook.converse(SAYS, "c")
    [number] = reply.counts
    cell = f"<ipython-input-{number}>"
    for said in (
        f"{cell}:4: UserWarning: warned",
        f'File "{cell}", line 5, in <lambda>',
        f'File "{cell}", line 8 in call',
        f"> {cell}(9)call()",
    ):
        assert said in reply.text, said
    assert set(re.findall(r"ipython-input-(\d+)", reply.text)) == {str(number)}


def test_an_executed_notebook_has_the_numbers_of_its_prompts(folder: Path) -> None:
    sources = ["%load_ext nbddp", "%%ddp --nproc 2\n1/0", "%%ddp\n1/0", "%ddp stop"]
    notebook = new_notebook(cells=[new_code_cell(each) for each in sources])
    path = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, resources=path, allow_errors=True, timeout=150).execute()
    saved = json.loads(nbformat.writes(notebook))
    for cell in saved["cells"][1:3]:
        said = re.sub(r"\x1b\[[0-9;]*m", "", json.dumps(cell["outputs"]).replace("\\u001b", "\x1b"))
        assert numbers(said) == {cell["execution_count"]}


@pytest.mark.full
def test_it_is_so_in_a_terminal(folder: Path) -> None:
    fail = "get_ipython().run_cell_magic('ddp', '--nproc 2', '1/0')"
    said = subprocess.run(
        [sys.executable, "-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor"],
        input=f"%load_ext nbddp\nx = 1\n{fail}\n%ddp stop\nexit\n",
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
    ).stdout
    prompt = said.rpartition("In [3]: ")[2].partition("In [4]: ")[0]
    assert numbers(prompt) == {3}
