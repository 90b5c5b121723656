"""Checkpoints: all that a run needs to go on as if it had never ended, whole or absent."""

from __future__ import annotations

import logging
import operator
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nbddp.errors import ArgumentError, CheckpointError
from nbddp.train import log_and_track, this_rank
from nbddp.train.checkpoint import atomic_files, sharded, state_dicts
from nbddp.train.checkpoint.contents import Held, given_parts, load, of_rank, taken
from nbddp.train.collectives import together
from nbddp.train.this_rank import warn_user

logger = logging.getLogger("nbddp")

_live: weakref.WeakSet[Checkpoint] = weakref.WeakSet()


def checkpoints() -> list[Checkpoint]:
    """All that somebody still holds."""
    return list(_live)


class Checkpoint:
    """A folder with the newest checkpoints of a run. Every rank makes it, saves and resumes.

    ::

        checkpoint = nbddp.Checkpoint("runs/first", keep=3)
        parts = dict(model=model, optimizer=optimizer, loader=loader)
        resumed = checkpoint.resume(**parts, best=0.0)
        best = resumed["best"]
        for step in range(resumed.step, 1000):
            ...
            checkpoint.save(step + 1, **parts, best=best)

    A run that is resumed on as many ranks goes on bit for bit as if it had never ended, with one
    exception: DDP arranges its buckets anew after the first backward, so that on more than two
    ranks the first gradients after a resume may be added up in another order, and differ in their
    last bits. One forward and backward before ``resume`` makes that equal, too.

    A killed writer leaves no half of a checkpoint, and damage is noticed by its checksum. Under
    several ranks rank 0 writes, and an error anywhere is raised on all of them.

    Args:
        folder: of this run alone; made when it is first needed. On several machines, a shared one.
        keep: how many checkpoints stay.

    Attributes:
        stall: seconds for which the last ``save`` held the loop.

    Raises:
        ArgumentError: ``keep`` is below 1.

    >>> from tempfile import TemporaryDirectory
    >>> from torch import nn
    >>> with TemporaryDirectory() as folder:
    ...     Checkpoint(folder).save(30, generator=nn.Linear(2, 1), best=0.97)
    ...     resumed = Checkpoint(folder).resume(generator=nn.Linear(2, 1), best=0.0)
    >>> bool(resumed), resumed.step, resumed["best"]
    (True, 30, 0.97)
    """

    def __init__(self, folder: str | PathLike[str], *, keep: int = 3) -> None:
        if keep < 1:
            raise ArgumentError(f"Checkpoint: keep must be at least 1, got {keep}")
        self.folder = Path(folder).absolute()  # a later chdir does not move it
        self.keep = keep
        self.stall = 0.0
        self._staging = state_dicts.StagingBuffers()
        self._in_background: Future[Any] | None = None
        self._finish: Callable[[], object] | None = None
        self._group: dist.ProcessGroup | None = None
        self._whole: set[tuple[str, int, int]] = set()
        _live.add(self)

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs: a write that is under way is this one's to end.

        But who takes a rank's place meets the others, who will be told how it ended.
        """
        return {"folder": self.folder, "keep": self.keep, "meets": self._finish is not None}

    def __setstate__(self, told: Mapping[str, Any]) -> None:
        """As when it is made."""
        self.__init__(told["folder"], keep=told["keep"])  # type: ignore[misc]
        if told["meets"]:
            self._finish = partial(together, self._join)

    def newest(self) -> Path | None:
        """The checkpoint of the latest step, unverified; None when there is none."""
        return next(iter(atomic_files.newest_first(self.folder)), None)

    # ---- saving

    def save(self, step: int, *, asynchronous: bool = False, **parts: Any) -> None:
        """Save a run after a step, with the random numbers' state of every rank.

        A checkpoint of the same step is replaced.

        Args:
            step: how many steps are done, as ``loader.step`` counts them.
            asynchronous: only copy now, and write while the loop goes on. The next save waits for
                it, and so does :meth:`wait`; an error comes up there. One that is spread over
                the ranks becomes whole there too.
            parts: by any names. Of what has ``state_dict()`` and ``load_state_dict()``, such as
                ``model=``, ``generator=``, ``optimizer=``, ``scheduler=``, ``precision=`` or
                ``ema=``, rank 0's state is saved; of what can be iterated, such as a loader,
                and of ``loader=``, that of each rank. Wrappers such as DDP are left out. Where
                FSDP2 spreads parameters over the ranks, each rank writes its own into a folder.
                All else is a plain value: tensors, numbers and strings, and lists, dicts and
                sets of them; rank 0's.

        Raises:
            CheckpointError: it could not be saved; the checkpoints before it are untouched.
            ArgumentError: ``step`` is below 0.
        """
        began = time.perf_counter()
        self.wait()
        given = given_parts(parts)
        spread = given.spread()
        whole: dict[str, Any] = {"world_size": this_rank.world_size(), "spread": list(spread)}

        def take() -> dict[str, Any]:
            whole["step"] = operator.index(step)
            if step < 0:
                raise ArgumentError(f"Checkpoint: step must be 0 or above, got {step}")
            if this_rank.rank() == 0:
                with _told(self.folder / _name(step)):
                    atomic_files.make_folder(self.folder)
                    self._tidy()
                keep_copy = self._staging if asynchronous else state_dicts.as_it_is
                rest = {name: each for name, each in given.parts.items() if name not in spread}
                whole.update(taken(rest, given.values, keep_copy))
                self._staging.settle()
            return of_rank(given.own)

        whole["ranks"] = together(take)
        if spread:
            self._save_spread(whole, spread, began, is_later=asynchronous)
        elif asynchronous:
            self._write_later(whole, began)
        else:
            together(partial(self._write, whole, began))
        self.stall = time.perf_counter() - began

    def wait(self) -> None:
        """Wait until an asynchronous save is whole. Every rank calls it.

        Raises:
            CheckpointError: it could not be written.
        """
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def _tidy(self) -> None:
        """Clear away what a killed writer left; a writer of this process may be at work still."""
        others = [each for each in checkpoints() if each.folder == self.folder]
        wait([each._in_background for each in others if each._in_background is not None])
        atomic_files.clean(self.folder)

    def _write(self, whole: dict[str, Any], began: float) -> None:
        if this_rank.rank() != 0:
            return
        path = self.folder / _name(whole["step"])
        with _told(path):
            atomic_files.write_whole(path, whole)
            self._written(path, whole["step"], began)

    def _write_later(self, whole: dict[str, Any], began: float) -> None:
        if this_rank.rank() == 0:
            thread = ThreadPoolExecutor(1, "nbddp-checkpoint")  # joined when the process ends
            self._in_background = thread.submit(_logged, partial(self._write, whole, began))
            thread.shutdown(wait=False)
        self._finish = partial(together, self._join)

    def _join(self) -> None:
        future, self._in_background = self._in_background, None
        if future is not None:
            future.result()

    def _save_spread(
        self, whole: dict[str, Any], spread: dict[str, Any], began: float, *, is_later: bool
    ) -> None:
        draft = atomic_files.draft_of(self.folder / _name(whole["step"], is_spread=True))
        states = sharded.take(spread)
        if not is_later:
            self._commit(whole, draft, began, partial(sharded.save, draft, states))
            return
        self._group = self._group or sharded.group_for_later()
        future = sharded.save_later(draft, states, self._group)
        self._finish = partial(
            self._commit, whole, draft, began, partial(sharded.finish, draft, future)
        )

    def _commit(
        self, whole: dict[str, Any], draft: Path, began: float, save: Callable[[], None]
    ) -> None:
        def write() -> dict[str, str]:
            with _told(draft):
                save()
                return sharded.checksums(draft)

        def commit() -> None:
            path = self.folder / _name(whole["step"], is_spread=True)
            with _told(path):
                atomic_files.write_whole(draft / sharded.REST, whole | {"files": sums})
                atomic_files.commit_folder(draft, path)
                self._written(path, whole["step"], began)

        sums = {name: digest for each in together(write) for name, digest in each.items()}
        together(lambda: commit() if this_rank.rank() == 0 else None)

    def _written(self, path: Path, step: int, began: float) -> None:
        """A checkpoint is whole: older ones may go, and damaged ones do not count."""
        self._whole.add(_identity(path))
        twin = self.folder / _name(step, is_spread=not path.is_dir())
        if twin.exists():  # of the same step, from when the model was not spread, or was
            atomic_files.remove(twin)
        n_whole = 0
        for each in atomic_files.newest_first(self.folder):
            identity = _identity(each)
            if n_whole >= self.keep:
                atomic_files.remove(each)
            elif identity in self._whole or not _damage(each):
                self._whole.add(identity)
                n_whole += 1
        seconds = round(time.perf_counter() - began, 6)
        log_and_track.happened("checkpoint", step=step, seconds=seconds, path=str(path))

    # ---- resuming

    def resume(self, **parts: Any) -> Resumed:
        """Load the newest whole checkpoint into what is given, on every rank.

        A damaged checkpoint is left out with a warning. Random numbers go on where they were. With
        another number of ranks than at the save there is a warning: random numbers are not taken
        up then, and loaders get rank 0's state; the rest is the same on all ranks anyway.

        Args:
            parts: by the names that they were saved under. A model may be prepared or not,
                whichever way it was saved, and stays on its device. A part of the checkpoint that
                is not named is left out with a warning; with None it is left out. A plain value
                is what :class:`Resumed` holds while there is no checkpoint.

        Returns:
            The step and the plain values that were saved; true if a checkpoint was loaded. When
            there is none, a step of 0 and the plain values that were given.

        Raises:
            CheckpointError: it does not hold what is asked for, or a rank cannot read it.
        """
        self.wait()
        given = given_parts(parts)
        path, damaged = together(self._choose)[0]
        for each, fault in damaged.items() if this_rank.rank() == 0 else ():
            instead = path.name if path else "no other"
            warn_user(f"{each} is damaged: {fault}; taking {instead} instead")
        if path is None:
            return Resumed(values=given.values)
        found: list[Held] = []
        together(lambda: found.append(load(path, given)))
        (held,) = found
        if this_rank.rank() == 0:
            _warn(held, [each for each in held.parts if each not in parts])
            log_and_track.happened("resume", step=held.whole["step"], path=str(path))
        defaults = {name: each for name, each in given.values.items() if name not in held.parts}
        return Resumed(held.whole["step"], {**defaults, **held.whole["values"]}, path)

    def _choose(self) -> tuple[Path | None, dict[Path, str]]:
        """What rank 0 finds to be the newest whole one, and what is wrong with newer ones."""
        damaged: dict[Path, str] = {}
        if this_rank.rank() != 0:
            return None, damaged
        self._tidy()
        for path in atomic_files.newest_first(self.folder):
            fault = _damage(path)
            if not fault:
                return path, damaged
            damaged[path] = fault
        return None, damaged


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a run goes on: at step 0, unless a checkpoint was loaded.

    It is true if a checkpoint was loaded. ``resumed["best"]`` and ``resumed.get("best", 0.0)``
    give its values, as of a dict.

    Attributes:
        step: the step that was saved; 0 when nothing was loaded.
        values: the plain values that were saved, by name, tensors on the CPU; and those that
            ``resume`` was given where none were.
        path: the checkpoint; None when nothing was loaded.

    Raises:
        CheckpointError: in ``resumed[name]``, when there is no such value.

    >>> resumed = Resumed(values={"best": 0.0})
    >>> bool(resumed), resumed.step, resumed["best"]
    (False, 0, 0.0)
    """

    step: int = 0
    values: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None

    def __bool__(self) -> bool:
        return self.path is not None

    def __getitem__(self, name: str) -> Any:
        if name not in self.values:
            held = f"{self.path} holds no value {name!r}" if self.path else f"no value {name!r}"
            only = f"only {', '.join(self.values)}" if self.values else "and no other"
            raise CheckpointError(f"{held}, {only}; give resume() one to begin with: {name}=...")
        return self.values[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The value of this name, or ``default`` if there is none."""
        return self.values.get(name, default)


# ---- files


def _name(step: int, *, is_spread: bool = False) -> str:
    return f"step-{step:08d}" if is_spread else f"step-{step:08d}.pt"


def _damage(path: Path) -> str:
    return sharded.damage(path) if path.is_dir() else atomic_files.damage(path)


def _identity(path: Path) -> tuple[str, int, int]:
    """A file as it was verified: one that is changed later has to be read again."""
    status = path.stat()
    return path.name, status.st_mtime_ns, status.st_size


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"could not write {path}: {error}{atomic_files.UNTOUCHED}") from error


def _logged(write: Callable[[], None]) -> None:
    try:
        write()
    except Exception as error:
        # perhaps nobody saves or waits any more
        logger.error("%s (raised again by the next save or wait)", error)
        raise


def _warn(held: Held, left: list[str]) -> None:
    if left:
        warn_user(
            f"{held.path} holds {', '.join(left)} too, which resume() was not given and which was "
            f"not loaded; write {left[0]}=None if that is meant"
        )
    if not held.is_same_world:
        warn_user(
            f"{held.path} was saved with world size {held.whole['world_size']} and this one is "
            f"{this_rank.world_size()}: random numbers are not taken up, so the run is not bit for "
            "bit what it would have been"
        )
