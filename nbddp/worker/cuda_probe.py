"""Whether this process has used CUDA: what is forked from it after that cannot use a GPU.

The driver is asked, not torch: a library that only counts the GPUs spoils the process as well, and
torch knows nothing of it.
"""

from __future__ import annotations

import ctypes
import os

DRIVER = "libcuda.so.1"
SUCCESS = 0  # as cuda.h has it; 3 is CUDA_ERROR_NOT_INITIALIZED


def has_used_cuda(driver: str = DRIVER) -> bool:
    """Whether the driver has been initialized in this process; loads and starts nothing."""
    try:
        library = ctypes.CDLL(driver, mode=os.RTLD_NOLOAD)
    except OSError:  # it is not there, or nobody has loaded it
        return False
    count = ctypes.c_int()
    return bool(library.cuDeviceGetCount(ctypes.byref(count)) == SUCCESS)
