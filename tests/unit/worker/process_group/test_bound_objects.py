"""Live objects of a rank are listed weakly, under the user's names for them."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import OptimizedModule

from nbddp.reporting.training_objects import WeakList
from nbddp.worker.process_group import bound_objects
from nbddp.worker.process_group.bound_objects import sharded_modules
from nbddp.worker.watch.namespace import MAX_PARTS, paths_of


class Thing:
    """Something that can be referred to weakly."""


def test_a_weak_list_keeps_its_order_and_keeps_no_object_alive() -> None:
    roll, things = WeakList(), [Thing() for _ in range(5)]
    for thing in [*things, things[0]]:
        roll.add(thing)
    assert list(roll) == things
    del things[1:3], thing
    gc.collect()
    assert list(roll) == things


def test_an_object_is_named_by_its_shortest_public_path() -> None:
    thing = Thing()
    inner = SimpleNamespace(thing=thing, _hidden=[thing])
    for namespace, name in [
        ({"b": thing, "a": thing, "_": thing}, "a"),
        ({"trainer": inner}, "trainer.thing"),
        ({"kept": {"x": [inner]}}, "kept['x'][0].thing"),
        ({"_private": thing, "torch": torch}, None),
    ]:
        assert paths_of([thing], namespace).get(id(thing)) == name


def test_a_compiled_model_has_the_name_of_its_wrapper() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    compiled = OptimizedModule(model, lambda run: run)
    found = paths_of([model, model[0]], {"compiled": compiled})
    assert found[id(model)] == "compiled"


@pytest.mark.parametrize("kind", [list, dict])
def test_only_the_beginning_of_large_data_is_searched(kind: type) -> None:
    """A rank looks for names after each stop, and may have lists of 30 million numbers."""
    first, last = Thing(), Thing()
    data = [first, *range(MAX_PARTS), last]
    found = paths_of([first, last], {"data": dict(enumerate(data)) if kind is dict else data})
    assert found == {id(first): "data[0]"}


def test_the_search_for_object_names_is_skipped_if_empty_and_ends_in_cycles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Kept(SimpleNamespace):
        __dict__: Any = property(lambda _self: pytest.fail("it was looked at"))

    around: list[object] = []
    around.append(around)
    assert paths_of([], {"kept": Kept()}) == {}
    assert paths_of([Thing()], {"around": around}) == {}
    monkeypatch.setattr(bound_objects, "fsdp_classes", tuple)  # FSDP was not imported
    assert sharded_modules() == []
