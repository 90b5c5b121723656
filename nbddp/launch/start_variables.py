"""Environment variables that only take effect if a process has them when it starts.

Ranks are forked from a process that has already started. So this process must have them.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from nbddp.formatting import list_some

# The names that getenv and os.environ get during the imports of the forkserver (torch 2.13, NumPy
# 2.4, Python 3.11), except those that torch reads again later, that a rank applies itself, or
# that libraries set in the kernel when they are imported (TORCHINDUCTOR_CACHE_DIR).
_READ_AT_START = re.compile(
    r"TORCH(?!ELASTIC_|INDUCTOR_CACHE_DIR|_NCCL_|_FR_|_DISTRIBUTED_DEBUG|_HOME|_EXTENSIONS_)"
    r"|PYTORCH_(?!NVML_)|(AOT_?)?INDUCTOR_"
    r"|PYTHON(?!BREAKPOINT|IOENCODING|PATH|STARTUP|UNBUFFERED)"
    r"|(OMP|GOMP|MKL|OPENBLAS|BLIS|ATEN|DNNL|ONEDNN|NPY|LD|MALLOC)_|GLIBC_TUNABLES|GLOO_DEVICE_"
)
# A rank sets the threads of these libraries. In the forkserver they have one: NumPy's OpenBLAS
# starts its threads when it is loaded, and a rank can only add some.
POOL_VARIABLES = tuple(f"{pool}_NUM_THREADS" for pool in ("OMP", "OPENBLAS", "MKL", "BLIS"))
_ERROR = re.compile(r"(Fatal )?\w+ error: |(\w+\.)*\w*(Error|Exception|Warning|_alloc)\b")
MAX_SHOWN_VARIABLES = 4
_lock = threading.Lock()  # the environment is global state of the process


def read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a process must have when it starts, for an effect on ranks.

    An empty variable counts as not set, as for Python and torch.
    """
    return {
        name: value
        for name, value in env.items()
        if value and _READ_AT_START.match(name) and name not in POOL_VARIABLES
    }


@contextmanager
def start_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Let a process that is started in the block have exactly these start variables.

    multiprocessing passes no environment to a process that it starts. The process inherits the
    environment of this process.
    """
    with _lock:
        names = {*read_at_start(os.environ), *variables}
        before = {name: os.environ.get(name) for name in names}
        _set({name: variables.get(name) for name in names})
        try:
            yield
        finally:
            _set(before)


def describe_end(output: str, variables: Mapping[str, str]) -> str:
    r"""Say in one line why the forkserver has ended, and how to remove a wrong variable.

    Args:
        output: what it has written to standard error.
        variables: the variables that may be the cause.

    >>> describe_end("Traceback:\n  line 3\nValueError: no such log\nall, dynamo\n", {})
    'the process from which ranks are forked has ended: ValueError: no such log'
    """
    lines = [*filter(None, map(str.rstrip, output.splitlines()))] or ["it wrote no error message"]
    at = max((number for number, line in enumerate(lines) if _ERROR.match(line)), default=-1)
    reason = " ".join(lines[at:][: 2 if lines[at].endswith(":") else 1])
    text = f"the process from which ranks are forked has ended: {reason}"
    if not variables:
        return text
    shown = list_some([f"{name}={value}" for name, value in variables.items()], MAX_SHOWN_VARIABLES)
    name = next(iter(variables))
    return f"{text}; it had {shown}: `--env {name}=`, or `%env {name}=`, removes such a variable"


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
