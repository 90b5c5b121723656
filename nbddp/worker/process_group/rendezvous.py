"""``init_process_group()`` in cells, and functions that start processes for a process group.

With torchrun, ranks read their rank, world size and address from the environment. Here a rank that
asks for its own rank and world size meets the others in nbddp's store, unless another store is
served at the given address. So a cell needs no port and no file, and can run again. All other calls
go to torch's own handlers.

A cell starts no processes for a process group, because the ranks are already running. A script may.
"""

from __future__ import annotations

import ast
import functools
import importlib
import linecache
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import context
from types import FrameType
from typing import Any
from urllib.parse import parse_qsl, urlparse

import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.distributed_c10d import default_pg_timeout

from nbddp.import_hooks import change_when_imported
from nbddp.topology import Topology
from nbddp.worker.watch.main_thread import frames_from

CONNECT_TIMEOUT = 1.0  # seconds to connect to a store on this machine
ALREADY_INITIALIZED = (
    "trying to initialize the default process group twice! The ranks have one already: delete this "
    "line, or run the cell with --no-init"
)
_SPAWN = "torch.multiprocessing.spawn"
_LAUNCHER = "torch.distributed.launcher.api"  # of torchrun and accelerate.notebook_launcher
_LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")


@dataclass(frozen=True, slots=True)
class RendezvousParameters:
    """The requested rank, world size and address."""

    rank: int
    world_size: int
    address: str
    port: int

    @classmethod
    def read(cls, url: str) -> RendezvousParameters | None:
        """Parse a URL as torch does. Return None if something is missing; torch then reports it."""
        parts, env = urlparse(url), os.environ
        is_env = parts.scheme == "env"
        try:
            given = {name: env.get(name.upper(), "") for name in ("rank", "world_size") if is_env}
            given |= parse_qsl(parts.query)
            return cls(
                rank=int(given["rank"]),
                world_size=int(given["world_size"]),
                address=env["MASTER_ADDR"] if is_env else parts.hostname or "",
                port=int(env["MASTER_PORT"]) if is_env else parts.port or 0,
            )
        except (KeyError, ValueError):
            return None


class Rendezvous:
    """Serves ``env://``, ``tcp://`` and ``file://`` in this rank and in its forked children.

    Args:
        topology: the rank's position.
        attempt: number of the group's start.
        open_store: returns a client of nbddp's store for one more process group.
    """

    def __init__(
        self, topology: Topology, attempt: int, open_store: Callable[[], dist.Store]
    ) -> None:
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
        """Replace torch's rendezvous handlers in this process."""
        # torch.distributed.rendezvous is a function, so import the module by its name
        handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
        # An interrupt cannot end a wait in a FileStore. A file of an earlier run breaks the next
        # one: torch deletes it only after the last rank has freed its process group.
        for scheme in ("env", "tcp", "file"):
            handlers[scheme] = self._handler(handlers[scheme])
        module: Any = dist.distributed_c10d
        original = module.init_process_group

        @functools.wraps(original)
        def init_process_group(*args: Any, **options: Any) -> None:
            if dist.is_initialized():
                raise ValueError(ALREADY_INITIALIZED)
            original(*args, **options)

        dist.init_process_group = module.init_process_group = init_process_group

    def _handler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def handler(
            url: str, timeout: timedelta = default_pg_timeout, **options: Any
        ) -> Iterator[tuple[dist.Store, int, int]]:
            parameters = RendezvousParameters.read(url)
            if parameters is None or not self._is_ours(parameters, url):
                yield from original(url, timeout=timeout, **options)
                return
            store = self._external_store(parameters, timeout)
            store = store or self._own_store(parameters, timeout)
            yield store, parameters.rank, parameters.world_size
            raise RuntimeError("the ranks cannot repeat a rendezvous")

        return handler

    def _is_ours(self, parameters: RendezvousParameters, url: str) -> bool:
        """Return whether to use nbddp's store, because only the ranks can take part.

        They use nbddp's address, or each rank asks for its own position at a local address
        or in a file.
        """
        if os.getpid() != self._pid or parameters.world_size > self._running:
            return False
        mine = self._topology
        shown = (mine.master_addr, mine.master_port)
        if url.startswith("env:") and (parameters.address, parameters.port) == shown:
            return True
        is_own_rank = (parameters.rank, parameters.world_size) == (mine.rank, mine.world_size)
        here = ("localhost", "127.0.0.1", "::1", "0.0.0.0", socket.gethostname())
        return is_own_rank and (parameters.address in here or url.startswith("file:"))

    def _external_store(
        self, parameters: RendezvousParameters, timeout: timedelta
    ) -> dist.Store | None:
        """Return a client of the store that is served at the address, for example by a notebook.

        Return None if there is none.
        """
        if parameters.port != self._topology.master_port:
            with suppress(OSError):  # nothing listens there
                address = parameters.address, parameters.port
                socket.create_connection(address, CONNECT_TIMEOUT).close()
                return dist.TCPStore(*address, parameters.world_size, timeout=timeout)
        return None

    def _own_store(self, parameters: RendezvousParameters, timeout: timedelta) -> dist.Store:
        """Return a client of nbddp's store, with a new prefix that is the same on all ranks.

        Groups of one rank alone, as rank 0 of 1, do not affect the prefixes of the others.
        """
        size = parameters.world_size
        self._count[size] += 1
        prefix = f"a{self._attempt}/env/{self._cell}/{size}/{self._count[size]}"
        if size == 1:
            prefix += f"/{self._topology.rank}"
        store = self._open_store()
        store.set_timeout(timeout)
        return dist.PrefixStore(prefix, store)


# ---- processes that a cell starts


def reset_start_method() -> None:
    """Let ``set_start_method`` be called once in this cell too. The chosen method stays."""
    default: Any = context._default_context
    if default._actual_context is not None:
        default._default_context, default._actual_context = default._actual_context, None


def refuse_launchers() -> None:
    """Make functions that start processes for a process group raise a helpful error."""
    spawn: Any = importlib.import_module(_SPAWN)
    package: Any = torch.multiprocessing
    package.start_processes = spawn.start_processes = _refuse_in_cells(
        spawn.start_processes, _instead_of_spawn
    )

    def refuse(launcher: Any) -> None:
        launcher.launch_agent = _refuse_in_cells(launcher.launch_agent, _instead_of_launch)

    change_when_imported(_LAUNCHER, refuse)


def _refuse_in_cells(
    original: Callable[..., Any], describe: Callable[..., str]
) -> Callable[..., Any]:
    """Refuse calls from cells. A started process can import a script, but not a cell."""

    @functools.wraps(original)
    def start(*args: Any, **options: Any) -> Any:
        if getattr(sys.modules["__main__"], "__file__", None) is None:
            raise RuntimeError(describe(*args, **options))
        return original(*args, **options)

    return start


def _instead_of_launch(_config: Any, entrypoint: Any, *_args: Any, **_options: Any) -> str:
    name = getattr(entrypoint, "__name__", "train")
    return (
        "the ranks are already running, and this launcher would start more processes on each of "
        f"them. Call {name}() directly, without the launcher"
    )


def _instead_of_spawn(fn: Any, *_args: Any, **_options: Any) -> str:
    frames = frames_from(sys._getframe(1))
    frame = next(each for each in frames if each.f_globals["__name__"] not in (__name__, _SPAWN))
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
