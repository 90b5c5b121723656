"""An optimizer takes over the state of another one, as far as it can be told in JSON."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from nbddp.worker.optimizer_state import layout_of, make_room, unsendable


def stepped(kind: type[Optimizer], steps: int, **options: object) -> Optimizer:
    """An optimizer that has made some steps."""
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), **options)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("mine", [0, 1, 3])
@pytest.mark.parametrize("theirs", [0, 2])
def test_any_state_gets_room_for_any_other(mine: int, theirs: int) -> None:
    main, other = stepped(Adam, theirs, lr=0.1), stepped(Adam, mine, lr=0.2)
    layout = json.loads(json.dumps(layout_of(main)))
    room, source = make_room(other, layout), make_room(main, layout)
    assert [each.shape for each in room] == [each.shape for each in source]
    for tensor, told in zip(room, source, strict=True):
        tensor.copy_(told)
    assert str(other.state_dict()) == str(main.state_dict())


def test_numbers_come_along_and_tuples_stay_tuples() -> None:
    main, other = stepped(AdamW, 1, betas=(0.5, 0.75)), stepped(AdamW, 1)
    make_room(other, json.loads(json.dumps(layout_of(main))))
    assert other.param_groups[0]["betas"] == (0.5, 0.75)


def test_nothing_is_replaced_that_fits() -> None:
    optimizer = stepped(SGD, 1, lr=0.1, momentum=0.9)
    before = [entry["momentum_buffer"] for entry in optimizer.state.values()]
    room = make_room(optimizer, layout_of(optimizer))
    assert all(new is old for new, old in zip(room, before, strict=True))


def test_what_is_no_number_and_no_tensor_stays_where_all_have_it() -> None:
    odd, same, without = (stepped(SGD, 1, lr=0.1) for _ in range(3))
    for optimizer in (odd, same):
        for each in optimizer.param_groups[0]["params"]:
            optimizer.state[each] = {"history": [torch.ones(1)], 7: "number"}
    assert unsendable([layout_of(odd), layout_of(same)]) == ""
    assert unsendable([layout_of(odd), layout_of(without)]) == "list"
    assert unsendable([layout_of(without), layout_of(odd)]) == ""
    make_room(same, layout_of(odd))
    assert all(set(entry) == {"history", 7} for entry in same.state.values())
