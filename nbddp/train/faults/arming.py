"""Faults put in on purpose: at a step, on a rank, once, so that an experiment can be repeated."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch.distributed as dist

from nbddp.errors import ArgumentError
from nbddp.train import log_and_track, this_rank
from nbddp.train.faults.fault_actions import FaultAction, FaultError, make_action
from nbddp.train.faults.kinds import FACTOR, FAULTS_VARIABLE, KINDS, Fault

__all__ = ["KINDS", "Fault", "FaultError", "armed", "at", "begin_cell", "clear"]

STRUCK = "NBDDP_STRUCK"  # nbddp always sets it, if only to nothing; torchrun never does


def __dir__() -> list[str]:
    """What Tab offers."""
    return ["KINDS", "Fault", "FaultError", "armed", "at", "clear"]


def at(*, step: int, rank: int, kind: str, factor: float = FACTOR, again: bool = False) -> None:
    """Arm a fault: every rank calls this, and the one that is meant keeps it in mind.

    It strikes right after ``nbddp.log`` reported that step or a later one; the numbers are
    written by then. A training that logs nothing goes by the steps that ``nbddp.loader`` counts.
    First it is put on the run's time line, then it strikes, and once only: not again when the cell
    runs again in the same process, unless told to, and not when nbddp or torchrun runs it again
    after a failure.

    Args:
        step: from which step on.
        rank: which rank it strikes.
        kind: what happens to that rank:

            ``raise`` (a :class:`FaultError`), ``kill`` (SIGKILL), ``segfault``, ``exit`` (code 3),
            ``hang`` (it sleeps), ``stop`` (SIGSTOP), ``slow`` (every later step takes ``factor``
            times as long), ``nan`` (a gradient of the next backward of a prepared model),
            ``skip`` (it leaves out its next collective, see
            :class:`nbddp.train.faults.fault_actions.SkipAction`),
            ``oom`` (an allocation that cannot be had), ``corrupt`` (bytes of the newest
            checkpoint are flipped).
        factor: for ``slow``.
        again: also if it has struck in this process, as after :func:`clear`.

    Raises:
        ArgumentError: there is no such kind, rank, step or factor; it says which there are.

    >>> at(step=30, rank=0, kind="kill")
    >>> armed()
    [Fault(kind='kill', rank=0, step=30, factor=2.0)]
    >>> clear()
    """
    fault = Fault(kind=kind, rank=rank, step=step, factor=factor)
    own_rank, world_size = _rank_and_world_size()
    if fault.rank >= world_size:
        raise ArgumentError(f"there is no rank {fault.rank}: the ranks are 0 to {world_size - 1}")
    if fault.rank == own_rank and not _struck_before(fault):
        _injector.arm(fault, again=again)


def armed() -> list[Fault]:
    """The faults that have yet to strike this rank, the next one first."""
    return list(_injector.armed)


def arm_from_environment() -> None:
    """Arm what nbddp has handed to the ranks of a script: faults of the cells' ranks."""
    texts = os.environ.pop(FAULTS_VARIABLE, "").split(";")
    for fault in [Fault.parse(text) for text in texts if text]:
        if fault.rank < _rank_and_world_size()[1]:
            at(step=fault.step, rank=fault.rank, kind=fault.kind, factor=fault.factor)


def disarm(texts: Sequence[str]) -> None:
    """Disarm faults that struck a script, written as ``str()`` writes them."""
    _injector.armed = [each for each in _injector.armed if str(each) not in texts]


def clear() -> None:
    """Disarm all faults of this rank, undo those that go on, and forget which ones struck."""
    global _injector
    _injector.disarm_all()
    _injector = FaultInjector()


_is_again = True  # until a cell begins that is a new one


def begin_cell(*, is_again: bool) -> None:
    """Another cell begins: the time since the last step of the one before is no step.

    What struck in an earlier attempt is spared if this is a cell that runs again by itself, in a
    recovery or a replay. In one that the user runs it is asked for anew.
    """
    global _is_again
    _is_again = is_again
    _injector.begin_cell()


def _rank_and_world_size() -> tuple[int, int]:
    """This rank and how many there are; torchrun's word for it before there is a process group."""
    if dist.is_initialized():
        return this_rank.rank(), this_rank.world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _struck_before(fault: Fault) -> bool:
    """Whether it struck in an earlier attempt, as far as whoever restarted us says so.

    nbddp names what struck. torchrun only counts its restarts; nbddp's count goes up with a
    restart by hand too, which is a new experiment.
    """
    if STRUCK in os.environ:
        return _is_again and str(fault) in os.environ[STRUCK].split(";")
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


class FaultInjector:
    """The faults of this process: armed, struck, and those that go on from there."""

    def __init__(self) -> None:
        self.armed: list[Fault] = []
        self._struck: set[Fault] = set()
        self._actions: list[FaultAction] = []
        self._remove_hook: Callable[[], None] | None = None
        self._has_logged = False
        self._pid = 0

    def arm(self, fault: Fault, *, again: bool) -> None:
        """Keep it in mind, unless it is or has struck; ``again``, though it has."""
        if fault in self.armed or (fault in self._struck and not again):
            return
        self._pid = os.getpid()
        self.armed = sorted([*self.armed, fault], key=lambda each: each.step)
        if self._remove_hook is None:
            self._remove_hook = log_and_track.on_step(self.on_step)

    def disarm_all(self) -> None:
        """Disarm everything, and undo what goes on."""
        if self._remove_hook is not None:
            self._remove_hook()
        for action in self._actions:
            action.undo()

    def begin_cell(self) -> None:
        """Another cell begins."""
        for action in self._actions:
            action.begin_cell()

    def on_step(self, step: int, source: str) -> None:
        """A step was reported; by ``log`` if it ever does, because a loader counts batches."""
        if os.getpid() != self._pid:
            return  # a child, such as a DataLoader's worker, is no rank
        self._has_logged |= source == "log"
        if source != "log" and self._has_logged:
            return
        for action in self._actions:
            action.on_step()
        for fault in [each for each in self.armed if each.step <= step]:
            self._strike(fault, step)

    def _strike(self, fault: Fault, step: int) -> None:
        action = make_action(fault)
        self.armed.remove(fault)
        self._struck.add(fault)
        self._actions.append(action)
        log_and_track.record_event("fault", fault=str(fault), at_step=step)
        log_and_track.flush()  # whoever dies of it tells nobody any more
        action.strike()


_injector = FaultInjector()
