"""The installed packages have each private name whose absence nbddp would not notice.

nbddp reads these names with a default, compares them as text, or overrides them. A failure names
what a release has renamed.
"""

import sys
from concurrent.futures import process
from operator import attrgetter
from typing import Any

import comm.base_comm
import ipykernel
import IPython
import pytest
import torch
import torch.distributed as dist
from ipykernel.kernelbase import Kernel
from IPython.core.compilerop import CachingCompiler
from IPython.core.interactiveshell import InteractiveShell
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

PROPAGATOR = "_op_dispatcher.sharding_propagator"
NAMES: dict[str, Any] = {
    f"{PROPAGATOR}.propagate_op_sharding.cache.cache_clear": DTensor,
    "_iterator": DataLoader(range(1)),  # type: ignore[arg-type]
    "_metadata": nn.Linear(1, 1).state_dict(),
    "_modules": nn.Linear(1, 1),
    "_msg_callback": comm.base_comm.BaseComm(primary=False),
    "_orig_mod": torch.compile(nn.Linear(1, 1), backend="eager"),
    "_RemoteTraceback": process,
    "_shutdown_message": Kernel,
}
NEW_NAMES: list[tuple[str, Any, bool]] = [  # with the versions that have the name
    ("_clear_DTensor_sharding_propagator_cache", torch._C, torch.__version__ >= "2.10"),
    ("_ensure_backend_registered", dist.Backend, torch.__version__ >= "2.14"),
    ("set_timeout", dist, torch.__version__ >= "2.14"),
    ("_get_shell_context_var", Kernel, ipykernel.version_info >= (7,)),  # type: ignore[attr-defined]
    ("_filename_map", CachingCompiler(), IPython.version_info >= (8,)),
    ("_format_exception_for_storage", InteractiveShell, IPython.version_info >= (9,)),
    ("_is_gil_enabled", sys, sys.version_info >= (3, 13)),
]


@pytest.mark.parametrize("path", NAMES)
def test_the_name_exists(path: str) -> None:
    attrgetter(path)(NAMES[path])


@pytest.mark.parametrize(("name", "owner", "is_expected"), NEW_NAMES)
def test_the_name_exists_since_the_version_on_the_page(
    name: str, owner: Any, is_expected: bool
) -> None:
    assert hasattr(owner, name) == is_expected


def test_a_failed_backward_has_the_frame_of_the_engine() -> None:
    names = []
    try:
        torch.ones(1).sum().backward()
    except RuntimeError as error:
        step = error.__traceback__
        while step is not None:
            names.append(step.tb_frame.f_code.co_name)
            step = step.tb_next
    assert "_engine_run_backward" in names


def test_a_ddp_model_names_the_attributes_that_nbddp_drops() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(1, 1))
        assert {"process_group", "reducer", "logger", "_comm_hooks"} <= vars(model).keys()
        assert ("forward_sync_buffers" in vars(model)) == (torch.__version__ >= "2.13")
    finally:
        dist.destroy_process_group()
