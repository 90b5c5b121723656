"""Reports of a training loop: numeric values, and bars that always end."""

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refusal
from sinks import Recorder, recording
from syrupy.assertion import SnapshotAssertion
from torch.utils.data import DataLoader, IterableDataset

from nbddp.errors import ArgumentError
from nbddp.reporting import log_and_track
from nbddp.reporting.log_and_track import ProgressBar, log, record_event, track


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> Recorder:
    """Collect reports here during a test; show every move of a bar."""
    monkeypatch.setattr(log_and_track, "SHOW_PERIOD", 0.0)
    return recorder


NUMBERS: list[Any] = [
    *(3, -0.5, True, math.inf, Fraction(1, 4), np.float32(0.5), np.int64(7), np.bool_(False)),
    *(np.array(2.5), torch.tensor(0.25), torch.tensor([0.25]), torch.tensor(3), torch.tensor(True)),
    torch.ones(1, 1, dtype=torch.bfloat16),
    torch.ones(2, requires_grad=True).sum(),  # with a graph: without a warning
]
FLOATS = [3.0, -0.5, 1.0, math.inf, 0.25, 0.5, 7.0, 0.0, 2.5, 0.25, 0.25, 3.0, 1.0, 1.0, 2.0]
STEPS: list[Any] = [0, -1, 10**30, np.int64(5), torch.tensor(5)]


def test_log_converts_values_of_any_type_to_floats_and_steps_to_integers(sink: Recorder) -> None:
    for value in NUMBERS:
        log(step=3, loss=value)
    for step in STEPS:
        log(step=step, loss=1)
    assert sink.calls[: len(NUMBERS)] == [(3, {"loss": number}) for number in FLOATS]
    assert [step for step, _ in sink.calls[len(NUMBERS) :]] == [0, -1, 10**30, 5, 5]
    assert {(type(step), type(values["loss"])) for step, values in sink.calls} == {(int, float)}


def test_log_below_too_many_calls_names_the_recursion_not_the_value(sink: Recorder) -> None:
    class Deep:
        def __float__(self) -> float:
            return float(self)

    with pytest.raises(RecursionError):
        log(loss=Deep())
    assert sink.calls == []


def test_without_a_step_the_step_counts_earlier_values_of_the_metric(sink: Recorder) -> None:
    reached: list[tuple[int, str]] = []
    end = log_and_track.on_step(lambda step, source: reached.append((step, source)))
    log_and_track.begin_cell()
    for _ in range(3):
        log(loss=1)
    log(accuracy=1)
    log(loss=1, accuracy=1)
    log_and_track.begin_cell()
    log(accuracy=1)
    end()
    assert reached == [(step, "log") for step in (0, 1, 2, 0, 3, 0)]
    assert [step for step, _ in sink.calls] == [None] * 6


NO_NUMBERS: list[Any] = [
    *("low", "1.0", b"1", bytearray(b"1"), [1.0], {"a": 1}, None, 1 + 2j, np.complex64(2j)),
    *(np.complex128(2j), torch.tensor(2j), torch.ones(2), torch.ones(0), np.ones(2)),
]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_log_refuses_other_values_and_reports_nothing(sink: Recorder, value: Any) -> None:
    reason = refusal(TypeError, log, step=3, accuracy=0.5, loss=value)
    assert " loss " in reason
    assert reason.endswith(f", got {value!r}")
    assert sink.calls == []


REFUSED: dict[str, tuple[type[Exception], tuple[Any, ...], dict[str, Any]]] = {
    "a long text": (TypeError, (), {"step": 3, "loss": "x" * 1000}),
    "a large number": (TypeError, (), {"step": 3, "loss": 10**400}),
    "a step": (TypeError, (), {"step": 1.0, "loss": 1}),
    "a step in a tensor": (TypeError, (), {"step": torch.tensor(1.0), "loss": 1}),
    "a step in letters": (TypeError, (), {"step": "1", "loss": 1}),
    "time": (ArgumentError, (), {"step": 3, "loss": 1, "time": 2}),
    "rank": (ArgumentError, (), {"step": 3, "loss": 1, "rank": 2}),
    "attempt": (ArgumentError, (), {"step": 3, "loss": 1, "attempt": 2}),
    "step": (ArgumentError, ({"step": 1},), {"step": 3}),
    "twice": (ArgumentError, ({"loss": 1},), {"step": 3, "loss": 2.0}),
    "no name": (TypeError, ({3: 1},), {"step": 3}),
    "an empty name": (ArgumentError, ({"": 1},), {"step": 3}),
    "no names": (TypeError, (torch.tensor(0.5),), {"step": 3}),
}


def test_invalid_log_calls_are_refused(sink: Recorder, snapshot: SnapshotAssertion) -> None:
    reasons = {}
    for name, (kind, values, named) in REFUSED.items():
        reasons[name] = refusal(kind, log, *values, **named)
        assert sink.calls == [], name
    assert reasons == snapshot


def test_names_that_are_not_identifiers_can_be_given_in_a_mapping(sink: Recorder) -> None:
    log({"train/loss": torch.tensor(0.5), "lr": 0.1}, step=3, accuracy=1)
    assert [*sink.calls[0][1]] == ["train/loss", "lr", "accuracy"]
    log(MappingProxyType({"train/loss": 0.25}), step=4)
    log({}, step=5)
    assert sink.calls == [
        (3, {"train/loss": 0.5, "lr": 0.1, "accuracy": 1.0}),
        (4, {"train/loss": 0.25}),
        5,
    ]


def test_without_a_panel_metrics_and_events_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nbddp")
    log(step=3, loss=0.25, accuracy=1 / 3)
    log(loss=0.25, accuracy=1 / 3)
    record_event("checkpoint", step=3, path="a b")
    assert list(track([1, 2, 3], label="epoch 1")) == [1, 2, 3]
    assert caplog.record_tuples == [
        ("nbddp", logging.INFO, "step 3: loss=0.25 accuracy=0.333333"),
        ("nbddp", logging.INFO, "loss=0.25 accuracy=0.333333"),
        ("nbddp", logging.INFO, "checkpoint step=3 path=a b"),
    ]


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Unsure(Endless):
    """It has a length, and does not know it."""

    def __len__(self) -> int:
        raise TypeError("nobody knows")


@pytest.mark.parametrize(
    ("make", "total"),
    [
        (lambda: [0, 1, 2], 3),
        (lambda: range(3), 3),
        (lambda: DataLoader([0, 1, 2], batch_size=None), 3),
        (lambda: (item for item in range(3)), 0),
        (lambda: DataLoader(Endless(), batch_size=None), 0),
        (Unsure, 0),
    ],
    ids=["list", "range", "loader", "generator", "endless loader", "unsure"],
)
def test_track_finds_the_total_if_the_iterable_has_a_length(
    sink: Recorder, make: Callable[[], Any], total: int
) -> None:
    assert [int(item) for item in track(make())] == [0, 1, 2]
    assert [(bar.total, bar.done) for bar in sink.bars] == [(total, 3)]


def test_a_given_total_is_used_and_converted_to_a_plain_int(sink: Recorder) -> None:
    assert len(track([1, 2], total=9)) == 9
    list(track((item for item in (1, 2)), total=np.int64(9), label=np.int64(7)))
    [bar] = sink.bars
    assert (type(bar.total), type(bar.label)) == (int, str)
    assert (bar.total, bar.label) == (9, "7")


def test_a_tracked_loop_reports_its_begin_each_step_and_its_end(sink: Recorder) -> None:
    loop = iter(track("ab", label="x"))
    assert sink.calls == []
    for item in loop:
        sink.calls.append(("item", item))
    assert sink.calls == [
        ("begin", "x"),
        ("item", "a"),
        ("show", "x", 1),
        ("item", "b"),
        ("show", "x", 2),
        ("end", "x", 2),
    ]


def test_a_fast_loop_is_rarely_shown(sink: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_and_track, "SHOW_PERIOD", 1000.0)
    list(track(range(100)))
    assert [told for told in sink.calls if told[0] == "show"] == [("show", "", 1)]
    assert sink.bars[0].done == 100


def test_a_tracked_loop_ends_in_the_sink_if_it_breaks_or_raises(sink: Recorder) -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    def train() -> None:
        for _ in track([1, 2, 3], label="x"):
            raise ValueError("no")

    for item in track([1, 2, 3], label="x"):
        if item == 2:
            break
    assert sink.calls[-1] == ("end", "x", 1)
    with pytest.raises(ValueError, match="no"):
        train()
    assert sink.calls[-1] == ("end", "x", 0)
    with pytest.raises(OSError, match="the disk is gone"):
        list(track(items(), label="x"))
    assert sink.calls[-1] == ("end", "x", 1)


def test_each_iteration_over_a_tracked_sequence_has_a_new_bar(sink: Recorder) -> None:
    loop = track([1, 2], label="x")
    assert [list(loop), list(loop)] == [[1, 2], [1, 2]]
    assert [bar.done for bar in sink.bars] == [2, 2]
    assert sink.bars[0] is not sink.bars[1]


def test_a_progress_bar_ends_in_the_sink_in_which_it_started(sink: Recorder) -> None:
    loop = iter(track([1, 2], label="x"))
    next(loop)
    with recording() as other:
        list(loop)
    assert sink.calls[-1] == ("end", "x", 2)
    assert other.calls == []


def test_a_bars_state_has_its_label_counts_and_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count(10.0, 2.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    bar = ProgressBar(label="epoch 1", total=8, began=8.0)
    bar.done = 3
    assert bar.state() == ["epoch 1", 3, 8, 2.0]
    assert bar.is_open
    bar.close()
    assert not bar.is_open
    assert bar.state() == bar.state() == ["epoch 1", 3, 8, 4.0]
