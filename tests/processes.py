"""Find the processes that descend from this test run, and wait for them."""

import os
import random
import socket
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

# message that torch 2.13 can print when Python finalizes a process with Gloo threads
GLOO_ABORTS = "terminate called without an active exception"
MARKER = "NBDDP_TEST_RUN"
os.environ[MARKER] = uuid.uuid4().hex  # inherited by all processes of a test


def own_children() -> set[int]:
    """Return the process ids of this process's children; called twice per test."""
    try:
        lists = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    except OSError:  # a thread has ended meanwhile
        return own_children()
    if not lists:  # a kernel without these files
        return {child.pid for child in psutil.Process().children()}
    return {int(pid) for pids in lists for pid in pids.split()}


def marked(but: Collection[int] = ()) -> dict[int, psutil.Process]:
    """Return every other process that descends from this test run, with orphans."""
    found = {}
    for pid in psutil.pids():
        if pid in but:
            continue
        try:
            process = psutil.Process(pid)
            is_ours = process.environ().get(MARKER) == os.environ[MARKER]
            is_there = process.status() != psutil.STATUS_ZOMBIE and bool(process.cmdline())
        except psutil.Error:
            continue
        if is_ours and is_there and pid != os.getpid():
            found[pid] = process
    return found


def in_child(act: Callable[[], object], *, timeout: float = 30.0) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # fork warns if there are threads; the child needs none
        pid = os.fork()
    if not pid:
        try:
            act()
            os._exit(0)
        finally:
            os._exit(1)
    child = psutil.Process(pid)
    if not wait_until(lambda: child.status() == psutil.STATUS_ZOMBIE, timeout=timeout):
        child.kill()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def is_helper(process: psutil.Process) -> bool:
    """Return whether a process is a forkserver or a resource tracker, which may outlive a test."""
    try:
        words = " ".join(process.cmdline())
        if not words:
            return True  # it is about to end
        if "resource_tracker" in words:
            return True
        parent = process.parent()
        if not is_forkserver(process) or parent is None or parent.pid == 1:
            return False
        is_first = not is_forkserver(parent)
        return is_first or os.getsid(process.pid) != process.pid
    except (psutil.Error, ProcessLookupError):
        return True  # ended meanwhile


def is_forkserver(process: psutil.Process) -> bool:
    """Return whether a process is a forkserver, or was forked from one, such as a rank."""
    words = " ".join(process.cmdline())
    return "multiprocessing.forkserver" in words or words.startswith("nbddp ")


def wait_until(condition: Callable[[], bool], *, timeout: float = 40.0) -> bool:
    """Poll a condition. Return whether it became true in time; slow machines get more time."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def free_port() -> int:
    """Return a free port outside the range of ports that the system assigns itself."""
    while True:
        port = random.SystemRandom().randrange(15_000, 29_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def under_torchrun(
    *arguments: str | Path, nproc: int = 2, timeout: float = 150.0, **options: Any
) -> list[str]:
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*agent, f"--nproc-per-node={nproc}", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        **options,
    )
    assert done.returncode == 0 or GLOO_ABORTS in done.stderr, done.stderr
    lines: list[str] = done.stdout.splitlines()
    return lines
