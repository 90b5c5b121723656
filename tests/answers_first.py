"""Answers to the exercises of notebooks 00 to 03: right ones, and mistakes."""

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
WRONG: dict[str, list[tuple[Any, ...]]] = {
    "00.1": [
        (11,),
        (23,),
        (45,),
        (7,),
        ("12",),
        (True,),
        (float("nan"),),
        (torch.tensor(float("nan")),),
        (10**400,),
        (-(10**400),),
        (torch.tensor([12, 12]),),
        (np.bool_(True),),
        (12j,),
    ],
    "00.2": [(1,), ("rank 1",), (np.arange(2),)],
    "01.3": [
        (87.5, 700, 0.7, 0.7e-3),
        (200, 700, 0.7, 0.7e-3),
        (175, 100, 0.7, 0.7e-3),
        (175, 800, 0.7, 0.7e-3),
        (175, 700, 0.05, 0.7e-3),
        (175, 700, 0.7, 5e-5),
    ],
    "02.1": [(1e-4,), (1.414e-4,), (5e-5,), (1.0,), (None,)],
    "02.3": [(45, 8, 3, 11), (11, 8, 3, 11), (12, 7, 3, 11), (12, 8, 1, 11), (12, 8, 3, 12)],
    "02.4": [(2, 12), (1, 6), (1, 1)],
    "03.1": [("torch.bfloat16", "torch.float32"), (None, None)],
    "03.2": [(65536,), (1.0,), (65536 * 2**40,)],
    "03.3": [(1 + 2**-23,), (1 + 2**-10,), (1 + 2**-8,), (1,), ("more",)],
}
FUNCTIONS = {"01.1", "01.2", "01.4", "02.2"}  # tried out on ranks, in tests/multiproc
