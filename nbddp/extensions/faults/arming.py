"""``nbddp.faults``: arm faults; each fires once, on one rank, at one step."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch.distributed as dist

from nbddp.errors import ArgumentError
from nbddp.extensions.faults import FACTOR
from nbddp.extensions.faults.fault_actions import ACTION_CLASSES, FaultAction, FaultError
from nbddp.extensions.faults.kinds import FAULTS_VARIABLE, KINDS, Fault
from nbddp.reporting import log_and_track, this_rank

__all__ = ["KINDS", "Fault", "FaultError", "armed", "at", "begin_cell", "clear"]

FIRED = "NBDDP_STRUCK"  # nbddp always sets it, perhaps to an empty text; torchrun never does


def __dir__() -> list[str]:
    """Return the names for tab completion."""
    return ["KINDS", "Fault", "FaultError", "armed", "at", "clear"]


def at(*, step: int, rank: int, kind: str, factor: float = FACTOR, again: bool = False) -> None:
    """Arm a fault. Call it on every rank; only the given rank arms the fault.

    The fault fires right after ``nbddp.log`` has reported the given step or a later one; the
    numbers of that step are already written. If the training logs nothing, the steps that
    ``nbddp.loader`` counts are used. nbddp records the fault in the run's event log before it
    fires. A fault fires only once. Without ``again``, it does not fire again if the cell runs
    again in the same process. It also does not fire again if nbddp or torchrun repeats the cell
    after a failure. A ``nan`` or ``skip`` that no backward or collective has followed is disarmed
    at the end of its cell.

    Args:
        step: the first step at which the fault may fire.
        rank: the rank on which it fires.
        kind: the failure of that rank:

            ``raise`` (a :class:`FaultError`), ``kill`` (SIGKILL), ``segfault``, ``exit`` (code 3),
            ``hang`` (the rank sleeps), ``stop`` (SIGSTOP), ``slow`` (every later step takes
            ``factor`` times as long), ``nan`` (a gradient in the next backward of a prepared
            model), ``skip`` (the rank skips its next collective, see
            :class:`nbddp.extensions.faults.fault_actions.SkipAction`), ``oom`` (an allocation that
            must fail), ``corrupt`` (bytes of the newest checkpoint are flipped).
        factor: the slowdown for ``slow``.
        again: whether to arm a fault that has already fired in this process.

    Raises:
        ArgumentError: the kind, rank, step or factor is invalid; the message shows valid ones.

    >>> at(step=30, rank=0, kind="kill")
    >>> armed()
    [Fault(kind='kill', rank=0, step=30, factor=2.0)]
    >>> clear()
    """
    fault = Fault(kind=kind, rank=rank, step=step, factor=factor)
    own_rank, world_size = _rank_and_world_size()
    if fault.rank >= world_size:
        raise ArgumentError(f"there is no rank {fault.rank}: the ranks are 0 to {world_size - 1}")
    if fault.rank == own_rank and not _fired_before(fault):
        _injector.arm(fault, again=again)


def armed() -> list[Fault]:
    """Return the faults that have not yet fired on this rank, the next one first."""
    return sorted(_injector.armed, key=lambda fault: fault.step)


def arm_from_environment() -> None:
    """Arm the faults that nbddp passed to the ranks of a script in the environment."""
    texts = os.environ.pop(FAULTS_VARIABLE, "").split(";")
    for fault in [Fault.parse(text) for text in texts if text]:
        if fault.rank < _rank_and_world_size()[1]:
            at(step=fault.step, rank=fault.rank, kind=fault.kind, factor=fault.factor)


def disarm(texts: Sequence[str]) -> None:
    """Disarm faults that fired in a script; ``texts`` has the format of ``str(fault)``."""
    _injector.armed = [each for each in _injector.armed if str(each) not in texts]


def clear() -> None:
    """Disarm all faults of this rank, undo lasting ones, and allow every fault to fire again."""
    global _injector
    _injector.disarm_all()
    _injector = FaultInjector()


_is_again = True  # until a new cell starts


def begin_cell(*, is_again: bool) -> None:
    """Start a cell: the time since the last step of the previous cell is not a step.

    With ``is_again``, a recovery or a replay runs the cell, and faults of an earlier attempt do
    not fire again. In a cell that the user runs, they do.
    """
    global _is_again
    _is_again = is_again
    _injector.begin_cell()


def end_cell() -> list[str]:
    """Disarm faults that still wait for a target: the next cell may not be a training.

    Return a notice for the user about each.
    """
    return [
        f"the fault {fault} is disarmed: the cell ended before the fault could change anything"
        for fault in _injector.end_cell()
    ]


def _rank_and_world_size() -> tuple[int, int]:
    """Return rank and world size; before the process group exists, from torchrun's environment."""
    if dist.is_initialized():
        return this_rank.rank(), this_rank.world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _fired_before(fault: Fault) -> bool:
    """Return whether a fault fired in an earlier attempt, as far as nbddp or torchrun tells.

    nbddp lists the faults that fired. torchrun only counts its restarts. nbddp's own count cannot
    be used: it also increases with a manual restart, which is a new experiment.
    """
    if FIRED in os.environ:
        return _is_again and str(fault) in os.environ[FIRED].split(";")
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


class FaultInjector:
    """The faults of this process: armed ones, fired ones and lasting ones."""

    def __init__(self) -> None:
        self.armed: list[Fault] = []
        self._fired: set[Fault] = set()
        self._actions: list[tuple[Fault, FaultAction]] = []
        self._remove_hook: Callable[[], None] | None = None
        self._has_logged = False
        self._pid = 0

    def arm(self, fault: Fault, *, again: bool) -> None:
        """Arm a fault unless it is armed, or has fired and ``again`` is not set."""
        if fault in self.armed or (fault in self._fired and not again):
            return
        self._pid = os.getpid()
        self.armed.append(fault)
        if self._remove_hook is None:
            self._remove_hook = log_and_track.on_step(self.on_step)

    def disarm_all(self) -> None:
        """Disarm all faults, and undo lasting ones."""
        if self._remove_hook is not None:
            self._remove_hook()
        for _, action in self._actions:
            action.undo()

    def begin_cell(self) -> None:
        """Tell the lasting faults that another cell starts."""
        for _, action in self._actions:
            action.begin_cell()

    def end_cell(self) -> list[Fault]:
        """Undo the faults that still wait for a target, and return them."""
        waiting = [(fault, action) for fault, action in self._actions if action.is_waiting]
        for _, action in waiting:
            action.undo()
        return [fault for fault, _ in waiting]

    def on_step(self, step: int, source: str) -> None:
        """Fire the faults of a step. A loader's steps count only if ``log`` never reports one."""
        if os.getpid() != self._pid:
            return  # a child process, such as a DataLoader worker, is not a rank
        self._has_logged |= source == "log"
        if source != "log" and self._has_logged:
            return
        for _, action in self._actions:
            action.on_step()
        for fault in sorted(self.armed, key=lambda each: each.step):
            if fault.step <= step:
                self._fire(fault, step)

    def _fire(self, fault: Fault, step: int) -> None:
        try:
            self.armed.remove(fault)
        except ValueError:  # a signal handler has reported a step meanwhile
            return
        self._fired.add(fault)
        action = ACTION_CLASSES.get(fault.kind, FaultAction)(fault)
        self._actions.append((fault, action))
        log_and_track.record_event("fault", fault=str(fault), at_step=step)
        log_and_track.flush()  # a rank that dies can send nothing afterwards
        action.fire()


_injector = FaultInjector()
