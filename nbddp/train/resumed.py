"""What a run goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbddp.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a run goes on: at step 0, unless a checkpoint was loaded.

    It is true if a checkpoint was loaded. ``resumed["best"]`` and ``resumed.get("best", 0.0)``
    give its values, as of a dict.

    Attributes:
        step: the step that was saved; 0 when nothing was loaded.
        values: the plain values that were saved, by name, tensors on the CPU; and those that
            ``resume`` was given where none were.
        path: the checkpoint; None when nothing was loaded.

    Raises:
        CheckpointError: in ``resumed[name]``, when there is no such value.

    >>> resumed = Resumed(values={"best": 0.0})
    >>> bool(resumed), resumed.step, resumed["best"]
    (False, 0, 0.0)
    """

    step: int = 0
    values: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None

    def __bool__(self) -> bool:
        return self.path is not None

    def __getitem__(self, name: str) -> Any:
        if name not in self.values:
            held = f"{self.path} holds no value {name!r}" if self.path else f"no value {name!r}"
            only = f"only {', '.join(self.values)}" if self.values else "and no other"
            raise CheckpointError(f"{held}, {only}; give resume() one to begin with: {name}=...")
        return self.values[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The value of this name, or ``default`` if there is none."""
        return self.values.get(name, default)
