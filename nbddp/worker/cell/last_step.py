"""Let an interrupt wait for the end of an optimizer's step, so that all ranks keep equal models.

After an interrupt of the user, each rank writes to the store the number of its next whole step of
the cell. The largest number is the last step of all ranks. A rank may not go on from its next step
before it knows the last one, so no rank makes more steps. Nothing is sent without an interrupt.

The interrupt comes at the start of the next iteration: the next forward of a model, the next step
of a pipeline's schedule, or the next step of an optimizer. So schedules, averages and counters that
follow the step in the loop are whole too.

A rank that has made no step yet in the cell may be behind a rank that has. So it stops until the
others have answered: it goes on to their last step, or is interrupted where it is.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.nn.modules.module import Module, register_module_forward_pre_hook
from torch.optim import Optimizer, optimizer
from torch.utils.hooks import RemovableHandle

from nbddp import accelerator
from nbddp.import_hooks import change_when_imported
from nbddp.wire.rank_start import last_step_key
from nbddp.worker.watch.flight_recorder import newest_collective
from nbddp.worker.watch.main_thread import frames_from
from nbddp.worker.wrapping import wrap

MIN_LIMIT = 1.0  # seconds that ranks get to end the last step,
STEPS_IN_LIMIT = 2  # or the time of so many steps if that is longer.
MAX_LIMIT = 10.0  # seconds at most; ranks get all of them once one has ended after the last step
MAX_LEAD = 3  # steps between ranks that wait for each other in each step
POLL_INTERVAL = 0.02  # seconds between two looks at the store
ANSWER_TIMEOUT = 0.2  # seconds for which a rank without steps waits for the others
# torch wraps each optimizer's step() in a function with this code
_STEP_CODE = Optimizer.profile_hook_step(lambda: None).__code__


@dataclass(eq=False, slots=True)
class _Progress:
    """The steps of one optimizer in the running cell.

    Attributes:
        began_at: the start of the newest step, in seconds as in ``time.time()``.
        ended_at: the end of the newest whole step, as in ``time.monotonic()``; before it has one,
            the start of the first step.
        seconds: time between the ends of the last two steps.
    """

    count: int = 0
    began_at: float = 0.0
    ended_at: float = field(default_factory=time.monotonic)
    seconds: float = 0.0

    @property
    def limit(self) -> float:
        return min(MAX_LIMIT, max(MIN_LIMIT, STEPS_IN_LIMIT * self.seconds))

    @property
    def is_active(self) -> bool:
        """Whether the next step may end within the limit. The first one is running."""
        return not self.count or time.monotonic() < self.ended_at + self.limit


class LastStep:
    """Agrees with the other ranks on the last step of an interrupted cell, and ends it there.

    Args:
        store: store of all ranks, which the control thread uses.
        attempt: attempt of the ranks.
        rank: number of this rank.

    Attributes:
        is_awaited: whether an interrupt waits for the end of an iteration. Then the main thread
            does not go on after a step before it knows the last one.
        is_undecided: whether this rank has made no step, and waits for the steps of the others.
        raise_interrupt: raises an interrupt with this text in the cell, if it is still due.
        blocked_at: returns the place of the call in which the main thread may wait for other ranks,
            or None.
    """

    def __init__(self, store: Any, attempt: int, rank: int) -> None:
        self._store = store
        self._key = partial(last_step_key, attempt)
        self._rank = rank
        self._progress: dict[int, _Progress] = {}
        self._awaited: list[_Progress] = []
        self._next = self._last = 0  # steps of this cell
        self._forward_hook: RemovableHandle | None = None  # after the last step
        self._place: object = None  # of a call that may wait for other ranks,
        self._there_since = 0.0  # and when it was first seen there
        self.is_awaited = self.is_undecided = False
        self.raise_interrupt: Callable[[str], None] = lambda _: None
        self.blocked_at: Callable[[], object] = lambda: None
        handle = optimizer.register_optimizer_step_pre_hook(self._begin_step)
        hooks: Any = optimizer._global_optimizer_pre_hooks
        # the first hook: if it raises the interrupt, no other one has counted the step as begun
        hooks.move_to_end(handle.id, last=False)
        optimizer.register_optimizer_step_post_hook(self._end_step)
        change_when_imported("torch.distributed.pipelining.schedules", self._watch_schedules)

    def begin_cell(self) -> None:
        """Forget the steps of earlier cells."""
        self._remove_forward_hook()
        self._progress.clear()
        self._awaited, self._next, self._last = [], 0, 0
        self._place = None

    @property
    def text(self) -> str:
        """How the cell was interrupted, if this rank has made the last step; else empty."""
        return f"after step {self._last} of this cell" if 0 < self._last <= self._count() else ""

    def is_in_step(self, frame: FrameType | None) -> bool:
        """Return whether a frame is in an optimizer's step that has started no collective.

        Steps of ZeroRedundancyOptimizer and steps with a closure may wait for other ranks.
        """
        steps = [each for each in frames_from(frame) if each.f_code is _STEP_CODE]
        if not steps:
            return False
        progress = self._progress.get(id(steps[-1].f_locals["args"][0]))
        newest = newest_collective()
        return progress is None or newest is None or newest.began_at < progress.began_at

    def _begin_step(self, obj: Optimizer, *_: Any) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and not self.is_awaited:
            self.raise_interrupt("")  # if it is due, for example after a slow __exit__
        progress = self._progress.get(id(obj))
        if progress is None:
            progress = self._progress[id(obj)] = _Progress()
            if self.is_awaited:
                self._awaited.append(progress)
        elif progress in self._awaited:
            self._begin_iteration()
        progress.began_at = time.time()

    def _end_step(self, obj: Optimizer, *_: Any) -> None:
        now, progress = time.monotonic(), self._progress.setdefault(id(obj), _Progress())
        progress.seconds = now - progress.ended_at if progress.count else 0.0
        progress.ended_at = now
        progress.count += 1
        if threading.current_thread() is not threading.main_thread():
            return
        while self.is_awaited and not self._last and self._count() >= self._next:
            time.sleep(0.001)  # until the control thread knows the last step
        if not self.is_awaited:
            self.raise_interrupt("")  # if it came in the step
        elif self.text and self._forward_hook is None:
            # torch 2.13 warns that a compiled model calls a global hook twice; it is called once
            warnings.filterwarnings("ignore", "Using `torch.compile.* when there are global hooks")
            # Dynamo would compile the hook, which takes longer than the interrupt may wait
            hook = torch.compiler.disable(self._before_forward)
            self._forward_hook = register_module_forward_pre_hook(hook)

    def _before_forward(self, module: Module, *_: Any) -> None:
        # losses and metrics are modules too, but come between the step and the schedule
        if any(each.requires_grad for each in module.parameters()):
            self._begin_iteration()

    def _watch_schedules(self, schedules: Any) -> None:
        for kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
            wrap(kind, "step", self._step_schedule)

    def _step_schedule(self, step: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Begin an iteration: a stage of a pipeline receives its input, then calls its model."""
        self._begin_iteration()
        return step(*args, **options)

    def _begin_iteration(self) -> None:
        """Raise the interrupt if the last step has ended."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or self._forward_hook is None:
            return
        self._remove_forward_hook()
        if self.is_awaited:
            accelerator.synchronize()  # new groups would abort collectives that the step uses
            self.raise_interrupt(self.text)

    def _remove_forward_hook(self) -> None:
        """Remove the hook, if any. Call this on the main thread only, which may be calling it."""
        if self._forward_hook:
            self._forward_hook.remove()
            self._forward_hook = None

    def _count(self) -> int:
        """Return how many steps all optimizers have ended."""
        return min((each.count for each in self._awaited), default=0)

    # ---- the control thread

    def begin_wait(self) -> None:
        """Set :attr:`is_awaited` if a step may end soon.

        C code that holds the GIL, such as ``re.match``, may let only one signal through. If no step
        is expected, that signal must raise the interrupt.
        """
        # On the control thread.
        progress = list(self._progress.values())
        self._awaited = [each for each in progress if each.is_active]
        self._next = self._count() + 1 if self._awaited else 0
        self.is_undecided = not progress
        self.is_awaited = self.is_undecided or bool(self._awaited)

    def wait(
        self,
        cell: int,
        ranks: Sequence[int],
        announce: Callable[[float], None],
        has_ended: Callable[[float], bool],
    ) -> str:
        """Wait until the cell has ended after the last step. First call :meth:`begin_wait`.

        Args:
            cell: the interrupted cell.
            ranks: the ranks that run it.
            announce: called with the limit in seconds, again if it grows.
            has_ended: waits for so many seconds, and returns whether the interrupt was raised.

        Returns:
            Why the cell must be interrupted in a step; empty if it has no step, or has ended.
        """
        # On the control thread.
        counts = [each.count for each in self._awaited]
        end, done = self._key(cell, "end"), self._key(cell, "done")
        keys = [self._key(cell, rank) for rank in ranks]
        if counts and max(counts) > min(counts) + 1:
            self._store.set(end, "the optimizers have made different numbers of steps")
        elif self.is_awaited:
            self._store.set(self._key(cell, self._rank), str(self._next))
        if self.is_undecided:
            self._decide(keys, end, has_ended)
        if not self.is_awaited:
            self._store.set(end, f"rank {self._rank} was making no steps")
            return ""
        return self._wait(keys, end, done, announce, has_ended)

    def _decide(self, keys: list[str], end: str, has_ended: Callable[[float], bool]) -> None:
        """Wait a short time for the answers of the others. Go on if one of them makes steps."""
        # On the control thread. Meanwhile the main thread waits in the signal handler.
        deadline, is_answered = time.monotonic() + ANSWER_TIMEOUT, self._store.check(keys)
        while not (is_answered or self._store.check([end]) or time.monotonic() > deadline):
            if has_ended(POLL_INTERVAL):
                break
            is_answered = self._store.check(keys)
        self.is_awaited = is_answered and any(int(self._store.get(key)) for key in keys)
        self.is_undecided = False  # last: now the main thread goes on, or raises the interrupt

    def _wait(
        self,
        keys: list[str],
        end: str,
        done: str,
        announce: Callable[[float], None],
        has_ended: Callable[[float], bool],
    ) -> str:
        # On the control thread.
        began = time.monotonic()
        limit = max((each.limit for each in self._awaited), default=MIN_LIMIT)
        announce(limit)
        while not self._store.check([end]):
            if self._waits_in_vain(done):
                return self.text
            if time.monotonic() > began + limit:
                if limit < MAX_LIMIT and self._store.check([done]):
                    limit = MAX_LIMIT  # a rank that stops earlier now would differ from that one
                    announce(limit)
                    continue
                self._store.set(end, f"a rank did not end its step within {limit:.0f} s")
            elif not self._last and self._store.check(keys):
                numbers = [int(self._store.get(key)) for key in keys]
                if max(numbers) > min(numbers) + MAX_LEAD:
                    self._store.set(end, "the ranks have made different numbers of steps")
                else:
                    self._last = max(numbers)
            if has_ended(POLL_INTERVAL):
                if self.text:
                    self._store.set(done, "")
                return ""
        return str(self._store.get(end).decode())

    def _waits_in_vain(self, done: str) -> bool:
        """Return whether this rank waits after the last step, perhaps for a rank that has ended.

        For example, a pipeline that is written by hand waits for its input before it calls its
        model.
        """
        if not self.text or not self._store.check([done]):
            return False
        place, now = self.blocked_at(), time.monotonic()
        if place is None or place != self._place:
            self._place, self._there_since = place, now
        return now > self._there_since + MIN_LIMIT
