"""Whether CUDA was touched in the helper: what is forked from it after that cannot use a GPU.

The driver is asked, not torch: a library that only counts the GPUs spoils the process as well, and
torch knows nothing of it.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

DRIVER = "libcuda.so.1"
SUCCESS = 0  # as cuda.h has it; 3 is CUDA_ERROR_NOT_INITIALIZED


def is_touched(driver: str = DRIVER) -> bool:
    """Whether the driver has been initialized in this process; loads and starts nothing."""
    try:
        library = ctypes.CDLL(driver, mode=os.RTLD_NOLOAD)
    except OSError:  # it is not there, or nobody has loaded it
        return False
    count = ctypes.c_int()
    return bool(library.cuDeviceGetCount(ctypes.byref(count)) == SUCCESS)


class CudaWatch:
    """Knows who has touched CUDA in the helper."""

    def __init__(self) -> None:
        self._who = ""

    def look(self, part: str) -> None:
        """Note this part of the helper's work, which is done, if it has touched CUDA."""
        if not self._who and is_touched():
            self._who = part

    def look_before_each_fork(self, sign: Path) -> None:
        """Leave a file that says who it was, before a process is forked that could not use it."""
        helper = os.getpid()

        def tell() -> None:
            if os.getpid() != helper:
                return  # a rank, which forks as well
            self.look("a thread of its own")
            if self._who and not sign.exists():
                sign.write_text(self._who)

        os.register_at_fork(before=tell)
