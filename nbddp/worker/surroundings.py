"""What the cells of a rank have set in its process: for another that takes a dead one's place."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

from nbddp.worker.traces import torch_settings


class Surroundings:
    """The import path, the folder, the environment and the settings of torch.

    Of the environment only what has changed since this was made: the rest is the rank's own.
    """

    def __init__(self) -> None:
        self._environ = dict(os.environ)

    def told(self) -> dict[str, Any]:
        """All of it, to be pickled."""
        now, before = dict(os.environ), self._environ
        changed = {name: now.get(name) for name in {*now, *before}}
        return {
            "path": [*sys.path],
            "folder": _folder(),
            "environ": {name: to for name, to in changed.items() if to != before.get(name)},
            "torch": [read() for read, _ in torch_settings()],
        }

    def take(self, told: dict[str, Any]) -> None:
        """Be surrounded like another."""
        sys.path[:] = told["path"]
        with suppress(OSError):  # the folder is gone
            os.chdir(told["folder"])
        for name, value in told["environ"].items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for (read, write), value in zip(torch_settings(), told["torch"], strict=True):
            if read() != value:
                write(value)


def _folder() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - as it is, not resolved
    except OSError:
        return ""
