"""Imported once by the forkserver, so that every rank is born with torch, IPython and a shell.

Never touches CUDA (a process forked after that cannot use it) and none of the user's modules
(a restart must see them changed).
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # is_available() then asks NVML

import torch
import torch.distributed  # noqa: F401

from nbddp.child_processes import adopt_orphans
from nbddp.wire.rank_start import CUDA_USED, SOCKET_FOLDER_VARIABLE
from nbddp.worker import (
    lazy_preload,
    main,  # noqa: F401
)
from nbddp.worker.cell.shell import make_shell, preload_shell
from nbddp.worker.cuda_probe import has_used_cuda

adopt_orphans()
# multiprocessing's: a child that it has not started, but inherited, has ended
warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")
folder = os.environ.pop(SOCKET_FOLDER_VARIABLE)
lazy_preload.clean_up_at_exit(folder)
shell = make_shell()
if has_used_cuda():
    (Path(folder) / CUDA_USED).touch()
lazy_preload.preload_on_signal(first=lambda: preload_shell(shell))
