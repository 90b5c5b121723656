"""torch's profiler in a rank, for some steps of a cell that was asked to be traced.

A step ends where ``nbddp.log`` reports it. In a cell that logs nothing it begins where an
``nbddp.loader`` hands over its batch. What was traced waits here until the notebook wants it.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function

from nbddp.interrupts import interrupt_held_back
from nbddp.train import place, report
from nbddp.wire.messages import Noticed, RunCell
from nbddp.wire.trace_messages import GiveTrace, Steps, Traced, say_steps
from nbddp.worker.flight_recorder import group_of, recorded
from nbddp.worker.mailing import Mailer
from nbddp.worker.trace_events import Begun, as_part, read, shape

LONGEST = 60.0  # seconds: then the trace ends with the step; what it holds is in memory
MOST_BEGUN = 100_000  # collectives that are noted while it is traced
NO_STEPS = (
    "no step was reported, so nothing was traced: say nbddp.log(step=step, ...) in the loop, or "
    "take its batches from an nbddp.loader"
)
OWN_PROFILER = "the cell runs a profiler of its own, beside which there is no other"
GONE = "the cell had not begun, or the process is a new one since"


class Tracer:
    """Traces some steps of one cell, and keeps what came of it.

    Args:
        steps: which ones.
        cell: of which cell.
        make: makes torch's profiler, which is not started yet.
    """

    def __init__(self, steps: Steps, cell: int, make: Callable[[bool], Any] | None = None) -> None:
        self.cell = cell
        self._steps = steps
        self._make = make or _profiler
        self._pid = os.getpid()
        self._profile: Any = None
        self._is_on = False
        self._has_logged = False
        self._why = ""
        self._restore: Callable[[], None] = lambda: None
        self._seen: list[int] = []  # the lowest and the highest step that was reported
        self._from = self._at = steps.first  # the step that was traced first, and this one
        self._traced: list[int] = []
        self._is_cut = False
        self._seconds = self._began = 0.0
        self._annotation: Any = None
        self._begun: list[Begun] = []
        self._newest = -1
        self._own = b""

    def begin(self) -> Callable[[], None]:
        """The cell begins; returns what ends the listening to its steps."""
        if self._steps.first <= 1:  # who counts from 0, or from 1: nothing is reported before
            self._start(self._steps.first)
        return report.on_step(self.reached)

    def end(self, *, is_ok: bool) -> None:
        """It is over; the step that goes on is whole if that is as it should be."""
        with interrupt_held_back():
            if self._is_on and not is_ok:
                self._is_cut = True
            elif self._is_on and self._seen and not self._has_logged:
                self._traced = [self._from, self._at]
            self._stop()

    def reached(self, step: int, source: str) -> None:
        """A step is reported: by ``log`` at its end, by a loader at its begin."""
        if os.getpid() != self._pid or threading.current_thread() is not threading.main_thread():
            return  # a DataLoader's worker, or a thread that the profiler does not see
        self._has_logged |= source == "log"
        if source != "log" and self._has_logged:
            return
        self._seen = [min([step, *self._seen]), max([step, *self._seen])]
        with interrupt_held_back():  # which would leave a profiler behind that nobody ends
            self._go_on(step if source != "log" else step + 1)

    def _go_on(self, begins: int) -> None:
        """The step before is over, and this one begins."""
        is_early = begins <= self._steps.first or self._seen[0] > self._steps.last
        if self._is_on and not self._traced and is_early:
            self._discard()  # nothing of it was one of the steps
        if self._is_on:
            self._note_collectives()
            if begins > self._at:
                self._traced = [max(self._from, self._seen[0]), begins - 1]
            has_gone_back = begins <= self._at
            is_long = time.monotonic() - self._began > LONGEST
            if begins > self._steps.last or has_gone_back or is_long:
                self._stop()
            else:
                self._annotate(begins)
        elif self._profile is None and self._is_first(begins):
            self._start(begins)

    def _is_first(self, begins: int) -> bool:
        return self._steps.first <= begins <= self._steps.last

    def _discard(self) -> None:
        self._stop()
        self._profile, self._seconds = None, 0.0
        self._begun.clear()

    def _start(self, step: int) -> None:
        if not self._why and torch.autograd._profiler_enabled():
            self._why = OWN_PROFILER  # a second one would start, and end the first
        if self._why:
            return
        entries = recorded()
        self._newest = int(entries[-1]["record_id"]) if entries else -1
        try:
            self._profile = self._make(self._steps.with_memory)
            self._profile.start()
        except RuntimeError as error:  # torch's: another one runs, or none can
            self._profile, self._why = None, _why(error)
            return
        self._is_on, self._began, self._from = True, time.monotonic(), step
        self._restore = before_another_begins(self._give_way)
        self._annotate(step)

    def _give_way(self) -> None:
        """The cell begins a profiler of its own: torch would end ours without a word."""
        self._stop()
        self._profile, self._why = None, OWN_PROFILER

    def _stop(self) -> None:
        if not self._is_on:
            return
        self._restore()
        self._note_collectives()
        self._annotate(None)
        self._is_on = False
        self._seconds = time.monotonic() - self._began
        try:
            self._profile.stop()
        except RuntimeError as error:  # the cell has ended it
            self._profile, self._why = None, _why(error)

    def _annotate(self, step: int | None) -> None:
        """Name what follows as torch's own schedule names it, for whoever reads the file."""
        before, self._annotation = self._annotation, None
        if before is not None:
            before.__exit__(None, None, None)
        if step is not None:
            self._at = step
            self._annotation = record_function(f"ProfilerStep#{step}")
            self._annotation.__enter__()

    def _note_collectives(self) -> None:
        """Keep which collectives were begun, before the recorder forgets them."""
        for each in recorded():
            if int(each["record_id"]) <= self._newest or len(self._begun) >= MOST_BEGUN:
                continue
            self._newest = int(each["record_id"])
            if not each.get("is_p2p"):
                number, at = int(each["collective_seq_id"]), int(each["time_created_ns"])
                self._begun.append(Begun(group_of(each), number, each["profiling_name"], at))

    # ---- afterwards

    def give(self, command: GiveTrace) -> tuple[Traced, list[bytes]]:
        """Write the rank's own file, and its part of the merged one, into the folder.

        Returns:
            What they are; where there is no folder, what is in them.
        """
        why = self._why_not()
        if why:
            return Traced(why=why), []
        if command.folder:
            return self._write(command, Path(command.folder)), []
        with tempfile.TemporaryDirectory(prefix="nbddp-trace-") as folder:
            traced = self._write(command, Path(folder))
            files = [Path(folder) / name(command.rank) for name in (own_name, part_name)]
            return traced, [] if traced.why else [each.read_bytes() for each in files]

    def _why_not(self) -> str:
        if self._why:
            return self._why
        if (self._profile is not None or self._own) and (self._traced or self._is_cut):
            return ""
        if not self._seen:
            return NO_STEPS
        return (
            f"{say_steps(*self._seen)} {'was' if self._seen[0] == self._seen[1] else 'were'} "
            f"reported, none of {self._steps}"
        )

    def _write(self, command: GiveTrace, folder: Path) -> Traced:
        rank = command.rank
        draft = folder / f"rank{rank}.tmp"
        try:
            self._own = self._own or self._exported(draft, rank)
            document = read(gzip.decompress(self._own))
            shaped = shape(
                document,
                rank=rank,
                node=command.node,
                zero=command.zero,
                most=command.most,
                begun=self._begun,
            )
            _write_private(folder / own_name(rank), self._own)
            _write_private(folder / part_name(rank), as_part(shaped.events).encode())
        except (OSError, RuntimeError, ValueError) as error:  # cut off by a full disk: no JSON
            said = str(error) if isinstance(error, RuntimeError) else "there may be no room"
            reason = getattr(error, "strerror", None) or said
            why = f"its trace could not be written to {folder}: {reason}"
            self._why = "" if self._own else why  # torch writes it only once
            return Traced(why=why)
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
        return Traced(
            steps=self._told_steps(),
            is_cut=self._is_cut,
            seconds=round(self._seconds, 6),
            events=len(shaped.events),
            left_out=shaped.left_out,
            under=round(shaped.under, 3),
            met=shaped.met,
            spent={name: list(each) for name, each in shaped.spent.items()},
            rest=round(shaped.rest, 4),
            peak=shaped.peak,
            lost=shaped.lost,
        )

    def _exported(self, draft: Path, rank: int) -> bytes:
        """What torch writes, compressed; its own, larger form of it is let go."""
        profile, self._profile = self._profile, None
        profile.export_chrome_trace(str(draft))
        if not draft.exists():  # torch has logged why, and raises nothing
            raise RuntimeError("torch could not write it: there may be no room")
        return gzip.compress(_say_whose(draft.read_bytes(), rank), 1)

    def _told_steps(self) -> list[int]:
        """The first and the last, be that a part of one."""
        if self._is_cut:
            return [self._from, self._at]
        return self._traced


def own_name(rank: int) -> str:
    """The file of one rank, as torch's profiler has written it."""
    return f"rank{rank}.json.gz"


def part_name(rank: int) -> str:
    """Its part of the merged file, which is made of these."""
    return f"rank{rank}.part"


def _write_private(path: Path, data: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)


def before_another_begins(act: Callable[[], None]) -> Callable[[], None]:
    """Do this just before torch's profiler is begun again; returns what forgets that."""
    room: Any = torch.autograd.profiler
    prepare = room._prepare_profiler

    def restore() -> None:
        room._prepare_profiler = prepare

    def prepare_after(*arguments: Any, **named: Any) -> Any:
        restore()
        act()
        return prepare(*arguments, **named)

    room._prepare_profiler = prepare_after
    return restore


class Profile:
    """torch's profiler, without what ``torch.profiler.profile`` adds to it.

    At its first start that one loads torch's compiler, 800 modules in each rank, which take
    seconds, only to ask whether CUDA graphs are used.
    """

    def __init__(self, *, with_memory: bool) -> None:
        device = "cuda" if torch.cuda.is_available() else None
        self._profile = torch.autograd.profiler.profile(
            use_device=device, profile_memory=with_memory, use_kineto=True
        )

    def start(self) -> None:
        """Begin."""
        self._profile.__enter__()

    def stop(self) -> None:
        """End."""
        self._profile.__exit__(None, None, None)

    def export_chrome_trace(self, path: str) -> None:
        """Write the file; once."""
        self._profile.export_chrome_trace(path)


def _profiler(with_memory: bool) -> Profile:  # noqa: FBT001 - the one thing that is chosen
    return Profile(with_memory=with_memory)


def _say_whose(data: bytes, rank: int) -> bytes:
    """The file with the rank in it, as ``torch.profiler.profile`` says it, for its readers."""
    ranks = place.world_size() if dist.is_initialized() else os.environ.get("WORLD_SIZE", "1")
    facts: dict[str, Any] = {"rank": rank, "world_size": int(ranks)}
    if dist.is_initialized():
        facts["backend"] = dist.get_backend()
    whose = f'{{"distributedInfo": {json.dumps(facts)},'
    return whose.encode() + data.lstrip().removeprefix(b"{")


@contextmanager
def traced(command: RunCell) -> Iterator[Tracer]:
    """Run a cell within, of which some steps are traced; then comes :meth:`Tracer.end`."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its log would be among the cell's lines
    tracer = Tracer(Steps(**command.trace), command.cell)
    forget = tracer.begin()
    try:
        yield tracer
    finally:
        forget()


def end_trace(tracer: Tracer | None, mailer: Mailer, *, is_ok: bool) -> None:
    """The cell is over, and so is its trace, if there is one.

    It may take torch seconds, in which no other thread of the rank runs: that it lives, and has
    heard a stop, is told before.
    """
    if tracer is not None:
        mailer.post(Noticed(cell=tracer.cell))
        mailer.flush()
        tracer.end(is_ok=is_ok)


def _why(error: RuntimeError) -> str:
    return "torch's profiler says: " + str(error).partition("\n")[0]
