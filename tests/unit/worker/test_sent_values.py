"""Values on their way to the notebook: what cannot be sent is named, with the way out."""

import pickle
import threading
from typing import Any

from refusals import refusal
from syrupy.assertion import SnapshotAssertion
from torch import nn

from nbddp.worker.requests import dumps


def test_a_picklable_value_is_pickled_without_a_message() -> None:
    data, note = dumps({"a": [1, lambda: 2]}, name="x")
    assert pickle.loads(data)["a"][1]() == 2
    assert note == ""


def test_values_that_cannot_be_pickled_get_an_error_with_the_next_step(
    snapshot: SnapshotAssertion,
) -> None:
    model: Any = nn.Linear(1, 1)
    model.lock = threading.Lock()
    for value, name in (({"a": [model.lock]}, "x"), (model, "model")):
        reason = refusal(pickle.PicklingError, dumps, value, name=name)
        assert reason == snapshot(name=name)
