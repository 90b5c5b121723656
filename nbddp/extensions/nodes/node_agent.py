"""The agent of a node: connects to the listener, forks ranks, forwards their data, reports exits.

torchrun starts it (``nbddp.nodes``). It does not import torch: it forks ranks from a
preloaded forkserver, so that a restart needs no imports and exit codes arrive unchanged.
"""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

import nbddp
from nbddp.accelerator import count_devices
from nbddp.child_processes import busy_time
from nbddp.extensions.nodes import ORPHAN_TIMEOUT
from nbddp.extensions.nodes.handshake import node_context
from nbddp.extensions.nodes.join_file import JoinFile
from nbddp.extensions.nodes.log_sync import LogSender
from nbddp.extensions.nodes.node_connection import (
    BUFFER,
    FRAME_ERRORS,
    FrameConnection,
    FrameType,
    StoreForwarder,
    decode_json,
)
from nbddp.extensions.nodes.remote_start import build_start, interface_of
from nbddp.extensions.nodes.stale_files import LockedPath, remove_stale_in
from nbddp.launch.local_launcher import LocalLauncher, RankHandle
from nbddp.topology import cores_here
from nbddp.wire.rank_start import RankStart

HEARTBEAT_PERIOD = 1.0  # seconds between two heartbeats
LOG_PERIOD = 0.05  # seconds between two checks for new log data
STOP_TIMEOUT = 5.0  # seconds between SIGTERM and SIGKILL for ranks, as for local ranks
NOTEBOOK_RETRY_DELAY = 0.5  # seconds between two attempts to connect
CONNECT_TIMEOUT = 5.0  # seconds for one attempt; with a cut cable the system tries for two minutes
SILENT_AFTER = 6.0  # seconds without a frame from the listener, after which the agent reconnects
BACKLOG = 512  # store connections of ranks that can wait while there is no notebook


class NodeAgent:
    """Runs all ranks of one node, in the running event loop.

    Args:
        join: the listener's address, and the secret.
        nproc: how many ranks this node can run.
        folder: an existing folder on this machine for the ranks' log files. The agent also sends
            them to the notebook.
        torchrun_pid: torchrun's process, which this one must not outlive; 0 for none.
        orphan_timeout: seconds without the notebook after which the agent ends.
        kept_join_file: the join file of a notebook on this machine, if ranks are kept for the next
            notebook. Its time is that of the loss of the last one.
    """

    def __init__(
        self,
        join: JoinFile,
        *,
        nproc: int,
        folder: Path,
        torchrun_pid: int,
        orphan_timeout: float,
        kept_join_file: Path | None = None,
    ) -> None:
        self._join = join
        self._context = node_context(join.secret)
        self._nproc = nproc
        self._folder = folder
        self._lock = LockedPath(folder)
        self._torchrun_pid = torchrun_pid
        self._orphan_timeout = orphan_timeout
        self._kept_join_file = kept_join_file
        self._launcher = LocalLauncher()
        self._launch_thread = ThreadPoolExecutor(1, "nbddp-fork")
        self._handles: dict[int, RankHandle] = {}
        self._log_sender = LogSender(self._send_log)
        self._control: FrameConnection | None = None
        self._new_control: FrameConnection | None = None  # replaces a silent one
        self._forwarder: StoreForwarder | None = None  # set when the listener has accepted the node
        self._interface = ""  # to ranks on other machines
        # start parameters of running processes, from the listener
        self._starts: dict[int, dict[str, Any]] = {}
        self._unwanted: set[int] = set()  # running processes that the listener does not know
        self._listener: socket.socket | None = None
        self._reconnecting: asyncio.Task[None] | None = None
        self._lost_at = 0.0  # since when there is no notebook
        self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[str] = self._loop.create_future()

    async def run(self) -> str:
        """Connect and serve until the end. Return the reason; empty if the agent was released."""
        loop = self._loop
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._finish, "")
        self._launcher.preload()
        loop.run_in_executor(None, remove_stale_in, self._folder.parent)
        torchrun = self._watch_torchrun()
        try:
            # a joined node must be ready for a cell: torch takes seconds to import, on NFS a minute
            await self._wait_or_finish(
                loop.run_in_executor(None, self._launcher.wait_until_preloaded)
            )
            self._repeat(HEARTBEAT_PERIOD, self._send_heartbeat)
            self._repeat(LOG_PERIOD, self._send_logs)
            serving = loop.create_task(self._serve())
            await self._wait_or_finish(serving)
            if serving.done():
                serving.result()
            return self._finished.result()
        finally:
            if torchrun is not None:
                loop.remove_reader(torchrun)
                os.close(torchrun)
            await self._shut_down()

    @property
    def has_joined(self) -> bool:
        """Whether a notebook has accepted this node."""
        return self._listener is not None

    async def _wait_or_finish(self, work: asyncio.Future[Any]) -> None:
        await asyncio.wait({work, self._finished}, return_when=asyncio.FIRST_COMPLETED)

    # ---- connection

    async def _serve(self) -> None:
        """Serve the notebook, then the next one, until none connects in time."""
        self._lost_at = time.monotonic()
        reason = f"cannot connect to the notebook at {self._join.address}:{self._join.port}"
        while (control := await self._connect()) is not None:
            self._control = control
            try:
                await self._register(control)
                while True:
                    self._on_frame(control, *await control.read())
            except FRAME_ERRORS as error:
                how = "" if isinstance(error, EOFError) else f" ({error})"
                reason = self._with_duration(f"no connection to the notebook{how}")
            finally:
                self._disconnect()
        self._finish(reason)

    async def _connect(self) -> FrameConnection | None:
        """Try to connect until the listener answers. Return None when it is time to end."""
        timeout = self._orphan_timeout
        if self._kept_join_file is not None and not self._handles:
            timeout = min(timeout, ORPHAN_TIMEOUT)  # there is nothing to keep
        while not self._finished.done():
            control, self._new_control = self._new_control or await self._dial(), None
            if control is not None:
                return control
            if time.monotonic() > self._lost_at + timeout:
                return None
            await asyncio.sleep(NOTEBOOK_RETRY_DELAY)
        return None

    async def _dial(self) -> FrameConnection | None:
        """Try once to connect. Return None if nothing listens there, or if the secret is wrong."""
        address, port = self._join.address, self._join.port
        dialing = asyncio.open_connection(address, port, ssl=self._context, limit=BUFFER)
        try:
            return FrameConnection(*await asyncio.wait_for(dialing, CONNECT_TIMEOUT))
        except (TimeoutError, OSError):
            return None

    async def _register(self, control: FrameConnection) -> None:
        """Describe this node to the listener. If it is accepted, forward its ranks' connections.

        The socket for ranks stays open without a notebook: they wait in its backlog.
        """
        address = control.own_address
        if self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
            self._interface = interface_of(address) if not address.startswith("127.") else ""
            self._loop.run_in_executor(None, self._launcher.preload_more)
        facts = node_facts(self._nproc) | {"is_kept": self._kept_join_file is not None}
        living = [
            {"number": number, "pid": handle.pid, "start": self._starts[number]}
            for number, handle in self._handles.items()
        ]
        control.send_json(
            FrameType.HELLO, **facts, address=address, agent=self._torchrun_pid, living=living
        )
        kind, number, data = await control.read()
        facts = decode_json(data)
        if kind is not FrameType.WELCOME:
            if self._handles:  # another notebook may take them back
                await asyncio.sleep(NOTEBOOK_RETRY_DELAY)
            else:
                self._finish(str(facts["reason"]))
            return
        self._kill_unwanted(facts["keep"])
        self._forwarder = StoreForwarder(control, number, self._dial, self._send_logs)
        self._forwarder.serve(self._listener)

    def _repeat(self, period: float, act: Callable[[], None]) -> None:
        if not self._finished.done():
            act()
            self._loop.call_later(period, self._repeat, period, act)

    def _send_heartbeat(self) -> None:
        self._lock.touch()
        if self._control is None:
            return
        self._control.send_json(FrameType.BEAT, at=time.time(), cpu=self._cpu_times())
        silence = self._loop.time() - self._control.last_received_at
        if silence > SILENT_AFTER + self._orphan_timeout:
            self._finish(self._with_duration("no connection to the notebook"))
        elif silence > SILENT_AFTER and (self._reconnecting is None or self._reconnecting.done()):
            self._reconnecting = self._loop.create_task(self._try_reconnect(self._control))

    def _cpu_times(self) -> dict[int, float]:
        """Return the CPU seconds of each rank; a rank that holds the GIL cannot report them."""
        seconds = {}
        for number, handle in self._handles.items():
            with suppress(psutil.Error):  # it has just exited
                seconds[number] = busy_time(handle.pid or 0)
        return seconds

    async def _try_reconnect(self, silent: FrameConnection) -> None:
        """Connect again to a silent listener: this node may be cut off, or the listener stopped.

        If the connection succeeds, the listener has dropped this node. If not, the network may be
        down, or the listener may continue later: a cell held the GIL for ten seconds, or the
        computer slept.
        """
        control = await self._dial()
        if control is None:
            return
        if (
            self._control is not silent
            or self._loop.time() - silent.last_received_at < SILENT_AFTER
        ):
            control.abort()
            return
        self._new_control = control
        silent.abort()  # _serve continues with the new one

    def _send_logs(self) -> None:
        if self._forwarder is not None:
            self._log_sender.send_new_data()

    # ---- frames from the listener

    def _on_frame(
        self, control: FrameConnection, kind: FrameType, number: int, data: bytes
    ) -> None:
        handle = self._handles.get(number)
        match kind:
            case FrameType.START:
                self._loop.run_in_executor(
                    self._launch_thread, self._launch, number, decode_json(data)
                )
            case FrameType.INTERRUPT if handle is not None:
                handle.interrupt()
            case FrameType.TERMINATE | FrameType.KILL if handle is not None:
                self._end_rank(number, kind)
            case FrameType.TERMINATE | FrameType.KILL:  # queued behind a start of this rank
                self._launch_thread.submit(
                    self._loop.call_soon_threadsafe, self._end_rank, number, kind
                )
            case FrameType.BEAT:
                control.send_json(FrameType.ECHO, sent=decode_json(data)["at"], at=time.time())
            case FrameType.LEAVE:
                self._finish(str(decode_json(data)["reason"]))

    def _end_rank(self, number: int, kind: FrameType) -> None:
        """Terminate or kill a rank, unless it has ended or did not start."""
        handle = self._handles.get(number)
        if handle is None:
            return
        if kind is FrameType.TERMINATE:
            handle.terminate()
        else:
            handle.kill()

    def _disconnect(self) -> None:
        """Close the connections to the notebook; it, or another one, may reconnect."""
        if self._control is not None:
            self._control.abort()
        if self._forwarder is not None:  # it was accepted
            self._forwarder.close()
            self._lost_at = time.monotonic()
            if self._kept_join_file is not None:
                with suppress(OSError):  # it was removed, because the notebook has ended the ranks
                    os.utime(self._kept_join_file)
        self._control = self._forwarder = None

    def _with_duration(self, reason: str) -> str:
        return f"{reason} for {self._orphan_timeout:g} s"

    def _kill_unwanted(self, wanted: dict[str, dict[str, int]]) -> None:
        """Kill the ranks that the notebook does not rejoin; send the others' missing log data.

        Args:
            wanted: for each process to keep, the sizes of its files that have arrived.
        """
        for number, handle in self._handles.items():
            sizes = wanted.get(str(number))
            if sizes is None:
                self._unwanted.add(number)
                self._log_sender.unfollow(number)
                handle.kill()
            else:
                self._log_sender.rewind(number, sizes)

    def _launch(self, number: int, facts: dict[str, Any]) -> None:
        """Start a rank, on the launch thread: it may have to wait for the forkserver."""
        try:
            assert self._listener is not None
            port = self._listener.getsockname()[1]
            start = build_start(
                facts, store_port=port, folder=self._folder, interface=self._interface
            )
            handle = self._launcher.launch(start)
        except Exception as error:  # noqa: BLE001 - the listener waits for this rank
            reason = f"{type(error).__name__}: {error}"
            self._loop.call_soon_threadsafe(
                self._send, FrameType.FAILED, number, {"reason": reason}
            )
        else:
            self._loop.call_soon_threadsafe(self._add_rank, number, facts, start, handle)

    def _add_rank(
        self, number: int, facts: dict[str, Any], start: RankStart, handle: RankHandle
    ) -> None:
        log = Path(start.log_path)
        self._starts[number] = facts
        self._handles[number] = handle
        if "log_path" not in facts:
            self._log_sender.follow(number, log)
            self._log_sender.follow(number, log.with_name("metrics.jsonl"), whole_lines=True)
        self._loop.add_reader(handle.sentinel, self._on_exit, number)
        self._send(FrameType.STARTED, number, {"pid": handle.pid})

    def _on_exit(self, number: int) -> None:
        handle = self._handles.pop(number)
        del self._starts[number]
        self._loop.remove_reader(handle.sentinel)
        handle.join()
        if number not in self._unwanted:
            self._send_logs()
            self._log_sender.unfollow(number)
            self._send(FrameType.EXITED, number, {"exitcode": handle.exitcode})
        self._launch_thread.submit(self._launcher.kill_orphans, handle)

    def _send(self, kind: FrameType, number: int, facts: dict[str, Any]) -> None:
        if self._control is not None:
            self._control.send_json(kind, number, **facts)

    def _send_log(self, number: int, name: str, data: bytes) -> None:
        if self._control is not None:
            self._control.send(FrameType.LOG, number, name.encode() + b"\0" + data)

    # ---- the end

    def _watch_torchrun(self) -> int | None:
        """End when torchrun's agent dies: a killed agent leaves its child processes running."""
        if not self._torchrun_pid or not hasattr(os, "pidfd_open"):
            return None
        try:
            torchrun = os.pidfd_open(self._torchrun_pid)
        except ProcessLookupError:
            self._finish("torchrun's agent has ended")
            return None
        self._loop.add_reader(torchrun, self._finish, "torchrun's agent has ended")
        return torchrun

    def _finish(self, reason: str) -> None:
        if not self._finished.done():
            self._finished.set_result(reason)

    async def _shut_down(self) -> None:
        """Send the reason, then end all ranks and the forkserver.

        The reason is first: otherwise the listener would report the exit of each rank.
        """
        if self._control is not None:
            reason = self._finished.result() if self._finished.done() else ""
            self._control.send_json(FrameType.LEAVE, reason=reason)
        await self._stop_ranks()
        self._send_logs()
        for closable in (self._control, self._forwarder, self._listener):
            if closable is not None:
                closable.close()
        await self._loop.run_in_executor(self._launch_thread, self._launcher.close)
        self._launch_thread.shutdown()

    async def _stop_ranks(self) -> None:
        for handle in self._handles.values():
            handle.terminate()
        deadline = time.monotonic() + STOP_TIMEOUT
        while self._handles and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for handle in self._handles.values():
            handle.kill()


def node_facts(nproc: int) -> dict[str, Any]:
    """Return the facts that the listener needs about this node."""
    kind, gpus = count_devices()
    return {
        "host": socket.gethostname(),
        "nproc": nproc,
        "cores": cores_here(),
        "gpus": gpus,
        "gpu_backend": kind.backend,
        "pid": os.getpid(),
        "python": platform.python_version(),
        "versions": {"nbddp": nbddp.__version__, "torch": version("torch")},
        "order": int(os.environ.get("SLURM_NODEID", sys.maxsize)),  # position among the nodes
    }
