"""The settings of a run are recorded, in any form they are given."""

from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from refusals import refusal
from sinks import Recorder
from syrupy.assertion import SnapshotAssertion
from torch import nn

import nbddp
from nbddp.errors import ArgumentError


def config_values(recorder: Recorder) -> dict[str, Any]:
    [(kind, facts)] = recorder.calls
    assert kind == "config"
    values: dict[str, Any] = facts["values"]
    return values


class Shy:
    def __repr__(self) -> str:
        raise RuntimeError("not now")


@dataclass
class Settings:
    lr: float = 0.1
    inner: dict[str, int] = field(default_factory=lambda: {"depth": 3})


@pytest.mark.parametrize(
    "values",
    [Settings(), {"lr": 0.1, "inner": {"depth": 3}}, Namespace(lr=0.1, inner=Namespace(depth=3))],
    ids=["dataclass", "mapping", "namespace"],
)
def test_nested_settings_get_dotted_names(values: Any, recorder: Recorder) -> None:
    nbddp.config(values)
    assert config_values(recorder) == {"lr": 0.1, "inner.depth": 3}


KEPT: dict[str, tuple[Any, Any]] = {
    "lr": (0.1, 0.1),
    "batch": (32, 32),
    "name": ("resnet18", "resnet18"),
    "amp": (True, True),
    "seed": (None, None),
    "shy": (Shy(), "<Shy: its repr failed>"),
    "model": (nn.Linear(3, 4), "Linear, 16 parameters"),
    "lazy": (nn.LazyLinear(3), "LazyLinear, 0 parameters"),
    "wrapped": (nn.DataParallel(nn.Linear(1, 1)), "Linear, 2 parameters"),
    "optimizer": (torch.optim.SGD, "SGD"),
    "dtype": (torch.bfloat16, "torch.bfloat16"),
    "rate": (torch.tensor(0.5), 0.5),
    "betas": ((0.9, 0.95), "(0.9, 0.95)"),
    "long": ("x" * 10_000, "x" * 500),
}


def test_config_keeps_plain_values_and_describes_other_objects_briefly(recorder: Recorder) -> None:
    nbddp.config({name: value for name, (value, _) in KEPT.items()})
    assert config_values(recorder) == {name: kept for name, (_, kept) in KEPT.items()}


def test_settings_that_contain_themselves_have_a_limited_depth(recorder: Recorder) -> None:
    settings: dict[str, Any] = {"lr": 0.1}
    settings["again"] = settings
    nbddp.config(settings)
    assert config_values(recorder)["again.again.lr"] == 0.1


def test_invalid_settings_are_refused_and_no_settings_report_nothing(
    recorder: Recorder, snapshot: SnapshotAssertion
) -> None:
    many = {f"x{number}": number for number in range(501)}
    assert [
        *(refusal(TypeError, nbddp.config, wrong) for wrong in (0.1, Settings, {1: 2})),
        refusal(ArgumentError, nbddp.config, {"lr": 1}, lr=2),
        refusal(ArgumentError, nbddp.config, many),
        refusal(ArgumentError, nbddp.config, {"": 1}),
    ] == snapshot
    assert recorder.calls == []
    nbddp.config()
    assert recorder.calls == []
