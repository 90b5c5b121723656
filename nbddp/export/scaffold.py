"""What a script has of its own around the cells: its imports, its functions, their names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from nbddp.export.outline import Outline

GIVEN = {  # what a rank's namespace has before the first cell, and the import that makes it
    "rank": "",
    "local_rank": "",
    "world_size": "",
    "device": "",
    "torch": "import torch",
    "dist": "import torch.distributed as dist",
    "nbddp": "import nbddp",
}
_ELASTIC = "torch.distributed.elastic.multiprocessing.errors"
_IMPORTS = {  # what the script's own lines need, and what tells it from a cell's import
    "os": "import os",
    "torch": "import torch",
    "dist": "import torch.distributed as dist",
    "argparse": "import argparse",
    "asyncio": "import asyncio",
    "pickle": "import pickle",
    "Path": "from pathlib import Path as Path",
    "timedelta": "from datetime import timedelta as timedelta",
    "record": f"from {_ELASTIC} import record as record",
}
_FUNCTIONS = [
    "main",
    "show",
    "form_group",
    "arguments",
    "pushed",
    "keep_store",
    "ports",
    "stores",
    "parser",
    "gpus",
    "cell",
    "loop",
]
_SHOWN = frozenset({"_", "__", "___", "Out"})


class Names(dict[str, str]):
    """What the script's own things are called: by their own names, as long as no cell has them."""

    def __init__(self, outline: Outline, taken: Collection[str]) -> None:
        super().__init__()
        for name in _FUNCTIONS:
            self[name] = name
            while self[name] in taken:
                self[name] += "_"
        for name, maker in _IMPORTS.items():
            self[name] = name
            while not outline.is_made_by(self[name], maker) or (
                self[name] != name and self[name] in taken
            ):
                self[name] += "_"

    def imports(self, needed: Collection[str]) -> Iterator[str]:
        """A line for each of these, under the name that it has here."""
        for name in needed:
            words = _IMPORTS[name].split()
            plain, own = words[-1], self[name]
            if words[0] == "from":
                begin = " ".join(words[:4])
                yield begin if own == plain else f"{begin} as {own}"
            elif name == "dist":
                yield f"import torch.distributed as {own}"
            else:
                yield f"import {name}" if own == name else f"import {name} as {own}"


def showing(names: Mapping[str, str], *, keeps: bool) -> str:
    """The function that prints what the notebook showed.

    Args:
        names: the script's own.
        keeps: whether cells ask again for what was shown, as ``_`` and ``Out[3]``.
    """
    text = _SHOW.format_map(names)
    return text + _KEEP_SHOWN if keeps else text


def asks_for_shown(used: Collection[str]) -> bool:
    """Whether cells ask for what was shown before."""
    return any(name in _SHOWN or (name[:1] == "_" and name[1:].isdigit()) for name in used)


_SHOW = '''def {show}(value, name="Out", number=0):
    """Print what the notebook showed."""
    if value is not None:
        print(f"[rank {{{os}.environ['RANK']}}] {{name}} {{value!r}}\\n", end="", flush=True)'''

_KEEP_SHOWN = """
        names = globals()
        names["___"], names["__"], names["_"] = names["__"], names["_"], value
        names[f"_{number}"] = Out[number] = value


_ = __ = ___ = ""
Out = {}"""

DISPLAY = '''def display(*values, **_options):
    """Print what the notebook displayed."""
    for value in values:
        print(repr(value), flush=True)'''

FORM = """def {form_group}():
    backend = {backend}
    {dist}.init_process_group(backend{more})
    {dist}.barrier()  # a rank that waits for no other would be gone before that one has come"""

# under torchrun a second init_process_group() of torch 2.13 finds the addresses of the first, and
# fails: tried with gloo and 4 ranks
FORM_AGAIN = '''def {form_group}(number=1):
    """Meet under keys that were not used before: the first group's addresses are gone."""
    if {dist}.is_initialized():
        {dist}.destroy_process_group()
    backend = {backend}
    address, port = {os}.environ["MASTER_ADDR"], int({os}.environ["MASTER_PORT"])
    store = {dist}.TCPStore(address, port, is_master=False)
    place = dict(rank=int({os}.environ["RANK"]), world_size=int({os}.environ["WORLD_SIZE"]))
    fresh = {dist}.PrefixStore(f"group {{number}}", store)
    {dist}.init_process_group(backend, store=fresh, **place{more})
    {dist}.barrier()  # a rank that waits for no other would be gone before that one has come'''

BEGIN = """    local_rank = int({os}.environ["LOCAL_RANK"])
    {gpus} = {torch}.cuda.device_count()
    device = {torch}.device("cuda", local_rank % {gpus}) if {gpus} else {torch}.device("cpu")
    if {gpus}:
        {torch}.cuda.set_device(device)
    {form_group}()
    rank, world_size = {dist}.get_rank(), {dist}.get_world_size()
    {torch}.set_num_threads({threads})  # as in the notebook"""
