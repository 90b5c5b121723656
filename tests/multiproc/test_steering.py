"""What %ddp commands, options and Tab do, in a real kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import IPython
import pytest
from limits import limit, limits_source
from notebook import Notebook
from processes import wait_until

pytestmark = pytest.mark.multiproc
SHARES_KERNEL = True


@pytest.mark.parametrize(
    ("cell", "complaint"),
    [
        (
            "%%ddp --nprc 2\npass",
            "unrecognized arguments: --nprc 2; the options are: --nproc, --backend, ",
        ),
        ("%%ddp --nproc 0\npass", "expected a whole number above 0, got '0'"),
        ("%%ddp --nproc 10000\npass", "nproc must be between 1 and 128, got 10000"),
        ("%%ddp --backend mpi\npass", "invalid choice: 'mpi' (choose from "),
        ("%%ddp --nproc 2 --backend nccl\npass", "backend nccl needs a GPU for every rank: 2 r"),
        ("%%ddp --nproc 2 --ranks 2\npass", "there is no rank 2; the group has ranks 0 to 1"),
        ("%%ddp --push nothing\npass", "there is no 'nothing' in the notebook to push"),
        ("%%ddp --push device\npass", "device is set by nbddp in each rank, and a push would give"),
        ("%ddp push rank", "the notebook's: push it under another name"),
        ("%%ddp --env novalue\npass", "expected NAME=VALUE, got 'novalue'"),
        ("%%ddp\nfor x in", "syntax error in line 2: invalid syntax"),
        ("%%ddp\n   \n", "the cell is empty: nothing to run"),
        ("%ddp nonsense", "there is no `%ddp nonsense`; the commands are: status, start"),
        ("%ddp kill 0", "there is no worker group"),
        ("%ddp run", "the following arguments are required: script, script_args"),
        ("%ddp run nothing.py --nproc 2", "there is no nothing.py in "),
        ("%ddp run --nproc 2 --ranks 2 nothing.py", "there is no rank 2; the group has ranks 0 "),
        ("%ddp pull x", "there is no worker group"),
        ("%ddp interrupt", "no cell is running"),
        ("%ddp restart --nproc x", "expected a whole number above 0, got 'x'"),
    ],
)
def test_bad_input_gets_one_clear_line_and_starts_nothing(
    notebook: Notebook, cell: str, complaint: str
) -> None:
    reply = notebook.run(cell)
    assert reply.status == "error"
    assert complaint in reply.text
    assert reply.text.startswith("UsageError: ")
    assert "no worker group" in notebook.run("%ddp status").text


def test_a_heal_whose_new_rank_dies_says_the_way_on(notebook: Notebook) -> None:
    notebook.run(
        "%%ddp --nproc 2\nimport os\nclass Deadly:\n"
        "    def __reduce__(self): return os._exit, (9,)\nit = Deadly()"
    )
    notebook.run("%ddp kill 1")
    assert notebook.run("%ddp heal").text == (
        "UsageError: rank 1 exited with code 9 before it could answer; `%ddp heal` replaces it, "
        "`%ddp restart` restarts all ranks, `%%ddp --ranks 0` uses the others\n"
    )
    notebook.run("%%ddp --ranks 0\ndel it")
    assert notebook.run("%ddp heal").status == "ok"


def test_another_number_of_ranks_does_not_throw_state_away(notebook: Notebook) -> None:
    notebook.run("%%ddp --nproc 2\nkept = 1")
    reply = notebook.run("%%ddp --nproc 3\npass")
    assert reply.text == (
        "UsageError: the worker group runs with nproc 2; `%ddp restart --nproc 3` restarts it "
        "with the new options (its names are lost), and so does --fresh in the cell\n"
    )
    assert notebook.run("%%ddp\nkept").text == "Out [ranks 0-1] 1\n"
    assert notebook.run("%%ddp --nproc 3 --fresh\nworld_size").text == "Out [ranks 0-2] 3\n"


def test_other_options_for_a_group_with_a_dead_rank_name_the_dead_rank_first(
    notebook: Notebook,
) -> None:
    notebook.run("%%ddp --nproc 2\nkept = 1")
    notebook.run("%ddp kill 1")
    reply = notebook.run("%%ddp --timeout 3\npass")
    assert reply.text == (
        "UsageError: rank 1 of the group died; the worker group runs with timeout 1800.0; `%ddp "
        "restart --timeout 3.0` restarts it with the new options (its names are lost), and so does "
        "--fresh in the cell\n"
    )


def test_status_shows_every_rank(notebook: Notebook) -> None:
    notebook.run("%ddp start --nproc 2")
    text = notebook.run("%ddp status").text
    assert text.startswith("worker group: ready · 2 ranks · gloo · cpu · attempt ")
    # a moment later the CPU is known too
    assert re.search(r"^1 +ready +(\d+ % +)?\d+ MiB +\d+$", text, re.MULTILINE)
    known = re.compile(r"^1 +ready +\d+ % +\d+ MiB +\d+$", re.MULTILINE)
    assert wait_until(lambda: known.search(notebook.run("%ddp status").text) is not None)


def test_a_killed_rank_is_named_and_restart_helps(notebook: Notebook) -> None:
    notebook.run("%%ddp --nproc 3\nkept = rank")
    assert notebook.run("%ddp kill 1").status == "ok"
    reply = notebook.run("%%ddp\npass")
    assert reply.text == (
        "UsageError: rank 1 was killed by SIGKILL; `%ddp heal` replaces it, `%ddp restart` "
        "restarts all ranks, `%%ddp --ranks 0,2` uses the others\n"
    )
    assert notebook.run("%%ddp --ranks 0,2\nprint(kept)").lines(2) == ["2"]
    assert notebook.run("%ddp restart").status == "ok"
    reply = notebook.run("%%ddp\nx = torch.ones(1)\ndist.all_reduce(x)\nx.item()")
    assert reply.text == "Out [ranks 0-2] 3.0\n"


def test_a_rank_that_dies_in_a_cell_is_the_first_cause(notebook: Notebook) -> None:
    reply = notebook.run(
        "%%ddp --nproc 3\nimport os\nif rank == 1:\n    print('last words')\n    os._exit(3)\n"
        "dist.barrier()"
    )
    assert reply.error == "CellFailedError: rank 1 exited with code 3"
    assert reply.lines(1) == ["last words"]
    assert "first cause: rank 1 exited with code 3" in reply.traceback
    assert (
        "Rank 1 lost all names, the other ranks keep theirs. `%ddp heal` replaces"
        in reply.traceback
    )


def test_one_rank_that_raises_frees_the_others_and_is_named(notebook: Notebook) -> None:
    notebook.run(
        "%%ddp --nproc 3\nimport os, time\n"
        "def come():\n    open(f'came{rank}', 'w').close()\n    return rank\n"
        "def late(error):\n    while not os.path.exists('came0') or not os.path.exists('came1'):\n"
        "        time.sleep(0.01)\n    return error"
    )
    reply = notebook.run(
        "%%ddp\nkept = come()\nif rank == 2:\n    raise late(ValueError('boom'))\ndist.barrier()"
    )
    assert reply.error == "CellFailedError: rank 2: ValueError: boom, line 4"
    assert re.search(r"ranks 0-1: interrupted in barrier #\d+, line 5", reply.traceback)
    assert reply.seconds < 20
    reply = notebook.run("%%ddp\ndist.barrier()\nprint(kept)")
    assert [reply.lines(rank) for rank in range(3)] == [["0"], ["1"], ["2"]]


def test_logs_shows_the_end_of_a_ranks_output(notebook: Notebook) -> None:
    notebook.run("%%ddp --nproc 1\nfor i in range(100): print('line', i)")
    text = notebook.run("%ddp logs 0 -n 2").text.splitlines()
    assert text[0].startswith("... earlier lines in ")
    assert text[1:] == ["line 98", "line 99"]


def test_environment_folder_and_path_reach_the_ranks_and_options_win(
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
    assert reply.lines(0) == ["yes option 3", f"{tmp_path} imported 2"]
    notebook.run("%ddp stop")
    notebook.run("os.chdir(here)\nsys.path.pop()\ndel os.environ['FROM_KERNEL']")


@pytest.mark.parametrize("what", ["a b", "x = 3", "for"])
def test_pull_takes_one_expression(notebook: Notebook, what: str) -> None:
    notebook.run("%%ddp --nproc 1\na, b = 1, 2")
    assert (
        f"UsageError: `{what}` is not a single expression" in notebook.run(f"%ddp pull {what}").text
    )
    assert notebook.run("%ddp pull a, b").result == "[(1, 2)]"


def test_unpicklable_values_and_missing_names_are_said_in_one_line(notebook: Notebook) -> None:
    notebook.run("import threading\nlock = threading.Lock()\nfine = 1")
    notebook.run("%ddp start --nproc 2")
    reply = notebook.run("%ddp push fine lock")
    assert reply.text.startswith("UsageError: cannot push 'lock': cannot pickle '_thread.lock'")
    notebook.run("other = 2")
    for written in ("fine, other", "fine,other", "fine other"):
        assert notebook.run(f"%ddp push {written}").status == "ok"
        assert notebook.run("%%ddp\nfine, other").text == "Out [ranks 0-1] (1, 2)\n"
        notebook.run("%%ddp\ndel fine, other")
    assert (
        notebook.run("%ddp push ,").text == "UsageError: there is no ',' in the notebook to push\n"
    )
    reply = notebook.run("%ddp pull missing")
    assert reply.text == "UsageError: rank 0: NameError: name 'missing' is not defined\n"
    assert notebook.run("%%ddp\nworld_size").status == "ok"


def test_help_and_question_mark_are_good_reading(notebook: Notebook) -> None:
    text = notebook.run("%ddp help").text
    for command in ("status", "restart", "kill", "pull", "auto"):
        assert re.search(rf"^  {command} +[A-Z].*\.$", text, re.MULTILINE)
    assert notebook.run("%ddp --help").text == text
    for asked in ("help pull", "pull --help", "pull -h"):
        assert "%ddp pull [--rank R] expression" in notebook.run(f"%ddp {asked}").text


def test_tab_completes_options_and_commands(notebook: Notebook, folder: Path) -> None:
    notebook.run("%load_ext nbddp")
    assert "--nproc" in notebook.complete("%%ddp --np")
    found = notebook.complete("%%ddp --backend g")
    assert [each for each in found if not each.startswith("%")] == ["gloo"]  # IPython 7 adds magics
    assert notebook.complete("%ddp rest") == ["restart"]
    assert notebook.complete("%ddp fault seg") == ["segfault"]
    (folder / "work").mkdir()
    for name in ("train.py", "data.csv", "work/test.py"):
        (folder / name).touch()
    notebook.run(f"%cd -q {folder}")
    assert "train.py" in notebook.complete("%ddp run t")
    assert "work/" in notebook.complete("%ddp run w")
    assert "work/test.py" in notebook.complete("%ddp run --keep work/t")
    assert "--nproc" not in notebook.complete("%ddp run train.py --np")
    notebook.run("import nbddp")
    kit = [each for each in notebook.complete("nbddp.") if not each.startswith("%")]
    assert {"nbddp.track", "nbddp.loader"} <= set(kit)
    assert not {"nbddp.record", "nbddp.annotations", "nbddp.load_ipython_extension"} & set(kit)


def test_shift_and_tab_explain_options_and_commands(notebook: Notebook) -> None:
    notebook.run("%load_ext nbddp")
    assert notebook.hint("%%ddp --nproc").startswith("--nproc, --nproc-per-node N\n\nranks on")
    assert "Kill one rank, to see what happens." in notebook.hint("%ddp kill")
    assert notebook.hint("%ddp fault hang") == "hang: it sleeps"
    assert "Steer the worker group" in notebook.hint("%ddp")  # by the kernel itself
    assert "sorted(" in notebook.hint("sorted")
    notebook.run("%unload_ext nbddp")
    assert notebook.hint("%%ddp --nproc") == ""
    notebook.run("%load_ext nbddp")
    assert notebook.hint("%%ddp --nproc")


@pytest.fixture
def patient(notebook: Notebook) -> Iterator[Notebook]:
    """A page that waits for ranks that a busy machine keeps from answering."""
    notebook.run(limits_source(completion_waits=15.0, hint_waits=15.0))
    yield notebook
    were = {name: limit(name) for name in ("completion_waits", "hint_waits")}
    notebook.run(limits_source(**were))


def test_shift_and_tab_explain_names_of_the_ranks(patient: Notebook) -> None:
    notebook = patient
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
def test_tab_completes_names_of_the_ranks(patient: Notebook) -> None:
    notebook = patient
    notebook.run("%%ddp --nproc 2\nlearning_rate = 0.1")
    assert "learning_rate" in notebook.complete("%%ddp\nx = learning_")
    assert "dist.all_reduce" in notebook.complete("%%ddp\ndist.all_re")
    assert "learning_rate" not in notebook.complete("learning_")
    notebook.run("%ddp stop")
    assert "learning_rate" not in notebook.complete("%%ddp\nlearning_")
