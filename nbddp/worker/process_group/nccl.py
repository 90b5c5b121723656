"""What NCCL may do to a rank, and which errors are those of a backend.

NCCL's groups are ended in parallel, and it never ends the process.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Iterable

import torch.distributed as dist

logger = logging.getLogger(__name__)

# As ProcessGroupNCCL.hpp has them. A rank is warm: who ends it is the controller, once it has said
# why, and what NCCL would write as its last word is there as the failure of a cell.
ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # CleanUpOnly: give a group up, but not the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # no monitor that kills when the watchdog is held up
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # an assert on the GPU is an error in Python, too
}
ABORT_TIMEOUT = 3.0  # seconds for all groups together
_WORDS = re.compile(
    r"gloo|nccl|timed out waiting|pair closure|closed by peer|connection was likely closed",
    re.IGNORECASE,
)


def configure_nccl() -> None:
    """Keep NCCL's watchdog from ending this process; what the user has set stays."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def abort_groups() -> None:
    """End all waits in process groups of this rank; it leaves them behind.

    What torch itself does for all of them goes one by one: a group whose abort does not return
    would hold up the others, and the thread that is to hear of the next interrupt.
    """
    module = dist.distributed_c10d
    if abort_all(list(module._world.pg_names), ABORT_TIMEOUT) and dist.is_initialized():
        module._abort_process_group()  # nothing is left to be waited for: it forgets them


def abort_all(groups: Iterable[dist.ProcessGroup], timeout: float) -> bool:
    """Abort groups at the same time; tell whether all have returned."""
    threads = [
        threading.Thread(target=_abort, args=[group], name="nbddp-abort", daemon=True)
        for group in groups
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def _abort(group: dist.ProcessGroup) -> None:
    try:
        group.abort()
    except RuntimeError as error:  # a backend that has none, beside NCCL's
        logger.info("a process group could not be aborted: %s", error)


# ---- errors of a backend: its connections are closed by them


def is_backend_error(error: BaseException | None) -> bool:
    """Whether Gloo or NCCL raised an error, or one that it came from."""
    seen: set[int] = set()  # a cell may have made a circle of them
    while error is not None and id(error) not in seen:
        is_told = isinstance(error, RuntimeError) and _WORDS.search(str(error))
        if is_told or isinstance(error, dist.DistBackendError):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
