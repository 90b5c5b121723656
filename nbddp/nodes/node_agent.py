"""A node's side: comes in at the door, forks ranks, carries what they say, and sees them end.

torchrun starts it (:mod:`nbddp.nodes.__main__`). It loads no torch itself: ranks are forked from a
warm helper, so that a restart costs no import, and their exit codes are seen as they are.
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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from nbddp.child_processes import cpu_time
from nbddp.launch.local_launcher import LocalLauncher, RankHandle
from nbddp.nodes.handshake import node_context
from nbddp.nodes.join_file import JoinFile
from nbddp.nodes.log_sync import LogSender
from nbddp.nodes.node_connection import (
    BUFFER,
    FRAME_ERRORS,
    FrameConnection,
    FrameType,
    StoreForwarder,
    decode_json,
)
from nbddp.nodes.remote_start import NodeSettings, interface_of
from nbddp.nodes.stale_files import LockedPath, remove_stale_in
from nbddp.topology import cores_here
from nbddp.wire.rank_start import RankStart

HEARTBEAT_PERIOD = 1.0  # seconds between two signs of life
LOG_PERIOD = 0.05  # seconds between two looks for what ranks have written
STOP_TIMEOUT = 5.0  # seconds that ranks get to end by themselves, as a rank of this machine does
RETRY_DELAY = 0.5  # seconds between two tries to come in
CONNECT_TIMEOUT = (
    5.0  # seconds for one: where a cable is cut, the system itself tries for two minutes
)
SILENT_AFTER = 6.0  # seconds without a sign of life of the door, after which another try is made
BACKLOG = 512  # connections of ranks that wait while the notebook is gone


class NodeAgent:
    """All ranks of one node, in the event loop that runs.

    Args:
        join: where to come in.
        nproc: ranks that this node is to have.
        folder: where ranks write first; it is there.
        agent_pid: the process that started this one, which it does not outlive; 0 for none.
        orphan_timeout: seconds after which it ends when the notebook is not heard any more.
    """

    def __init__(
        self, join: JoinFile, *, nproc: int, folder: Path, agent_pid: int, orphan_timeout: float
    ) -> None:
        self._join = join
        self._context = node_context(join.secret)
        self._nproc = nproc
        self._folder = folder
        self._lock = LockedPath(folder)
        self._agent_pid = agent_pid
        self._orphan_timeout = orphan_timeout
        self._launcher = LocalLauncher()
        self._launch_thread = ThreadPoolExecutor(1, "nbddp-fork")
        self._handles: dict[int, RankHandle] = {}
        self._log_sender = LogSender(self._send_log)
        self._control: FrameConnection | None = None
        self._new_control: FrameConnection | None = None  # takes the place of one that is silent
        self._forwarder: StoreForwarder | None = None  # once the door has said what it has of logs
        self._settings: NodeSettings | None = None
        self._starts: dict[int, dict[str, Any]] = {}  # what the door said of those that live
        self._unwanted: set[int] = set()  # of those that live: the door does not know them
        self._listener: socket.socket | None = None
        self._reconnecting: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[str] = self._loop.create_future()

    async def run(self) -> str:
        """Come in and serve until there is no more to do; why it ended, empty if it ended well."""
        loop = self._loop
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._finish, "")
        self._launcher.preload()
        loop.run_in_executor(None, remove_stale_in, self._folder.parent)
        agent = self._watch_torchrun()
        try:
            # who is here can run a cell at once: torch takes seconds to import, on NFS a minute
            await self._wait_or_finish(
                loop.run_in_executor(None, self._launcher.wait_until_preloaded)
            )
            for repeat, period in (
                (self._send_heartbeat, HEARTBEAT_PERIOD),
                (self._send_logs, LOG_PERIOD),
            ):
                self._repeat(period, repeat)
            serving = loop.create_task(self._serve())
            await self._wait_or_finish(serving)
            if serving.done():
                serving.result()
            return self._finished.result()
        finally:
            if agent is not None:
                loop.remove_reader(agent)
                os.close(agent)
            await self._shut_down()

    async def _wait_or_finish(self, work: asyncio.Future[Any]) -> None:
        await asyncio.wait({work, self._finished}, return_when=asyncio.FIRST_COMPLETED)

    # ---- coming in

    async def _serve(self) -> None:
        """Serve the notebook, and the one that comes after it, until there is none."""
        why = f"no way in at {self._join.address}:{self._join.port}"
        while (control := await self._connect()) is not None:
            self._control = control
            try:
                await self._register(control)
                while True:
                    self._on_frame(control, *await control.read())
            except FRAME_ERRORS as error:
                how = "" if isinstance(error, EOFError) else f" ({error})"
                why = self._with_duration(f"the notebook is gone{how}")
            finally:
                self._disconnect()
        self._finish(why)

    async def _connect(self) -> FrameConnection | None:
        """Dial until the door answers. Return None when it is time to end."""
        deadline = time.monotonic() + self._orphan_timeout
        while not self._finished.done():
            control, self._new_control = self._new_control or await self._dial(), None
            if control is not None:
                return control
            if time.monotonic() > deadline:
                return None
            await asyncio.sleep(RETRY_DELAY)
        return None

    async def _dial(self) -> FrameConnection | None:
        """Once; None: nobody is there yet, or has another secret."""
        address, port = self._join.address, self._join.port
        dialing = asyncio.open_connection(address, port, ssl=self._context, limit=BUFFER)
        try:
            return FrameConnection(*await asyncio.wait_for(dialing, CONNECT_TIMEOUT))
        except (OSError, asyncio.TimeoutError):
            return None

    async def _register(self, control: FrameConnection) -> None:
        """Describe this node, and forward its ranks' connections if the door accepts it.

        The socket that ranks dial stays while no notebook is there: they wait in its backlog.
        """
        address = control.own_address
        if self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
            interface = interface_of(address) if not address.startswith("127.") else ""
            port = self._listener.getsockname()[1]
            self._settings = NodeSettings(store_port=port, folder=self._folder, interface=interface)
            self._loop.run_in_executor(None, self._launcher.preload_more)
        about = node_facts(self._nproc)
        living = [
            {"number": number, "pid": handle.pid, "start": self._starts[number]}
            for number, handle in self._handles.items()
        ]
        control.send_json(
            FrameType.HELLO, **about, address=address, agent=self._agent_pid, living=living
        )
        kind, number, data = await control.read()
        facts = decode_json(data)
        if kind is not FrameType.WELCOME:
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
            self._finish(self._with_duration("the notebook is gone"))
        elif silence > SILENT_AFTER and (self._reconnecting is None or self._reconnecting.done()):
            self._reconnecting = self._loop.create_task(self._try_reconnect(self._control))

    def _cpu_times(self) -> dict[int, float]:
        """Return the CPU seconds of each rank: one that holds Python's lock cannot report them."""
        found = {}
        for number, handle in self._handles.items():
            with suppress(psutil.Error):  # it has just ended
                found[number] = cpu_time(handle.pid or 0)
        return found

    async def _try_reconnect(self, silent: FrameConnection) -> None:
        """Dial while the door is silent: is this node cut off, or does its process stand still?

        If somebody answers, the door has given this node up. If nobody does, there may be no way to
        it, or it will go on with this node as soon as it can: a cell that holds Python's lock for
        ten seconds, a computer that was asleep.
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
        silent.abort()  # its reader goes on with the next one

    def _send_logs(self) -> None:
        if self._forwarder is not None:
            self._log_sender.send_new_data()

    # ---- what the door says

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
            case FrameType.TERMINATE if handle is not None:
                handle.terminate()
            case FrameType.KILL if handle is not None:
                handle.kill()
            case FrameType.BEAT:
                control.send_json(FrameType.ECHO, sent=decode_json(data)["at"], at=time.time())
            case FrameType.LEAVE:
                self._finish(str(decode_json(data)["reason"]))

    def _disconnect(self) -> None:
        """The notebook, or another one, may come back."""
        if self._control is not None:
            self._control.abort()
        if self._forwarder is not None:
            self._forwarder.close()
        self._control = self._forwarder = None

    def _with_duration(self, why: str) -> str:
        return f"{why}, for {self._orphan_timeout:g} s"

    def _kill_unwanted(self, wanted: dict[str, dict[str, int]]) -> None:
        """End the ranks that nobody wants back; of the others, send again what has not arrived.

        Args:
            wanted: for each process that is, how much has arrived of each of its files.
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
        """On the forking thread: a helper that still imports keeps it waiting."""
        try:
            assert self._settings is not None
            start = self._settings.build_start(facts)
            handle = self._launcher.launch(start)
        except Exception as error:  # noqa: BLE001 - whatever it is, the door waits for this rank
            reason = f"{type(error).__name__}: {error}"
            news = FrameType.FAILED, number, {"reason": reason}
            self._loop.call_soon_threadsafe(self._send, *news)
        else:
            self._loop.call_soon_threadsafe(self._add_rank, number, facts, start, handle)

    def _add_rank(
        self, number: int, facts: dict[str, Any], start: RankStart, handle: RankHandle
    ) -> None:
        log = Path(start.log_path)
        self._starts[number] = facts
        self._handles[number] = handle
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
        """Torchrun's agent, when it is killed, leaves those that it started running."""
        if not self._agent_pid or not hasattr(os, "pidfd_open"):
            return None
        try:
            agent = os.pidfd_open(self._agent_pid)
        except ProcessLookupError:
            self._finish("torchrun's agent is gone")
            return None
        self._loop.add_reader(agent, self._finish, "torchrun's agent is gone")
        return agent

    def _finish(self, reason: str) -> None:
        if not self._finished.done():
            self._finished.set_result(reason)

    async def _shut_down(self) -> None:
        """Say why, then end all ranks, and then the helper.

        Said first: else the ranks' ends would be news of their own.
        """
        if self._control is not None:
            reason = self._finished.result() if self._finished.done() else ""
            self._control.send_json(FrameType.LEAVE, reason=reason)
        await self._stop_ranks()
        self._send_logs()
        for each in (self._control, self._forwarder, self._listener):
            if each is not None:
                each.close()
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


def count_gpus() -> int:
    """NVIDIA GPUs that ranks of this node will see; asks no driver, touches no GPU."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        return len([each for each in shown.split(",") if each.strip() not in ("", "-1")])
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def node_facts(nproc: int) -> dict[str, Any]:
    """What the door must know of it."""
    found = dict.fromkeys(("torch", "nbddp", "cloudpickle"), "")
    for name in found:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return {
        "host": socket.gethostname(),
        "nproc": nproc,
        "cores": cores_here(),
        "gpus": count_gpus(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "versions": found,
        "order": int(os.environ.get("SLURM_NODEID", sys.maxsize)),  # among the nodes
    }
