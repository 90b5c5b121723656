"""Answers to the exercises of notebooks 04 to 07: right ones, and mistakes with their hints."""

from __future__ import annotations

from typing import Any

RIGHT: dict[str, list[tuple[Any, ...]]] = {
    "04.2": [({1, 2},), ([1, 2],), ((2, 1, 2),), ({"1", "2"},)],
    "04.3": [(3,)],
    "04.4": [(15.49, 0.08607, 3.464, 0.01925), (15.5, 0.086, 3.5, 0.019)],
    "05.1": [(1,)],
    "05.2": [(309.84, 9.798), (310, 10)],
    "05.4": [(0, 1)],
    "06.2": [(0.3, 1.2), (1.18, 10.36)],
    "06.3": [(0.0394, 0.99996), (0.04, 1)],
    "07.1": [(1, 63)],
    "07.2": [(2, 1)],
    "07.3": [(0,)],
}
WRONG: dict[str, list[tuple[tuple[Any, ...], str]]] = {
    "04.2": [
        (({1},), "renamed its draft"),
        (({2},), "holds the kill back"),
        ((set(),), "Under which names"),
        (({0, 1},), "Under which names"),
        ((1,), "as a set"),
        (("12",), "as a set"),
    ],
    "04.3": [((2,), "a + b = b + a"), ((4,), "so many"), ((1,), "How many floats")],
    "04.4": [
        ((929.5, 0.086, 3.5, 0.019), "in minutes"),
        ((10, 0.086, 3.5, 0.019), "sqrt"),
        ((15.5, 8.6, 3.5, 0.019), "between 0 and 1"),
        ((15.5, 0.043, 3.5, 0.019), "half an interval"),
        ((15.5, 0.086, 208, 0.019), "in minutes"),
        ((15.5, 0.086, 15.1, 0.019), "2 of the 40 seconds"),
        ((15.5, 0.086, 3.5, 1.92), "between 0 and 1"),
        ((15.5, 0.086, 3.5, "1.9 %"), "this is a str"),
    ],
    "05.1": [((0,), "lost patience"), (("rank 0",), "lost patience")],
    "05.2": [
        ((18590, 9.8), "in minutes"),
        ((310, 588), "in minutes"),
        ((310, 310), "a thousand times as often"),
        ((310, 0.31), "the root"),
        ((1, 9.8), "how long is m"),
    ],
    "05.4": [((1, 0), "got the signal"), ((0, 0), "die with their process")],
    "06.2": [
        ((1.2, 0.3), "`--fresh`"),
        ((0.3, 0.3), "`--fresh`"),
        ((0, 0.3), "in milliseconds"),
        ((None, 0.3), "in milliseconds"),
        ((0.3, True), "in milliseconds"),
        ((float("nan"), 1.0), "in milliseconds"),
    ],
    "06.3": [
        ((0.01, 1), "one rank's"),
        ((0.961, 1), "are fast"),
        ((3.94, 1), "between 0 and 1"),
        ((0.0394, 10), "multiply"),
        ((0.0394, 100), "between 0 and 1"),
        ((0.0394, 0.04), "each of a thousand"),
    ],
    "07.1": [
        ((0, 112), "That is DDP"),
        ((2, 38), "an earlier stage"),
        ((3, 14), "an earlier stage"),
        ((9, 14), "0, which is DDP, to 3"),
        ((1, 112), "without any stage"),
        ((1, 70), "with four ranks"),
        ((1, 91), "count once"),
        ((1, 1), "Seven billion times"),
    ],
    "07.2": [
        ((10, 5), "each block a part"),
        ((1, 1), "freed after the forward pass"),
        ((2, 2), "in one pass only"),
        ((5, 1), "One part"),
        ((2, 5), "One part"),
    ],
    "07.3": [((18,), "does the optimizer hold"), ((1,), "or it has others")],
}
FUNCTIONS = {"04.1", "05.3", "06.1"}  # the last two are tried out on ranks, in tests/multiproc
