"""A notebook that publishes while its ranks run: what becomes of cells when a tracker does not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from notebook import Notebook
from published import fake_wandb, run_folder

from nbddp.publish.noted import read_note

# a tracker's process gets what others leave of the machine
pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]

TRAINING = "for step in range(30):\n    dist.barrier()\n    nbddp.log(step=step, loss=rank + 1.0)\n"


def prepared(notebook: Notebook, base: Path, how: str) -> None:
    path = str(fake_wandb(base))
    code = f"import os, sys; sys.path.insert(0, {path!r}); os.environ['FAKE_WANDB'] = {how!r}"
    assert not notebook.run(code).error


@pytest.mark.gate_runs("nobody")
@pytest.mark.parametrize(
    ("how", "why"),
    [("nobody", "RuntimeError: no API key"), ("dies", "its process exited with code 7")],
)
def test_a_tracker_that_fails_is_said_once_and_the_cells_go_on(
    tmp_path: Path, how: str, why: str
) -> None:
    with Notebook(tmp_path) as notebook:
        prepared(notebook, tmp_path, how)
        said = ""
        until = time.monotonic() + 90
        while time.monotonic() < until:
            reply = notebook.run(f"%%ddp --nproc 2 --publish wandb\n{TRAINING}rank")
            assert not reply.error
            said += reply.text
            if "failed" in said:
                break
            time.sleep(0.25)
        for _ in range(3):
            said += notebook.run(f"%%ddp --publish wandb\n{TRAINING}rank").text
        notebook.run("%ddp stop")
    assert f"publishing to wandb failed: {why}" in said
    assert said.count("failed") == 1
    assert "; the run goes on without. `%ddp publish wandb " in said


def test_a_tracker_that_does_not_answer_holds_no_cell_up_and_no_stop(tmp_path: Path) -> None:
    with Notebook(tmp_path) as notebook:
        prepared(notebook, tmp_path, "blocks")
        for _ in range(5):
            assert not notebook.run(f"%%ddp --nproc 2 --publish wandb\n{TRAINING}").error
        assert not notebook.run("%ddp stop").error
        code = (
            "[made] = get_ipython()._nbddp.desk.publishing._begun.values()\n"
            "print(made.is_over); made._process.kill(); made.follower.join(20); print(made.is_over)"
        )
        assert notebook.run(code).text == "False\nTrue\n"
    assert len((run_folder(tmp_path) / "metrics.jsonl").read_text().splitlines()) == 5 * 30 * 2


def test_a_run_is_published_to_its_stop_and_later_cells_with_it(tmp_path: Path) -> None:
    with Notebook(tmp_path) as notebook:
        prepared(notebook, tmp_path, "well")
        said = notebook.run(f"%%ddp --nproc 2 --publish wandb:digits\n{TRAINING}").text
        for _ in range(2):
            said += notebook.run(f"%%ddp\n{TRAINING}").text
        notebook.run("%ddp stop")
        folder, deadline = run_folder(tmp_path), time.monotonic() + 120
        while not read_note(folder, "wandb").get("is_whole") and time.monotonic() < deadline:
            time.sleep(0.05)
    done = read_note(folder, "wandb")
    assert (done["steps"], done["late"]) == (90, 0)
    log = (folder / "publish-wandb.log").read_text()
    assert log.count('"loss": 1.5, ') == 90
    assert "finished 0" in log


@pytest.mark.full
def test_each_run_of_a_sweep_is_a_run_there_with_its_settings(tmp_path: Path) -> None:
    with Notebook(tmp_path) as notebook:
        prepared(notebook, tmp_path, "well")
        line = "%%ddp --nproc 2 --sweep lr=0.1,0.01 --publish wandb"
        assert not notebook.run(f"{line}\n{TRAINING}").error
        notebook.run("%ddp stop")
        folders = sorted((tmp_path / ".nbddp" / "runs").glob("*-lr*"))
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            notes = [read_note(folder, "wandb") for folder in folders]
            if all(each.get("is_whole") for each in notes):
                break
            time.sleep(0.05)
    assert [each.get("steps") for each in notes] == [30, 30]
    assert len({each["name"] for each in notes}) == 2
