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
from nbddp.train.checkpoint.contents import (
    CheckpointContents,
    collect_state,
    load,
    rank_state,
    split_parts,
)
from nbddp.train.collectives import run_on_all_ranks
from nbddp.train.this_rank import warn_user

logger = logging.getLogger("nbddp")

_checkpoints: weakref.WeakSet[Checkpoint] = weakref.WeakSet()


def checkpoints() -> list[Checkpoint]:
    """All that somebody still holds."""
    return list(_checkpoints)


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
        self._finish_save: Callable[[], object] | None = None
        self._group: dist.ProcessGroup | None = None
        self._verified: set[tuple[str, int, int]] = set()
        _checkpoints.add(self)

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs: a write that is under way is this one's to end.

        But who takes a rank's place meets the others, who will be told how it ended.
        """
        return {"folder": self.folder, "keep": self.keep, "meets": self._finish_save is not None}

    def __setstate__(self, saved: Mapping[str, Any]) -> None:
        """As when it is made."""
        self.__init__(saved["folder"], keep=saved["keep"])  # type: ignore[misc]
        if saved["meets"]:
            self._finish_save = partial(run_on_all_ranks, self._join_writer)

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
        start = time.perf_counter()
        self.wait()
        given = split_parts(parts)
        sharded_parts = given.sharded_parts()
        state: dict[str, Any] = {
            "world_size": this_rank.world_size(),
            "spread": list(sharded_parts),
        }

        def collect() -> dict[str, Any]:
            state["step"] = operator.index(step)
            if step < 0:
                raise ArgumentError(f"Checkpoint: step must be 0 or above, got {step}")
            if this_rank.rank() == 0:
                with _as_checkpoint_error(self.folder / _file_name(step)):
                    atomic_files.make_folder(self.folder)
                    self._clean_folder()
                keep_copy = self._staging if asynchronous else state_dicts.without_copy
                rest = {
                    name: each for name, each in given.shared.items() if name not in sharded_parts
                }
                state.update(collect_state(rest, given.values, keep_copy))
                self._staging.synchronize()
            return rank_state(given.per_rank)

        state["ranks"] = run_on_all_ranks(collect)
        if sharded_parts:
            self._save_sharded(state, sharded_parts, start, in_background=asynchronous)
        elif asynchronous:
            self._write_in_background(state, start)
        else:
            run_on_all_ranks(partial(self._write, state, start))
        self.stall = time.perf_counter() - start

    def wait(self) -> None:
        """Wait until an asynchronous save is whole. Every rank calls it.

        Raises:
            CheckpointError: it could not be written.
        """
        finish, self._finish_save = self._finish_save, None
        if finish is not None:
            finish()

    def _clean_folder(self) -> None:
        """Clear away what a killed writer left; a writer of this process may be at work still."""
        others = [each for each in checkpoints() if each.folder == self.folder]
        wait([each._in_background for each in others if each._in_background is not None])
        atomic_files.remove_leftovers(self.folder)

    def _write(self, state: dict[str, Any], start: float) -> None:
        if this_rank.rank() != 0:
            return
        path = self.folder / _file_name(state["step"])
        with _as_checkpoint_error(path):
            atomic_files.write_atomically(path, state)
            self._finish_files(path, state["step"], start)

    def _write_in_background(self, state: dict[str, Any], start: float) -> None:
        if this_rank.rank() == 0:
            thread = ThreadPoolExecutor(1, "nbddp-checkpoint")  # joined when the process ends
            self._in_background = thread.submit(_log_failure, partial(self._write, state, start))
            thread.shutdown(wait=False)
        self._finish_save = partial(run_on_all_ranks, self._join_writer)

    def _join_writer(self) -> None:
        future, self._in_background = self._in_background, None
        if future is not None:
            future.result()

    def _save_sharded(
        self,
        state: dict[str, Any],
        sharded_parts: dict[str, Any],
        start: float,
        *,
        in_background: bool,
    ) -> None:
        draft = atomic_files.draft_path(self.folder / _file_name(state["step"], is_sharded=True))
        states = sharded.get_state(sharded_parts)
        if not in_background:
            self._commit(state, draft, start, partial(sharded.save, draft, states))
            return
        self._group = self._group or sharded.new_background_group()
        future = sharded.save_in_background(draft, states, self._group)
        self._finish_save = partial(
            self._commit, state, draft, start, partial(sharded.wait_for_save, draft, future)
        )

    def _commit(
        self, state: dict[str, Any], draft: Path, start: float, save: Callable[[], None]
    ) -> None:
        def write() -> dict[str, str]:
            with _as_checkpoint_error(draft):
                save()
                return sharded.checksums(draft)

        def commit() -> None:
            path = self.folder / _file_name(state["step"], is_sharded=True)
            with _as_checkpoint_error(path):
                atomic_files.write_atomically(
                    draft / sharded.UNSHARDED_FILE, state | {"files": sums}
                )
                atomic_files.commit_folder(draft, path)
                self._finish_files(path, state["step"], start)

        sums = {name: digest for each in run_on_all_ranks(write) for name, digest in each.items()}
        run_on_all_ranks(lambda: commit() if this_rank.rank() == 0 else None)

    def _finish_files(self, path: Path, step: int, start: float) -> None:
        """A checkpoint is whole: older ones may go, and damaged ones do not count."""
        self._verified.add(_identity(path))
        twin = self.folder / _file_name(step, is_sharded=not path.is_dir())
        if twin.exists():  # of the same step, from when the model was not spread, or was
            atomic_files.remove(twin)
        n_kept = 0
        for each in atomic_files.newest_first(self.folder):
            identity = _identity(each)
            if n_kept >= self.keep:
                atomic_files.remove(each)
            elif identity in self._verified or not _find_damage(each):
                self._verified.add(identity)
                n_kept += 1
        seconds = round(time.perf_counter() - start, 6)
        log_and_track.record_event("checkpoint", step=step, seconds=seconds, path=str(path))

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
        given = split_parts(parts)
        path, damaged = run_on_all_ranks(self._find_newest_whole)[0]
        for each, problem in damaged.items() if this_rank.rank() == 0 else ():
            instead = path.name if path else "no other"
            warn_user(f"{each} is damaged: {problem}; taking {instead} instead")
        if path is None:
            return Resumed(values=given.values)
        found: list[CheckpointContents] = []
        run_on_all_ranks(lambda: found.append(load(path, given)))
        (contents,) = found
        if this_rank.rank() == 0:
            not_given = [each for each in contents.part_names if each not in parts]
            _warn_about_differences(contents, not_given)
            log_and_track.record_event("resume", step=contents.state["step"], path=str(path))
        defaults = {
            name: each for name, each in given.values.items() if name not in contents.part_names
        }
        return Resumed(contents.state["step"], {**defaults, **contents.state["values"]}, path)

    def _find_newest_whole(self) -> tuple[Path | None, dict[Path, str]]:
        """What rank 0 finds to be the newest whole one, and what is wrong with newer ones."""
        damaged: dict[Path, str] = {}
        if this_rank.rank() != 0:
            return None, damaged
        self._clean_folder()
        for path in atomic_files.newest_first(self.folder):
            problem = _find_damage(path)
            if not problem:
                return path, damaged
            damaged[path] = problem
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
            missing = f"{self.path} holds no value {name!r}" if self.path else f"no value {name!r}"
            only = f"only {', '.join(self.values)}" if self.values else "and no other"
            raise CheckpointError(f"{missing}, {only}; give resume() one to begin with: {name}=...")
        return self.values[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The value of this name, or ``default`` if there is none."""
        return self.values.get(name, default)


# ---- files


def _file_name(step: int, *, is_sharded: bool = False) -> str:
    return f"step-{step:08d}" if is_sharded else f"step-{step:08d}.pt"


def _find_damage(path: Path) -> str:
    return sharded.find_damage(path) if path.is_dir() else atomic_files.find_damage(path)


def _identity(path: Path) -> tuple[str, int, int]:
    """A file as it was verified: one that is changed later has to be read again."""
    status = path.stat()
    return path.name, status.st_mtime_ns, status.st_size


@contextmanager
def _as_checkpoint_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"could not write {path}: {error}{atomic_files.OLDER_UNTOUCHED}"
        ) from error


def _log_failure(write: Callable[[], None]) -> None:
    try:
        write()
    except Exception as error:
        # perhaps nobody saves or waits any more
        logger.error("%s (raised again by the next save or wait)", error)
        raise


def _warn_about_differences(contents: CheckpointContents, not_loaded: list[str]) -> None:
    if not_loaded:
        warn_user(
            f"{contents.path} holds {', '.join(not_loaded)} too, which resume() was not given and "
            f"which was not loaded; write {not_loaded[0]}=None if that is meant"
        )
    if not contents.is_same_world:
        warn_user(
            f"{contents.path} was saved with world size {contents.state['world_size']} and this "
            f"one is {this_rank.world_size()}: random numbers are not taken up, so the run is not "
            "bit for bit what it would have been"
        )
