"""What a run is tried with is written down, whatever it is said as."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import nbddp
from nbddp.errors import ArgumentError
from nbddp.train import report
from nbddp.train.report import LoggerSink


class Recorder(LoggerSink):
    """Keeps what happens."""

    def __init__(self) -> None:
        self.found: list[tuple[str, dict[str, Any]]] = []

    def happened(self, kind: str, facts: dict[str, Any]) -> None:
        self.found.append((kind, facts))


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    sink = Recorder()
    report.set_sink(sink)
    yield sink
    report.set_sink(LoggerSink())


def said(recorder: Recorder) -> dict[str, Any]:
    [(kind, facts)] = recorder.found
    assert kind == "config"
    values: dict[str, Any] = facts["values"]
    return values


def test_numbers_and_words_are_kept_as_they_are(recorder: Recorder) -> None:
    nbddp.config(lr=0.1, batch=32, model="resnet18", amp=True, seed=None)
    assert said(recorder) == {
        "lr": 0.1,
        "batch": 32,
        "model": "resnet18",
        "amp": True,
        "seed": None,
    }


class Shy:
    def __repr__(self) -> str:
        raise RuntimeError("not now")


def test_a_value_whose_repr_fails_is_kept_by_its_type(recorder: Recorder) -> None:
    nbddp.config(lr=0.1, shy=Shy())
    assert said(recorder) == {"lr": 0.1, "shy": "<Shy: its repr failed>"}


@dataclass
class Settings:
    lr: float = 0.1
    inner: dict[str, int] = field(default_factory=lambda: {"depth": 3})


@pytest.mark.parametrize(
    "values",
    [Settings(), {"lr": 0.1, "inner": {"depth": 3}}, Namespace(lr=0.1, inner=Namespace(depth=3))],
    ids=["dataclass", "mapping", "namespace"],
)
def test_settings_inside_others_have_a_dot(values: Any, recorder: Recorder) -> None:
    nbddp.config(values)
    assert said(recorder) == {"lr": 0.1, "inner.depth": 3}


def test_things_are_said_in_a_few_words(recorder: Recorder) -> None:
    nbddp.config(
        model=nn.Linear(3, 4),
        optimizer=torch.optim.SGD,
        dtype=torch.bfloat16,
        rate=torch.tensor(0.5),
        betas=(0.9, 0.95),
        long="x" * 10_000,
    )
    values = said(recorder)
    assert values.pop("long") == "x" * 500
    assert values == {
        "model": "Linear, 16 parameters",
        "optimizer": "SGD",
        "dtype": "torch.bfloat16",
        "rate": 0.5,
        "betas": "(0.9, 0.95)",
    }


def test_a_model_that_is_not_made_yet_and_one_that_is_wrapped_have_a_name(
    recorder: Recorder,
) -> None:
    nbddp.config(lazy=nn.LazyLinear(3), wrapped=nn.DataParallel(nn.Linear(1, 1)))
    assert said(recorder) == {"lazy": "LazyLinear, 0 parameters", "wrapped": "Linear, 2 parameters"}


def test_settings_that_have_themselves_inside_come_to_an_end(recorder: Recorder) -> None:
    settings: dict[str, Any] = {"lr": 0.1}
    settings["again"] = settings
    nbddp.config(settings)
    assert said(recorder)["again.again.lr"] == 0.1


def test_nothing_to_say_is_nothing_said(recorder: Recorder) -> None:
    nbddp.config()
    assert recorder.found == []


@pytest.mark.parametrize(
    ("values", "named", "error", "words"),
    [
        (0.1, {}, TypeError, r"nbddp.config: settings need names.*got float"),
        (Settings, {}, TypeError, r"nbddp.config: settings need names.*got type"),
        ({1: 2}, {}, TypeError, "nbddp.config: a name must be a string, got 1"),
        ({"lr": 1}, {"lr": 2}, ArgumentError, "nbddp.config: lr: given twice"),
        ({f"x{n}": n for n in range(501)}, {}, ArgumentError, "501 settings, and a run has up to"),
    ],
)
def test_what_cannot_be_settings_is_refused_and_nothing_is_said(
    values: Any, named: Any, error: type[Exception], words: str, recorder: Recorder
) -> None:
    with pytest.raises(error, match=words):
        nbddp.config(values, **named)
    assert recorder.found == []


def test_under_torchrun_it_goes_to_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="nbddp"):
        nbddp.config(lr=0.1)
    assert caplog.messages == ["config values={'lr': 0.1}"]
