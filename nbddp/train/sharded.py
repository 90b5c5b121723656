"""Models whose parameters are spread over the ranks, through ``torch.distributed.checkpoint``.

torch's parts for that are imported where they are used: that takes a second, and few runs need it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from nbddp.errors import CheckpointError
from nbddp.train import files, place
from nbddp.train.files import UNTOUCHED

REST = "rest.pt"  # what is not spread, and the checksums of what is


def is_sharded(model: object) -> bool:
    """Whether some parameter lies on several ranks, as FSDP2 leaves it.

    >>> is_sharded(nn.Linear(1, 1))
    False
    """
    tensors = sys.modules.get("torch.distributed.tensor")  # nothing is spread without it
    if tensors is None or not isinstance(model, nn.Module):
        return False
    return any(isinstance(parameter, tensors.DTensor) for parameter in model.parameters())


def save(draft: Path, state: dict[str, Any]) -> None:
    """Write every rank's part into a folder.

    Raises:
        CheckpointError: a rank could not write its part.
    """
    from torch.distributed import checkpoint as dcp

    with _plainly(f"write {draft}", UNTOUCHED):
        dcp.save(state, checkpoint_id=draft)


def save_later(draft: Path, state: dict[str, Any], group: dist.ProcessGroup | None) -> Future[Any]:
    """The same in the background, over a process group of its own; see :func:`finish`."""
    from torch.distributed import checkpoint as dcp

    future = dcp.async_save(state, checkpoint_id=draft, process_group=group)
    assert isinstance(future, Future)
    return future


def finish(draft: Path, future: Future[Any]) -> None:
    """Wait for what is written in the background.

    Raises:
        CheckpointError: a rank could not write its part.
    """
    with _plainly(f"write {draft}", UNTOUCHED):
        future.result()


@contextmanager
def _plainly(what: str, end: str = "") -> Iterator[None]:
    """What torch raises here is no Exception, and its words are every rank's traceback."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        first, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise CheckpointError(f"could not {what} on rank {first}: {cause}{end}") from error


def take(model: Any, optimizer: Any) -> dict[str, Any]:
    """What is spread over the ranks, under names that do not depend on how it is spread."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    optimizers = [] if optimizer is None else [optimizer]
    model_state, optimizer_state = get_state_dict(model, optimizers)
    return {"model": model_state, "optimizer": optimizer_state}


def load(folder: Path, model: Any, optimizer: Any) -> None:
    """Give every rank its part, however many ranks there were.

    Raises:
        CheckpointError: a rank could not read it, or it is of another model.
    """
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    state = take(model, optimizer)
    with _plainly(f"read {folder}"):
        dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        [] if optimizer is None else [optimizer],
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


def checksums(draft: Path) -> dict[str, str]:
    """The SHA-256 of every file that this rank wrote; rank 0 adds the list of all parts."""
    names = sorted(path.name for path in draft.glob(f"__{place.rank()}_*"))
    if place.rank() == 0:
        names.append(".metadata")
    return {name: _sha256(draft / name) for name in names}


def damage(folder: Path) -> str:
    """What is wrong with a folder; empty if it is whole."""
    rest = folder / REST
    if fault := files.damage(rest):
        return f"{REST} {fault}"
    for name, expected in files.read_whole(rest)["files"].items():
        try:
            found = _sha256(folder / name)
        except OSError as error:
            return f"{name} cannot be read: {error}"
        if found != expected:
            return f"{name} does not match its checksum"
    return ""


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return files.sha256(file, path.stat().st_size)


def group_for_later() -> dist.ProcessGroup | None:
    """A process group that only background saves use, so that they cross no other collective."""
    return dist.new_group(backend="gloo") if place.world_size() > 1 else None
