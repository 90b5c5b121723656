"""The thread pools of NumPy's libraries: OpenBLAS, MKL or BLIS."""

from __future__ import annotations

import os

from threadpoolctl import ThreadpoolController

_POOLS = ("openblas", "mkl", "blis")


def set_pool_threads(threads: int) -> None:
    """Set the threads of the loaded pools as in a process that starts with this environment.

    Pools that were loaded before the fork have one thread. Libraries that are loaded later read the
    variables by themselves.

    Args:
        threads: the threads of a pool whose variable, such as ``MKL_NUM_THREADS``, is not set.
    """
    values = {pool: os.environ.get(f"{pool.upper()}_NUM_THREADS", "") for pool in _POOLS}
    if threads == 1 and not any(values.values()):
        return  # nothing to change, and finding the libraries takes 7 ms
    for library in ThreadpoolController().lib_controllers:
        if library.user_api == "blas":
            value = values.get(library.internal_api, "")
            library.set_num_threads(int(value) if value.isdecimal() else threads)
