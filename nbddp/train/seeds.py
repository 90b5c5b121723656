"""Random numbers that depend on a seed alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers that depend on the seed alone; the training's own go on as if nothing was."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs too
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])


def mix(*numbers: int) -> int:
    """One seed out of several numbers, another for others."""
    digest = blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # torch takes 63 bits
