"""``nbddp.Checkpoint``: save the state that a run needs to continue, completely or not at all."""

from __future__ import annotations

import logging
import operator
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nbddp.errors import ArgumentError, CheckpointError
from nbddp.extensions.train.checkpoint import atomic_files, sharded, state_dicts
from nbddp.extensions.train.checkpoint.atomic_files import OLDER_UNTOUCHED
from nbddp.extensions.train.checkpoint.contents import CheckpointContents, load, split_parts
from nbddp.extensions.train.collectives import run_on_all_ranks
from nbddp.reporting import log_and_track, this_rank
from nbddp.reporting.this_rank import warn_user
from nbddp.reporting.training_objects import checkpoints

logger = logging.getLogger("nbddp")


class Checkpoint:
    """A folder with the newest checkpoints of a run. Every rank creates it, saves and resumes.

    ::

        checkpoint = nbddp.Checkpoint("runs/first", keep=3)
        parts = dict(model=model, optimizer=optimizer, loader=loader)
        resumed = checkpoint.resume(**parts, best=0.0)
        best = resumed["best"]
        for step in range(resumed.step, 1000):
            ...
            checkpoint.save(step + 1, **parts, best=best)

    A run that is resumed with the same world size continues bit for bit as if it had never ended,
    with one exception. DDP rearranges its buckets after the first backward. With more than two
    ranks, the first gradients after a resume may therefore be added up in another order, and
    differ in their last bits. One forward and backward before ``resume`` avoids that.

    A killed writer leaves no partial checkpoint, and a checksum detects damage. With several ranks,
    rank 0 writes, and an error on any rank is raised on all ranks.

    Args:
        folder: a folder for this run only; it is created when needed. On several machines, use a
            shared folder.
        keep: the number of checkpoints to keep.

    Attributes:
        stall: the seconds for which the last ``save`` blocked the loop.

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
        self.folder = Path(folder).absolute()  # independent of a later chdir
        self.keep = keep
        self.stall = 0.0
        self._save_start = 0.0
        self._staging = state_dicts.StagingBuffers()
        self._in_background: Future[Any] | None = None
        self._finish_save: Callable[[], object] | None = None
        self._group: dist.ProcessGroup | None = None
        self._verified: set[tuple[str, int, int]] = set()
        checkpoints.add(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, without a write that is in progress.

        This process finishes the write. A replacement of this rank still has to take part in the
        wait for it, which is a collective.
        """
        return {"folder": self.folder, "keep": self.keep, "meets": self._finish_save is not None}

    def __setstate__(self, saved: Mapping[str, Any]) -> None:
        """Initialize again from the folder."""
        self.__init__(saved["folder"], keep=saved["keep"])  # type: ignore[misc]
        if saved["meets"]:
            self._finish_save = partial(run_on_all_ranks, self._join_writer)

    def newest(self) -> Path | None:
        """Return the checkpoint of the latest step, not verified; None if there is none."""
        return next(iter(atomic_files.newest_first(self.folder)), None)

    # ---- saving

    def save(self, step: int, *, asynchronous: bool = False, **parts: Any) -> None:
        """Save the run after a step, with the state of the random generators of every rank.

        A checkpoint of the same step is replaced.

        Args:
            step: the number of completed steps, as counted by ``loader.step``.
            asynchronous: whether to copy now and write while the loop continues. The next save and
                :meth:`wait` wait for the write and raise its error. A sharded checkpoint is
                complete only after that wait.
            parts: the parts of the run, by any names. For objects with ``state_dict()`` and
                ``load_state_dict()``, such as ``model=``, ``generator=``, ``optimizer=``,
                ``scheduler=``, ``precision=`` or ``ema=``, rank 0's state is saved, without
                wrappers such as DDP. For iterable ones, such as a loader, and for ``loader=``, the
                state of each rank is saved. If FSDP2 shards a part, each rank writes its shard
                into a folder. Other values are saved from rank 0: tensors, numbers and strings,
                and lists, dicts and sets of them.

        Raises:
            CheckpointError: saving failed; older checkpoints are untouched.
            ArgumentError: ``step`` is below 0.
        """
        start = time.perf_counter()
        self.wait()
        self._save_start = start
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
                    name: value for name, value in given.shared.items() if name not in sharded_parts
                }
                state["parts"] = state_dicts.plain_states(rest, keep_copy)
                state["values"] = {
                    name: state_dicts.plain_value(value, name, keep_copy)
                    for name, value in given.values.items()
                }
                self._staging.synchronize()
            states = state_dicts.plain_states(given.per_rank, state_dicts.without_copy)
            return {"random": state_dicts.random_state(), "own": states}

        state["ranks"] = run_on_all_ranks(collect)
        if sharded_parts:
            self._save_sharded(state, sharded_parts, in_background=asynchronous)
        elif asynchronous:
            self._write_in_background(state)
        else:
            run_on_all_ranks(partial(self._write, state))
        self.stall = time.perf_counter() - start

    def wait(self) -> None:
        """Wait until an asynchronous save is complete. Call it on every rank.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        finish, self._finish_save = self._finish_save, None
        if finish is not None:
            finish()

    def _clean_folder(self) -> None:
        """Remove the drafts of a killed writer, after all writers of this process have finished."""
        others = [each for each in checkpoints if each.folder == self.folder]
        wait([each._in_background for each in others if each._in_background is not None])
        atomic_files.remove_leftovers(self.folder)

    def _write(self, state: dict[str, Any]) -> None:
        # On the main thread, or on the nbddp-checkpoint thread if the save is in the background.
        if this_rank.rank() != 0:
            return
        path = self.folder / _file_name(state["step"])
        with _as_checkpoint_error(path):
            atomic_files.write_atomically(path, state)
            self._finish_files(path, state["step"])

    def _write_in_background(self, state: dict[str, Any]) -> None:
        if this_rank.rank() == 0:
            # no executor: a save in a signal handler would wait for the lock of its submit()
            future: Future[None] = Future()
            write = partial(_run_in_future, future, partial(self._write, state))
            threading.Thread(target=write, name="nbddp-checkpoint").start()  # joined at exit
            self._in_background = future  # after the start: a handler's save waits for it
        self._finish_save = partial(run_on_all_ranks, self._join_writer)

    def _join_writer(self) -> None:
        future, self._in_background = self._in_background, None
        if future is not None:
            future.result()

    def _save_sharded(
        self, state: dict[str, Any], parts: dict[str, Any], *, in_background: bool
    ) -> None:
        draft = atomic_files.draft_path(self.folder / _file_name(state["step"], is_sharded=True))

        def make() -> None:
            with _as_checkpoint_error(draft):
                atomic_files.make_draft(draft)

        run_on_all_ranks(make)
        states = sharded.get_state(parts)
        if not in_background:
            self._commit(state, draft, partial(sharded.save, draft, states))
            return
        self._group = self._group or sharded.new_background_group()
        future = sharded.save_in_background(draft, states, self._group)
        self._finish_save = partial(self._commit, state, draft, future.result)

    def _commit(self, state: dict[str, Any], draft: Path, save: Callable[[], object]) -> None:
        """Write the shards on every rank, then complete and rename the folder on rank 0."""

        def write() -> dict[str, str]:
            shard_error = sharded.as_checkpoint_error(f"write {draft}", OLDER_UNTOUCHED)
            with _as_checkpoint_error(draft), shard_error:
                save()
                return sharded.checksums(draft)

        def commit() -> None:
            path = self.folder / _file_name(state["step"], is_sharded=True)
            with _as_checkpoint_error(path):
                rest = draft / sharded.UNSHARDED_FILE
                atomic_files.write_atomically(rest, state | {"files": sums})
                atomic_files.commit_folder(draft, path)
                self._finish_files(path, state["step"])

        sums = {name: digest for each in run_on_all_ranks(write) for name, digest in each.items()}
        run_on_all_ranks(lambda: commit() if this_rank.rank() == 0 else None)

    def _finish_files(self, path: Path, step: int) -> None:
        """Remove old checkpoints after a new one is complete; damaged ones are not counted."""
        with suppress(FileNotFoundError):  # a save of a signal handler has removed it
            self._verified.add(_identity(path))
        twin = self.folder / _file_name(step, is_sharded=not path.is_dir())
        if twin.exists():  # the same step in the other form, sharded or not
            atomic_files.remove(twin)
        n_kept = 0
        for older in atomic_files.newest_first(self.folder):
            with suppress(FileNotFoundError):  # a save of a signal handler has removed it
                identity = _identity(older)
                if n_kept >= self.keep:
                    atomic_files.remove(older)
                elif identity in self._verified or not _find_damage(older):
                    self._verified.add(identity)
                    n_kept += 1
        seconds = round(time.perf_counter() - self._save_start, 6)
        log_and_track.record_event("checkpoint", step=step, seconds=seconds, path=str(path))

    # ---- resuming

    def resume(self, **parts: Any) -> Resumed:
        """Load the newest intact checkpoint into the given parts, on every rank.

        A damaged checkpoint is skipped with a warning. The random generators continue from their
        saved state. If the world size has changed, there is a warning: the random state is not
        restored, and loaders get rank 0's state. All other parts are the same on all ranks.

        Args:
            parts: the parts, by their names in ``save``. A model may be prepared or not, now and at
                the save, and stays on its device. A part of the checkpoint that you do not name is
                skipped with a warning; with ``name=None`` it is skipped without one. A plain value
                is the default while there is no checkpoint.

        Returns:
            The step and the plain values that were saved; true if a checkpoint was loaded. Without
            a checkpoint, step 0 and the given plain values.

        Raises:
            CheckpointError: the checkpoint lacks a given part, or a rank cannot read it.
        """
        self.wait()
        given = split_parts(parts)
        path, damaged = run_on_all_ranks(self._find_newest_intact)[0]
        for broken, problem in damaged.items() if this_rank.rank() == 0 else ():
            instead = f"taking {path.name} instead" if path else "there is no intact checkpoint"
            warn_user(f"{broken} is damaged: {problem}; {instead}")
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
            name: value for name, value in given.values.items() if name not in contents.part_names
        }
        return Resumed(contents.state["step"], {**defaults, **contents.state["values"]}, path)

    def _find_newest_intact(self) -> tuple[Path | None, dict[Path, str]]:
        """Return the newest intact checkpoint, and the damage of newer ones; on rank 0 only."""
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
    """The result of a resume: the step at which the run continues, and the saved values.

    It is true if a checkpoint was loaded. ``resumed["best"]`` and ``resumed.get("best", 0.0)``
    return its values, as in a dict.

    Attributes:
        step: the saved step; 0 if nothing was loaded.
        values: the saved plain values by name, with tensors on the CPU; for missing ones, the
            values that ``resume`` was given.
        path: the checkpoint; None if nothing was loaded.

    Raises:
        CheckpointError: ``resumed[name]`` found no such value.

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
        """Return the value of this name, or ``default`` if there is none."""
        return self.values.get(name, default)


# ---- files


def _file_name(step: int, *, is_sharded: bool = False) -> str:
    return f"step-{step:08d}" if is_sharded else f"step-{step:08d}.pt"


def _find_damage(path: Path) -> str:
    return sharded.find_damage(path) if path.is_dir() else atomic_files.find_damage(path)


def _identity(path: Path) -> tuple[str, int, int]:
    """Return the name, time and size of a verified file: a later change requires a new check."""
    status = path.stat()
    return path.name, status.st_mtime_ns, status.st_size


@contextmanager
def _as_checkpoint_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"could not write {path}: {error}{OLDER_UNTOUCHED}") from error


def _run_in_future(future: Future[None], write: Callable[[], None]) -> None:
    try:
        write()
    except Exception as error:  # noqa: BLE001 - the future raises it
        # the script may end without another save() or wait()
        logger.error("%s (raised again by the next save or wait)", error)
        future.set_exception(error)
    else:
        future.set_result(None)


def _warn_about_differences(contents: CheckpointContents, not_loaded: list[str]) -> None:
    if not_loaded:
        warn_user(
            f"{contents.path} also holds {', '.join(not_loaded)}, not loaded: name it in resume(), "
            f"or pass {not_loaded[0]}=None to skip it without this warning"
        )
    if not contents.is_same_world:
        warn_user(
            f"{contents.path} was saved with world size {contents.state['world_size']} and this "
            f"one is {this_rank.world_size()}: the random state is not restored, so the run is not "
            "bit for bit equal to an unbroken run"
        )
