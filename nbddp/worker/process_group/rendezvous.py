"""``init_process_group()`` in cells, and functions that start processes for a process group.

With torchrun, ranks read their rank, world size and address from the environment. Here a rank that
asks for its own rank and world size meets the others in nbddp's store, unless another store is
served at the given address. So a cell needs no port and no file, and can run again. All other calls
get torch's own stores.

A cell starts no processes for a process group, because the ranks are already running. A script may.
"""

from __future__ import annotations

import ast
import importlib
import linecache
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import context
from types import FrameType
from typing import Any

import torch.distributed as dist
import torch.multiprocessing

from nbddp.import_hooks import change_when_imported
from nbddp.topology import Topology
from nbddp.worker.watch.main_thread import frames_from
from nbddp.worker.wrapping import wrap

CONNECT_TIMEOUT = 1.0  # seconds to connect to a store on this machine
ALREADY_INITIALIZED = (
    "trying to initialize the default process group twice! The ranks have one already: delete this "
    "line, or run the cell with --no-init"
)
_SPAWN = "torch.multiprocessing.spawn"
_LAUNCHER = "torch.distributed.launcher.api"  # of torchrun and accelerate.notebook_launcher
_LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")


class Rendezvous:
    """Serves ``env://``, ``tcp://`` and ``file://`` in this rank and in its forked children.

    Args:
        topology: the rank's position.
        attempt: number of the group's start.
        open_store: returns a client of nbddp's store for one more process group.
        default_backend: the backend of groups for which a script names none; None for torch's.
    """

    def __init__(
        self,
        topology: Topology,
        attempt: int,
        open_store: Callable[[], dist.Store],
        *,
        default_backend: str | None = None,
    ) -> None:
        self._default_backend = default_backend
        self._topology = topology
        self._attempt = attempt
        self._open_store = open_store
        self._pid = os.getpid()
        self._cell = "start"
        self._running = topology.world_size
        self._count: Counter[int] = Counter()  # by world size

    def begin_cell(self, cell: int, *, running: int) -> None:
        """Use the prefix of this cell from now on; ``running`` ranks run the cell."""
        self._cell = f"cell{cell}"
        self._running = running
        self._count.clear()

    def install(self) -> None:
        """Replace the stores of torch's rendezvous handlers in this process."""
        # torch.distributed.rendezvous is a function, so import the module by its name
        handlers: Any = importlib.import_module("torch.distributed.rendezvous")
        create, file_store = handlers._create_c10d_store, handlers.FileStore

        def create_store(
            address: str, port: int, rank: int, size: int, timeout: timedelta, *options: Any
        ) -> dist.Store:
            if not self._is_ours(address, port, rank, size):
                store: dist.Store = create(address, port, rank, size, timeout, *options)
                return store
            return self._external_store(address, port, size, timeout) or self._own_store(size)

        def create_file_store(path: str, size: int) -> dist.Store:
            """Use no file: an interrupt cannot end a wait in a FileStore.

            A file of an earlier run breaks the next one. torch deletes it only after the last rank
            has freed its process group.
            """
            is_ours = self._are_all_here(size) and size == self._topology.world_size
            return self._own_store(size) if is_ours else file_store(path, size)

        handlers._create_c10d_store, handlers.FileStore = create_store, create_file_store
        wrap(dist.distributed_c10d, "init_process_group", self._init_once)
        dist.init_process_group = dist.distributed_c10d.init_process_group

    def _init_once(self, init: Callable[..., None], *args: Any, **options: Any) -> None:
        if dist.is_initialized():
            raise ValueError(ALREADY_INITIALIZED)
        if not args and options.get("backend") is None:
            options["backend"] = self._default_backend
        init(*args, **options)

    def _is_ours(self, address: str, port: int, rank: int, size: int) -> bool:
        """Return whether to use nbddp's store, because only the ranks can take part.

        They use nbddp's address, or each rank asks for its own position at a local address.
        """
        topology = self._topology
        is_shown = (address, port) == (topology.master_addr, topology.master_port)
        is_own_rank = (rank, size) == (topology.rank, topology.world_size)
        here = ("localhost", "127.0.0.1", "::1", "0.0.0.0", socket.gethostname())
        return self._are_all_here(size) and (is_shown or (is_own_rank and address in here))

    def _are_all_here(self, size: int) -> bool:
        return os.getpid() == self._pid and size <= self._running

    def _external_store(
        self, address: str, port: int, size: int, timeout: timedelta
    ) -> dist.Store | None:
        """Return a client of the store that is served at the address, for example by a notebook.

        Return None if there is none.
        """
        if port != self._topology.master_port:
            with suppress(OSError):  # nothing listens there
                socket.create_connection((address, port), CONNECT_TIMEOUT).close()
                return dist.TCPStore(address, port, size, timeout=timeout)
        return None

    def _own_store(self, size: int) -> dist.Store:
        """Return a client of nbddp's store, with a new prefix that is the same on all ranks.

        Groups of one rank alone, as rank 0 of 1, do not affect the prefixes of the others.
        """
        self._count[size] += 1
        prefix = f"a{self._attempt}/env/{self._cell}/{size}/{self._count[size]}"
        if size == 1:
            prefix += f"/{self._topology.rank}"
        return dist.PrefixStore(prefix, self._open_store())


# ---- processes that a cell starts


def reset_start_method() -> None:
    """Let ``set_start_method`` be called once in this cell too. The chosen method stays."""
    default: Any = context._default_context
    if default._actual_context is not None:
        default._default_context, default._actual_context = default._actual_context, None


def refuse_launchers() -> None:
    """Make functions that start processes for a process group raise a helpful error."""
    spawn: Any = importlib.import_module(_SPAWN)
    _refuse_in_cells(spawn, "start_processes", _instead_of_spawn)
    torch.multiprocessing.start_processes = spawn.start_processes
    change_when_imported(
        _LAUNCHER, lambda launcher: _refuse_in_cells(launcher, "launch_agent", _instead_of_launch)
    )


def _refuse_in_cells(module: Any, name: str, describe: Callable[..., str]) -> None:
    """Refuse calls from cells. A started process can import a script, but not a cell."""

    def start(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if getattr(sys.modules["__main__"], "__file__", None) is None:
            raise RuntimeError(describe(*args, **options))
        return original(*args, **options)

    wrap(module, name, start)


def _instead_of_launch(_config: Any, entrypoint: Any, *_args: Any, **_options: Any) -> str:
    name = getattr(entrypoint, "__name__", "train")
    return (
        "the ranks are already running, and this launcher would start more processes on each of "
        f"them. Call {name}() directly, without the launcher"
    )


def _instead_of_spawn(fn: Any, *_args: Any, **_options: Any) -> str:
    frames, ours = frames_from(sys._getframe(1)), (__name__, wrap.__module__, _SPAWN)
    frame = next(each for each in frames if each.f_globals["__name__"] not in ours)
    if frame.f_globals["__name__"].partition(".")[0] in _LIGHTNING:
        return (
            "this Lightning strategy starts its own processes, but the ranks are already running: "
            'use strategy="ddp" with devices=world_size'
        )
    call = _call_of_rank(frame) or f"{getattr(fn, '__name__', 'main')}(rank, ...)"
    return f"the ranks are already running: call `{call}`"


def _call_of_rank(frame: FrameType) -> str:
    """Return the call in a rank that replaces the ``mp.spawn(main, args=(x,))`` of a frame's line.

    It is empty if the source of that line is not known.
    """
    with suppress(SyntaxError):
        lines = linecache.getlines(frame.f_code.co_filename)
        for call in ast.walk(ast.parse("".join(lines))):
            if isinstance(call, ast.Call) and _starts(call, frame.f_lineno):
                given = dict(zip(("fn", "args"), call.args, strict=False))
                given |= {each.arg: each.value for each in call.keywords if each.arg}
                more = given.get("args", ast.Tuple([]))
                rest = more.elts if isinstance(more, ast.Tuple | ast.List) else [ast.Starred(more)]
                return f"{ast.unparse(given['fn'])}({', '.join(['rank', *map(ast.unparse, rest)])})"
    return ""


def _starts(call: ast.Call, line: int) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    is_here = call.lineno <= line <= (call.end_lineno or call.lineno)
    return is_here and name in ("spawn", "start_processes")
