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

import torch
import torch.distributed as dist
from torch import nn

from nbddp.errors import CheckpointError
from nbddp.train import this_rank
from nbddp.train.checkpoint import atomic_files
from nbddp.train.checkpoint.atomic_files import OLDER_UNTOUCHED

UNSHARDED_FILE = "rest.pt"  # what is not spread, and the checksums of what is


def has_dtensors(part: object) -> bool:
    """Whether a model, an optimizer or a tensor lies on several ranks, as FSDP2 leaves it.

    >>> has_dtensors(nn.Linear(1, 1))
    False
    """
    tensors = sys.modules.get("torch.distributed.tensor")  # nothing is spread without it
    return tensors is not None and any(
        isinstance(each, tensors.DTensor) for each in _parameters(part)
    )


def fsdp_classes() -> tuple[type, ...]:
    """The classes of FSDP, old and new; none where nobody has imported it, which takes a second."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    names = ("FullyShardedDataParallel", "FSDPModule")
    return tuple(getattr(fsdp, name) for name in names if hasattr(fsdp, name))


def _parameters(part: Any) -> Iterator[torch.Tensor]:
    kind = type(part)  # isinstance() may run code of the user's
    if issubclass(kind, torch.Tensor):
        yield part
    elif issubclass(kind, nn.Module) and "_modules" in vars(part):  # else not made to its end
        yield from part.parameters()
    elif issubclass(kind, torch.optim.Optimizer):
        for group in part.param_groups:
            yield from group["params"]


def save(draft: Path, state: dict[str, Any]) -> None:
    """Write every rank's part into a folder.

    Raises:
        CheckpointError: a rank could not write its part.
    """
    from torch.distributed import checkpoint as dcp

    with _as_checkpoint_error(f"write {draft}", OLDER_UNTOUCHED):
        dcp.save(state, checkpoint_id=draft)


def save_in_background(
    draft: Path, state: dict[str, Any], group: dist.ProcessGroup | None
) -> Future[Any]:
    """The same in the background, over a process group of its own; see :func:`wait_for_save`."""
    from torch.distributed import checkpoint as dcp

    future = dcp.async_save(state, checkpoint_id=draft, process_group=group)
    assert isinstance(future, Future)
    return future


def wait_for_save(draft: Path, future: Future[Any]) -> None:
    """Wait for what is written in the background.

    Raises:
        CheckpointError: a rank could not write its part.
    """
    with _as_checkpoint_error(f"write {draft}", OLDER_UNTOUCHED):
        future.result()


@contextmanager
def _as_checkpoint_error(what: str, suffix: str = "") -> Iterator[None]:
    """What torch raises here is no Exception, and its words are every rank's traceback."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        first, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise CheckpointError(f"could not {what} on rank {first}: {cause}{suffix}") from error


def get_state(parts: dict[str, Any]) -> dict[str, Any]:
    """What is spread over the ranks, under names that do not depend on how it is spread.

    Raises:
        CheckpointError: an optimizer trains what is not one of the models.
    """
    from torch.distributed.checkpoint import state_dict as states

    return {
        name: states.get_model_state_dict(part)
        if model is None
        else states.get_optimizer_state_dict(model, part)
        for name, part, model in _with_models(parts)
    }


def load(folder: Path, parts: dict[str, Any]) -> None:
    """Give every rank its part, however many ranks there were.

    Raises:
        CheckpointError: a rank could not read it, or it is of another model.
    """
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as states

    state = get_state(parts)
    with _as_checkpoint_error(f"read {folder}"):
        dcp.load(state, checkpoint_id=folder)
    for name, part, model in _with_models(parts):
        if model is None:
            states.set_model_state_dict(part, state[name])
        else:
            states.set_optimizer_state_dict(model, part, state[name])


def _with_models(parts: dict[str, Any]) -> list[tuple[str, Any, nn.Module | None]]:
    """Each part, models first, and the model that it trains if it is an optimizer."""
    models = {name: part for name, part in sorted(parts.items()) if isinstance(part, nn.Module)}
    others = sorted(parts.keys() - models.keys())
    return [
        *((name, part, None) for name, part in models.items()),
        *((name, parts[name], _model_of(name, parts[name], models)) for name in others),
    ]


def _model_of(name: str, optimizer: Any, models: dict[str, nn.Module]) -> nn.Module:
    own = {id(each) for each in _parameters(optimizer)}
    for model in models.values():
        if own <= {id(each) for each in model.parameters()}:
            return model
    raise CheckpointError(
        f"{name} trains parameters that are spread over the ranks: it is saved and loaded together "
        "with the one model that they belong to"
    )


def checksums(draft: Path) -> dict[str, str]:
    """The SHA-256 of every file that this rank wrote; rank 0 adds the list of all parts."""
    names = sorted(path.name for path in draft.glob(f"__{this_rank.rank()}_*"))
    names += [".metadata"] if this_rank.rank() == 0 else []
    return {name: _sha256(draft / name) for name in names}


def find_damage(folder: Path) -> str:
    """What is wrong with a folder; empty if it is whole."""
    rest = folder / UNSHARDED_FILE
    if problem := atomic_files.find_damage(rest):
        return UNSHARDED_FILE + problem.removeprefix("it")
    for name, expected in atomic_files.read_plain(rest)["files"].items():
        try:
            found = _sha256(folder / name)
        except OSError as error:
            return f"{name} cannot be read: {error}"
        if found != expected:
            return f"{name} does not match its checksum"
    return ""


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return atomic_files.sha256(file, path.stat().st_size)


def new_background_group() -> dist.ProcessGroup | None:
    """A process group that only background saves use, so that they cross no other collective."""
    return dist.new_group(backend="gloo") if this_rank.world_size() > 1 else None
