"""Record the training of a script under torchrun, and inject one fault after the other.

The judge copies this file as ``sitecustomize.py`` into a folder of PYTHONPATH. So Python runs it in
each worker before the script, and the script stays as it is. ``plan.json`` in that folder has the
faults. An attempt gets the first one that has not fired yet, so an attempt that fails by itself
costs none. Each worker writes a file of JSON lines there: one for each optimizer step and save.
"""

from __future__ import annotations

import io
import json
import os
import signal
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

INJECTED = "an error that the judge raises"


class Recorder:
    """Writes the events of one worker, and injects its fault."""

    def __init__(self, file: Path, fault: Mapping[str, Any], mark: Path) -> None:
        self.mark = mark  # a file that says that the fault has fired
        self.file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.fault = fault
        self.n_steps = 0
        self.n_saves = 0
        self.facts: dict[str, Any] = {}  # of the step that is under way
        self.samples: list[int] = []
        self.write("began")

    def write(self, event: str, **facts: Any) -> None:
        os.write(self.file, (json.dumps({"event": event} | facts) + "\n").encode())

    def is_due(self, kind: str, count: int) -> bool:
        return self.fault.get("kind") == kind and self.fault["at"] == count

    def before_forward(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if not isinstance(module, DistributedDataParallel) or not torch.is_grad_enabled():
            return
        if not self.samples:
            self.facts["weights"] = checksum(module.module.state_dict().values())
            self.facts["random"] = checksum([torch.get_rng_state()])
            self.facts["dropout"] = describe_dropout(module)
        self.samples += [checksum([row]) for row in args[0]]

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.facts["rate"] = float(optimizer.param_groups[0]["lr"])
        self.facts["has_averages"] = len(optimizer.state) > 0
        self.facts["optimizer"] = describe_optimizer(optimizer)

    def after_step(self, *_: Any) -> None:
        self.n_steps += 1
        self.write("step", samples=self.samples, **self.facts)
        self.samples, self.facts = [], {}
        if self.is_due("kill", self.n_steps):
            self.die()
        if self.is_due("raise", self.n_steps):
            self.note_fault()
            raise RuntimeError(INJECTED)

    def note_fault(self) -> None:
        self.mark.touch()
        self.write("fault")

    def die(self) -> None:
        self.note_fault()
        os.kill(os.getpid(), signal.SIGKILL)

    def saving(self, save: Callable[..., None]) -> Callable[..., None]:
        """Wrap ``torch.save``."""

        def recorded(obj: Any, f: Any, *args: Any, **options: Any) -> None:
            name = getattr(f, "name", None) if hasattr(f, "write") else os.fspath(f)
            if not isinstance(name, str):  # a buffer: pickle uses it for the storage of a tensor
                save(obj, f, *args, **options)
                return
            self.n_saves += 1
            path = os.path.abspath(name)  # noqa: PTH100 - without links
            self.write("save", path=path, after=self.n_steps)
            if self.is_due("save", self.n_saves):
                buffer = io.BytesIO()
                save(obj, buffer, *args, **options)
                _write_half(buffer.getvalue(), f)
                self.die()
            save(obj, f, *args, **options)

        return recorded

    def noting(self, event: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that each call is an event."""

        def noted(*args: Any, **options: Any) -> Any:
            self.write(event)
            return function(*args, **options)

        return noted


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    total = 0
    for tensor in tensors:
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        total = zlib.crc32(data.numpy().tobytes(), total)
    return total


def describe_dropout(net: torch.nn.Module) -> list[float]:
    """Return the rate of each layer with dropout."""
    return [each.p for each in net.modules() if isinstance(each, torch.nn.Dropout)]


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Return the kind of an optimizer, and its constants."""
    names = {"betas", "eps", "momentum", "weight_decay"} & optimizer.defaults.keys()
    constants = [f"{name}={optimizer.defaults[name]}" for name in sorted(names)]
    return f"{type(optimizer).__name__}({', '.join(constants)})"


def _write_half(content: bytes, target: Any) -> None:
    half = content[: len(content) // 2]
    if hasattr(target, "write"):
        target.write(half)
        target.flush()
    else:
        Path(target).write_bytes(half)


def install(folder: Path) -> None:
    """Watch torch in this process. Processes that it starts are not watched."""
    rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    paths = os.environ["PYTHONPATH"].split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path != str(folder))
    number = len([*folder.glob("fired-*")])
    faults = json.loads((folder / "plan.json").read_text())[number:]
    fault = faults[0] if faults and faults[0]["rank"] == int(rank) else {}
    recorder = Recorder(folder / f"{attempt}-{rank}.jsonl", fault, folder / f"fired-{number}")
    register_module_forward_pre_hook(recorder.before_forward)
    register_optimizer_step_pre_hook(recorder.before_step)
    register_optimizer_step_post_hook(recorder.after_step)
    torch.save = torch.serialization.save = recorder.saving(torch.save)
    torch.load = torch.serialization.load = recorder.noting("load", torch.load)
    restore = recorder.noting("random restored", torch.set_rng_state)
    torch.set_rng_state = torch.random.set_rng_state = restore


if __name__ == "sitecustomize" and "TORCHELASTIC_RESTART_COUNT" in os.environ:
    install(Path(__file__).parent)
