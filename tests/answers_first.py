"""Answers to the exercises of notebooks 00 to 03: right ones, and mistakes with their hints."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import torch

RIGHT: dict[str, list[tuple[Any, ...]]] = {
    "00.1": [(12,), (np.int64(12),), (torch.tensor([12]),), (Fraction(12),)],
    "00.2": [(0,), (torch.tensor(0),)],
    "01.3": [(175, 700, 0.7, 0.7e-3), (175.0, 700, 0.7, 0.0007)],
    "02.1": [(2e-4,), (2.2e-4,), (np.float32(2e-4),)],
    "02.3": [(12, 8, 3, 11)],
    "02.4": [(1, 12)],
    "03.1": [(torch.float32, torch.float32), ("torch.float32", "float32")],
    "03.2": [(65536 / 2**40,), (5.96e-8,)],
    "03.3": [(1.0078125,), (1 + 2**-7,)],
}
WRONG: dict[str, list[tuple[tuple[Any, ...], str]]] = {
    "00.1": [
        ((11,), "is smaller than the others"),
        ((23,), "two ranks"),
        ((45,), "one rank's"),
        ((7,), "1,437 images"),
        (("12",), "this is a str"),
        ((True,), "this is a bool"),
        ((float("nan"),), "1,437 images"),
        ((torch.tensor(float("nan")),), "1,437 images"),
        ((10**400,), "1,437 images"),
        ((-(10**400),), "1,437 images"),
        ((torch.tensor([12, 12]),), "this is a list"),
        ((np.bool_(True),), "this is a bool"),
        ((12j,), "this is a complex"),
    ],
    "00.2": [
        ((1,), "Which one makes it"),
        (("rank 1",), "Which one makes it"),
        ((np.arange(2),), "Which one makes it"),
    ],
    "01.3": [
        ((87.5, 700, 0.7, 0.7e-3), "one half of the ring"),
        ((200, 700, 0.7, 0.7e-3), "seven of eight"),
        ((175, 100, 0.7, 0.7e-3), "to everybody"),
        ((175, 800, 0.7, 0.7e-3), "nothing to itself"),
        ((175, 700, 0.05, 0.7e-3), "two halves"),
        ((175, 700, 0.7, 5e-5), "two halves"),
    ],
    "02.1": [
        ((1e-4,), "half as many updates"),
        ((1.414e-4,), "Adam"),
        ((5e-5,), "shorter, or longer"),
        ((1.0,), "twice the batch"),
        ((None,), "NoneType"),
    ],
    "02.3": [
        ((45, 8, 3, 11), "without ranks"),
        ((11, 8, 3, 11), "last batch counts"),
        ((12, 7, 3, 11), "`drop_last` in the sampler"),
        ((12, 8, 1, 11), "left out"),
        ((12, 8, 3, 12), "not full"),
    ],
    "02.4": [((2, 12), "6 MiB"), ((1, 6), "a weight and a bias"), ((1, 1), "how many parameters")],
    "03.1": [
        (("torch.bfloat16", "torch.float32"), "type of their weights"),
        ((None, None), "`.grad.dtype`"),
    ],
    "03.2": [((65536,), "at the beginning"), ((1.0,), "halves it"), ((65536 * 2**40,), "falls")],
    "03.3": [
        ((1 + 2**-23,), "fp32"),
        ((1 + 2**-10,), "fp16"),
        ((1 + 2**-8,), "halfway"),
        ((1,), "7 bits"),
        (("more",), "7 bits"),
    ],
}
FUNCTIONS = {"01.1", "01.2", "01.4", "02.2"}  # tried out on ranks, in tests/multiproc
