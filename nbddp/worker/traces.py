"""What a script finds as in a new process, and what is afterwards as it was before.

Each part is a context manager; they do not know each other.
"""

from __future__ import annotations

import builtins
import decimal
import gc
import logging
import multiprocessing.context
import os
import random
import resource
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from types import ModuleType
from typing import Any

import numpy as np
import torch

from nbddp.train.seeds import going_on
from nbddp.wire.script import Script
from nbddp.worker.family import family_of_its_own
from nbddp.worker.libraries import accelerate_apart, compiler_apart
from nbddp.worker.streams import flush_python_streams

# what a GPU's generator begins with: default_rng_seed_val in torch's c10/core/GeneratorImpl.h; the
# CPU's begins with chance, as getDefaultCPUGenerator() in its ATen/CPUGeneratorImpl.cpp has it
GPU_SEED = 67280421310721

# a class of a script's that a spawned process sends back belongs to the second
MAINS = ("__main__", "__mp_main__")

Pair = tuple[Callable[[], Any], Callable[[Any], Any]]


@contextmanager
def leaving_no_trace(script: Script, is_own: Callable[[str], bool]) -> Iterator[None]:
    """Within it a script runs.

    Args:
        script: which one.
        is_own: whether a file of this name is the user's own and belongs to it.
    """
    with ExitStack() as stack:
        for part in (
            _descriptors(),
            _process(),
            family_of_its_own(),
            _builtins(),
            _interpreter(script),
            _modules(is_own),
            _logging(),
            _signals(),
            _printing(),
            _torch(),
            _random(),
            _pyplot(),
            accelerate_apart(keeps=script.keeps),
            compiler_apart(),
        ):
            stack.enter_context(part)
        yield


@contextmanager
def _descriptors() -> Iterator[None]:
    """Input, output and errors: a script sends them to a file of its own, or closes them."""
    kept = {fd: os.dup(fd) for fd in (0, 1, 2)}
    try:
        yield
    finally:
        flush_python_streams()
        for fd, copy in kept.items():
            os.dup2(copy, fd)
            os.close(copy)


@contextmanager
def _process() -> Iterator[None]:
    """Folder, environment, and what else the system keeps of a process."""
    environ, cwd = dict(os.environ), os.getcwd()  # noqa: PTH109 - as it is, not resolved
    pairs = [
        _umask(),
        _open_files(),
        (socket.getdefaulttimeout, socket.setdefaulttimeout),
    ]
    if hasattr(os, "sched_getaffinity"):
        pairs.append(
            (lambda: os.sched_getaffinity(0), lambda cores: os.sched_setaffinity(0, cores))
        )
    with _kept(pairs):
        try:
            yield
        finally:
            if dict(os.environ) != environ:
                os.environ.clear()
                os.environ.update(environ)
            with suppress(OSError):  # the folder is gone
                os.chdir(cwd)


def _umask() -> Pair:
    def read() -> int:
        now = os.umask(0)
        os.umask(now)
        return now

    return read, os.umask


def _open_files() -> Pair:
    """How many files may be open: loaders raise it."""

    def write(limits: tuple[int, int]) -> None:
        with suppress(ValueError):  # it gave up what no process gets back
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    return lambda: resource.getrlimit(resource.RLIMIT_NOFILE), write


_IPYTHONS = ("__IPYTHON__", "display")  # by which code tells whether it is in a notebook


@contextmanager
def _builtins() -> Iterator[None]:
    """Scripts replace ``print``, so that rank 0 alone prints."""
    before = dict(vars(builtins))
    for name in _IPYTHONS:
        vars(builtins).pop(name, None)
    try:
        yield
    finally:
        _put_back(vars(builtins), before)


def _put_back(names: dict[str, Any], before: dict[str, Any]) -> None:
    for name in names.keys() - before.keys():
        del names[name]
    for name, value in before.items():
        if names.get(name) is not value:
            names[name] = value


_HOOKS = ("excepthook", "displayhook", "unraisablehook", "breakpointhook", "stdin")


@contextmanager
def _interpreter(script: Script) -> Iterator[None]:
    """Where modules are looked for, arguments, hooks, warnings."""
    lists: list[list[Any]] = [sys.argv, sys.path, sys.meta_path, sys.path_hooks]
    before = [list(each) for each in lists]
    hooks = {name: getattr(sys, name) for name in _HOOKS}
    on_thread = threading.excepthook
    pairs: list[Pair] = [
        (sys.getrecursionlimit, sys.setrecursionlimit),
        (sys.gettrace, sys.settrace),
        (sys.getprofile, sys.setprofile),
        (gc.get_threshold, lambda limits: gc.set_threshold(*limits)),
        (gc.isenabled, lambda was_on: gc.enable() if was_on else gc.disable()),
    ]
    # the next edit may come within the second that the time of a .pyc is exact to
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    os.chdir(script.cwd)
    sys.path[:] = [script.folder, *(each for each in sys.path if each)]  # "" is the working folder
    with warnings.catch_warnings(), _kept(pairs):
        try:
            yield
        finally:
            sys.dont_write_bytecode = writes
            threading.excepthook = on_thread
            for name, hook in hooks.items():
                setattr(sys, name, hook)
            for each, items in zip(lists, before, strict=True):
                each[:] = items


@contextmanager
def _modules(is_own: Callable[[str], bool]) -> Iterator[None]:
    """``__main__``, and modules of the user's own: a script imports them as they are now."""
    mains = {name: sys.modules[name] for name in MAINS if name in sys.modules}
    before = dict(_own_modules(is_own))
    for name in before:
        del sys.modules[name]
    try:
        yield
    finally:
        for name, _ in list(_own_modules(is_own)):
            del sys.modules[name]
        sys.modules.update(before)
        sys.modules.update(mains)


def _own_modules(is_own: Callable[[str], bool]) -> Iterable[tuple[str, ModuleType]]:
    for name, module in list(sys.modules.items()):
        if name not in MAINS and is_own(_file_of(module)):
            yield name, module


def _file_of(module: ModuleType) -> str:
    """Where it is; of a package without a file its folder, of one in C nothing: it stays."""
    file = getattr(module, "__file__", None)
    if file is None:
        file = next(iter(getattr(module, "__path__", ())), "")
    return "" if str(file).endswith((".so", ".pyd")) else str(file)


@contextmanager
def _logging() -> Iterator[None]:
    """A new process's root logger has no handlers, without which basicConfig() does nothing."""
    root = logging.root
    disabled = root.manager.disable
    before = {each: _state_of(each) for each in (root, *_loggers())}
    root.handlers, root.filters, root.level = [], [], logging.WARNING
    root.manager._clear_cache()  # type: ignore[attr-defined]  # as setLevel() does
    try:
        yield
    finally:
        for each in (root, *_loggers()):
            _give_state(each, before.get(each, _NEW))
        root.manager.disable = disabled
        root.manager._clear_cache()  # type: ignore[attr-defined]


_LOGGERS = ("handlers", "filters", "level", "propagate", "disabled")
_NEW: dict[str, Any] = {"handlers": [], "filters": [], "level": 0, "propagate": True, "disabled": 0}


def _loggers() -> list[logging.Logger]:
    known = logging.root.manager.loggerDict.values()
    return [each for each in known if isinstance(each, logging.Logger)]


def _state_of(logger: logging.Logger) -> dict[str, Any]:
    state = {name: getattr(logger, name) for name in _LOGGERS}
    return state | {"handlers": list(logger.handlers), "filters": list(logger.filters)}


def _give_state(logger: logging.Logger, state: dict[str, Any]) -> None:
    for handler in logger.handlers:
        if handler not in state["handlers"]:
            handler.close()
    for name, value in state.items():
        setattr(logger, name, list(value) if isinstance(value, list) else value)


@contextmanager
def _signals() -> Iterator[None]:
    """Handlers and the timer; SIGINT is the interrupter's, which sets it for each cell."""
    numbers = signal.valid_signals() - {signal.SIGINT}
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            if signal.getsignal(number) is not handler and handler is not None:
                signal.signal(number, handler)


@contextmanager
def _printing() -> Iterator[None]:
    """How numbers are printed, and what NumPy does about errors in them."""
    options: Any = torch._tensor_str.PRINT_OPTS
    before = dict(vars(options))
    torch.set_printoptions(profile="default", sci_mode=None)
    with (
        np.errstate(**_NUMPYS),
        np.printoptions(precision=8, suppress=False, threshold=1000),
        decimal.localcontext(decimal.DefaultContext),
    ):
        try:
            yield
        finally:
            vars(options).update(before)


_NUMPYS: dict[str, Any] = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}


def torch_settings() -> list[Pair]:
    """How each setting of torch is read, and written."""
    cudnn: Any = torch.backends.cudnn
    return [
        (torch.get_default_dtype, torch.set_default_dtype),
        (_default_device, torch.set_default_device),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.multiprocessing.get_sharing_strategy, torch.multiprocessing.set_sharing_strategy),
        *(
            (
                lambda name=name: getattr(cudnn, name),
                lambda value, name=name: setattr(cudnn, name, value),
            )
            for name in ("benchmark", "deterministic", "enabled")
        ),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    ]


@contextmanager
def _torch() -> Iterator[None]:
    """The settings of torch; what a new process begins with are the defaults."""
    context: Any = multiprocessing.context._default_context
    chosen = context._actual_context
    with _kept(torch_settings()), _interop_threads():
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        try:
            yield
        finally:
            context._actual_context = chosen


@contextmanager
def _interop_threads() -> Iterator[None]:
    """A process may say once how many there are: to the next script it is as if it had."""
    before, may_say = torch.set_num_interop_threads, True

    def set_num_interop_threads(nthreads: int) -> None:
        nonlocal may_say
        with suppress(RuntimeError) if may_say else nullcontext():
            before(nthreads)
        may_say = False

    torch.set_num_interop_threads = set_num_interop_threads
    try:
        yield
    finally:
        torch.set_num_interop_threads = before


def _default_device() -> Any:
    """None where none was set, which torch's own getter does not tell from the CPU."""
    context = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
    return None if context is None else context.device


@contextmanager
def _random() -> Iterator[None]:
    """Random numbers: a script's begin as a new process's, and the cells' go on as before."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    with going_on():
        if gpus is not None:
            torch.cuda.manual_seed_all(GPU_SEED)
        torch.default_generator.seed()
        random.seed()
        np.random.seed()
        try:
            yield
        finally:
            if gpus is not None:
                torch.cuda.set_rng_state_all(gpus)


@contextmanager
def _pyplot() -> Iterator[None]:
    """Matplotlib's settings: a script chooses a backend for files, the cells show theirs."""
    loaded: Any = sys.modules.get("matplotlib")
    if loaded is None:
        yield
        return
    with loaded.rc_context():
        yield


@contextmanager
def _kept(pairs: Iterable[Pair]) -> Iterator[None]:
    """Values that are read and set by functions: afterwards they are as they were."""
    before = [(read, write, read()) for read, write in pairs]
    try:
        yield
    finally:
        for read, write, value in before:
            if read() != value:
                write(value)
