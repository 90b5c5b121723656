"""What a run can be published to, and how that is written: ``wandb``, ``wandb:my-project``."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass

from nbddp.errors import ArgumentError, RequestError

# by the name of the package, which is an extra's too: the class in nbddp.publish.to_KIND
KINDS = {
    "trackio": "ToTrackio",
    "wandb": "ToWandb",
    "tensorboard": "ToTensorBoard",
    "mlflow": "ToMlflow",
}
PLACE = "nbddp"  # the project, or experiment, unless another is named


@dataclass(frozen=True, slots=True)
class Target:
    """A tracker, and the project, experiment or folder there; empty for the usual one."""

    kind: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.place}" if self.place else self.kind


def target(text: str) -> Target:
    """Where to publish, as it is written.

    Raises:
        ArgumentError: there is no such tracker.

    >>> str(target("wandb:digits")), target("trackio")
    ('wandb:digits', Target(kind='trackio', place=''))
    """
    kind, colon, place = text.partition(":")
    if kind not in KINDS or bool(colon) != bool(place.strip()):
        allowed = ", ".join(KINDS)
        raise ArgumentError(
            f"expected one of {allowed}, or with a project or folder as in wandb:digits, "
            f"got {text!r}"
        )
    return Target(kind, place.strip())


def require(kind: str) -> None:
    """See to it that the tracker's package is there, without importing it.

    Raises:
        RequestError: it is not; what to install.
    """
    importlib.invalidate_caches()  # it may have been installed a moment ago
    try:
        found = importlib.util.find_spec(kind)
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin is None:  # a folder ./wandb is no package
        raise RequestError(
            f"publishing to {kind} needs the package {kind}: `pip install 'nbddp[{kind}]'`"
        )
