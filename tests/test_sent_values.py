"""Values on their way to the notebook: what cannot be sent is named, with the way out."""

from __future__ import annotations

import pickle
import re
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion
from torch import nn

from nbddp.worker.values import MAX_TRIED, dumps


@dataclass
class Trainer:
    steps: int = 3
    parts: list[Any] = field(default_factory=lambda: [1, threading.Lock()])


def test_a_value_that_can_be_pickled_is_and_nothing_is_said() -> None:
    data, note = dumps({"a": [1, lambda: 2]}, name="x")
    assert pickle.loads(data)["a"][1]() == 2
    assert note == ""


@pytest.mark.parametrize(
    ("value", "name", "kind"),
    [
        (threading.Lock(), "x", "lock"),
        ({"a": 1, "b": threading.Lock()}, "x['b']", "lock"),
        ((0, [threading.Lock()]), "x[1][0]", "lock"),
        (Trainer(), "x.parts[1]", "lock"),
        ([*range(2 * MAX_TRIED), threading.Lock()], f"x[{2 * MAX_TRIED}]", "lock"),
        # to try them all would take too long
        ([*([()] * MAX_TRIED), threading.Lock()], "x", "list"),
        ((each for each in ()), "x", "generator"),
    ],
)
def test_the_part_that_cannot_be_sent_is_named(value: Any, name: str, kind: str) -> None:
    with pytest.raises(pickle.PicklingError) as caught:
        dumps(value, name="x")
    assert re.match(rf"{re.escape(name)} .*\b{kind}\b", str(caught.value))
    assert "TypeError" in str(caught.value)


def test_a_value_that_holds_itself_is_looked_at_to_a_depth() -> None:
    value: list[Any] = [threading.Lock()]
    value.insert(0, value)
    with pytest.raises(pickle.PicklingError, match=r"^x(\[0\])+ .*\blist\b"):
        dumps(value, name="x")


def test_what_cannot_be_sent_is_said_with_the_way_out(snapshot: SnapshotAssertion) -> None:
    model = nn.Linear(1, 1)
    model.lock = threading.Lock()
    for value, name in ((model.lock, "x"), ([model], "models")):
        with pytest.raises(pickle.PicklingError) as caught:
            dumps(value, name=name)
        assert str(caught.value) == snapshot(name=name)
