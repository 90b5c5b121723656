"""Answers that are functions, and need no ranks to be tried out: what is right, and each hint."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from nbddp import check_answer


def test_an_iterator_is_begun_before_the_random_state_is_restored() -> None:
    def begin(loader, state):
        batches = iter(loader)
        torch.set_rng_state(state)
        return batches

    def restored_too_soon(loader, state):
        torch.set_rng_state(state)
        return iter(loader)

    def one_batch_taken(loader, state):
        batches = begin(loader, state)
        next(batches)
        return batches

    before = torch.get_rng_state()
    for answer, text in {
        begin: "Right.",
        restored_too_soon: "what has drawn from it",
        one_batch_taken: "all batches still to come",
        (lambda *given: given[0]): "return the iterator",
        (lambda *_: None): "return the iterator",
    }.items():
        assert text in check_answer("04.1", answer).text
    assert torch.equal(torch.get_rng_state(), before), "the learner's own is as it was"


def test_the_mates_of_a_rank_are_those_of_its_machine() -> None:
    answers = {
        (lambda rank: range(rank // 8 * 8, rank // 8 * 8 + 8)): "Right.",
        (lambda rank: torch.arange(64).view(8, 8)[rank // 8].tolist()): "Right.",
        (lambda rank: range(rank % 8, 64, 8)): "on several machines",
        (lambda rank: [each for each in range(8) if each != rank]): "in its own row, too",
        (lambda rank: [rank]): "1 are in it: a machine has eight",
        (lambda rank: rank // 8): "return ranks",
        (lambda rank: [str(rank)]): "return ranks",
        (lambda rank: torch.arange(64).view(8, 8)[rank // 8]): "Right.",
    }
    for answer, text in answers.items():
        assert text in check_answer("12.3", answer).text


def test_a_mistake_inside_a_function_is_the_users_to_see() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        check_answer("12.3", lambda: [0])


@pytest.mark.parametrize("exercise", ["01.1", "01.2", "01.4", "02.2", "05.3", "06.1", "10.2"])
def test_a_function_that_talks_to_other_ranks_is_not_judged_where_there_are_none(
    exercise: str,
) -> None:
    called = Mock()
    found = check_answer(exercise, called)
    assert not found
    assert "in a `%%ddp` cell, on two ranks or more" in found.text
    called.assert_not_called()


class Server:
    """As notebook 14 has it, without a lock."""

    def __init__(self):
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.version, self.history, self.is_open = 0, [], True

    def push(self, trainer, version, gradients, loss):
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.history.append((trainer, self.version - version, loss))
        self.version += 1
        return self.is_open


def refusing(*, above: int, says: Any = True, notes: bool = False) -> type[Server]:
    """A server that refuses, and what it does then."""

    class Strict(Server):
        def push(self, trainer, version, gradients, loss):
            if self.version - version <= above:
                return super().push(trainer, version, gradients, loss)
            if notes:
                self.history.append((trainer, self.version - version, loss))
            return says

    return Strict


@pytest.mark.parametrize(
    ("server", "text"),
    [
        (refusing(above=4), "Right."),
        (Server, "stale by five updates has moved"),
        (refusing(above=5), "stale by five updates has moved"),
        (refusing(above=3), "stale by four is not"),
        (refusing(above=4, notes=True), "in the history"),
        (refusing(above=4, says=None), "is told nothing"),
        (refusing(above=4)(), "Give the class itself"),
        (dict, "It has no `model`"),
    ],
)
def test_a_strict_server_is_tried_out(server: Any, text: str) -> None:
    assert text in check_answer("14.1", server).text
