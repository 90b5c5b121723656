"""Tell the errors that torch raised from those of the user's code, before a text is read.

Types do not tell them apart: Gloo raises a plain RuntimeError. Frames do not either: the frame in
which DDP's backward loses a peer is also the frame of "Trying to backward through the graph a
second time".
"""

from __future__ import annotations

import dis
import re
from collections.abc import Iterator

import torch.distributed as dist

_RAISE = dis.opmap["RAISE_VARARGS"]
# RPC raises the errors of the function that it has called on another rank
_TORCH_DISTRIBUTED = re.compile(r"torch[/\\]distributed[/\\](?!rpc[/\\])")

# Gloo begins with a position in its code; torch's errors may name a file, such as "igloo.pt"
_WORDS = re.compile(
    r"\[\S*\bgloo/\S+:\d+\]|\bGloo |\bNCCL\b|\bnccl[A-Z]|\bDistBackendError\b|"
    r"(?i:timed out waiting|operation timed out|pair closure|closed by peer|"
    r"connection was likely closed)"
)


def torch_errors(error: BaseException | None) -> Iterator[RuntimeError]:
    """Yield the RuntimeErrors of C++ code and torch.distributed among an error and its causes.

    A RuntimeError that another ``raise`` has raised is the user's, whatever its text. A loader
    raises its worker's error in this way, too.
    """
    seen: set[int] = set()  # a cell may have created a cycle of causes
    while error is not None and id(error) not in seen:
        file = raising_file(error)
        # a backend of an extension raises torch's type of error
        is_of_backend = isinstance(error, dist.DistBackendError)
        is_from_torch = not file or _TORCH_DISTRIBUTED.search(file) or is_of_backend
        if isinstance(error, RuntimeError) and is_from_torch:
            yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def raising_file(error: BaseException) -> str:
    """Return the file of the ``raise`` that raised an error, or "" if C or C++ code raised it.

    >>> raising_file(RuntimeError("it was not raised"))
    ''
    """
    step = error.__traceback__
    if step is None:
        return ""
    while step.tb_next is not None:
        step = step.tb_next
    code = step.tb_frame.f_code
    # Cython adds frames whose last instruction is unknown, -1 or lower
    is_raise = step.tb_lasti < 0 or code.co_code[step.tb_lasti] == _RAISE
    return code.co_filename if is_raise else ""


def is_backend_error(error: BaseException | None) -> bool:
    """Return whether an error, or one that caused it, was raised by Gloo or NCCL."""
    return any(
        isinstance(cause, dist.DistBackendError) or _WORDS.search(str(cause)) is not None
        for cause in torch_errors(error)
    )
