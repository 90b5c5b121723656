"""``%%ddp --sweep``: each combination a run of its own, whatever becomes of the others."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from drivers.inside import imported
from notebook import Notebook, Reply

from nbddp import Run
from nbddp.magics.sweep import Sweep

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]

SETUP = """%%ddp --nproc 2
def train(lr, batch):
    for step in range(4):
        nbddp.log(step=step, loss=lr * batch + step + rank / 10)
        dist.barrier()
lr = 7
"""
SIX = "%%ddp --sweep lr=0.1,0.2,0.3 --sweep batch=16,64"


@pytest.fixture
def base(notebook: Notebook, tmp_path: Path) -> Path:
    """A folder of its own for each test, where the kernel's runs are."""
    notebook.run(f"%ddp stop\n%cd -q {tmp_path}")
    return tmp_path


def runs_in(base: Path) -> dict[str, dict[str, Any]]:
    """By the name that follows the time, what each ``run.json`` says; oldest first."""
    found = sorted((base / ".nbddp" / "runs").glob("*/run.json"))
    return {path.parent.name[16:]: json.loads(path.read_text()) for path in found}


def swept(base: Path) -> dict[str, dict[str, Any]]:
    return {name: facts for name, facts in runs_in(base).items() if "sweep" in facts}


def table(reply: Reply) -> list[str]:
    """The lines of the last table, of names of runs."""
    lines = reply.text[reply.text.rindex("sweep of ") :].splitlines()
    return [line for line in lines if re.match(r"\d{8}-\d{6}-lr", line)]


def test_each_combination_is_a_run_of_its_own(notebook: Notebook, base: Path) -> None:
    notebook.run(SETUP)
    reply = notebook.run(f"{SIX}\ntrain(lr, batch)\nnbddp.log(lr_was=lr)")
    assert reply.status == "ok", reply.traceback
    runs = swept(base)
    names = [f"lr{lr}-batch{batch}" for lr in (0.1, 0.2, 0.3) for batch in (16, 64)]
    assert list(runs) == names
    assert [facts["config"] for facts in runs.values()] == [
        {"lr": lr, "batch": batch} for lr in (0.1, 0.2, 0.3) for batch in (16, 64)
    ]
    assert [facts["last"]["lr_was"]["mean"] for facts in runs.values()] == [
        *(0.1, 0.1, 0.2, 0.2, 0.3, 0.3)
    ]
    assert [facts["outcome"] for facts in runs.values()] == ["ok"] * 6
    assert all("ended" in facts for facts in runs.values())
    assert "nbddp: 6 runs, each with fresh ranks, cell " in reply.text
    assert "nbddp: sweep, 3 of 6: lr=0.2, batch=16; 3 left after it" in reply.text
    assert [line.split()[0][16:] for line in table(reply)] == names
    comparison, *others = reversed(reply.displays)
    assert not any("image/png" in each for each in others), "it has the curves of all runs"
    assert "the code of all cells is the same" in comparison["text/plain"]
    assert re.search(r"differs +A +B +C +D +E +F", comparison["text/plain"])
    assert comparison["image/png"]
    assert notebook.run("%%ddp\nlr").text == "Out [ranks 0-1] 7\n"  # as before
    notebook.run("%ddp export train.py")
    script = (base / "train.py").read_text()
    assert "def train(lr, batch):" in script
    assert "it ran several times, on ranks of its own" in script


def test_six_survive_a_killed_rank_an_exception_and_a_stop(notebook: Notebook, base: Path) -> None:
    notebook.run(SETUP)
    cell = f"""{SIX}
import os, signal, time, pathlib
if (lr, batch) == (0.1, 64) and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if (lr, batch) == (0.2, 16) and rank == 0:
    raise ValueError("diverged")
train(lr, batch)
if (lr, batch) == (0.3, 16) and not pathlib.Path("go_on").exists():
    print("here")
    time.sleep(60)
"""
    request = notebook.begin(cell)
    first = notebook.finish(request, until="[rank 1] here")
    notebook.interrupt()
    reply = notebook.finish(request)
    reply.text = first.text + reply.text
    assert reply.error.startswith("CommandInterruptedError: `%%ddp --sweep` was ended by you: ")
    assert "sweep of 6: 2 ok, 2 failed, 1 ended by you, 1 not run" in reply.error
    outcomes = [facts["outcome"] for facts in swept(base).values()]
    assert outcomes[0] == outcomes[3] == "ok"
    assert "rank 1 was killed by SIGKILL" in outcomes[1]
    assert "rank 0: ValueError: diverged" in outcomes[2]
    assert len(outcomes) == 5
    assert len(table(reply)) == 5
    assert "lr=0.1, batch=64: failed: rank 1 was killed by SIGKILL" in reply.text
    assert "lr=0.2, batch=16: failed: rank 0: ValueError: diverged" in reply.text
    assert "`%ddp restart --replay` does cell" in reply.text

    (base / "go_on").touch()
    again = notebook.run(cell)
    assert again.status == "ok", again.traceback
    assert "2 combinations of 6 done before and not run again (lr=0.1, batch=16; " in again.text
    assert "sweep of 6: 2 ok, 2 done before and not run again, 2 failed" in again.text
    assert len(table(again)) == 6
    assert notebook.run("%%ddp\nlr").text == "Out [ranks 0-1] 7\n"
    last = notebook.run(cell.replace("SIGKILL", "SIGTERM").replace("pathlib.P", "pathlib. P"))
    assert "done before" not in last.text  # another cell is another sweep


def test_what_is_done_is_run_again_only_if_asked_for(notebook: Notebook, base: Path) -> None:
    notebook.run(SETUP)
    cell = "%%ddp --sweep lr=0.1,0.2\ntrain(lr, 1)"
    notebook.run(cell)
    assert len(swept(base)) == 2
    reply = notebook.run(cell)
    assert "nothing was left to run; the ranks are as they were" in reply.text
    assert len(table(reply)) == 2
    assert len(swept(base)) == 2
    assert notebook.run(cell.replace("0.2", "0.2 --start-over")).status == "ok"
    assert len(list((base / ".nbddp" / "runs").glob("*lr*"))) == 4
    notebook.run("%%ddp\nlr = 8")  # an earlier cell is another now
    assert "done before" not in notebook.run(cell).text


def test_seeds_make_what_a_cell_draws_and_what_earlier_cells_draw(
    notebook: Notebook, base: Path
) -> None:
    notebook.run("%%ddp --nproc 2\nweight = torch.rand(1).item()")
    cell = (
        "%%ddp --repeat 2\nimport random, numpy\n"
        "nbddp.log(weight=weight, drawn=torch.rand(1).item() + random.random(), seed_was=seed,"
        " numpy=numpy.random.rand())"
    )
    assert notebook.run(cell).status == "ok"
    assert notebook.run(cell.replace("2\n", "2 --start-over\n", 1)).status == "ok"
    found: dict[int, set[str]] = {}
    for path in (base / ".nbddp" / "runs").glob("*seed*/run.json"):
        facts = json.loads(path.read_text())
        assert all(each["low"] == each["high"] for each in facts["last"].values())
        found.setdefault(facts["config"]["seed"], set()).add(json.dumps(facts["last"]))
    assert sorted(found) == [0, 1]
    assert all(len(each) == 1 for each in found.values())
    one, other = (json.loads(each.pop()) for each in found.values())
    assert all(one[name] != other[name] for name in ("weight", "drawn", "numpy", "seed_was"))


def test_a_sweep_of_which_nothing_goes_well_fails(notebook: Notebook, base: Path) -> None:
    reply = notebook.run("%%ddp --nproc 2 --sweep lr=1,2\n1 / 0")
    assert reply.error == (
        "CellFailedError: none of the 2 runs went well; ranks 0-1: ZeroDivisionError: "
        "division by zero, line 2"
    )
    assert len(swept(base)) == 2
    assert "the ranks are stopped; the next cell starts others" in reply.text
    assert notebook.run("%%ddp\nworld_size").text == "Out [ranks 0-1] 2\n"


def test_values_that_are_pushed_are_there_each_time(notebook: Notebook, base: Path) -> None:
    notebook.run("scale, lr = 10, 1")
    reply = notebook.run(
        "%%ddp --nproc 1 --push scale,lr --name first --sweep lr=1,2\nnbddp.log(x=scale * lr)"
    )
    assert reply.status == "ok", reply.traceback
    runs = swept(base)
    assert [facts["last"]["x"]["mean"] for facts in runs.values()] == [10, 20]
    assert list(runs) == ["first-lr1", "first-lr2"]


def test_other_values_or_another_environment_are_another_sweep(
    notebook: Notebook, base: Path
) -> None:
    cell = "%%ddp --nproc 1 --push scale --sweep lr=1,2 --env SHIFT={}\nimport os\n"
    cell += "nbddp.log(x=scale * lr + int(os.environ['SHIFT']))"
    for scale, shift in ((10, 0), (20, 0), (20, 5)):
        notebook.run(f"scale = {scale}")
        reply = notebook.run(cell.format(shift))
        assert "done before" not in reply.text
    written = [path.read_text() for path in (base / ".nbddp" / "runs").glob("*lr*/run.json")]
    found = sorted(json.loads(each)["last"]["x"]["mean"] for each in written)
    assert found == [10, 20, 20, 25, 40, 45]
    assert "nothing was left to run" in notebook.run(cell.format(5)).text
    notebook.run("scale = (each for each in 'ab')")
    reply = notebook.run(cell.format(5))
    assert reply.text.startswith("UsageError: cannot push 'scale': ")
    assert len([*(base / ".nbddp" / "runs").glob("*lr*")]) == 6


def test_what_earlier_cells_report_again_is_no_part_of_a_combination(
    notebook: Notebook, base: Path
) -> None:
    notebook.run(SETUP)
    notebook.run("%%ddp\nfor step in range(50):\n    nbddp.log(step=step, loss=100.0, other=1)")
    reply = notebook.run("%%ddp --sweep lr=1,2,3\nif lr < 3:\n    train(lr, 10)")
    assert reply.status == "ok", reply.traceback
    first, _, silent = swept(base).values()
    assert first["steps"] == 4
    assert first["last"] == {"loss": {"mean": 13.05, "low": 13.0, "high": 13.1}}
    assert first["curves"]["loss"][0][0] in (10.0, 10.1)
    assert silent["last"] == {}
    assert "other" not in reply.text
    compared = reply.displays[-1]["text/plain"]
    assert "13.05" in compared
    assert "other" not in compared
    run = Run(next((base / ".nbddp" / "runs").glob("*lr1")))
    assert len(run.metrics()["loss"]) == 2 * 4
    assert len(run.cells) == 3
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2 * (50 + 4)  # they are recorded all the same


def test_a_cell_that_sets_what_is_swept_is_refused(notebook: Notebook, base: Path) -> None:
    for line, name in (("--sweep lr=1,2", "lr"), ("--repeat 2", "seed")):
        reply = notebook.run(f"%%ddp {line}\n%matplotlib inline\n{name} = 0\nnbddp.log(x={name})")
        assert reply.text == (
            f"UsageError: {name} is swept, and line 3 of the cell sets it before it is used: take "
            "that line out\n"
        )
    assert not swept(base)


@pytest.mark.parametrize("push", ["", pytest.param("--push scaled", marks=pytest.mark.full)])
def test_another_kernel_goes_on_where_it_was(
    fresh_notebook: Notebook, tmp_path: Path, push: str
) -> None:
    cell = f"%%ddp --sweep lr=0.1,0.2 {push}\ntrain(lr, 1)"
    for is_first in (True, False):
        fresh_notebook.run(f"%load_ext nbddp\n%cd -q {tmp_path}")
        fresh_notebook.run("import torch\nunit = torch.ones(1)\ndef scaled(lr): return lr * unit")
        fresh_notebook.run(SETUP)
        reply = fresh_notebook.run(cell)
        assert ("nothing was left to run" in reply.text) is not is_first
        fresh_notebook.restart()
    assert len(swept(tmp_path)) == 2


def test_what_earlier_cells_made_is_left_out_if_asked_for(notebook: Notebook, base: Path) -> None:
    notebook.run(SETUP)
    reply = notebook.run("%%ddp --fresh --sweep n=1,2\nnbddp.log(there='train' in globals())")
    assert "2 runs, each with fresh ranks\n" in reply.text
    assert [facts["last"]["there"]["mean"] for facts in swept(base).values()] == [0, 0]
    assert notebook.run("%%ddp\nlr").text == "Out [ranks 0-1] 7\n"


def test_a_cell_that_fails_when_it_is_done_again_fails_that_combination_alone(
    notebook: Notebook, base: Path
) -> None:
    notebook.run(
        "%%ddp --nproc 2\nimport pathlib\npath = pathlib.Path(f'times{rank}')\n"
        "times = int(path.read_text()) if path.exists() else 0\n"
        "path.write_text(str(times + 1))\nassert times != 2"
    )
    reply = notebook.run("%%ddp --sweep lr=1,2,3\nnbddp.log(x=lr)")
    assert "sweep of 3: 2 ok, 1 failed" in reply.text
    said = "lr=2: failed: an earlier cell, done again: ranks 0-1: AssertionError"
    assert said in reply.text, reply.text
    assert len(swept(base)) == 3


PRESSES = 12
ENDED = re.compile(r"`%%ddp( --sweep)?` was (ended by you|interrupted)[:;] [^\n]+")


def test_a_stop_at_a_random_moment_is_one_line_and_what_earlier_cells_made_can_be_had(
    notebook: Notebook, base: Path
) -> None:
    notebook.run(SETUP)
    cell = "%%ddp --start-over --sweep lr=1,2,3\ntrain(lr, 1)"
    whole, chance = notebook.run(cell).seconds, random.Random(7)
    for _ in range(PRESSES):
        seconds = chance.random() * whole
        reply = notebook.run_and_stop(cell, seconds)
        where = f"after {seconds:.3f} s of {whole:.3f}: {reply.text}{reply.traceback}"
        assert reply.status == "ok" or ENDED.fullmatch(reply.traceback), where
        assert "Traceback" not in reply.text, where
        assert notebook.run("%ddp restart --replay").status == "ok", where
        assert notebook.run("%%ddp\nlr").text == "Out [ranks 0-1] 7\n", where
    runs = [path.parent for path in base.glob(".nbddp/runs/*/run.json")]
    assert all(json.loads((path / "run.json").read_text()) for path in runs)


def test_after_a_stop_a_cell_that_misses_what_earlier_ones_made_does_not_lose_it(
    notebook: Notebook,
) -> None:
    notebook.run("%%ddp --fresh --nproc 2\nmade = 7")
    sweep = "%%ddp --start-over --sweep lr=1,2\nprint('it runs')\nwhile made:\n    time.sleep(0.01)"
    for way_back in ("%ddp restart --replay", "%%ddp --sweep lr=3,4\nlr / made"):
        request = notebook.begin(sweep)
        notebook.finish(request, until="it runs", times=2)
        notebook.interrupt()
        assert "does cell" in notebook.finish(request).text
        assert "name 'made' is not defined" in notebook.run("%%ddp\nmade").error
        assert notebook.run(way_back).status == "ok"
        assert notebook.run("%%ddp\nmade").text == "Out [ranks 0-1] 7\n"
    request = notebook.begin(sweep)
    notebook.finish(request, until="it runs", times=2)
    notebook.interrupt()
    notebook.finish(request)
    notebook.run("%%ddp --fresh\nmade")
    notebook.run("%ddp restart --replay")
    assert "name 'made' is not defined" in notebook.run("%%ddp\nmade").error


@pytest.mark.full
def test_a_sweep_runs_on_nodes_and_they_stay(notebook: Notebook, base: Path) -> None:
    opened = notebook.run("%ddp nodes --nnodes 2 --nproc-per-node 1 --local 2 --wait 60")
    assert opened.status == "ok", opened.traceback
    try:
        notebook.run("%%ddp\nkept = 5")
        reply = notebook.run("%%ddp --sweep lr=1,2\nnbddp.log(x=lr * kept, ranks=world_size)")
        assert reply.status == "ok", reply.traceback
        lasts = [facts["last"] for facts in swept(base).values()]
        assert [each["x"]["mean"] for each in lasts] == [5, 10]
        assert [each["ranks"]["mean"] for each in lasts] == [2, 2]
        assert notebook.run("%%ddp\nkept, world_size").text == "Out [ranks 0-1] (5, 2)\n"
        refused = notebook.run("%%ddp --scale 1,2\n1")
        assert refused.text == (
            "UsageError: --scale is for ranks of this machine: `%ddp stop` sends the nodes home\n"
        )
    finally:
        notebook.run("%ddp stop")


LOST = (
    "that would be lost, as each run begins on fresh ranks, which do only those cells again that "
    "went well here; `%ddp restart --replay` gives it up, then this runs; with --fresh it runs at "
    "once, each time with no names\n"
)


@pytest.mark.until_cut
def test_what_no_replay_makes_is_not_lost_to_a_sweep(notebook: Notebook, base: Path) -> None:
    notebook.run("%%ddp --nproc 2\nimport time\nweight = 0")
    request = notebook.begin("%%ddp\nweight = 5\nprint('here')\ntime.sleep(60)")
    first = notebook.finish(request, until="here", times=2)  # both ranks have set it
    notebook.interrupt()
    assert "interrupted" in (first.text + notebook.finish(request).error)
    number = int(notebook.run("get_ipython().displayhook.prompt_count").result or 0) - 1
    notebook.run("%%ddp\nother = 6\n1 / 0")
    sweep = "%%ddp --sweep lr=1,2\nnbddp.log(lr=lr)"
    said = f"UsageError: cell [{number}] was interrupted, cell [{number + 2}] failed: {LOST}"
    for cell in (sweep, "%%ddp --scale 1,2\nnbddp.log(step=0)"):
        assert notebook.run(cell).text == said
    assert not swept(base)
    assert notebook.run("%%ddp --once\nweight, other").text == "Out [ranks 0-1] (5, 6)\n"
    notebook.run("%%ddp\nother = 7")  # as the cell that failed should have
    assert notebook.run(sweep).text == f"UsageError: cell [{number}] was interrupted: {LOST}"
    reply = notebook.run(sweep.replace("lr=1,2", "lr=3,4 --fresh"))
    assert reply.status == "ok", reply.traceback
    assert f" done again; given up: cell [{number}] was interrupted\n" in reply.text
    assert notebook.run("%%ddp --once\nweight, other").text == "Out [ranks 0-1] (0, 7)\n"
    assert notebook.run(sweep).status == "ok"


@pytest.mark.until_cut
def test_a_restart_with_a_replay_gives_up_what_no_replay_makes(
    notebook: Notebook, base: Path
) -> None:
    notebook.run("%%ddp --nproc 2\nweight = 0")
    notebook.run("%%ddp\nweight = 5\n1 / 0")
    assert notebook.run("%%ddp --sweep lr=1,2\nnbddp.log(lr=lr)").status == "error"
    assert notebook.run("%ddp restart --replay").status == "ok"
    reply = notebook.run("%%ddp --sweep lr=1,2\nnbddp.log(lr=lr)")
    assert reply.status == "ok", reply.traceback
    assert "given up" not in reply.text
    assert len(swept(base)) == 2


STOPPED_AT_FIRST = f"""
import signal
{imported(Sweep)}run_one = Sweep._run_one
def stopped(self, row):
    Sweep._run_one = run_one
    signal.raise_signal(signal.SIGINT)
Sweep._run_one = stopped
"""


def test_a_sweep_that_is_stopped_before_its_first_run_leaves_the_ranks_alone(
    notebook: Notebook, base: Path
) -> None:
    notebook.run("%%ddp --nproc 2\nkept = 7")
    pids = notebook.run("%%ddp\nimport os\nos.getpid()").text
    notebook.run(STOPPED_AT_FIRST)
    reply = notebook.run("%%ddp --sweep lr=1,2\nnbddp.log(lr=lr)")
    assert reply.error.startswith("CommandInterruptedError: `%%ddp --sweep` was ended by you")
    assert "nbddp: no run has begun; the ranks are as they were\n" in reply.text
    assert notebook.run("%%ddp\nos.getpid()").text == pids
    assert not swept(base)


def test_a_sweep_does_not_end_the_cell_that_runs(notebook: Notebook, base: Path) -> None:
    notebook.run("%%ddp --nproc 2\nimport pathlib, time\nkept = 7")
    path = base / "go_on"
    notebook.run(f"%%ddp --no-wait\nwhile not pathlib.Path('{path}').exists(): time.sleep(0.01)")
    reply = notebook.run("%%ddp --sweep lr=1,2\nnbddp.log(lr=lr)")
    path.touch()
    assert reply.text.startswith("UsageError: a cell is still running; `%ddp wait` waits for it")
    assert notebook.run("%ddp wait").status == "ok"
    assert notebook.run("%%ddp\nkept").text == "Out [ranks 0-1] 7\n"
