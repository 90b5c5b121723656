"""Checkpoints in one process: whole or absent, and what they bring back."""

import gc
import logging
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_devices import FakeDevices
from refusals import refusal
from sinks import Recorder
from syrupy.assertion import SnapshotAssertion
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbddp.errors import CheckpointError
from nbddp.extensions.faults.fault_actions import flip_bytes
from nbddp.extensions.train.checkpoint import atomic_files, state_dicts
from nbddp.extensions.train.checkpoint.checkpoint import Checkpoint, Resumed
from nbddp.extensions.train.precision import precision
from nbddp.reporting.training_objects import checkpoints


class Loader:
    """The loader methods that a checkpoint uses."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models are small here: threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run_of(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": Loader()}


def train(run: dict[str, Any], steps: range, save: Callable[[int], None] | None = None) -> None:
    """Steps with data, dropout and noise from torch's, Python's and NumPy's random numbers."""
    amp = precision()
    for step in steps:
        inputs = torch.randn(8, 4) * random.random() + float(np.random.rand())
        with amp.autocast(run["model"]):
            loss = run["model"](inputs).square().mean()
        amp.step(loss, run["optimizer"], scheduler=run["scheduler"])
        run["loader"].position += 1
        if save:
            save(step)


def model_state(run: dict[str, Any]) -> torch.Tensor:
    return torch.cat([each.double().flatten() for each in run["model"].state_dict().values()])


def step_in(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.pt"


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


@contextmanager
def disk_full(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., str]:
    """Return the error of a refused call, with FOLDER for the folder."""

    def refuse(act: Callable[..., object], *args: Any, **parts: Any) -> str:
        reason = refusal(parts.pop("kind", CheckpointError), act, *args, **parts)
        return reason.replace(str(tmp_path), "FOLDER")

    return refuse


# ---- going on


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_resumed_run_ends_bit_for_bit_like_an_uninterrupted_run(
    tmp_path: Path, asynchronous: bool
) -> None:
    random.seed(1)
    np.random.seed(1)
    unbroken = run_of()
    checkpoint = Checkpoint(tmp_path)

    def save(step: int) -> None:
        if step == 9:
            checkpoint.save(step, **unbroken, extra={"loss": [0.5]}, asynchronous=asynchronous)

    train(unbroken, range(20), save)
    checkpoint.wait()
    again = run_of(seed=5)
    resumed = Checkpoint(tmp_path).resume(**again)
    assert resumed == Resumed(9, {"extra": {"loss": [0.5]}}, step_in(tmp_path, 9))
    train(again, range(resumed.step + 1, 20))
    assert torch.equal(model_state(again), model_state(unbroken))
    assert str(again["optimizer"].state_dict()) == str(unbroken["optimizer"].state_dict())
    assert again["scheduler"].state_dict() == unbroken["scheduler"].state_dict()
    assert again["loader"].position == 20


def test_an_empty_or_missing_folder_has_nothing_to_resume(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "none")
    resumed = checkpoint.resume(**run_of(), best=0.5, history=None)
    assert not resumed
    assert resumed == Resumed(0, {"best": 0.5, "history": None}, None)
    assert checkpoint.newest() is None
    assert not checkpoint.folder.exists()


def test_resume_loads_requested_parts_and_warns(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    run, other = run_of(), run_of(seed=1)
    Checkpoint(tmp_path).save(3, **run, seen=1)
    nothing = dict.fromkeys(["optimizer", "scheduler", "loader"])
    assert Checkpoint(tmp_path).resume(model=other["model"], **nothing)
    assert torch.equal(model_state(other), model_state(run))
    with pytest.warns(UserWarning, match="scheduler=None") as caught:
        Checkpoint(tmp_path).resume(model=run["model"], optimizer=None)
    [warning] = caught
    assert str(warning.message).replace(str(tmp_path), "FOLDER") == snapshot


def test_resuming_parts_that_the_checkpoint_lacks_is_refused(
    tmp_path: Path, refused: Callable[..., str], snapshot: SnapshotAssertion
) -> None:
    run = run_of()
    checkpoint = Checkpoint(tmp_path)
    held = {name: run[name] for name in ("model", "optimizer")}
    reasons = [refused(lambda: checkpoint.resume()["best"])]
    checkpoint.save(3, **held)
    reasons += [refused(checkpoint.resume, **run), refused(checkpoint.resume, **held, best=0.5)]
    checkpoint.save(4)
    reasons.append(refused(checkpoint.resume, model=run["model"]))
    checkpoint.save(5, scheduler=None, seen=3)
    reasons.append(refused(lambda: checkpoint.resume()["best"]))
    assert "scheduler" in refused(checkpoint.resume, scheduler=run["scheduler"])
    checkpoint.save(6, model=run["model"], best=0.5)
    reasons.append(refused(checkpoint.resume, model=3))
    reasons.append(refused(checkpoint.resume, model=None, best=nn.Linear(1, 1)))
    assert reasons == snapshot


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("is_saved_wrapped", [False, True])
def test_ddp_and_plain_models_share_checkpoints(tmp_path: Path, is_saved_wrapped: bool) -> None:
    plain, wrapped = nn.Linear(4, 2), DistributedDataParallel(nn.Linear(4, 2))
    saved, loaded = (wrapped, plain) if is_saved_wrapped else (plain, wrapped)
    Checkpoint(tmp_path).save(0, model=saved)
    Checkpoint(tmp_path).resume(model=loaded)
    assert torch.equal(plain.weight, wrapped.module.weight)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler, of itself
def test_torch_load_reads_a_compiled_model_under_its_plain_parameter_names(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    Checkpoint(tmp_path).save(0, model=torch.compile(model, backend="eager"), extra="words")
    found = torch.load(step_in(tmp_path, 0), weights_only=True)
    assert (found["step"], found["values"]) == (0, {"extra": "words"})
    assert list(found["parts"]["model"]) == ["weight", "bias"]
    metadata = model.state_dict()._metadata  # type: ignore[attr-defined]
    assert found["parts"]["model"]._metadata == metadata


def test_parts_and_values_under_any_name_are_restored(tmp_path: Path) -> None:
    def parts_of(position: int) -> dict[str, Any]:
        ema = Loader()  # as an average of weights, it has a state and is no module
        ema.position = position
        generator, discriminator = nn.Linear(2, 3), nn.Linear(3, 1)
        adam = torch.optim.Adam(generator.parameters(), lr=0.1 * position)
        return {"generator": generator, "discriminator": discriminator, "ema": ema, "adam": adam}

    saved, loaded = parts_of(1), parts_of(2)
    Checkpoint(tmp_path).save(7, **saved, best=0.5, history=[torch.ones(2)], note=None)
    resumed = Checkpoint(tmp_path).resume(**loaded, best=0.0)
    assert (bool(resumed), resumed.step, resumed["best"], resumed["note"]) == (True, 7, 0.5, None)
    assert torch.equal(resumed.values["history"][0], torch.ones(2))
    assert resumed.get("lr", 0.1) == 0.1
    for name in saved:
        assert str(loaded[name].state_dict()) == str(saved[name].state_dict())


def test_saving_and_resuming_a_checkpoint_record_events(tmp_path: Path, recorder: Recorder) -> None:
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(3)
    checkpoint.save(4, asynchronous=True)
    checkpoint.resume()
    path = str(step_in(tmp_path, 4))
    (first, _), (second, saved), (third, resumed) = recorder.calls
    assert [first, second, third] == ["checkpoint", "checkpoint", "resume"]
    assert 0 < saved.pop("seconds") < 30
    assert saved == resumed == {"step": 4, "path": path}


def test_checkpoints_lists_the_live_checkpoint_objects(tmp_path: Path) -> None:
    first, second = Checkpoint(tmp_path / "b"), Checkpoint(tmp_path / "a")
    assert {first, second} <= {*checkpoints}
    del first
    gc.collect()
    assert [each for each in checkpoints if each.folder.parent == tmp_path] == [second]


# ---- whole or absent


def test_the_three_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    (tmp_path / "notes.txt").touch()
    for step in range(10):
        checkpoint.save(step)
    assert names(tmp_path) == ["notes.txt", *(f"step-0000000{step}.pt" for step in (7, 8, 9))]
    assert checkpoint.newest() == step_in(tmp_path, 9)


def test_damaged_checkpoints_are_skipped(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    checkpoint = Checkpoint(tmp_path)
    for step in range(3):
        checkpoint.save(step)
    one = step_in(tmp_path, 1)
    one.write_bytes(one.read_bytes()[:-1])
    flip_bytes(step_in(tmp_path, 2))
    with pytest.warns(UserWarning, match="damaged") as caught:
        assert checkpoint.resume().step == 0
    assert {each.filename for each in caught} == {__file__}
    step_in(tmp_path, 0).unlink()
    step_in(tmp_path, 3).mkdir()
    with pytest.warns(UserWarning, match="damaged") as of_all:
        assert not checkpoint.resume()
    assert f"{step_in(tmp_path, 3)} is damaged: rest.pt cannot be read" in str(of_all[0].message)
    warnings = [str(each.message).replace(str(tmp_path), "FOLDER") for each in (*caught, of_all[1])]
    assert warnings == snapshot


def test_a_damaged_checkpoint_does_not_replace_the_last_intact_one(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, keep=1)
    checkpoint.save(9)
    flip_bytes(step_in(tmp_path, 9))
    checkpoint.save(5)
    assert names(tmp_path) == ["step-00000005.pt", "step-00000009.pt"]
    checkpoint.save(9)
    assert names(tmp_path) == ["step-00000009.pt"]


def test_drafts_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    for clear in (lambda: checkpoint.save(1), checkpoint.resume):
        (tmp_path / ".step-00000007.pt.draft").write_bytes(b"half")
        (tmp_path / ".step-00000008.draft").mkdir()
        (tmp_path / ".step-00000008.draft" / "part").touch()
        clear()
        assert names(tmp_path) == ["step-00000001.pt"]


def test_a_draft_that_another_user_prepared_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, path = tmp_path / "victim", tmp_path / "step-00000001.pt"
    victim.write_text("kept")
    atomic_files.draft_path(path).symlink_to(victim)
    atomic_files.write_atomically(path, {"step": 1})
    assert (victim.read_text(), path.is_symlink()) == ("kept", False)
    draft = atomic_files.draft_path(tmp_path / "step-00000002")
    atomic_files.make_draft(draft)
    atomic_files.make_draft(draft)  # by another rank
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)
    with pytest.raises(PermissionError, match=r"step-00000002\.draft belongs to another user"):
        atomic_files.make_draft(draft)


def test_commit_folder_replaces_a_folder_of_the_same_name(tmp_path: Path) -> None:
    path = tmp_path / "step-00000001"
    for content in ("old", "new"):
        draft = atomic_files.draft_path(path)
        draft.mkdir()
        (draft / "part").write_text(content)
        atomic_files.commit_folder(draft, path)
    assert names(tmp_path) == ["step-00000001"]
    assert (path / "part").read_text() == "new"
    # a folder that was set aside is restored unless it was replaced
    for name in (".step-00000001.aside", ".step-00000002.aside"):
        (tmp_path / name).mkdir()
    atomic_files.remove_leftovers(tmp_path)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert (path / "part").read_text() == "new"


def test_a_failed_save_raises_an_error_and_keeps_the_old_checkpoint(
    tmp_path: Path, refused: Callable[..., str], snapshot: SnapshotAssertion
) -> None:
    checkpoint = Checkpoint(tmp_path)
    model = nn.Linear(1000, 100)
    checkpoint.save(1, model=model)
    with disk_full(100_000):
        reason = refused(checkpoint.save, 2, model=model)
    assert [reason] == snapshot
    assert names(tmp_path) == ["step-00000001.pt"]
    assert checkpoint.resume(model=model).step == 1
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"\[Errno (17|20)\]"):
        Checkpoint(tmp_path / "file").save(1)


def test_a_relative_checkpoint_folder_does_not_follow_a_change_of_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint("runs/first")
    monkeypatch.chdir("/")
    checkpoint.save(0)
    assert names(folder / "runs" / "first") == ["step-00000000.pt"]


@pytest.mark.process
@pytest.mark.parametrize("kills", [20, pytest.param(100, marks=pytest.mark.full)])
def test_a_killed_writer_always_leaves_a_complete_checkpoint(tmp_path: Path, kills: int) -> None:
    script = Path(__file__).parents[2] / "checkpoint_killer.py"
    command = [sys.executable, "-W", "error", str(script), str(tmp_path), str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=140, check=False)
    assert done.returncode == 0, done.stderr
    n_drafts, n_saved = map(int, done.stdout.split())
    assert n_drafts >= kills / 5  # it was killed while it wrote
    assert n_saved >= kills


# ---- what can be saved


def test_plain_values_are_restored_exactly_and_other_numbers_as_plain(tmp_path: Path) -> None:
    plain = [
        {"a": [1, 2.5, True, None, "x", b"y", 1j], ("k", 1): {3}},
        {1: (torch.float32, torch.device("cpu"), torch.Size([2]))},
        OrderedDict(a=1),
        float("inf"),
    ]
    numbers = [np.float64(1.5), np.float32(2), np.int64(3), signal.SIGHUP]
    Checkpoint(tmp_path).save(0, plain=plain, numbers=numbers)
    resumed = Checkpoint(tmp_path).resume()
    assert resumed["plain"] == plain
    assert resumed["numbers"] == [1.5, 2.0, 3, 1]
    assert {type(each) for each in resumed["numbers"]} == {float, int}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_tensors_of_all_kinds_are_restored(tmp_path: Path, asynchronous: bool) -> None:
    extra = [torch.tensor(2), torch.eye(2).to_sparse(), torch.ones(2, 3).T, torch.zeros(0)]
    extra += [torch.ones(2, dtype=torch.bfloat16), nn.Parameter(torch.ones(1))]
    extra += [torch.zeros(1_000_000)[:3]]  # of a view, only its own elements are saved
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(0, extra=extra, asynchronous=asynchronous)
    resumed = checkpoint.resume()
    for found, expected in zip(resumed["extra"], extra, strict=True):
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=0)
        assert not found.requires_grad
    assert step_in(tmp_path, 0).stat().st_size < 100_000


def test_save_refuses_unloadable_values_and_invalid_arguments(
    tmp_path: Path, refused: Callable[..., str], snapshot: SnapshotAssertion
) -> None:
    checkpoint = Checkpoint(tmp_path)
    logs, models = {"logs": [0, np.zeros(2)]}, [nn.Linear(1, 1), nn.Linear(1, 1)]
    extras = [{"plot": print}, logs, [Path()], {frozenset(): 1}, {(1, Path()): 1}, {Path()}]
    several = [models, tuple(models), dict(enumerate(models))]
    assert [
        *(refused(checkpoint.save, 0, extra=each) for each in extras),
        *(refused(checkpoint.save, 0, models=each) for each in several),
        refused(Checkpoint, tmp_path, keep=0, kind=ValueError),
        refused(checkpoint.save, -1, kind=ValueError),
    ] == snapshot
    assert names(tmp_path) == []


# ---- in the background


def test_an_asynchronous_save_holds_the_state_at_the_time_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Semaphore(0)
    write = atomic_files.write_atomically
    monkeypatch.setattr(
        atomic_files,
        "write_atomically",
        lambda *args: may_write.acquire(timeout=10) and write(*args),
    )
    run, again = run_of(), run_of(seed=1)
    train(run, range(3))
    before = model_state(run)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(3, **run, asynchronous=True)
    assert 0 < checkpoint.stall < 10  # the loop is not held until it may write
    train(run, range(3, 6))
    assert checkpoint.newest() is None
    may_write.release()
    checkpoint.save(6, **run, asynchronous=True)
    assert checkpoint.newest() == step_in(tmp_path, 3)
    may_write.release()
    Checkpoint(tmp_path).resume(**again)
    assert not torch.equal(model_state(again), before)
    step_in(tmp_path, 6).unlink()
    Checkpoint(tmp_path).resume(**again)
    assert torch.equal(model_state(again), before)


def test_an_error_of_an_asynchronous_save_is_logged_and_raised_by_the_next_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, refused: Callable[..., str]
) -> None:
    checkpoint = Checkpoint(tmp_path)
    model = nn.Linear(1000, 100)
    with disk_full(100_000), caplog.at_level(logging.ERROR, "nbddp"):
        checkpoint.save(2, model=model, asynchronous=True)
        raised = refused(checkpoint.save, 3)
    for text in (raised, caplog.text):
        assert "step-00000002.pt: [Errno 27]" in text
    checkpoint.save(4, model=model, asynchronous=True)
    checkpoint.wait()
    checkpoint.wait()
    assert names(tmp_path) == ["step-00000004.pt"]


@pytest.mark.process
def test_an_exiting_process_completes_its_asynchronous_save(tmp_path: Path) -> None:
    source = (
        "import torch\nfrom nbddp import Checkpoint\n"
        f"Checkpoint({str(tmp_path)!r}).save(1, model=torch.nn.Linear(3000, 1000),"
        " asynchronous=True)"
    )
    subprocess.run([sys.executable, "-c", source], check=True)
    assert atomic_files.find_damage(step_in(tmp_path, 1)) == ""


def test_a_pickled_checkpoint_object_keeps_its_folder_and_settings(tmp_path: Path) -> None:
    made, model = Checkpoint(tmp_path, keep=2), nn.Linear(2, 1)
    made.save(3, model=model)
    made.save(4, asynchronous=True, model=model)
    other = pickle.loads(pickle.dumps(made))
    made.wait()
    assert (other.folder, other.keep) == (made.folder, 2)
    assert other.resume(model=nn.Linear(2, 1)).step == 4
    other.save(5, model=model)
    assert made.resume(model=nn.Linear(2, 1)).step == 5


def test_the_random_state_of_the_device_is_restored(devices: FakeDevices) -> None:
    state = state_dicts.random_state()
    devices.random_state = torch.tensor([2])
    state_dicts.restore_random(state)
    assert devices.random_state.tolist() == [1]
