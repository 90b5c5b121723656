"""The parts of an exported script around the cells.

A cell may assign names such as ``os`` or ``print``. The functions import them again, or use a
private name.
"""

from __future__ import annotations

IMPORTS = "import torch\nimport torch.distributed as dist"

# a cell that assigns one of these is left out
OWN_NAMES = {
    "_RANK",
    "_args",
    "_dist",
    "_group_options",
    "_init_process_group",
    "_print_value",
    "_pushed",
    "_wait_for_all",
}

NAMES = """_RANK = int(os.environ["RANK"]) if "RANK" in os.environ else 0
_dist = dist"""

PRINT_VALUE = '''def _print_value(value, name="Out"):
    """Print a result of a cell, as the notebook showed it."""
    from builtins import print

    if value is not None:
        print(f"[rank {_RANK}] {name} {value!r}\\n", end="", flush=True)'''

DISPLAY = '''def display(*values, **_options):
    """Print values, as the notebook displayed them."""
    from builtins import print, repr

    for value in values:
        print(repr(value), flush=True)'''

INIT_GROUP = """    dist.init_process_group({backend}{timeout})
    dist.barrier()  # else a fast rank could exit before a slow one has joined"""

INIT_FIRST_GROUP = """    _group_options = dict(backend={backend}{timeout})
    _init_process_group()"""

# under torchrun, a second init_process_group() of torch 2.13 finds the addresses of the first one
# and fails: tried with gloo and 4 ranks
INIT_GROUP_AGAIN = '''def _init_process_group(number=1):
    """Initialize the group with new store keys: the old keys hold stale addresses."""
    if _dist.is_initialized():
        _dist.destroy_process_group()
    store, rank, world_size = next(_dist.rendezvous("env://"))
    fresh = _dist.PrefixStore(f"group {number}", store)
    _dist.init_process_group(store=fresh, rank=rank, world_size=world_size, **_group_options)
    _dist.barrier()  # else a fast rank could exit before a slow one has joined'''

WAIT_FOR_ALL = '''def _wait_for_all():
    """Wait for all ranks, as the notebook does before each cell."""
    if _dist.is_initialized():
        _dist.barrier()'''

SETUP = """    device, local_rank = torch.device("cpu"), int(os.environ["LOCAL_RANK"])
    if _gpus := torch.cuda.device_count():
        device = torch.device("cuda", local_rank % _gpus)
        torch.cuda.set_device(device)"""

AUTO_BACKEND = '"nccl" if _gpus >= int(os.environ["LOCAL_WORLD_SIZE"]) else "gloo"'

FACTS = """    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads({threads})  # as in the notebook"""

USE_CPU = """    if device.type == "cpu":  # else Accelerate ignores a group without a GPU
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")"""

CLEANUP = """    if _dist.is_initialized():
        _dist.destroy_process_group()"""
