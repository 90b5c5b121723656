"""Save and load sharded models with ``torch.distributed.checkpoint``.

The functions import these torch modules themselves: the import takes a second, and few runs need
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from nbddp.errors import CheckpointError
from nbddp.extensions.train.checkpoint import atomic_files
from nbddp.reporting import this_rank
from nbddp.sharding import parameters_of

UNSHARDED_FILE = "rest.pt"  # the parts that are not sharded, and the checksums of the shards


def save(draft: Path, state: dict[str, Any]) -> None:
    """Write the shard of every rank into a folder, inside :func:`as_checkpoint_error`."""
    from torch.distributed import checkpoint as dcp

    dcp.save(state, checkpoint_id=draft)


def save_in_background(
    draft: Path, state: dict[str, Any], group: dist.ProcessGroup | None
) -> Future[Any]:
    """Save in the background, with a separate process group.

    Wait for the result inside :func:`as_checkpoint_error`.
    """
    from torch.distributed import checkpoint as dcp

    future = dcp.async_save(state, checkpoint_id=draft, process_group=group)
    assert isinstance(future, Future)
    return future


@contextmanager
def as_checkpoint_error(what: str, suffix: str = "") -> Iterator[None]:
    """Convert torch's CheckpointException: it is no Exception, and its text is all tracebacks."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        first, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise CheckpointError(f"could not {what} on rank {first}: {cause}{suffix}") from error


def get_state(parts: dict[str, Any]) -> dict[str, Any]:
    """Return the sharded states, with names that do not depend on the sharding.

    Raises:
        CheckpointError: an optimizer has parameters that are in none of the models.
    """
    from torch.distributed.checkpoint import state_dict as states

    return {
        name: states.get_model_state_dict(part)
        if model is None
        else states.get_optimizer_state_dict(model, part)
        for name, part, model in _with_models(parts)
    }


def load(folder: Path, parts: dict[str, Any]) -> None:
    """Load the shard of every rank; the world size may differ from that of the save.

    Raises:
        CheckpointError: a rank could not read its shard, or the model is a different one.
    """
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as states

    state = get_state(parts)
    with as_checkpoint_error(f"read {folder}"):
        dcp.load(state, checkpoint_id=folder)
    for name, part, model in _with_models(parts):
        if model is None:
            states.set_model_state_dict(part, state[name])
        else:
            states.set_optimizer_state_dict(model, part, state[name])


def _with_models(parts: dict[str, Any]) -> list[tuple[str, Any, nn.Module | None]]:
    """Return each part, models first, with the model of each optimizer."""
    models = {name: part for name, part in sorted(parts.items()) if isinstance(part, nn.Module)}
    others = sorted(parts.keys() - models.keys())
    return [
        *((name, part, None) for name, part in models.items()),
        *((name, parts[name], _model_of(name, parts[name], models)) for name in others),
    ]


def _model_of(name: str, optimizer: Any, models: dict[str, nn.Module]) -> nn.Module:
    held = {id(each) for each in parameters_of(optimizer)}
    for model in models.values():
        if held <= {id(each) for each in model.parameters()}:
            return model
    raise CheckpointError(
        f"{name} trains parameters that are sharded over the ranks: save and load it together with "
        "the model that has these parameters"
    )


def checksums(draft: Path) -> dict[str, str]:
    """Return the SHA-256 of each file that this rank wrote; rank 0 adds the metadata file."""
    names = sorted(path.name for path in draft.glob(f"__{this_rank.rank()}_*"))
    names += [".metadata"] if this_rank.rank() == 0 else []
    return {name: _sha256(draft / name) for name in names}


def find_damage(folder: Path) -> str:
    """Describe the damage of a checkpoint folder; empty if the folder is intact."""
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
    """Create a process group for background saves only, so that other collectives never match."""
    return dist.new_group(backend="gloo") if this_rank.world_size() > 1 else None
