"""Keep NCCL from ending a rank, let ranks share a GPU, and abort NCCL's groups in parallel."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from nbddp.topology import Topology

logger = logging.getLogger(__name__)

# Variables as in ProcessGroupNCCL.hpp and distributed_c10d.py. Only the controller ends a rank,
# after it has shown the reason. An error of NCCL is the failure of a cell, and the rank lives on.
# torch 2.15's new backend reads only the first one and TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC.
ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # CleanUpOnly: abort the group, not the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # no monitor that kills if the watchdog is delayed
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # a failed assert on the GPU raises in Python, too
    # Else the watchdog sleeps 60 s before it aborts, while the recorder is written to a file.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # a heal sends while no collective runs
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
    # torch 2.15: "nccl" means the old backend until nbddp has run nccl2 on a GPU. torch reads it
    # when it registers the backend: at the first group of the process.
    "TORCH_DIST_USE_NCCL2": "0",
}
ABORT_TIMEOUT = 3.0  # seconds for all groups together


def configure_nccl(topology: Topology) -> None:
    """Keep NCCL's watchdog from ending this process, and let ranks share a GPU.

    NCCL refuses two ranks on one GPU of one host. So ranks that share a GPU claim to be on
    different hosts, and NCCL sends through sockets. The user's own settings stay.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if topology.local_world_size > torch.cuda.device_count() > 0:
        os.environ.setdefault("NCCL_HOSTID", f"{socket.gethostname()}-{topology.rank}")


def abort_groups() -> None:
    """Abort all process groups of this rank, which ends all waits in them.

    torch's own function aborts them one after the other. If one abort does not return, it would
    delay the others, and also the thread that receives the next interrupt.
    """
    module = dist.distributed_c10d
    if abort_all(list(module._world.pg_names), ABORT_TIMEOUT) and dist.is_initialized():
        module._abort_process_group()  # all aborts are done: remove the groups


def abort_all(groups: Iterable[dist.ProcessGroup], timeout: float) -> bool:
    """Abort groups at the same time. Return whether all aborts have returned."""
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
    # On an nbddp-abort thread; each group has its own.
    try:
        group.abort()
    except RuntimeError as error:  # a backend without abort
        logger.info("a process group could not be aborted: %s", error)


def describe_abort() -> str:
    """Return why NCCL's watchdog has aborted a group of this rank; "" if it has aborted none.

    That ends the waits for its collectives without an error; only the next collective raises one.
    """
    world: Any = dist.distributed_c10d._world
    for group in list(world.pg_names):
        for device in group._device_types:
            if (error := _error_of(group._get_backend(device))) != "SUCCESS":
                has_timed_out = error == "TIMEOUT"
                reason = (
                    "collective operation timeout" if has_timed_out else "remote process exited"
                )
                ranks = list(world.pg_group_ranks.get(group, ()))
                return reason if group is world.default_pg else f"{reason} in group {ranks}"
    return ""


def _error_of(backend: Any) -> str:
    try:
        return str(backend.get_error().name)
    except (AttributeError, RuntimeError):  # Gloo before torch 2.15, alone or in DETAIL's wrapper
        return "SUCCESS"
