"""The spec of a worker group: how many ranks, with which devices and options."""

from __future__ import annotations

import codecs
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Any

from nbddp import accelerator
from nbddp.errors import ArgumentError, RequestError
from nbddp.formatting import unknown_rank
from nbddp.topology import cores_here
from nbddp.wire.frozen import Frozen
from nbddp.wire.options import option_values as values
from nbddp.wire.options.option import option
from nbddp.wire.options.option_values import positive_int, seconds, variable

MAX_NPROC = 128
BACKENDS = ("auto", "gloo", *(kind.backend for kind in accelerator.ACCELERATORS))
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _is_error_handler(name: str) -> bool:
    try:
        return not name or codecs.lookup_error(name) is not None
    except LookupError:
        return False


def check_variables(env: Mapping[str, str], *, is_local: bool) -> None:
    """Refuse values of variables with which torch fails in each rank.

    Raises:
        ArgumentError: torch refuses a value, or this machine does not have an interface.
    """
    level = env.get("TORCH_DISTRIBUTED_DEBUG", "OFF")
    if level.upper() not in ("OFF", "INFO", "DETAIL"):
        raise ArgumentError(f"TORCH_DISTRIBUTED_DEBUG must be OFF, INFO or DETAIL, got {level!r}")
    if is_local and (asked := env.get("GLOO_SOCKET_IFNAME")):
        names = ["", *(name for _, name in socket.if_nameindex())]  # torch skips empty ones
        for name in asked.split(","):
            if name.partition(":")[0] not in names:  # eth0:1 is another address of eth0
                raise ArgumentError(
                    f"GLOO_SOCKET_IFNAME={asked}: this machine has no interface {name!r}, "
                    f"only {', '.join(names[1:])}"
                )


class StartOptions(Frozen):
    """The options with which ranks start: of ``%%ddp``, and of all that starts ranks.

    Parser, help, Tab completion, ``GroupSpec`` and ``RankStart`` have each of them from here.
    """

    nproc: int = option(
        "--nproc --nproc-per-node N",
        "ranks on this machine (default: as before, or {default})",
        2,
        positive_int,
    )
    backend: str = option(
        "--backend",
        "collectives: {default} is nccl if every rank has a GPU, else gloo",
        "auto",
        choices=BACKENDS,
    )
    gpus: tuple[int | str, ...] | None = option(
        "--gpus 0,1",
        "GPUs that the ranks may use: numbers, UUIDs or MIG devices",
        None,
        values.gpus,
    )
    name: str = option("--name NAME", "part of the name of the run's folder", "")
    timeout: float = option(  # the default is torch's own
        "--timeout SECONDS",
        "a collective fails after this time (default: {default:g})",
        1800.0,
        seconds,
    )
    env: Mapping[str, str] = option(
        "--env K=V",
        "environment variable for the ranks; may be repeated",
        {},
        variable,
        repeat=dict,
    )
    grace: float = option(
        "--grace SECONDS",
        "seconds until a rank that ignores an interrupt or a stop is killed (default: {default:g})",
        5.0,
        seconds,
    )
    threads: int = option(
        "--threads N",
        "threads per rank for torch's operators (default: cores / ranks)",
        0,
        positive_int,
    )


class GroupSpec(StartOptions):
    """How to start a worker group.

    Attributes:
        joins_group: whether the ranks form a process group at the start.
        ranks: start only these ranks; None for all.
        more: additional facts for the run's record.

    Raises:
        ArgumentError: a value is invalid.
    """

    joins_group: bool = True
    ranks: tuple[int, ...] | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.nproc <= MAX_NPROC:
            raise ArgumentError(f"nproc must be between 1 and {MAX_NPROC}, got {self.nproc}")
        for name, limit in (("timeout", self.timeout), ("grace", self.grace)):
            if not limit > 0:  # also refuses NaN
                raise ArgumentError(f"{name} must be above 0 seconds, got {limit:g}")
        if self.threads < 0:
            raise ArgumentError(f"threads must be at least 1, got {self.threads}")
        for name in self.env:
            if not _ENV_NAME.fullmatch(name):
                raise ArgumentError(f"{name!r} is not a valid name of an environment variable")
        encoding, _, handler = self.env.get("PYTHONIOENCODING", "").partition(":")
        if encoding.lower() not in ("", "utf-8", "utf8") or not _is_error_handler(handler):
            raise ArgumentError(
                f"PYTHONIOENCODING={self.env['PYTHONIOENCODING']}: the logs of ranks are UTF-8; "
                "only an error handler can be set, as in PYTHONIOENCODING=:replace"
            )
        self._check_ranks()

    def _check_ranks(self) -> None:
        if self.ranks == ():
            raise ArgumentError("at least one rank must be started")
        for rank in self.ranks or ():
            if not 0 <= rank < self.nproc:
                raise ArgumentError(unknown_rank(rank, self.nproc))

    def check_gpus(self) -> None:
        """Refuse a backend that needs a GPU if there is none. This creates no CUDA context.

        Raises:
            RequestError: there is no GPU.
        """
        if not accelerator.has_devices_for(self.backend):
            raise RequestError(
                f"backend {self.backend} needs a GPU, and this machine has none: use --backend gloo"
            )

    def threads_per_rank(self) -> int:
        """Return the threads of each rank: ``threads``, or cores / ranks, at least 1."""
        return self.threads or max(1, cores_here() // self.nproc)

    def environment(self, rank: int = 0, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return a rank's environment: ``base``, or the kernel's, with this spec's variables."""
        env = dict(os.environ if base is None else base)
        if "JPY_PARENT_PID" in env:  # set by Jupyter, as are these two, which make rich move the
            for name in ("FORCE_COLOR", "CLICOLOR_FORCE"):  # cursor in logs: ipykernel 7.4
                env.pop(name, None)
        if self.gpus is not None:
            env |= accelerator.select_devices(self.gpus, rank)
        return env | dict(self.env)

    def cwd(self) -> Path:
        """Return the working folder of the ranks: the kernel's, or home if that was deleted."""
        try:
            return Path.cwd()
        except FileNotFoundError:
            return Path.home()

    def facts(self) -> dict[str, Any]:
        """Return the facts for a run's record; of ``env`` only the names: values may be secret."""
        facts = {item.name: getattr(self, item.name) for item in fields(self)}
        del facts["ranks"], facts["more"]  # each recorded cell has its ranks
        return facts | {"env": sorted(self.env), "cwd": str(self.cwd())} | dict(self.more)
