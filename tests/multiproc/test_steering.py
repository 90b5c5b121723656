"""``%ddp`` commands, options and tab completion in a real kernel."""

import re
from collections.abc import Iterator
from pathlib import Path

import IPython
import pytest
from limits import limit, limits_source
from notebook import Notebook
from processes import wait_until
from rank_fixtures import FORGET_OPTIONS

SHARES_KERNEL = True


REFUSED = {  # with words of the refusal
    "%%ddp --nproc 2 --ranks 2\npass": "rank 2",
    "%%ddp --push nothing\npass": "'nothing'",
    "%%ddp\nfor x in": "line 2",
    "%%ddp --push device\npass": "device",
    "%ddp push rank": "another name",
    "%%ddp\n   \n": "empty",
}


def test_bad_input_gets_a_one_line_error_and_starts_no_ranks(notebook: Notebook) -> None:
    for cell, words in REFUSED.items():
        reply = notebook.run(cell)
        assert reply.status == "error", cell
        assert reply.text.startswith("UsageError: "), cell
        assert words in reply.text, cell
    for cell in ("%ddp\nx = 1", "%ddp\nrank", "%ddp --nproc 2\nx = 1"):
        assert notebook.run(cell).text.count("For the cell's code, write `%%ddp`") == 1
    assert "no ranks" in notebook.run("%ddp status").text


def test_metrics_in_a_plain_cell_are_explained_once(notebook: Notebook) -> None:
    plain = "import nbddp\nnbddp.config(lr=1)\nnbddp.log(loss=1)"
    remark = "nbddp: `nbddp.config` records nothing in a plain cell, because no rank runs it: "
    assert notebook.run(plain).text == f"{remark}use it in a `%%ddp` cell\n"
    assert notebook.run(plain).text == ""


def test_changed_options_do_not_discard_names(notebook: Notebook) -> None:
    notebook.run("%%ddp --nproc 2\nkept = 1")
    text = notebook.run("%%ddp --nproc 3\npass").text
    for words in ("UsageError: ", "%ddp restart --nproc 3", "--fresh"):
        assert words in text
    assert notebook.run("%%ddp\nkept").text == "Out [ranks 0-1] 1\n"
    assert "rank 9" in notebook.run("%ddp fault kill --rank 9 --step 3").text
    notebook.run("%ddp kill 1")
    text = notebook.run("%%ddp --timeout 3\npass").text
    for words in ("UsageError: rank 1 ", "%ddp restart --timeout 3.0", "--fresh"):
        assert words in text
    assert notebook.run("%%ddp --nproc 3 --fresh\nworld_size").text == "Out [ranks 0-2] 3\n"


def test_kill_stop_and_auto_say_in_one_line_what_they_did(notebook: Notebook) -> None:
    notebook.run("%%ddp --nproc 2\nprint('kept')\nimport time")
    notebook.run("%%ddp --no-wait\ntime.sleep(60)")
    notebook.run("%ddp restart --replay")
    assert "The replay sets those of earlier cells again." in notebook.run("%ddp show").text
    notebook.run("%%ddp --no-wait\ntime.sleep(60)")
    # with ipykernel 6 the running cell prints here, too, if it learns of the death at once
    last = notebook.run("%ddp kill 1").text.splitlines()[-1]
    assert last.startswith("nbddp: rank 1 was killed; `%ddp heal`")
    assert notebook.run("%ddp wait").error == "CellFailedError: rank 1 was killed by you"
    assert notebook.run("%ddp stop").text.startswith("nbddp: all ranks are stopped and")
    assert notebook.run("%ddp logs 1").text == "kept\nkept\n"  # once more by the replay
    assert notebook.run("%ddp stop").text == "nbddp: there were no ranks to stop\n"
    for switch, words in {"on": "cells run on the ranks", "off": "cells run in the kernel"}.items():
        assert words in notebook.run(f"%ddp auto {switch}").text
    notebook.run(
        "%%ddp --nproc 2 --grace 1\nimport atexit, time\n_ = atexit.register(time.sleep, 60)"
    )
    assert "ranks 0-1 did not end in 1 s: killed" in notebook.run("%ddp stop").text
    assert notebook.run("%%ddp --grace 5\npass").text == ""  # it is not told again


def test_status_shows_every_rank(notebook: Notebook) -> None:
    notebook.run("%ddp start --nproc 2")
    first = notebook.run("%ddp status").text.splitlines()[0]
    for words in ("ready", "2 ranks", "gloo", "cpu", "attempt "):
        assert words in first
    # a moment later the CPU is known too
    row = re.compile(r"^1 +ready +\d+ % +\d+ MiB +\d+$", re.MULTILINE)
    assert wait_until(lambda: row.search(notebook.run("%ddp status").text) is not None)


def test_an_armed_fault_is_confirmed_listed_and_disarmed(notebook: Notebook) -> None:
    notebook.run("%ddp start --nproc 2")
    armed = "armed faults: kill@rank=1,step=3; `%ddp fault off` disarms all\n"
    assert notebook.run("%ddp fault kill --rank 1 --step 3").text == f"nbddp: {armed}"
    assert armed in notebook.run("%ddp status").text
    assert notebook.run("%ddp fault off").text == "nbddp: no fault is armed\n"
    assert notebook.run("%ddp restart --replay").status == "ok"
    assert notebook.run("%%ddp\nnbddp.log(step=3, loss=1)").status == "ok"
    notebook.run("%ddp fault kill --rank 1 --step 4")
    text = "nbddp: kill@rank=1,step=4 is disarmed, because its rank has ended; arm it again on"
    reply = notebook.run("%%ddp --fresh\nnbddp.log(step=4, loss=1)")
    assert (reply.status, text in reply.text) == ("ok", True)
    notebook.run("%ddp fault kill --rank 1 --step 4\n%ddp kill 1")
    assert text.removeprefix("nbddp: ") in notebook.run("%ddp heal").text
    notebook.run("%ddp fault kill --rank 1 --step 4")
    assert text in notebook.run("%ddp stop").text
    assert "disarmed" not in notebook.run("%%ddp\npass").text
    notebook.run("%ddp fault kill --rank 1 --step 5")
    assert "disarmed" not in notebook.run("%ddp restart --replay").text
    assert "kill@rank=1,step=5" in notebook.run("%ddp status").text


def test_ranks_inherit_environment_folder_and_path_and_options_override(
    notebook: Notebook, tmp_path: Path
) -> None:
    (tmp_path / "only_here.py").write_text("value = 'imported'\n")
    notebook.run(
        f"import os, sys\nos.environ['FROM_KERNEL'] = 'yes'\nos.environ['BOTH'] = 'kernel'\n"
        f"here = os.getcwd()\nos.chdir({str(tmp_path)!r})\nsys.path.append({str(tmp_path)!r})"
    )
    reply = notebook.run(
        "%%ddp --nproc 1 --env BOTH=option --gpus 3 --threads 2\nimport os, only_here\n"
        "print(os.environ['FROM_KERNEL'], os.environ['BOTH'], os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "print(os.getcwd(), only_here.value, torch.get_num_threads())"
    )
    assert reply.lines(0)[-2:] == ["yes option 3", f"{tmp_path} imported 2"]
    notebook.run("%ddp stop")
    notebook.run(f"os.chdir(here)\nsys.path.pop()\ndel os.environ['FROM_KERNEL']{FORGET_OPTIONS}")


def test_pull_takes_one_expression(notebook: Notebook) -> None:
    notebook.run("%%ddp --nproc 1\na, b = 1, 2")
    for what in ("a b", "x = 3", "for"):
        assert notebook.run(f"%ddp pull {what}").text.startswith(f"UsageError: `{what}` ")
    assert notebook.run("%ddp pull a, b").result == "[(1, 2)]"


def test_push_and_pull_errors_are_one_line(notebook: Notebook) -> None:
    notebook.run("import threading\nlock = threading.Lock()\nfine = 1")
    notebook.run("%ddp start --nproc 2")
    text = notebook.run("%ddp push fine lock").text
    assert re.match("UsageError: .*'lock'.* '_thread.lock'", text)
    notebook.run("other = 2")
    for written in ("fine, other", "fine,other", "fine other"):
        assert notebook.run(f"%ddp push {written}").status == "ok"
        assert notebook.run("%%ddp\nfine, other").text == "Out [ranks 0-1] (1, 2)\n"
        notebook.run("%%ddp\ndel fine, other")
    assert notebook.run("%ddp push ,").text.startswith("UsageError: ")
    text = notebook.run("%ddp pull missing").text
    assert text == "UsageError: rank 0: NameError: name 'missing' is not defined\n"
    assert notebook.run("%%ddp\nworld_size").status == "ok"


def test_help_is_shown_for_each_spelling(notebook: Notebook) -> None:
    for asked in ("help pull", "pull --help", "pull -h"):
        assert "%ddp pull [--rank R] expression" in notebook.run(f"%ddp {asked}").text


def test_load_ext_still_loads_other_extensions(notebook: Notebook) -> None:
    text = notebook.run("%load_ext autoreload\n%load_ext autoreload").text
    assert text.startswith("The autoreload extension is already loaded.")
    notebook.run("%ddp auto on")  # the unloaded extension sends no cell to the ranks
    notebook.run("%%local\n%unload_ext nbddp")
    assert notebook.hint("%%ddp --nproc") == ""
    where = "get_ipython().find_line_magic('load_ext').__module__"
    assert "nbddp" not in notebook.run(where).result
    assert notebook.run("%load_ext nbddp").text == ""
    assert notebook.hint("%%ddp --nproc")


@pytest.fixture
def patient(notebook: Notebook) -> Iterator[Notebook]:
    """A page that waits for ranks that a busy machine keeps from answering."""
    notebook.run(limits_source(completion_timeout=15.0, help_timeout=15.0))
    yield notebook
    were = {name: limit(name) for name in ("completion_timeout", "help_timeout")}
    notebook.run(limits_source(**were))


def test_shift_and_tab_explain_options_and_names_of_the_ranks(patient: Notebook) -> None:
    notebook = patient
    assert "--nproc-per-node N" in notebook.hint("%%ddp --nproc")
    assert "sorted(" in notebook.hint("sorted")  # by the kernel itself
    notebook.run("%%ddp --nproc 2\ndef train(steps, rate=0.1):\n    'Trains a little.'")
    hint = notebook.hint("%%ddp\ntrain")
    assert "train(steps, rate=0.1)" in hint
    assert "Trains a little." in hint
    assert notebook.hint("train") == ""
    assert notebook.hint("%%ddp\nnothing_of_this_name") == ""
    request = notebook.begin("%%ddp --no-wait\nimport time\ntime.sleep(60)")
    notebook.finish(request)
    assert notebook.hint("%%ddp\ntrain") == ""
    notebook.run("%ddp interrupt")
    notebook.run("%ddp wait")
    assert "Trains a little." in notebook.hint("%%ddp\ntrain")


@pytest.mark.skipif(IPython.version_info[0] < 8, reason="IPython 7 tells only one line of a cell")
def test_tab_completes_options_and_names_of_the_ranks(patient: Notebook) -> None:
    notebook = patient
    assert "--nproc" in notebook.complete("%%ddp --np")
    assert notebook.complete("%ddp rest") == ["restart"]
    notebook.run("import nbddp")
    kit = [each for each in notebook.complete("nbddp.") if not each.startswith("%")]
    assert {"nbddp.track", "nbddp.loader"} <= set(kit)
    assert not {"nbddp.record", "nbddp.annotations", "nbddp.load_ipython_extension"} & set(kit)
    notebook.run("%%ddp --nproc 2\nlearning_rate = 0.1")
    assert "learning_rate" in notebook.complete("%%ddp\nx = learning_")
    assert "dist.all_reduce" in notebook.complete("%%ddp\ndist.all_re")
    assert "learning_rate" not in notebook.complete("learning_")
    notebook.run("%ddp stop")
    assert "learning_rate" not in notebook.complete("%%ddp\nlearning_")
