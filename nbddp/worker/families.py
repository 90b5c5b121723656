"""Processes that a rank starts, and where they meet: each rank's are a family of their own.

Scripts that launch themselves name one port for all. If every rank runs such a script, the first
family has the port, and the others would mix with it; here they are told at once. Loaded in
processes that a rank spawned, so it imports no torch before the script does.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlparse

from nbddp.worker.streams import flush_python_streams

T = TypeVar("T")
Handler = Callable[..., Iterator[tuple[Any, int, int]]]

KEY = "nbddp/family"
PATIENCE = timedelta(seconds=5)  # for the one that serves the port to say whose it is


def taken(port: object) -> str:
    """What to do about a port that is in use."""
    return (
        f"port {port} is taken, perhaps by the processes of another rank: run the cell with "
        "--ranks 0, or give each rank a port of its own"
    )


class Arrival:
    """A process on its way: at its destination it joins the family of the rank that sent it."""

    def __init__(self, process: Any, family: str) -> None:
        self._process = process
        self._family = family

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        return _arrive, (self._process, self._family)


def _arrive(process: Any, family: str) -> Any:
    if "torch" in sys.modules:  # what the process needs was loaded with it
        _keep_groups()
        process._bootstrap = _ending_whole(process._bootstrap)
        handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
        for scheme in ("env", "tcp"):
            handlers[scheme] = guarded(handlers[scheme], lambda: family)
    return process


def at_home(make: Callable[..., T], name: str, *arguments: Any) -> T:
    """A class or function that came whole, under its name in ``__main__``."""
    made = make(*arguments)
    if isinstance(made, type):
        made.__qualname__ = name
    if "." not in name:  # else it is part of one that has a name
        vars(sys.modules["__main__"]).setdefault(name, made)
    return made


def _keep_groups() -> None:
    """Hold every process group of this process to its end, which frees none.

    Whoever frees one just after it was destroyed, as a tutorial does when its model goes out of
    scope, may stand still for ever with torch 2.13: a rank's own are held for the same reason.
    """
    kept: list[Any] = []
    importlib.import_module("nbddp.worker.new_groups").watch_new_groups(made=kept.append)


def _ending_whole(bootstrap: Callable[..., int]) -> Callable[..., int]:
    """End the process when its function has returned, as forked ones end, with Python whole.

    A spawned one is else taken apart: that frees the groups after all, and a thread of Gloo's that
    wants Python's lock then aborts the process.
    """

    def run(*arguments: Any, **options: Any) -> int:
        exitcode = bootstrap(*arguments, **options)
        atexit._run_exitfuncs()
        with suppress(OSError):  # nobody reads any more
            flush_python_streams()
        os._exit(exitcode)

    return run


def guarded(handler: Handler, family: Callable[[], str]) -> Handler:
    """A rendezvous as torch has it, but among the processes of one family only."""

    def meet(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
        meeting = handler(url, **options)
        store, rank, world_size = _first(meeting, url)
        _stay_apart(store, rank, family())
        yield store, rank, world_size
        yield from meeting

    return meet


def _first(meeting: Iterator[tuple[Any, int, int]], url: str) -> tuple[Any, int, int]:
    import torch.distributed as dist

    try:
        return next(meeting)
    except dist.DistNetworkError as error:
        if "address already in use" not in str(error).lower():
            raise
        raise dist.DistNetworkError(taken(_port(url))) from None


def _stay_apart(store: Any, rank: int, family: str) -> None:
    import torch.distributed as dist

    if rank == 0:  # it serves
        store.set(KEY, family)
        return
    try:
        store.wait([KEY], PATIENCE)
    except dist.DistStoreError:
        return  # served by a program that knows nothing of families
    if store.get(KEY).decode() != family:
        raise dist.DistNetworkError(taken(store.port))


def _port(url: str) -> object:
    return urlparse(url).port or os.environ.get("MASTER_PORT", "")
