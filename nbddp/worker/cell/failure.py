"""Describe the failure of a cell on this rank.

A description has the error in one line, its traceback, and the collective that the rank was in. For
an error of DDP it names the parameters; for a full GPU it lists the memory.
"""

from __future__ import annotations

import builtins
import difflib
import linecache
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbddp import accelerator
from nbddp.formatting import format_bytes, format_few
from nbddp.wire.messages import Failure
from nbddp.worker.torch_errors import is_backend_error, raising_file, torch_errors
from nbddp.worker.tracebacks import error_text, locations_in, torch_text
from nbddp.worker.watch.flight_recorder import RecordedCollective, newest_collective
from nbddp.worker.watch.main_thread import (
    blocking_call,
    describe_call,
    function_name,
    library_of_file,
)
from nbddp.worker.watch.namespace import Part, paths_of, walk

MIN_SIMILARITY = 0.75  # of two names, by difflib: `np` is not similar to `n`
# causes that hold the traceback of another process
_REMOTE = ("_RemoteTraceback", "RemoteTraceback")
# a loader's error has the traceback of its worker in its text (torch/_utils.py, torch 2.13.0)
_CAUGHT = re.compile(r"Caught (\w+) in (.+)\.\nOriginal Traceback ")
_REMOTE_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in .*', re.MULTILINE)
_ADVICE = {
    # torch keeps the batches of loader workers in files of this name (torch 2.13.0)
    re.compile(r"</torch_\w+>.*No space left|out of shared memory"): (
        "/dev/shm is full: use fewer loader workers or smaller batches, or a container with a "
        "larger one, as by `docker run --shm-size=8g`"
    ),
    re.compile("no attribute '_cuda_setDevice'"): (
        "this rank has no CUDA: leave out this line; `device` is the device of each rank"
    ),
    # of torch.cuda without CUDA, such as device(), Stream() and Event() (torch 2.13.0 and 2.15.0)
    re.compile(
        "not compiled with CUDA enabled|No CUDA GPUs are|Found no NVIDIA driver|'_cuda_|"
        "requires CUDA support|compiled without CUDA|dummy base class (Event|CUDAGraph)|NVTX func|"
        "CUDA driver version is insufficient"
    ): ("this rank has no CUDA: use `.to(device)`, which works with and without a GPU"),
}
# of torch.distributed, for a group that was destroyed (torch 2.13.0)
_OLD_GROUP = re.compile(r"(Process group|Group) <.*> is not (registered|initialized in the world)")
_MISSING_NAME = re.compile(r"name '(\w+)' is not defined")


class Shell(Protocol):
    """The parts of the RankShell that a description needs."""

    user_ns: dict[str, Any]

    def is_cell_file(self, filename: str) -> bool:
        """Return whether the code of this file belongs to a cell."""

    def name_of_file(self, filename: str) -> str:
        """Return the name to show for a file."""

    def format_error(self, error: BaseException, /) -> str:
        """Return the traceback of an error."""


def describe_failure(
    error: BaseException, shell: Shell, *, stuck_in: RecordedCollective | None, at: float
) -> Failure:
    """Describe the error that ended a cell: its text, the innermost user line, the first cause.

    Args:
        error: the error.
        shell: the shell that ran the cell.
        stuck_in: the collective that the rank waited in when it was interrupted, if any.
        at: the time of the error.
    """
    name, text, reason = _unwrap_remote(error)
    local = (each[:2] for each in locations_in(error.__traceback__))
    remote = ((file, int(line)) for file, line in _REMOTE_FRAME.findall(_remote_traceback(error)))
    locations = [*local, *remote]
    user_locations = [each for each in locations if shell.is_cell_file(each[0])]
    filename, line = user_locations[-1] if user_locations else ("", 0)
    is_in_cell = bool(locations) and user_locations[-1:] == locations[-1:]
    if not text and isinstance(error, AssertionError):
        text = linecache.getline(filename, line).strip()
    names = shell.user_ns
    stack = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    functions = (frame for frame in stack if frame.f_locals is not frame.f_globals)
    scopes = [frame.f_locals for frame in functions if frame.f_locals is not names]
    missing = _MISSING_NAME.match(text) if is_in_cell and name == NameError.__name__ else None
    return Failure(
        name=name,
        text=text,
        traceback=shell.format_error(error),
        line=line,
        file=shell.name_of_file(filename) if line else "",
        because=reason or _first_cause(error, text) or describe_ddp_parameters(error, names),
        collective=_describe_collective(stack, stuck_in) or _describe_wait(error, shell),
        at=at,
        memory=describe_out_of_memory(error, [names, *scopes]),
        torch_text=torch_text(error),
        missing_name=missing[1] if missing else "",
        hint=_suggest_name(missing[1], stack[-1])
        if missing
        else _name_on_old_group(text, scopes, names),
        is_from_nbddp=library_of_file(raising_file(error)) == "nbddp",
    )


# ---- the error in one line


def _remote_traceback(error: BaseException) -> str:
    """Return the traceback of the process or thread that raised an error; "" if there is none."""
    text = error_text(error)
    if _CAUGHT.match(text):
        return text
    cause = error.__cause__
    return error_text(cause) if cause and type(cause).__name__ in _REMOTE else ""


def _unwrap_remote(error: BaseException) -> tuple[str, str, str]:
    """Return the name and text of an error. A loader's error has those of its worker's error.

    The third value is the place of the worker's error, or advice for some errors of torch.
    """
    name, text, where = type(error).__name__, error_text(error), ""
    if caught := _CAUGHT.match(text):
        name, where = caught[1], f"in {caught[2]}"
        after_frames = _REMOTE_FRAME.split(text)[-1]  # source lines are indented
        message = re.search(rf"^(?:\w+\.)*{name}(?:: ((?s:.*)))?", after_frames, re.MULTILINE)
        text = ((message and message[1]) or "").strip()
    advice = (advice for words, advice in _ADVICE.items() if words.search(text))
    return name, text, next(advice, where)


def _suggest_name(missing: str, frame: FrameType) -> str:
    defined = {*frame.f_locals, *frame.f_globals, *dir(builtins)}
    similar = difflib.get_close_matches(missing, defined, 1, cutoff=MIN_SIMILARITY)
    return f"Did you mean `{similar[0]}`?" if similar else ""


def _name_on_old_group(text: str, scopes: Iterable[Names], names: Names) -> str:
    """Name the outermost model or group in the stack, for an error about a destroyed group."""
    if not _OLD_GROUP.match(text):
        return ""
    used = [scope[key] for scope in scopes for key in ("self", "group") if key in scope]
    used = [each for each in used if isinstance(each, nn.Module | dist.ProcessGroup)]
    found = paths_of(used, names)
    paths = (found.get(id(each), "._") for each in used)
    public = (f"`{path}`" for path in paths if "._" not in path)  # not a group inside of a mesh
    return f"{next(public, 'A model or a group')} is on the old process group: create it again."


def _first_cause(error: BaseException, text: str) -> str:
    """Name the first error in the chain of causes, unless ``text`` contains its text."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        if type(cause).__name__ in _REMOTE:
            break
        chain.append(cause)
    root, words = chain[-1], error_text(chain[-1]).strip()
    if root is error or (words and words in text):
        return ""
    first_line = words.partition("\n")[0]
    return f"caused by {type(root).__name__}{': ' if first_line else ''}{first_line}"


# ---- the collective that the rank was in


def _describe_collective(stack: list[FrameType], stuck_in: RecordedCollective | None) -> str:
    """Name the collective that the rank waited in, with its number if it is known."""
    torch_frames = (frame for frame in stack if "torch/distributed/" in frame.f_code.co_filename)
    called = next(torch_frames, None)
    name = function_name(called) if called is not None else ""
    newest = stuck_in or newest_collective({name})
    if newest is not None and (newest is stuck_in or newest.call.name in (name, f"_{name}")):
        return newest.call.title
    return describe_call(called) if called is not None else ""  # Gloo does not record send and recv


def _describe_wait(error: BaseException, shell: Shell) -> str:
    """Name the collective, or the code, of a failed ``work.wait()``, which has no frame of torch.

    Gloo records no send and no receive.
    """
    failed = next(filter(is_backend_error, torch_errors(error)), None)
    if failed is None or failed.__traceback__ is None:
        return ""
    frame = [frame for frame, _ in traceback.walk_tb(failed.__traceback__)][-1]
    newest = newest_collective()
    if newest is not None and newest.is_in_flight:
        return newest.call.title
    return blocking_call(frame, shell.is_cell_file)


# ---- the parameters for which DDP's errors give only indices

_NO_GRADIENT = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
_MARKED_TWICE = re.compile(r"Parameter at index (\d+) ")


def describe_ddp_parameters(error: BaseException, names: Mapping[str, Any]) -> str:
    """Name the parameters that an error of DDP refers to. Return "" for other errors.

    An error in forward has a frame of its model. An error in backward has none: then the model is
    the only DDP model among ``names``, the variables of the cells.
    """
    text = str(error) if isinstance(error, RuntimeError) else ""
    if not (_NO_GRADIENT.search(text) or _MARKED_TWICE.search(text)):
        return ""
    frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    models = ddp_models(frames) or ddp_models(names.values())
    return describe_parameters(models[0], text) if len(models) == 1 else ""


def describe_parameters(model: DistributedDataParallel, text: str) -> str:
    """Name the parameters of a model that the text of an error refers to."""
    if found := parameters_without_gradient(model, text):
        return f"without a gradient: {format_few(found)}"
    twice = _MARKED_TWICE.search(text)
    return f"parameter: {format_few(_parameter_names(model, twice[1]))}" if twice else ""


def parameters_without_gradient(model: DistributedDataParallel, text: str) -> list[str]:
    """Return the parameters without a gradient at the start of the next forward pass."""
    unused = _NO_GRADIENT.search(text)
    return _parameter_names(model, unused[1]) if unused else []


def ddp_models(values: Iterable[Any]) -> list[DistributedDataParallel]:
    """Return the DDP models among some values, without duplicates."""
    found = {id(each): each for each in values if issubclass(type(each), DistributedDataParallel)}
    return list(found.values())


def _parameter_names(model: DistributedDataParallel, indices: str) -> list[str]:
    # DDP counts the parameters that need gradients, each once (torch 2.13.0)
    counted, _ = model._build_params_for_reducer()
    names_by_id = {id(each): name for name, each in model.module.named_parameters()}
    positions = [int(each) for each in indices.split()]
    if max(positions) >= len(counted):
        return []
    return [names_by_id.get(id(counted[index]), "?") for index in positions]


# ---- the memory of a full GPU

MAX_TENSORS = 5  # number of the largest tensors to show
_GPU = re.compile(r"\bGPU (\d+)")
# the fraction of reserved memory without tensors above which memory counts as fragmented
FRAGMENTED = 0.2

Names = Mapping[str, Any]
Named = tuple[str, torch.Tensor]


def describe_out_of_memory(error: BaseException, scopes: Iterable[Names]) -> str:
    """Describe the GPU memory at a failed allocation. Return "" for other errors.

    Args:
        error: the error that ended the cell.
        scopes: the variables of the cells, and those of each function in the traceback.
    """
    kind = accelerator.current()
    if not isinstance(error, torch.OutOfMemoryError) or not kind.module.is_initialized():
        return ""
    match = _GPU.search(str(error))  # the number in this process
    index = int(match[1]) if match else kind.module.current_device()
    device = torch.device(kind.device_type, index)
    try:
        return "\n".join(_describe_gpu(device, largest_tensors(scopes, device)))
    except Exception as inner:  # noqa: BLE001 - a user's module may raise anything
        return f"  its tensors cannot be listed: {type(inner).__name__}: {inner}"


def _describe_gpu(device: torch.device, largest: list[Named]) -> Iterator[str]:
    module = accelerator.current().module
    free, total = module.mem_get_info(device)
    held, reserved = module.memory_allocated(device), module.memory_reserved(device)
    others = max(0, total - free - reserved)
    capacity = f"has {format_bytes(total)}; {format_bytes(free)} free"
    yield f"  {device}, {module.get_device_name(device)}, {capacity}"
    unused = format_bytes(reserved - held)
    yield f"    this rank: {format_bytes(held)} in tensors, {unused} reserved but unallocated"
    yield f"    everything else (CUDA, other ranks, other processes): {format_bytes(others)}"
    if largest:
        yield f"    largest tensors: {', '.join(_describe_tensor(*each) for each in largest)}"
    yield f"    {_memory_hint(held, reserved, others, total)}"


def _memory_hint(held: int, reserved: int, others: int, total: int) -> str:
    if others > total / 2:
        return (
            "other processes use most of it: `nvidia-smi` names them; start fewer ranks on this GPU"
        )
    if reserved and (reserved - held) / reserved > FRAGMENTED:
        return (
            "much is free, but fragmented: restart with "
            "`--env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`"
        )
    return (
        "use a smaller batch, `nbddp.precision(accumulate=4)` with a quarter of the batch, or "
        "bf16; `del` frees the memory of a variable"
    )


def _describe_tensor(name: str, tensor: torch.Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{name} {format_bytes(tensor.nbytes)} ({kind} {list(tensor.shape)})"


def largest_tensors(scopes: Iterable[Names], device: torch.device | None = None) -> list[Named]:
    """Return the largest tensors on a device and their paths, one for each shared storage."""
    found = [named for scope in scopes for part in walk(scope) for named in _tensors(part)]
    found.sort(key=lambda each: -each[1].nbytes)
    largest: dict[int, Named] = {}
    for path, tensor in found:
        address = tensor.untyped_storage().data_ptr()
        if address and (device is None or tensor.device == device):
            largest.setdefault(address, (path, tensor))
    return [*largest.values()][:MAX_TENSORS]


def _tensors(part: Part) -> Iterator[Named]:
    """Yield the tensors of an object, each with its Python expression."""
    path, value = part.path, part.value
    if type(value) in (torch.Tensor, nn.Parameter):
        yield path, value
        if value.is_leaf and value.grad is not None:
            yield f"{path}.grad", value.grad
    elif isinstance(value, nn.Module) and not isinstance(part.holder, nn.Module):
        for name, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield from _tensors(Part(f"{path}.{name}", value, name, tensor))
    elif isinstance(value, torch.optim.Optimizer):
        for number, state in enumerate(value.state.values()):
            for key, item in state.items():
                yield from _tensors(Part(f"{path}.state[{number}][{key!r}]", state, key, item))
