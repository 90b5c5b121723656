"""Checkpoints in one process: whole or absent, and what they bring back."""

from __future__ import annotations

import enum
import gc
import logging
import pickle
import random
import resource
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
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbddp.errors import CheckpointError, RequestError
from nbddp.train import files, report
from nbddp.train.checkpoint import Checkpoint, Resumed, checkpoints
from nbddp.train.precision import precision


class Loader:
    """What a checkpoint asks of a loader."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Kept(report.LoggerSink):
    """A sink that keeps what happened."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def happened(self, kind: str, facts: dict[str, Any]) -> None:
        self.events.append((kind, facts))


@pytest.fixture
def events() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """What happened, kind and facts."""
    before, kept = report._sink, Kept()
    report.set_sink(kept)
    yield kept.events
    report.set_sink(before)


def run_of(seed: int = 0) -> dict[str, Any]:
    """All parts of a run, their state depending on the seed."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": Loader()}


def train(run: dict[str, Any], steps: range, save: Callable[[int], None] | None = None) -> None:
    """Steps with data, dropout and noise from torch's, Python's and NumPy's random numbers."""
    amp = run.get("precision") or precision()
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


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


@contextmanager
def disk_full(size: int) -> Iterator[None]:
    """No file may grow larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ---- going on


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_resumed_run_ends_bit_for_bit_where_an_unbroken_one_does(
    tmp_path: Path, asynchronous: bool
) -> None:
    random.seed(1)
    np.random.seed(1)
    unbroken = run_of()
    checkpoint = Checkpoint(tmp_path)

    def save(step: int) -> None:
        if step == 29:
            checkpoint.save(step, **unbroken, extra={"loss": [0.5]}, asynchronous=asynchronous)

    train(unbroken, range(60), save)
    checkpoint.wait()
    again = run_of(seed=5)
    resumed = Checkpoint(tmp_path).resume(**again)
    assert resumed == Resumed(29, {"extra": {"loss": [0.5]}}, tmp_path / "step-00000029.pt")
    train(again, range(resumed.step + 1, 60))
    assert torch.equal(model_state(again), model_state(unbroken))
    assert str(again["optimizer"].state_dict()) == str(unbroken["optimizer"].state_dict())
    assert again["scheduler"].state_dict() == unbroken["scheduler"].state_dict()
    assert again["loader"].position == 60


def test_an_empty_or_missing_folder_has_nothing_to_resume(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "none")
    resumed = checkpoint.resume(**run_of(), best=0.5, history=None)
    assert not resumed
    assert resumed == Resumed(0, {"best": 0.5, "history": None}, None)
    assert checkpoint.newest() is None
    assert not checkpoint.folder.exists()


def test_only_what_is_asked_for_is_loaded(tmp_path: Path) -> None:
    run, other = run_of(), run_of(seed=1)
    Checkpoint(tmp_path).save(3, **run)
    left = dict.fromkeys(["optimizer", "scheduler", "loader"])
    assert Checkpoint(tmp_path).resume(model=other["model"], **left)
    assert torch.equal(model_state(other), model_state(run))


def test_what_it_does_not_hold_is_said(tmp_path: Path) -> None:
    run = run_of()
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(3, model=run["model"], optimizer=run["optimizer"])
    with pytest.raises(CheckpointError) as caught:
        checkpoint.resume(**run)
    path = tmp_path / "step-00000003.pt"
    assert str(caught.value) == (f"{path} holds no scheduler and no loader, only model, optimizer")
    with pytest.raises(CheckpointError, match=r"holds no best, only model, optimizer$"):
        checkpoint.resume(model=run["model"], optimizer=run["optimizer"], best=0.5)
    checkpoint.save(4)
    with pytest.raises(CheckpointError, match=r"step-00000004.pt holds no model, only its step$"):
        checkpoint.resume(model=run["model"])
    checkpoint.save(5, scheduler=None, seen=3)
    with pytest.raises(CheckpointError, match=r"holds no scheduler, only scheduler, seen$"):
        checkpoint.resume(scheduler=run["scheduler"])


def test_torch_reads_the_file_as_it_is(tmp_path: Path) -> None:
    run = run_of()
    Checkpoint(tmp_path).save(3, **run, extra="words")
    found = torch.load(tmp_path / "step-00000003.pt", weights_only=True)
    assert found["step"] == 3
    assert found["values"] == {"extra": "words"}
    assert found["parts"]["model"].keys() == run["model"].state_dict().keys()


@pytest.mark.parametrize("is_saved_wrapped", [False, True])
def test_a_ddp_model_and_a_plain_one_load_each_others(
    tmp_path: Path, is_saved_wrapped: bool
) -> None:
    from torch import distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain, wrapped = nn.Linear(4, 2), DistributedDataParallel(nn.Linear(4, 2))
        saved, loaded = (wrapped, plain) if is_saved_wrapped else (plain, wrapped)
        Checkpoint(tmp_path).save(0, model=saved)
        Checkpoint(tmp_path).resume(model=loaded)
        assert torch.equal(plain.weight, wrapped.module.weight)
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler, of itself
def test_a_compiled_models_names_are_those_of_the_model(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    Checkpoint(tmp_path).save(0, model=torch.compile(model, backend="eager"))
    found = torch.load(tmp_path / "step-00000000.pt", weights_only=True)
    assert list(found["parts"]["model"]) == ["weight", "bias"]
    assert found["parts"]["model"]._metadata == model.state_dict()._metadata


def test_checkpoint_and_resume_are_events(tmp_path: Path, events: list[Any]) -> None:
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(3)
    checkpoint.save(4, asynchronous=True)
    checkpoint.resume()
    path = str(tmp_path / "step-00000004.pt")
    assert [kind for kind, _ in events] == ["checkpoint", "checkpoint", "resume"]
    assert events[1][1].keys() == {"step", "seconds", "path"}
    assert events[1][1]["path"] == path
    assert 0 < events[1][1]["seconds"] < 30
    assert events[2][1] == {"step": 4, "path": path}


def test_the_live_ones_are_known_in_the_order_they_were_made(tmp_path: Path) -> None:
    gc.collect()
    first, second = Checkpoint(tmp_path / "b"), Checkpoint(tmp_path / "a")
    assert checkpoints()[-2:] == [first, second]
    del first
    gc.collect()
    assert [each.folder.name for each in checkpoints()[-1:]] == ["a"]


# ---- whole or absent


def test_the_newest_three_stay(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    (tmp_path / "notes.txt").touch()
    for step in range(10):
        checkpoint.save(step)
    assert names(tmp_path) == ["notes.txt", *(f"step-0000000{step}.pt" for step in (7, 8, 9))]
    assert checkpoint.newest() == tmp_path / "step-00000009.pt"


def test_a_damaged_newest_one_is_skipped_with_a_warning(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    for step in range(3):
        checkpoint.save(step)
    one, two = (tmp_path / f"step-0000000{step}.pt" for step in (1, 2))
    flip(two)
    one.write_bytes(one.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="is damaged") as caught:
        resumed = checkpoint.resume()
    assert resumed
    assert resumed.step == 0
    assert [str(each.message) for each in caught] == [
        f"{two} is damaged: it does not match its checksum; taking step-00000000.pt instead",
        f"{one} is damaged: it has no checksum at its end; taking step-00000000.pt instead",
    ]
    assert {each.filename for each in caught} == {__file__}


def test_when_all_are_damaged_there_is_nothing_to_resume(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(0)
    flip(tmp_path / "step-00000000.pt")
    (tmp_path / "step-00000001.pt").mkdir()
    with pytest.warns(UserWarning, match=r"taking no other instead$") as caught:
        assert not checkpoint.resume()
    assert "rest.pt cannot be read: [Errno 2] No such file" in str(caught[0].message)


def test_a_damaged_one_does_not_push_the_last_whole_one_out(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, keep=1)
    checkpoint.save(9)
    flip(tmp_path / "step-00000009.pt")
    checkpoint.save(5)
    assert names(tmp_path) == ["step-00000005.pt", "step-00000009.pt"]
    checkpoint.save(9)
    assert names(tmp_path) == ["step-00000009.pt"]


def test_what_a_killed_writer_left_is_cleared_away(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    for clear in (lambda: checkpoint.save(1), checkpoint.resume):
        (tmp_path / ".step-00000007.pt.draft").write_bytes(b"half")
        (tmp_path / ".step-00000008.draft").mkdir()
        (tmp_path / ".step-00000008.draft" / "part").touch()
        clear()
        assert names(tmp_path) == ["step-00000001.pt"]


def test_a_folder_that_was_set_aside_comes_back_unless_it_was_replaced(tmp_path: Path) -> None:
    for name in (".step-00000001.aside", ".step-00000002.aside", "step-00000002"):
        (tmp_path / name).mkdir()
    files.clean(tmp_path)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_folder_takes_the_place_of_one_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "step-00000001"
    for content in ("old", "new"):
        draft = files.draft_of(path)
        draft.mkdir()
        (draft / "part").write_text(content)
        files.commit_folder(draft, path)
    assert names(tmp_path) == ["step-00000001"]
    assert (path / "part").read_text() == "new"


def test_a_full_disk_is_said_and_the_old_one_stays(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    model = nn.Linear(1000, 100)
    checkpoint.save(1, model=model)
    with disk_full(100_000), pytest.raises(CheckpointError) as caught:
        checkpoint.save(2, model=model)
    assert str(caught.value) == (
        f"could not write {tmp_path / 'step-00000002.pt'}: [Errno 27] File too large; "
        "the checkpoints before it are untouched"
    )
    assert names(tmp_path) == ["step-00000001.pt"]
    resumed = checkpoint.resume(model=model)
    assert resumed
    assert resumed.step == 1


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"could not write .*\[Errno (17|20)\]"):
        Checkpoint(tmp_path / "file").save(1)


def test_a_relative_folder_stays_where_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint("runs/first")
    monkeypatch.chdir("/")
    checkpoint.save(0)
    assert names(folder / "runs" / "first") == ["step-00000000.pt"]


# ---- what can be saved


class Level(enum.IntEnum):
    LOW = 1


LOADABLE = [
    {"a": [1, 2.5, True, None, "x", b"y", 1j], ("k", 1): {3}},
    {1: (torch.float32, torch.device("cpu"), torch.Size([2]))},
    OrderedDict(a=1),
    float("inf"),
]


@pytest.mark.parametrize("extra", LOADABLE)
def test_plain_values_come_back_as_they_were(tmp_path: Path, extra: Any) -> None:
    Checkpoint(tmp_path).save(0, extra=extra)
    resumed = Checkpoint(tmp_path).resume()
    assert resumed
    assert resumed["extra"] == extra


def test_numbers_of_other_kinds_come_back_as_plain_ones(tmp_path: Path) -> None:
    Checkpoint(tmp_path).save(0, extra=[np.float64(1.5), np.float32(2), np.int64(3), Level.LOW])
    resumed = Checkpoint(tmp_path).resume()
    assert resumed
    assert resumed["extra"] == [1.5, 2.0, 3, 1]
    assert {type(each) for each in resumed["extra"]} == {float, int}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_tensors_of_all_kinds_come_back(tmp_path: Path, asynchronous: bool) -> None:
    extra = [torch.tensor(2), torch.eye(2).to_sparse(), torch.ones(2, 3).T, torch.zeros(0)]
    extra += [torch.ones(2, dtype=torch.bfloat16), nn.Parameter(torch.ones(1))]
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(0, extra=extra, asynchronous=asynchronous)
    resumed = checkpoint.resume()
    assert resumed
    for found, expected in zip(resumed["extra"], extra, strict=True):
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=0)
        assert not found.requires_grad


def test_the_middle_of_an_accumulation_is_refused(tmp_path: Path) -> None:
    run, amp = run_of(), precision(accumulate=2)
    with amp.autocast(run["model"]):
        loss = run["model"](torch.ones(4, 4)).mean()
    amp.step(loss, run["optimizer"])
    with pytest.raises(RequestError, match=r"^precision: micro-step 1 of 2: "):
        Checkpoint(tmp_path).save(0, **run, precision=amp)
    assert names(tmp_path) == []


def test_of_a_view_only_what_it_shows_is_saved(tmp_path: Path) -> None:
    Checkpoint(tmp_path).save(0, extra=torch.zeros(1_000_000)[:3])
    assert (tmp_path / "step-00000000.pt").stat().st_size < 100_000


@pytest.mark.parametrize(
    ("extra", "where"),
    [
        ({"plot": print}, "extra['plot'] is a builtin_function_or_method"),
        ({"logs": [0, np.zeros(2)]}, "extra['logs'][1] is a ndarray"),
        ([Path()], "extra[0] is a PosixPath"),
        ({frozenset(): 1}, "a key of extra is a frozenset"),
        ({(1, Path()): 1}, "a key of extra[1] is a PosixPath"),
        ({Path()}, "an item of extra is a PosixPath"),
    ],
)
def test_what_could_not_be_loaded_again_is_refused(tmp_path: Path, extra: Any, where: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path).save(0, extra=extra)
    assert str(caught.value) == (
        f"{where}: it could not be loaded again; save tensors, numbers and strings, and lists, "
        "dicts and sets of them"
    )
    assert names(tmp_path) == []


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^Checkpoint: keep must be at least 1, got 0$"):
        Checkpoint(tmp_path, keep=0)
    with pytest.raises(ValueError, match=r"^Checkpoint: step must be 0 or above, got -1$"):
        Checkpoint(tmp_path).save(-1)


# ---- in the background


def test_an_asynchronous_save_holds_what_was_there_when_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    write = files.write_whole
    monkeypatch.setattr(files, "write_whole", lambda *args: may_write.wait(10) and write(*args))
    run, again = run_of(), run_of(seed=1)
    train(run, range(3))
    before = model_state(run)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(3, **run, asynchronous=True)
    train(run, range(3, 6))
    assert checkpoint.newest() is None
    may_write.set()
    checkpoint.save(6, **run, asynchronous=True)
    assert checkpoint.newest() == tmp_path / "step-00000003.pt"
    Checkpoint(tmp_path).resume(**again)
    assert not torch.equal(model_state(again), before)
    (tmp_path / "step-00000006.pt").unlink()
    Checkpoint(tmp_path).resume(**again)
    assert torch.equal(model_state(again), before)


def test_its_error_is_logged_at_once_and_raised_by_the_next_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = Checkpoint(tmp_path)
    model = nn.Linear(1000, 100)
    with disk_full(100_000), caplog.at_level(logging.ERROR, "nbddp"):
        checkpoint.save(2, model=model, asynchronous=True)
        with pytest.raises(CheckpointError, match="File too large; the checkpoints before it are"):
            checkpoint.save(3)
    assert "could not write" in caplog.text
    assert "(raised again by the next save or wait)" in caplog.text
    checkpoint.save(4, model=model, asynchronous=True)
    checkpoint.wait()
    checkpoint.wait()
    assert names(tmp_path) == ["step-00000004.pt"]


@pytest.mark.process
def test_a_process_that_ends_writes_to_the_end(tmp_path: Path) -> None:
    source = (
        "import torch\nfrom nbddp import Checkpoint\n"
        f"Checkpoint({str(tmp_path)!r}).save(1, model=torch.nn.Linear(3000, 1000),"
        " asynchronous=True)"
    )
    subprocess.run([sys.executable, "-c", source], check=True)
    assert files.damage(tmp_path / "step-00000001.pt") == ""


def test_the_loop_is_held_for_less_time_than_by_a_synchronous_save(tmp_path: Path) -> None:
    model = nn.Linear(2500, 5000)  # 50 MB
    checkpoint = Checkpoint(tmp_path, keep=1)
    stalls: dict[bool, list[float]] = {False: [], True: []}
    for step in range(10):
        is_later = step % 2 == 1
        checkpoint.save(step, model=model, asynchronous=is_later)
        stalls[is_later].append(checkpoint.stall)
        checkpoint.wait()
    assert sorted(stalls[True])[2] < sorted(stalls[False])[2]


# ---- killed at any moment


@pytest.mark.process
@pytest.mark.parametrize("kills", [20, pytest.param(100, marks=pytest.mark.full)])
def test_a_writer_killed_many_times_always_leaves_a_whole_one(tmp_path: Path, kills: int) -> None:
    script = Path(__file__).with_name("checkpoint_killer.py")
    command = [sys.executable, "-W", "error", str(script), str(tmp_path), str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=140, check=False)
    assert done.returncode == 0, done.stderr
    n_drafts, n_saved = map(int, done.stdout.split())
    assert n_drafts >= kills / 5  # it was killed while it wrote
    assert n_saved >= kills


# ---- parts by any name


class Average:
    """An average of weights, as many people write it."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = [each.detach().clone() for each in model.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


def gan_of(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    generator, discriminator = nn.Linear(2, 3), nn.Linear(3, 1)
    return {
        "generator": generator,
        "discriminator": discriminator,
        "ema": Average(generator),
        "generator_optimizer": torch.optim.Adam(generator.parameters(), lr=0.1 * seed),
    }


def test_parts_of_any_name_come_back_and_values_with_them(tmp_path: Path) -> None:
    saved, loaded = gan_of(1), gan_of(2)
    Checkpoint(tmp_path).save(7, **saved, best=0.5, history=[torch.ones(2)], note=None)
    resumed = Checkpoint(tmp_path).resume(**loaded, best=0.0)
    assert (bool(resumed), resumed.step, resumed["best"], resumed["note"]) == (True, 7, 0.5, None)
    assert torch.equal(resumed.values["history"][0], torch.ones(2))
    assert resumed.get("lr", 0.1) == 0.1
    assert torch.equal(loaded["generator"].weight, saved["generator"].weight)
    assert torch.equal(loaded["discriminator"].weight, saved["discriminator"].weight)
    assert torch.equal(loaded["ema"].shadow[0], saved["ema"].shadow[0])
    assert loaded["generator_optimizer"].param_groups[0]["lr"] == 0.1


def test_a_value_that_there_is_not_is_missed_with_the_way_out(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.resume()["best"]
    assert str(caught.value) == (
        "no value 'best', and no other; give resume() one to begin with: best=..."
    )
    checkpoint.save(3, seen=1)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.resume()["best"]
    assert str(caught.value) == (
        f"{tmp_path / 'step-00000003.pt'} holds no value 'best', only seen; give resume() one to "
        "begin with: best=..."
    )


def test_a_part_that_is_left_out_is_said_unless_that_is_meant(tmp_path: Path) -> None:
    run = run_of()
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(3, **run, seen=1)
    with pytest.warns(UserWarning, match="holds") as caught:
        checkpoint.resume(model=run["model"], optimizer=None)
    assert [str(each.message) for each in caught] == [
        f"{tmp_path / 'step-00000003.pt'} holds scheduler, loader too, which resume() was not "
        "given and which was not loaded; write scheduler=None if that is meant"
    ]


def test_a_part_is_not_a_value_and_a_value_is_no_part(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(3, model=nn.Linear(1, 1), best=0.5)
    path = tmp_path / "step-00000003.pt"
    with pytest.raises(CheckpointError) as caught:
        checkpoint.resume(model=3)
    assert str(caught.value) == (
        f"{path} holds model as a part with a state, and here it is a plain value: int"
    )
    with pytest.raises(CheckpointError) as caught:
        checkpoint.resume(model=None, best=nn.Linear(1, 1))
    assert str(caught.value) == (
        f"{path} holds best as a plain value, and here it is a part with a state: Linear"
    )


@pytest.mark.parametrize("kind", [list, tuple, lambda models: dict(enumerate(models))])
def test_several_parts_under_one_name_are_refused_with_the_way_out(
    tmp_path: Path, kind: Callable[[list[nn.Module]], Any]
) -> None:
    checkpoint = Checkpoint(tmp_path)
    models = kind([nn.Linear(1, 1), nn.Linear(1, 1)])
    for act in (checkpoint.resume, lambda **parts: checkpoint.save(0, **parts)):
        with pytest.raises(TypeError) as caught:
            act(models=models)
        assert str(caught.value) == (
            f"Checkpoint: models is a {type(models).__name__} with a Linear in it: give each part "
            "by a name of its own, as in models_1=..., models_2=..."
        )
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_the_first_form_is_read(tmp_path: Path) -> None:
    run, again = run_of(), run_of(seed=1)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(3, **run)
    whole = files.read_whole(tmp_path / "step-00000003.pt")
    del whole["values"], whole["spread"]
    whole["extra"] = [0.5]
    whole["ranks"] = [{"random": whole["ranks"][0]["random"], "loader": {"position": 7}}]
    files.write_whole(tmp_path / "step-00000003.pt", whole)
    resumed = Checkpoint(tmp_path).resume(**again)
    assert (resumed.step, resumed["extra"], again["loader"].position) == (3, [0.5], 7)
    assert torch.equal(model_state(again), model_state(run))


# ---- one run in one folder


def lost(path: Path, name: str) -> str:
    return (
        f"{path / 'step-00000003.pt'} holds another {name} of the same step, which would be lost: "
        "use another name, or a folder for each"
    )


def test_two_models_do_not_take_each_others_place(tmp_path: Path) -> None:
    one, other = nn.Linear(2, 1), nn.Linear(2, 1)
    first, second = Checkpoint(tmp_path), Checkpoint(tmp_path)
    first.save(3, model=one)
    for checkpoint in (first, second):
        with pytest.raises(CheckpointError) as caught:
            checkpoint.save(3, model=other)
        assert str(caught.value) == lost(tmp_path, "model")
    with pytest.raises(CheckpointError) as caught:
        second.save(3, teacher=other)
    assert str(caught.value) == (
        f"{tmp_path / 'step-00000003.pt'} holds model of the same step, which would be lost: give "
        "one save all parts, or use a folder for each"
    )
    second.save(4, model=other)
    first.save(3, model=one, best=1)
    first.save(3, model=one, teacher=other)
    assert names(tmp_path) == ["step-00000003.pt", "step-00000004.pt"]


def test_a_model_of_another_shape_does_not_take_the_place_of_one_of_a_run_before(
    tmp_path: Path,
) -> None:
    Checkpoint(tmp_path).save(3, model=nn.Linear(2, 1))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path).save(3, model=nn.Linear(3, 1))
    assert str(caught.value) == lost(tmp_path, "model")
    flip(tmp_path / "step-00000003.pt")
    Checkpoint(tmp_path).save(3, model=nn.Linear(3, 1))


def test_the_same_run_done_again_takes_its_own_place(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    for seed in range(2):
        run = run_of(seed)
        run["model"].itself = [run["model"]]  # it lives on in a circle
        checkpoint.save(3, **run)
    assert torch.equal(
        torch.load(tmp_path / "step-00000003.pt")["parts"]["model"]["0.weight"],
        run["model"][0].weight,
    )


def test_a_checkpoint_goes_to_another_process_as_it_is_made(tmp_path: Path) -> None:
    made, model = Checkpoint(tmp_path, keep=2), nn.Linear(2, 1)
    made.save(3, model=model)
    made.save(4, asynchronous=True, model=model)
    other = pickle.loads(pickle.dumps(made))
    made.wait()
    assert (other.folder, other.keep) == (made.folder, 2)
    assert other.resume(model=nn.Linear(2, 1)).step == 4
    other.save(5, model=model)
    assert made.resume(model=nn.Linear(2, 1)).step == 5
