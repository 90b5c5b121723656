"""Preload torch, IPython and a shell in the forkserver, so that forked ranks have them.

This module must not use CUDA: processes forked after that could not use it. It must not import the
user's modules, so that a restart sees their changes.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # is_available() then uses NVML

try:
    import torch.distributed as dist

    from nbddp.child_processes import adopt_orphans
    from nbddp.wire.rank_start import CUDA_USED, SOCKET_FOLDER_VARIABLE
    from nbddp.worker import (
        lazy_preload,
        main,  # noqa: F401
        process_title,
    )
    from nbddp.worker.cell.shell import make_shell, preload_shell
    from nbddp.worker.cuda_probe import has_used_cuda
except ImportError as error:  # multiprocessing would ignore it, and each rank would fail
    raise RuntimeError(error) from error

adopt_orphans()
if register := getattr(dist.Backend, "_ensure_backend_registered", None):  # since torch 2.14
    # else the first group of each rank scans the entry points of all packages (30 to 60 ms). Not
    # NCCL: which backend that is depends on the environment of the rank.
    register("gloo")
if "GLOO_DEVICE_TRANSPORT" in os.environ:  # raise here what each rank would raise
    dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
# multiprocessing warns when an inherited child ends
warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")
folder = os.environ.pop(SOCKET_FOLDER_VARIABLE)
lazy_preload.clean_up_at_exit(folder)
shell = make_shell()
if has_used_cuda():
    (Path(folder) / CUDA_USED).touch()
process_title.name_forkserver()
lazy_preload.preload_on_signal(first=lambda: preload_shell(shell))
