"""Imported once by the forkserver, so that every rank is born with torch, IPython and a shell.

Never touches CUDA (a process forked after that cannot use it) and none of the user's modules
(a restart must see them changed).
"""

from __future__ import annotations

import os
import warnings

import torch
import torch.distributed  # noqa: F401

from nbddp.descendants import adopt_orphans
from nbddp.wire.helper import FOLDER
from nbddp.worker import entry, growth  # noqa: F401
from nbddp.worker.shell import make_shell, warm_shell

adopt_orphans()
# multiprocessing's: a child that it has not started, but inherited, has ended
warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")
growth.take_along(os.environ.pop(FOLDER))
shell = make_shell()
growth.listen(first=lambda: warm_shell(shell))
