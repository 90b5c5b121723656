"""A run in trackio, W&B, TensorBoard and MLflow: one for all ranks, with the values of its file."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from notebook import Notebook
from published import (
    Curves,
    await_whole,
    expected,
    of_mlflow,
    of_tensorboard,
    of_trackio,
    of_wandb,
    run_folder,
    same,
)
from runs_on_disk import BEGAN, make_run, rows_of

from nbddp.extensions.publish import TRACKER_CLASSES
from nbddp.extensions.publish.publication import Publication
from nbddp.extensions.publish.tracker import Target, plain_name

for package in TRACKER_CLASSES:
    pytest.importorskip(package)
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("default"),  # warnings of the trackers about each other
]

PLACE = "digits"
TRAINING = (
    "nbddp.config(lr=0.1)\n"
    "for step in range({begin}, {end}):\n"
    "    dist.barrier()\n"
    "    nbddp.log(step=step, loss=1 / (step + 1) + rank, **{{'val/acc': 0.25 * rank}})\n"
)


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    variables = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}",
        "HOME": str(tmp_path),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def curves_of(kind: str, base: Path, run: str) -> Curves:
    match kind:
        case "tensorboard":
            return of_tensorboard(base / PLACE / run)[0]
        case "wandb":
            return of_wandb(base)[0]
        case "trackio":
            return of_trackio(base / "trackio", PLACE, run)[0]
        case _:
            return of_mlflow(f"sqlite:///{base / 'mlflow.db'}", PLACE)[0]


def check_equal(kind: str, base: Path, folder: Path, *, is_retried: bool = False) -> None:
    found = curves_of(kind, base, folder.name)
    wanted = expected(folder, is_retried=is_retried)
    assert {name for name in found if not name.startswith("nbddp")} == set(wanted)
    for name, curve in wanted.items():
        assert same(found[name], curve), name


@pytest.mark.parametrize("kind", TRACKER_CLASSES)
def test_live_run_is_published_as_one_run_across_restarts(offline: Path, kind: str) -> None:
    with Notebook(offline) as notebook:
        to = f"--publish {kind}:{PLACE}"
        reply = notebook.run(f"%%ddp --nproc 1 {to}\n{TRAINING.format(begin=0, end=20)}")
        assert not reply.error
        for nproc, begin in ((2, 15), (4, 30)):
            notebook.run(f"%ddp restart --nproc {nproc}")
            cell = TRAINING.format(begin=begin, end=begin + 20)
            assert not notebook.run(f"%%ddp\n{cell}").error
        notebook.run("%ddp stop")
        folder = run_folder(offline)
        done = await_whole(folder, kind)
    assert done["late"] == 0
    assert done["steps"] == 60
    check_equal(kind, offline, folder)


ODD_NAMES = (
    *("/loss of all", "a//b", "../up", "..down", "größe é 😀", "val/acc@5 (%)", ".", "a b"),
    f"{'deep/' * 60}end",
)


@pytest.mark.parametrize("kind", TRACKER_CLASSES)
def test_trackers_accept_unusual_names_and_values(offline: Path, kind: str) -> None:
    odd = {name: [1.5, math.nan, math.inf, -math.inf] for name in ODD_NAMES}
    rows = [
        {"time": BEGAN + 1 + step, "rank": rank, "attempt": 1, "step": step}
        | {name: values[step] for name, values in odd.items()}
        for step in range(4)
        for rank in range(2)
    ]
    settings: dict[str, Any] = {
        "": 1,
        "_": 2,
        "/näme é": None,
        "big": "x" * 100_000,
        "up": math.inf,
    }
    settings[".."] = {"a": [1, 2]}
    folder = make_run(offline, rows=rows, config=settings)
    told = {"kind": "config", "rank": 0, "values": settings, "time": BEGAN + 0.5}
    with (folder / "events.jsonl").open("a") as events:
        events.write(json.dumps(told) + "\n")
    Publication(Target(kind, PLACE), folder, folder.name).wait()
    if kind != "mlflow":
        check_equal(kind, offline, folder)
        return
    found = curves_of(kind, offline, folder.name)
    for name in ODD_NAMES:
        for end in ("", "/rank0", "/min", "/max"):
            assert plain_name(f"{name}{end}") in found
    assert len([name for name in found if not name.startswith("nbddp/")]) == 4 * len(ODD_NAMES)


def failed_run(base: Path) -> Path:
    """Return a run whose ranks failed in step 20 and resumed at step 10."""
    first = [{**row, "attempt": 1} for row in rows_of(20)]
    second = [
        {**row, "attempt": 2, "time": row["time"] + 20} for row in rows_of(40) if row["step"] >= 10
    ]
    began = second[0]["time"] - 0.5
    extra = [
        {"kind": "config", "rank": 0, "values": {"lr": 0.1, "model": "cnn"}, "time": began - 21},
        {"kind": "failure", "rank": 1, "what": "ValueError: odd", "time": began - 5},
        {"kind": "start", "attempt": 2, "world_size": 2, "time": began - 1},
        {"kind": "cell", "number": 7, "ranks": [0, 1], "source": "", "again": True, "time": began},
    ]
    return make_run(
        base,
        cells=(("train()", "rank 1: ValueError: odd"),),
        rows=[*first, *second],
        extra=extra,
        config={"lr": 0.1, "model": "cnn"},
        restarts=1,
        failures=1,
    )


@pytest.mark.parametrize("kind", TRACKER_CLASSES)
def test_repeated_steps_and_events_after_a_restart_are_published(offline: Path, kind: str) -> None:
    folder = failed_run(offline)
    Publication(Target(kind, PLACE), folder, folder.name).wait()
    check_equal(kind, offline, folder, is_retried=True)
    curves = curves_of(kind, offline, folder.name)
    assert sorted(curves["nbddp/attempt"]) == [(0, 1.0), (10, 2.0)]
    why = "rank 1: ValueError: odd"
    if kind == "tensorboard":
        shown, texts = of_tensorboard(offline / PLACE / folder.name, hides=True)
        assert [step for step, _ in shown["loss"]] == list(range(40))  # the repeated steps
        assert texts["outcome"] == f"failed: {why}"
        assert "restart: attempt 2" in texts["record"]
        assert "| lr | 0.1 |" in texts["settings"]
    elif kind == "wandb":
        _, config, summary = of_wandb(offline)
        assert (config["lr"], config["model"], config["nbddp.run"]) == (0.1, "cnn", folder.name)
        assert summary["nbddp/outcome"] == f"failed: {why}"
        assert summary["nbddp/restarts"] == 1
        [table] = (offline / "wandb").glob("offline-run-*/files/media/table/nbddp/record*.json")
        assert "restart: attempt 2" in table.read_text()
    elif kind == "trackio":
        _, config, reports = of_trackio(offline / "trackio", PLACE, folder.name)
        assert (config["lr"], config["model"], config["nbddp.run"]) == (0.1, "cnn", folder.name)
        assert reports[-1].startswith(f"**failed: {why}**")
        assert "restart: attempt 2" in reports[-1]
    else:
        _, params, tags, status = of_mlflow(f"sqlite:///{offline / 'mlflow.db'}", PLACE)
        assert (params["lr"], params["model"], params["nbddp.run"]) == ("0.1", "cnn", folder.name)
        assert tags["nbddp.outcome"] == f"failed: {why}"
        assert status == "FAILED"
        [record] = offline.rglob("record.md")
        assert "restart: attempt 2" in record.read_text()
