"""Checkpoints: all that a run needs to go on as if it had never ended, whole or absent."""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nbddp.errors import ArgumentError, CheckpointError
from nbddp.train import files, place, report, sharded, state
from nbddp.train.parts import checked_step, given_parts, load, of_rank, split_off_spread, taken
from nbddp.train.together import together
from nbddp.train.warn import warn

logger = logging.getLogger("nbddp")

_live: weakref.WeakValueDictionary[int, Checkpoint] = weakref.WeakValueDictionary()
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a run goes on from.

    Attributes:
        step: the step that was saved; the next one is ``step + 1``.
        extra: what was saved with it, tensors on the CPU.
        path: the checkpoint.
    """

    step: int
    extra: Any
    path: Path


def checkpoints() -> list[Checkpoint]:
    """All that somebody still holds, in the order they were made."""
    return list(_live.values())


class Checkpoint:
    """A folder with the newest checkpoints of a run. Every rank makes it, saves and resumes.

    ::

        checkpoint = nbddp.Checkpoint("runs/first", keep=3)
        resumed = checkpoint.resume(model=model, optimizer=optimizer, loader=loader)
        for step in range(resumed.step + 1 if resumed else 0, 1000):
            ...
            checkpoint.save(step, model=model, optimizer=optimizer, loader=loader)

    A run that is resumed on as many ranks goes on bit for bit as if it had never ended, with one
    exception: DDP arranges its buckets anew after the first backward, so that on more than two
    ranks the first gradients after a resume may be added up in another order, and differ in their
    last bits. One forward and backward before ``resume`` makes that equal, too.

    A killed writer leaves no half of a checkpoint, and damage is noticed by its checksum. Under
    several ranks rank 0 writes, and an error anywhere is raised on all of them.

    Args:
        folder: of this run and this model alone (a GAN needs two); made when it is first needed.
            On several machines, a shared one.
        keep: how many checkpoints stay.

    Attributes:
        stall: seconds for which the last ``save`` held the loop.

    Raises:
        ArgumentError: ``keep`` is below 1.
    """

    def __init__(self, folder: str | PathLike[str], *, keep: int = 3) -> None:
        if keep < 1:
            raise ArgumentError(f"Checkpoint: keep must be at least 1, got {keep}")
        self.folder = Path(folder).absolute()  # a later chdir does not move it
        self.keep = keep
        self.stall = 0.0
        self._staging = state.Staging()
        self._in_background: Future[Any] | None = None
        self._finish: Callable[[], object] | None = None
        self._group: dist.ProcessGroup | None = None
        self._whole: set[tuple[str, int, int]] = set()
        _live[next(_numbers)] = self

    def newest(self) -> Path | None:
        """The checkpoint of the latest step, unverified; None when there is none."""
        return next(iter(files.newest_first(self.folder)), None)

    # ---- saving

    def save(
        self,
        step: int,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        precision: Any = None,
        loader: Any = None,
        extra: Any = None,
        asynchronous: bool = False,
    ) -> None:
        """Save a run after a step, with the random numbers' state of every rank.

        Args:
            step: the step that is done, from 0.
            model: as for ``optimizer``, ``scheduler`` and ``precision``, whatever has a
                ``state_dict()``; rank 0's is saved. A wrapper such as DDP is left out. Where FSDP2
                spreads parameters over the ranks, each rank writes its own into a folder.
            optimizer: see ``model``.
            scheduler: see ``model``.
            precision: see ``model``.
            loader: has a ``state_dict()`` too, and every rank's is saved.
            extra: tensors, numbers and strings, and lists, dicts and sets of them; rank 0's.
            asynchronous: only copy now, and write while the loop goes on. The next save waits for
                it, and so does :meth:`wait`; an error comes up there. One that is spread over
                the ranks becomes whole there too.

        Raises:
            CheckpointError: it could not be saved; the checkpoints before it are untouched.
            TypeError: a part has no state, such as a list of optimizers.
            ArgumentError: ``step`` is below 0.
        """
        began = time.perf_counter()
        self.wait()
        given = given_parts(
            model=model, optimizer=optimizer, scheduler=scheduler, precision=precision
        )
        spread = split_off_spread(given)
        whole: dict[str, Any] = {"world_size": place.world_size()}

        def take() -> dict[str, Any]:
            whole["step"] = checked_step(step)
            if place.rank() == 0:
                with _told(self.folder / _name(step)):
                    files.make_folder(self.folder)
                    self._tidy()
                keep_copy = self._staging if asynchronous else state.as_it_is
                whole.update(taken(given, extra, keep_copy))
                self._staging.settle()
            return of_rank(loader)

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
        files.clean(self.folder)

    def _write(self, whole: dict[str, Any], began: float) -> None:
        if place.rank() != 0:
            return
        path = self.folder / _name(whole["step"])
        with _told(path):
            files.write_whole(path, whole)
            self._written(path, whole["step"], began)

    def _write_later(self, whole: dict[str, Any], began: float) -> None:
        if place.rank() == 0:
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
        draft = files.draft_of(self.folder / _name(whole["step"], is_spread=True))
        states = sharded.take(**spread)
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
                files.write_whole(draft / sharded.REST, whole | {"files": sums})
                files.commit_folder(draft, path)
                self._written(path, whole["step"], began)

        sums = {name: digest for each in together(write) for name, digest in each.items()}
        together(lambda: commit() if place.rank() == 0 else None)

    def _written(self, path: Path, step: int, began: float) -> None:
        """A checkpoint is whole: older ones may go, and damaged ones do not count."""
        self._whole.add(_identity(path))
        n_whole = 0
        for each in files.newest_first(self.folder):
            if n_whole >= self.keep:
                files.remove(each)
            elif self._is_whole(each):
                n_whole += 1
        seconds = round(time.perf_counter() - began, 6)
        report.happened("checkpoint", step=step, seconds=seconds, path=str(path))

    def _is_whole(self, path: Path) -> bool:
        identity = _identity(path)
        if identity not in self._whole and not _damage(path):
            self._whole.add(identity)
        return identity in self._whole

    # ---- resuming

    def resume(
        self,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        precision: Any = None,
        loader: Any = None,
    ) -> Resumed | None:
        """Load the newest whole checkpoint into what is given, on every rank.

        A damaged one is left out with a warning. Random numbers go on where they were. Another
        number of ranks than at the save is warned of: random numbers are not taken up then, and
        the loader gets rank 0's state; the rest is the same on all ranks anyway.

        Args:
            model: prepared or not, whichever way it was saved; each rank's stays on its device.
            optimizer: made for that model.
            scheduler: made for that optimizer.
            precision: of the same kind.
            loader: the same data in the same batches.

        Returns:
            The step and what was saved with it; None when there is no whole checkpoint.

        Raises:
            CheckpointError: it does not hold what is asked for, or a rank cannot read it.
        """
        self.wait()
        given = given_parts(
            model=model, optimizer=optimizer, scheduler=scheduler, precision=precision
        )
        path, damaged = together(self._choose)[0]
        whole: dict[str, Any] = {}
        if path is not None:
            together(lambda: whole.update(load(path, given, loader)))
        if place.rank() == 0:
            _warn(path, damaged, whole.get("world_size"))
        if path is None:
            return None
        if place.rank() == 0:
            report.happened("resume", step=whole["step"], path=str(path))
        return Resumed(whole["step"], whole["extra"], path)

    def _choose(self) -> tuple[Path | None, dict[Path, str]]:
        """What rank 0 finds to be the newest whole one, and what is wrong with newer ones."""
        damaged: dict[Path, str] = {}
        if place.rank() != 0:
            return None, damaged
        self._tidy()
        for path in files.newest_first(self.folder):
            fault = _damage(path)
            if not fault:
                return path, damaged
            damaged[path] = fault
        return None, damaged


# ---- files


def _name(step: int, *, is_spread: bool = False) -> str:
    return f"step-{step:08d}" if is_spread else f"step-{step:08d}.pt"


def _damage(path: Path) -> str:
    return sharded.damage(path) if path.is_dir() else files.damage(path)


def _identity(path: Path) -> tuple[str, int, int]:
    """A file as it was verified: one that is changed later has to be read again."""
    status = path.stat()
    return path.name, status.st_mtime_ns, status.st_size


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"could not write {path}: {error}{files.UNTOUCHED}") from error


def _logged(write: Callable[[], None]) -> None:
    try:
        write()
    except Exception as error:
        # perhaps nobody saves or waits any more
        logger.error("%s (raised again by the next save or wait)", error)
        raise


def _warn(path: Path | None, damaged: dict[Path, str], n_ranks: int | None) -> None:
    instead = path.name if path else "no other"
    for each, fault in damaged.items():
        warn(f"{each} is damaged: it {fault}; taking {instead} instead")
    if n_ranks in (None, place.world_size()):
        return
    warn(
        f"{path} was saved with world size {n_ranks} and this one is {place.world_size()}: random "
        "numbers are not taken up, so the run is not bit for bit what it would have been"
    )
