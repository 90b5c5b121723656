"""The process state that cells have set, for transfer to a replacement."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from nbddp import accelerator

Pair = tuple[Callable[[], Any], Callable[[Any], Any]]


class ProcessEnvironment:
    """Import path, folder, environment variables, settings of torch, and Accelerate's state.

    Only environment variables that changed after this object was created are transferred. All
    others are the rank's own.
    """

    def __init__(self) -> None:
        self._environ = dict(os.environ)

    def capture(self) -> dict[str, Any]:
        """Return the state as a dict that can be pickled."""
        folder = ""
        with suppress(OSError):  # the folder was deleted
            folder = os.getcwd()  # noqa: PTH109 - without resolving links
        # all objects of Accelerate share one dict of attributes
        accelerate = sys.modules.get("accelerate.state")
        changed = {name for name, _ in os.environ.items() ^ self._environ.items()}
        return {
            "path": [*sys.path],
            "folder": folder,
            "environ": {name: os.environ.get(name) for name in changed},
            "torch": [read() for read, _ in _torch_settings()],
            "accelerate": dict(accelerate.PartialState._shared_state) if accelerate else {},
        }

    def apply(self, captured: dict[str, Any]) -> None:
        """Apply the state of another rank."""
        sys.path[:] = captured["path"]
        with suppress(OSError):  # the folder was deleted
            os.chdir(captured["folder"])
        for name, value in captured["environ"].items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for (read, write), value in zip(_torch_settings(), captured["torch"], strict=True):
            if read() != value:
                write(value)
        _apply_accelerate_state(captured["accelerate"])


def _apply_accelerate_state(captured: dict[str, Any]) -> None:
    """Restore Accelerate's state. Without it the next object sees this process as the only one."""
    if not captured:
        return
    of_rank: dict[str, Any] = {
        "process_index": int(os.environ["RANK"]),
        "local_process_index": int(os.environ["LOCAL_RANK"]),
    }
    kind = accelerator.current()
    if captured["device"].type == kind.device_type:
        of_rank["device"] = torch.device(kind.device_type, kind.module.current_device())
    state: Any = importlib.import_module("accelerate.state")
    state.PartialState._shared_state.update(captured | of_rank)


def _torch_settings() -> list[Pair]:
    """Return a getter and a setter for each setting of torch."""
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
            (partial(getattr, cudnn, name), partial(setattr, cudnn, name))
            for name in ("benchmark", "deterministic", "enabled")
        ),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    ]


def _default_device() -> Any:
    """Return the default device; None if none is set, where torch's own getter returns the CPU."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device
