"""Answers to the exercises of notebooks 08 to 14: right ones, and mistakes with their hints."""

from __future__ import annotations

from math import log
from typing import Any

LINES = """
if rank == 5:
    dist.all_reduce(x){}
    dist.all_reduce(y){}
"""
OK = "  # nbddp: ok ND101"
RIGHT: dict[str, list[tuple[Any, ...]]] = {
    "08.1": [(1, 1, 12)],
    "08.2": [(5,)],
    "08.3": [("C",)],
    "09.1": [(16, 28, 31.968), (16.0, 28.0, 32)],
    "09.2": [(80, 35), (80.0, 35.0)],
    "10.1": [(LINES.format(OK, ""),), (LINES.format("  #nbddp: ok ND101, ND102", ""),)],
    "11.1": [(2, 100 / 30), (2.0, 3.3)],
    "11.2": [(1 / 63,), (0.0158,)],
    "11.3": [(256, 6)],
    "12.1": [(64,)],
    "12.2": [(2,)],
    "13.1": [(1 / 65536, 6), (1.53e-5, 6.0)],
    "13.2": [(3.11, 2.39)],
    "13.3": [(4, 1)],
    "14.2": [(3.0, 0.6), (3, 0.6000001)],
}
WRONG: dict[str, list[tuple[tuple[Any, ...], str]]] = {
    "08.1": [
        ((9, 1, 12), "That is its rank"),
        ((2, 1, 12), "The first one is 0"),
        ((5, 1, 12), "counted from 0 again"),
        ((1, 0, 12), "has ranks 0 to 7"),
        ((1, 2, 12), "The first one is 0"),
        ((1, 1, 16), "fewer GPUs"),
        ((1, 1, 2), "All ranks count"),
        (("1", 1, 12), "this is a str"),
    ],
    "08.2": [
        ((4,), "a little longer"),
        ((10,), "a third of the time"),
        ((1,), "several times as long"),
        ((100,), "3 GB of each rank"),
    ],
    "08.3": [(("A",), "A is told"), (("B",), "B is told"), ((2,), "Name one of them")],
    "09.1": [
        ((8, 28, 32), "one half of the ring"),
        ((32, 28, 32), "with N = 2"),
        ((16, 14, 32), "one half"),
        ((16, 224, 32), "all eight"),
        ((16, 28, 16), "one half"),
        ((16, 28, 16000), "everything to everybody"),
        ((16, 28, 1), "2 (N - 1) / N"),
    ],
    "09.2": [
        ((35, 35), "slowest rank"),
        ((20, 35), "one of them is slow"),
        ((80, 20), "it is dealt out"),
        ((80, 40), "within its 80"),
        ((80, 1), "Add up"),
    ],
    "10.1": [
        ((LINES.format("", ""),), "still finds both"),
        ((LINES.format("  # nbddp: ok ND102", ""),), "still finds both"),
        ((LINES.format("", OK),), "the first one is not"),
        ((LINES.format(OK, OK),), "silent about both"),
        (("# nbddp: ok ND101\n" + LINES.format("", ""),), "holds for all"),
        (("dist.all_reduce(x)",), "Leave the three lines as they are"),
        (("if rank == 5",), "That is no Python"),
        ((5,), "this is a int"),
    ],
    "11.1": [
        ((1.25, 3.33), "hidden"),
        ((1, 3.33), "half of it"),
        ((3, 3.33), "What is longer"),
        ((2, 8), "no shorter than its sending"),
        ((2, 2.353), "hidden"),
        ((2, 2), "What is longer"),
    ],
    "11.2": [
        ((1.587,), "not in per cent"),
        ((0.03125,), "more than 32 times"),
        ((0.5,), "more than twice"),
        ((0.1,), "`amdahl`"),
    ],
    "11.3": [
        ((64, 6), "one rank's"),
        ((16, 6), "strong"),
        ((128, 6), "Each of four ranks"),
        ((256, 23), "one rank's alone"),
        ((256, 5), "not full"),
        ((256, 12), "dealt out"),
    ],
    "12.1": [
        ((63,), "not below"),
        ((71,), "m + p - 1"),
        ((28,), "a fifth"),
        ((73,), "p - 1 = 7"),
        ((65,), "with p = 8"),
    ],
    "12.2": [
        ((1,), "and the result, too"),
        ((0,), "wants all of them"),
        ((4,), "the forward pass alone"),
        ((3,), "CommDebugMode"),
    ],
    "13.1": [
        ((1, 6), "what the trainer wanted"),
        ((65536, 6), "divides by the scale"),
        ((0.5, 6), "divided by the scale"),
        ((1 / 65536, 64), "halves the scale"),
        ((1 / 65536, 16), "not to 1"),
        ((1 / 65536, 1), "by halves"),
    ],
    "13.2": [
        ((3.106 / log(2), 2.39), "in bits"),
        ((log(59), 2.39), "equally frequent"),
        ((1, 2.39), "share of the seen text"),
        ((3.11, 2.39 / log(2)), "in bits"),
        ((3.11, 3.11), "without the letter before"),
        ((3.11, float("inf")), "never seen has no share"),
    ],
    "13.3": [
        ((2, 1), "16 windows"),
        ((8, 1), "32 as before"),
        ((4, 2), "64 windows"),
        ((4, 4), "32 as before"),
    ],
    "14.2": [
        ((6, 0.6), "nothing of the other one's"),
        ((1, 0.6), "Three rows of ones"),
        ((3, 0.3), "a step of its own"),
        ((3, 6), "lr times"),
        ((3, 0), "Two steps"),
    ],
}
FUNCTIONS = {"10.2", "12.3", "14.1"}  # the first is tried out on ranks, in tests/multiproc
