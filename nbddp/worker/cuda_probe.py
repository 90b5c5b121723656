"""Check whether this process has used CUDA; processes forked after that cannot use a GPU.

The check asks the driver and not torch. A library that only counts the GPUs is enough to make
forked processes fail, and torch does not know of it.
"""

from __future__ import annotations

import ctypes
import os

DRIVER = "libcuda.so.1"
SUCCESS = 0  # as in cuda.h; 3 is CUDA_ERROR_NOT_INITIALIZED


def has_used_cuda(driver: str = DRIVER) -> bool:
    """Return whether the CUDA driver is initialized in this process, without initializing it."""
    try:
        library = ctypes.CDLL(driver, mode=os.RTLD_NOLOAD)
    except OSError:  # not installed, or not loaded
        return False
    count = ctypes.c_int()
    return bool(library.cuDeviceGetCount(ctypes.byref(count)) == SUCCESS)
