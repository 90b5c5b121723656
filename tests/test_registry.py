"""What lives in a rank is noted weakly, and called what the user calls it."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import torch
from torch import nn
from torch._dynamo import OptimizedModule

from nbddp.worker.in_common import pair
from nbddp.worker.registry import Roll, names_of, sharded_modules


class Thing:
    """Something that can be referred to weakly."""


def test_a_roll_keeps_the_order_and_keeps_nothing_alive() -> None:
    roll, things = Roll(), [Thing() for _ in range(5)]
    for thing in [*things, things[0]]:
        roll.note(thing)
    assert list(roll) == things
    del things[1:3], thing
    gc.collect()
    assert list(roll) == things


def test_the_shortest_way_by_names_is_found() -> None:
    thing = Thing()
    inner = SimpleNamespace(thing=thing, _hidden=[thing])
    for namespace, name in [
        ({"b": thing, "a": thing, "_": thing}, "a"),
        ({"trainer": inner}, "trainer.thing"),
        ({"kept": {"x": [inner]}}, "kept['x'][0].thing"),
        ({"_private": thing, "torch": torch}, None),
    ]:
        assert names_of([thing], namespace).get(id(thing)) == name


def test_what_torch_compile_wraps_has_the_name_of_the_wrapper() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    compiled = OptimizedModule(model, lambda run: run)
    found = names_of([model, model[0]], {"compiled": compiled})
    assert found[id(model)] == "compiled"


def test_a_circle_ends() -> None:
    around: list[object] = []
    around.append(around)
    assert names_of([Thing()], {"around": around}) == {}


def test_without_fsdp_nothing_is_searched() -> None:
    assert sharded_modules() == []


def test_things_of_which_the_ranks_have_different_numbers_are_left_out() -> None:
    everyone = [["a", "b", "a", "c"], ["c", "a", "b", "b", "a"]]
    assert pair(everyone, 0) == [0, 2, 3]
    assert pair(everyone, 1) == [1, 4, 0]
    assert pair([["a"], []], 1) == []
