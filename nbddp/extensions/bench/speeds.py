"""The times of collectives, and the bus bandwidth that follows from them.

The bus bandwidth is that of nccl-tests, with the same meaning of a size for each collective:
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

MEMCPY = "memcpy"
# bytes that a rank must send, in relation to the size, with n ranks
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda _: 1.0,
    MEMCPY: lambda _: 1.0,
}


@dataclass(frozen=True)
class Speeds:
    """The measured times of a process group.

    Attributes:
        backend: its backend.
        world_size: its number of ranks.
        sizes: bytes.
        times: the seconds of a call on the slowest rank, by collective, for each size.
    """

    backend: str
    world_size: int
    sizes: list[int]
    times: dict[str, list[float]] = field(default_factory=dict)

    def bandwidths(self, name: str) -> list[float]:
        """Return the bus bandwidth for each size, in GB/s.

        >>> Speeds("gloo", 4, [1000], {"all_reduce": [1e-6]}).bandwidths("all_reduce")
        [1.5]
        """
        factor = BUS_FACTORS[name](self.world_size)
        sizes = zip(self.sizes, self.times[name], strict=True)
        return [factor * size / seconds / 1e9 for size, seconds in sizes]
