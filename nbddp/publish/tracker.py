"""What a run can be published to, and what every tracker is told of it, and in which order."""

from __future__ import annotations

import importlib
import importlib.util
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nbddp.errors import ArgumentError, RequestError
from nbddp.publish.step_aggregator import AggregatedStep

# by the name of the package, which is an extra's too: the class in nbddp.publish.to_KIND
TRACKER_CLASSES = {
    "trackio": "ToTrackio",
    "wandb": "ToWandb",
    "tensorboard": "ToTensorBoard",
    "mlflow": "ToMlflow",
}
DEFAULT_PROJECT = "nbddp"  # the project, or experiment, unless another is named
MAX_NAME_LENGTH = 250
_NOT_ALLOWED = re.compile(r"[^\w\-. :/]")


@dataclass(frozen=True, slots=True)
class Target:
    """A tracker, and the project, experiment or folder there; empty for the usual one."""

    kind: str
    project: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.project}" if self.project else self.kind


def parse_target(text: str) -> Target:
    """Where to publish, as it is written.

    Raises:
        ArgumentError: there is no such tracker.

    >>> str(parse_target("wandb:digits")), parse_target("trackio")
    ('wandb:digits', Target(kind='trackio', project=''))
    """
    kind, colon, project = text.partition(":")
    if kind not in TRACKER_CLASSES or bool(colon) != bool(project.strip()):
        allowed = ", ".join(TRACKER_CLASSES)
        raise ArgumentError(
            f"expected one of {allowed}, or with a project or folder as in wandb:digits, "
            f"got {text!r}"
        )
    return Target(kind, project.strip())


def require_package(kind: str) -> None:
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


class PublishError(Exception):
    """The tracker does not take it; what it says, for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """Which run it is.

    Attributes:
        name: its folder's, with a number behind it if it was published there before.
        place: the project, experiment or folder that was asked for; empty for the usual one.
        began: in ``time.time()``.
        settings: what ``nbddp.config`` has said so far, and facts of the run as ``nbddp.*``.
    """

    name: str
    project: str
    start_time: float
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """What came of it.

    Attributes:
        outcome: ``ok``, ``failed``, ``interrupted``, ``killed``, ``running``, ...; ``why`` is in a
            line.
        is_live: whether the run goes on.
        ended: in ``time.time()``.
        sums: steps, restarts, heals, failures, seconds lost.
        record: what happened, line by line, each with when it was, in ``time.time()``.
    """

    outcome: str
    why: str
    is_live: bool
    end_time: float
    totals: Mapping[str, float]
    events: Sequence[tuple[float, str]]

    @property
    def text(self) -> str:
        """In a line."""
        return f"{self.outcome}: {self.why}" if self.why else self.outcome


class Tracker(Protocol):
    """Where a run is published: ``begin`` first and ``finish`` last, each once."""

    def start(self, run: RunIdentity) -> str:
        """Make a run there; returns where it is, for the user."""
        ...

    def update_config(self, settings: Mapping[str, Any]) -> None:
        """Some settings are new, or others than before."""
        ...

    def log_steps(self, steps: Sequence[AggregatedStep]) -> None:
        """The next steps, in the order in which they began; steps may fall back."""
        ...

    def log_event(self, when: float, text: str) -> None:
        """A restart, a heal, a failure, in words, while the run goes on."""
        ...

    def finish(self, outcome: RunOutcome) -> None:
        """Nothing more comes; returns when all of it was taken."""
        ...


# ---- settings and the record as a tracker shows text: Markdown


def settings_text(settings: Mapping[str, Any]) -> str:
    """A table.

    >>> print(settings_text({"lr": 0.1}))
    | setting | value |
    |---|---|
    | lr | 0.1 |
    """
    rows = [f"| {_cell(name)} | {_cell(value)} |" for name, value in settings.items()]
    return "\n".join(["| setting | value |", "|---|---|", *rows])


def events_text(record: Sequence[tuple[float, str]]) -> str:
    """What happened, line by line, with the time of this machine.

    >>> events_text([]), events_text([(0.0, "stopped")])[:4]
    ('', '- 19')
    """
    times = [time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when)) for when, _ in record]
    lines = zip(times, record, strict=True)
    return "\n".join(f"- {when} {' '.join(text.split())}" for when, (_, text) in lines)


def plain_name(name: str) -> str:
    """A name in letters that MLflow takes, and no longer than it takes them; it could be a path.

    >>> plain_name("val/acc@5 (%)"), plain_name("/train//loss"), plain_name("../loss")
    ('val/acc_5 ___', 'train/loss', 'loss')
    """
    parts = [part for part in _NOT_ALLOWED.sub("_", name).split("/") if part.strip(".")]
    plain = "/".join(parts).lstrip(".") or "_"
    if len(plain) <= MAX_NAME_LENGTH:
        return plain
    half = MAX_NAME_LENGTH // 2
    return f"{plain[:half]}_{plain[-(half - 1) :]}"  # /min is at the end


def _cell(value: object) -> str:
    return " ".join(str(value).replace("|", "\\|").split())
