"""The process of a rank: apply the environment, join the group, then serve the controller."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from IPython.core.interactiveshell import ExecutionResult

import nbddp
from nbddp import accelerator
from nbddp.extension.rank_half import EndedCell
from nbddp.reporting import log_and_track
from nbddp.topology import cores_here
from nbddp.wire import messages as msg
from nbddp.wire.envelope import CONTROLLER
from nbddp.wire.queues import QueueReader, QueueWriter
from nbddp.wire.rank_start import RANKS_QUEUE, URGENT_QUEUE, RankStart, command_queue, control_queue
from nbddp.wire.request_messages import Request
from nbddp.worker import lazy_preload
from nbddp.worker.cell.debugger import Debuggers, clear_last_error
from nbddp.worker.cell.display import truncate_failure
from nbddp.worker.cell.failure import describe_failure
from nbddp.worker.cell.input_forecast import may_request_input
from nbddp.worker.cell.interrupt import CellInterrupter
from nbddp.worker.cell.last_step import LastStep
from nbddp.worker.cell.run_script import EXIT_FILENAME, exit_code, exit_forked_child
from nbddp.worker.cell.shell import RankShell, make_shell
from nbddp.worker.cell.shell_commands import PackageCommands
from nbddp.worker.cell.stdin import StdinProxy
from nbddp.worker.heal.healing import HealHandler
from nbddp.worker.heal.reported_values import ReportedValues
from nbddp.worker.heal.shard_copies import ShardCopies
from nbddp.worker.main_process import become_main_process, leave_resource_tracker
from nbddp.worker.output.log_writer import LogWriter
from nbddp.worker.output.metric_sink import MetricSink
from nbddp.worker.output.outbox import Outbox, build_notice
from nbddp.worker.process_group.connections import Connections
from nbddp.worker.process_group.nccl import configure_nccl
from nbddp.worker.process_group.process_group import (
    ProcessGroup,
    describe_missing_gpus,
    describe_shared_gpus,
)
from nbddp.worker.process_group.regroup import Regrouper
from nbddp.worker.process_title import name_rank
from nbddp.worker.rank_halves import RankHalves
from nbddp.worker.requests import PULL_FILENAME, RequestHandler, store_pickled
from nbddp.worker.shutdown import clear_exit_hooks, exit_process, exit_with_kernel
from nbddp.worker.store_clients import StoreClients
from nbddp.worker.thread_pools import set_pool_threads
from nbddp.worker.tracebacks import failure_outside_cells
from nbddp.worker.watch import dataloader_waits, polls
from nbddp.worker.watch.flight_recorder import BUFFER_SIZE
from nbddp.worker.watch.main_thread import blocking_call, main_frame
from nbddp.worker.watch.resource_usage import UsageSampler
from nbddp.worker.watch.sampler import Sampler


def run_rank(start: RankStart) -> None:
    """Run as a rank until the controller shuts it down."""
    with suppress(PermissionError):  # already a session leader
        os.setsid()
    lazy_preload.reset_in_rank()
    name_rank(start.topology.rank, start.topology.world_size)
    _seed_generators()
    clear_exit_hooks()
    exit_with_kernel(start.kernel_pid)
    become_main_process()  # after exit_with_kernel, which needs its parent
    leave_resource_tracker()
    apply_environment(start)
    connections = Connections()
    clients = StoreClients.connect(
        start.store_port, start.store_prefix, connections.protecting, connections.recording
    )
    sender, attempt = start.topology.rank, start.attempt
    writer, urgent = (
        QueueWriter(
            clients.reports,
            queue,
            secret=start.secret,
            sender=sender,
            attempt=attempt,
            incarnation=start.incarnation,
            can_rejoin=start.can_rejoin,
        )
        for queue in (RANKS_QUEUE, URGENT_QUEUE)
    )
    outbox = Outbox(writer, urgent, ranks=start.topology.world_size)
    path = Path(start.log_path)
    log = LogWriter(path, outbox)
    metric_sink = MetricSink(
        path.with_name("metrics.jsonl"), outbox, rank=sender, attempt=start.run_attempt
    )
    outbox.start(log, metric_sink)
    log.capture_output()
    # After a SIGSEGV the log has the Python stacks of all threads. A Gloo thread that aborts the
    # process because of different sizes has no Python stack, but the main thread's shows the line.
    faulthandler.enable(file=2)
    try:
        rank = Rank(start, clients, connections, outbox, log, metric_sink)
    except Exception as error:  # noqa: BLE001 - the controller must know of any error
        reason = f"{type(error).__name__}: {error}"
        outbox.post(msg.StartFailed(reason=reason, traceback=traceback.format_exc()))
        outbox.close()
        while True:  # the controller kills this process; after an exit it might not read the reason
            signal.pause()
    rank.serve()
    rank.exit()


def _seed_generators() -> None:
    """Give this rank random states of its own, as each process of torchrun has them.

    All ranks of a machine are forked with the same states. Python seeds ``random`` in a fork.
    """
    torch.default_generator.seed()
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()


def apply_environment(start: RankStart) -> None:
    """Apply the environment variables, folder and import path that the kernel had at the start."""
    os.environ.clear()
    os.environ.update(start.env)
    os.environ.update(start.topology.to_env(attempt=start.run_attempt, run_id=start.run_id))
    if not start.env.get("GLOO_DEVICE_TRANSPORT"):  # Gloo refuses an empty one
        os.environ.pop("GLOO_DEVICE_TRANSPORT", None)
    os.environ["OMP_NUM_THREADS"] = str(start.spec.threads)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(BUFFER_SIZE))
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    is_here = start.topology.master_addr == "127.0.0.1"
    if interface := start.interface or (loopback if is_here else ""):
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
            os.environ.setdefault(name, interface)  # else they listen on all interfaces
    configure_nccl(start.topology)
    dist.set_debug_level_from_env()  # torch read TORCH_DISTRIBUTED_DEBUG before the fork
    os.chdir(start.cwd)
    sys.path[:] = start.sys_path
    torch.set_num_threads(start.spec.threads)
    set_pool_threads(start.spec.threads)
    time.tzset()  # the C library read TZ before the fork


class Rank:
    """One rank: a shell, a process group, and two queues of messages from the controller."""

    def __init__(
        self,
        start: RankStart,
        clients: StoreClients,
        connections: Connections,
        outbox: Outbox,
        log: LogWriter,
        metric_sink: MetricSink,
    ) -> None:
        self._start = start
        self._topology = start.topology
        self._cell = 0
        self._last_ended: msg.CellEnded | None = None
        self._clients = clients
        clients.payloads.set_timeout(timedelta(seconds=30))  # the pieces are already in the store
        self._outbox = outbox
        self._log = log
        self._metric_sink = metric_sink
        log_and_track.set_sink(metric_sink)
        self._extensions = RankHalves(self._notify_user, start.attempt, self._was_interrupted)
        self._group = ProcessGroup(
            clients.groups,
            connections,
            start.topology,
            backend=start.spec.backend,
            timeout=timedelta(seconds=start.spec.timeout),
            attempt=start.attempt,
        )
        if self._group.device.type == "cpu":  # else Accelerate ignores a group without a GPU
            os.environ.setdefault("ACCELERATE_USE_CPU", "true")
        self._shell = self._make_shell(start.colors)
        self._reported_values = ReportedValues(self._shell.user_ns)
        claims = f"a{start.attempt}/installs"
        PackageCommands(clients.commands, claims, self._topology, self._shell).install_hooks()
        self._regrouper = Regrouper(self._group, self._shell.user_ns, self._notify_user)
        self._shard_copies = ShardCopies(
            self._shell.user_ns,
            self._group,
            clients.commands.open_connection,
            self._topology.rank,
            self._topology.world_size,
            self._notify_user,
        )
        self._stdin = StdinProxy(self._post_input_request, is_interrupted=self._was_interrupted)
        self._debuggers = Debuggers(self._stdin, self._topology.rank, self._claim_breakpoint)
        usage = UsageSampler(self._group.device)
        self._sampler = Sampler(
            outbox.post,
            self._shell.is_cell_file,
            self._shell.name_of_file,
            usage,
            log,
            metric_sink,
            lambda: self._stdin.waiting_for,
        )
        self._interrupter = CellInterrupter(
            is_cell_file=self._is_interruptible,
            cancel_task=self._shell.cancel_task,
            record_wait=self._record_wait,
            is_transferring=connections.had_traffic,
            abort_waits=self._group.abort_waits,
            acknowledge=lambda cell: self._outbox.post(msg.InterruptAcknowledged(cell=cell)),
            announce_wait=lambda cell, seconds: self._outbox.post(
                msg.StepAwaited(cell=cell, seconds=seconds)
            ),
            last_step=LastStep(clients.control, start.attempt, self._topology.rank),
        )
        self._interrupter.install_hooks()
        self._request_handler = RequestHandler(
            self._shell,
            clients.payloads,
            self._payload_key,
            outbox.post,
            self._interrupter,
            self._extensions,
            self._reported_values,
            HealHandler(
                self._shell,
                self._reported_values,
                self._group,
                self._regrouper,
                self._shard_copies,
                clients.payloads,
                self._payload_key,
            ),
        )
        dataloader_waits.install_hooks()
        polls.install_hooks()
        self._stdin.install()
        self._debuggers.install()
        if start.spec.joins_group:
            self._group.init(0)
            self._group.apply_user_timeout()
        self._notify_user(describe_shared_gpus(start.spec.backend, start.topology.local_world_size))
        self._notify_user(describe_missing_gpus())
        serve = self._serve_control_queue
        threading.Thread(target=serve, name="nbddp-control", daemon=True).start()
        self._outbox.post(self._sampler.sample())
        self._sampler.start()
        self._report_ready()  # last: now the controller may send cells

    def _report_ready(self) -> None:
        self._reported_values.report_all_next()
        self._sampler.force_next_status()
        ready = msg.Ready(
            pid=os.getpid(),
            device=str(self._group.device),
            backend=self._group.backend,
            host=socket.gethostname(),
            cores=cores_here(),
            threads=torch.get_num_threads(),
            cell=self._cell,
        )
        self._outbox.post(ready)

    def _make_shell(self, colors: str) -> RankShell:
        shell = RankShell.instance() if RankShell.initialized() else make_shell()
        if colors:
            shell.colors = colors
        shell.attach_to_rank(self._outbox.post)
        self._preset_names = {
            "rank": self._topology.rank,
            "local_rank": self._topology.local_rank,
            "world_size": self._topology.world_size,
            "device": self._group.device,
            "torch": torch,
            "dist": dist,
            "nbddp": nbddp,
        }
        shell.push(self._preset_names, interactive=False)
        return shell

    def serve(self) -> None:
        """Handle messages on the main thread, one after the other, until ``Shutdown``."""
        commands = self._clients.commands
        for message in self._messages(commands, command_queue, commands.reconnect):
            match message:
                case msg.Shutdown():
                    break
                case msg.RunCell() as command:
                    self._run_cell(command)
                case msg.Regroup() as command:
                    self._regrouper.regroup(command)
                case command if isinstance(command, Request):
                    self._request_handler.answer(command)
        if self._group.backend != "gloo":
            self._group.destroy()  # NCCL warns if its communicators still exist at exit

    def exit(self, *, code: int = 0) -> NoReturn:
        """Save the files that are open, and end this process."""
        clear_last_error()
        exit_process(self._outbox.close, code=code)

    def _messages(
        self, client: Any, queue: Callable[..., str], reconnect: Callable[[], dist.Store]
    ) -> Iterator[Any]:
        """Yield the controller's messages from a queue of this rank."""
        start = self._start
        name = queue(start.attempt, start.topology.rank, start.incarnation)
        reopen = reconnect if start.can_rejoin else None
        reader = QueueReader(client, name, secret=start.secret, reopen=reopen)
        while True:
            envelope = reader.get()
            if envelope.sender == CONTROLLER and envelope.attempt == start.attempt:
                if envelope.missing:
                    text = msg.missing_messages(envelope.missing, f"to rank {start.topology.rank}")
                    self._outbox.post(build_notice(text))
                yield envelope.message

    def _serve_control_queue(self) -> None:
        # On the control thread.
        clients = self._clients
        for message in self._messages(clients.control, control_queue, self._reconnect_control):
            match message:
                case msg.Interrupt() as command:
                    self._interrupt(command)
                case msg.InputReply() as reply:
                    self._stdin.receive_reply(reply)
                case msg.CancelRequest(request=request):
                    self._request_handler.cancel(request)

    def _interrupt(self, command: msg.Interrupt) -> None:
        # On the control thread.
        try:
            self._interrupter.interrupt(
                command.cell, rank_died=command.rank_died, ranks=command.ranks
            )
        except Exception:  # noqa: BLE001 - this thread must survive for the next interrupt
            traceback.print_exc()

    def _reconnect_control(self) -> dist.Store:
        """Connect to the store of another notebook, and tell it what it missed. A cell goes on."""
        # On the control thread.
        store: dist.Store = self._clients.control.reconnect()
        self._clients.payloads.invalidate()
        self._clients.groups.invalidate()
        self._outbox.reconnect()
        self._report_ready()
        if self._last_ended is not None and self._last_ended.cell == self._cell:
            self._outbox.post(replace(self._last_ended, payload={}))  # it was in the old store
        self._stdin.ask_again()
        return store

    def _record_wait(self) -> None:
        # On the control thread.
        if blocking_call(main_frame(), self._shell.is_cell_file):
            self._group.record_wait()

    # ---- cells

    def _run_cell(self, command: msg.RunCell) -> None:
        self._was_quit = False
        self._log.begin_cell()
        can_run = self._prepare_cell(command)
        failure = self._regrouper.pop_failure(command)  # also if this cell cannot start
        if not can_run:
            failure = msg.Failure(name="KeyboardInterrupt", text="", traceback="", at=time.time())
        if failure is not None:
            self._interrupter.end_cell()
            self._sampler.end_cell()
            self._end_cell(command, failure)
            return
        pid = os.getpid()
        result = self._shell.run(command, self._extensions.before_cell)
        if os.getpid() != pid:  # a forked child; only the rank itself may serve
            exit_forked_child(result.error_before_exec or result.error_in_exec)
        if result.success:
            self._shard_copies.end_cell()
        self._debuggers.end_cell()
        self._interrupter.end_cell()
        # else a late signal would call the cell's own handler
        self._interrupter.install_signal_handler()
        self._sampler.end_cell()
        at = time.time()
        if command.options:
            # The extensions of these options may stop all threads for seconds, as torch's profiler
            # does. So first say that the cell ends, as after an interrupt: else the rank would
            # count as stuck.
            self._outbox.post(msg.InterruptAcknowledged(cell=command.cell))
            self._outbox.flush()
        for notice in self._extensions.after_cell(result.error_before_exec or result.error_in_exec):
            self._outbox.post(build_notice(notice))
        self._log.capture_output()
        failure = self._describe_end(result, at)
        # The error refers to its frames and so to this one; drop it to free their objects.
        result.error_before_exec = result.error_in_exec = None
        self._end_cell(command, failure, result.result)

    def _describe_end(self, result: ExecutionResult, at: float) -> msg.Failure | None:
        """Return the failure of a cell that has ended at this time, and keep its error."""
        error = result.error_before_exec or result.error_in_exec or self._group.lost_result()
        if exit_code(error) == 0:
            error = None  # a script may end with sys.exit()
        if error is not None and accelerator.has_lost_context():
            sys.stderr.write(self._shell.format_error(error))
            self.exit(code=1)  # a new process can use the GPU again
        self._group.record_failure(error)
        # The user left the debugger, or its input ended. It also quits in an interrupted cell.
        self._was_quit = isinstance(error, BdbQuit) and not self._interrupter.was_interrupted
        if error is None:
            return None
        if not self._was_quit:  # else keep the exception that was debugged before
            is_interrupt = self._interrupter.was_interrupted
            self._debuggers.keep_exception(error, is_interrupt=is_interrupt)
        self._log.write_hidden(self._shell.format_error(error, is_whole=True))
        return describe_failure(error, self._shell, stuck_in=self._group.stuck_in, at=at)

    def _was_interrupted(self) -> bool:
        return self._interrupter.was_interrupted

    def _is_interruptible(self, filename: str) -> bool:
        is_code = filename in (PULL_FILENAME, EXIT_FILENAME) or self._shell.is_cell_file(filename)
        return is_code or self._extensions.is_in_hook(filename)

    def _prepare_cell(self, command: msg.RunCell) -> bool:
        """Prepare for a cell. Return False if it was interrupted before it could start."""
        for name, value in self._preset_names.items():
            self._shell.user_ns.setdefault(name, value)
        self._cell = command.cell
        dataloader_waits.begin_cell()
        self._sampler.begin_cell(command.cell)  # the next lines may free much memory, slowly
        self._stdin.begin_cell(command.answers)
        self._debuggers.begin_cell(command)
        may_request = may_request_input(command.source, self._shell.user_ns)
        self._group.begin_cell(command, may_request_input=may_request)
        self._metric_sink.begin_cell(is_recorded=not command.is_replay)
        log_and_track.begin_cell()
        self._outbox.begin_cell()
        copies = f"a{self._start.attempt}/copies/{command.cell}"
        self._shard_copies.begin_cell(copies, command.shard_copies)
        return self._interrupter.begin_cell(command.cell)  # last: now interrupts raise

    def _end_cell(
        self, command: msg.RunCell, failure: msg.Failure | None, value: Any = None
    ) -> None:
        payload: msg.JsonDict = {}
        if command.wants_value and failure is None:
            store, key = self._clients.payloads, self._payload_key(f"cell{command.cell}")
            try:
                payload = store_pickled(store, key, value, name="the last value")
            except Exception as error:  # noqa: BLE001 - from pickle or from the store
                failure = failure_outside_cells(error)
            if note := payload.get("note"):
                self._outbox.post(build_notice(note))
        ended = EndedCell(names=self._shell.user_ns, source=command.source, failure=failure)
        self._last_ended = msg.CellEnded(
            cell=command.cell,
            in_group=self._group.is_intact(),
            **self._group.count_collectives(),
            steps=self._group.step_counts.made,
            is_interrupted=self._interrupter.was_interrupted or self._was_quit,
            is_quit=self._was_quit,
            failure=asdict(truncate_failure(failure)) if failure else {},
            result=self._shell.displayhook.bundle if failure is None else {},
            payload=payload,
            facts=self._extensions.facts(ended),
            values=self._reported_values.changes(),
            armed=self._extensions.armed(),
        )
        self._outbox.post(self._last_ended)

    def _post_input_request(self, question: msg.MessageFromRank) -> None:
        self._outbox.post(question)
        self._outbox.post(self._sampler.sample(self._cell))  # show it in the panel at once

    def _claim_breakpoint(self) -> bool:
        """Return whether this rank is the first to reach a breakpoint in this cell."""
        key, rank = f"a{self._start.attempt}/break/{self._cell}", str(self._topology.rank)
        return bool(self._clients.payloads.compare_set(key, "", rank).decode() == rank)

    def _notify_user(self, line: str) -> None:
        """Show a line that is the same on all ranks; only rank 0 sends it."""
        if line and self._topology.rank == 0:
            self._outbox.post(build_notice(line))

    def _payload_key(self, name: str) -> str:
        return f"a{self._start.attempt}/payload/{self._topology.rank}/{name}"
