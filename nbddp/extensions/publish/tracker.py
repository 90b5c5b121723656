"""The supported trackers, and the protocol that each of them implements."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nbddp.errors import ArgumentError, RequestError
from nbddp.extensions.publish import TRACKER_CLASSES
from nbddp.extensions.publish.step_aggregator import AggregatedStep

_PROJECT_VARIABLES = {"wandb": "WANDB_PROJECT", "mlflow": "MLFLOW_EXPERIMENT_NAME"}
_PLACES = {
    "trackio": "project {project}, run {name}. To look at it: `trackio show --project {project}`",
    "wandb": "project {project}, run {name}. A later line has its address",
    "tensorboard": "{project}/{name}. To look at it: `tensorboard --logdir {project}`",
    "mlflow": "experiment {project}, run {name}. To look at it: `mlflow ui`",
}
MAX_NAME_LENGTH = 250
_NOT_ALLOWED = re.compile(r"[^\w\-. :/]")


@dataclass(frozen=True, slots=True)
class Target:
    """A tracker, and the project, experiment or folder in it; empty for the default one."""

    kind: str
    project: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.project}" if self.project else self.kind

    @property
    def used_project(self) -> str:
        """The project, also if it is the default one."""
        # the folder as for torch's SummaryWriter
        default = "runs" if self.kind == "tensorboard" else "nbddp"
        return self.project or os.environ.get(_PROJECT_VARIABLES.get(self.kind, "")) or default


def parse_target(text: str) -> Target:
    """Parse a tracker and its project, as in ``wandb:digits``.

    Raises:
        ArgumentError: there is no such tracker, or the project is empty.

    >>> str(parse_target("wandb:digits")), parse_target("trackio")
    ('wandb:digits', Target(kind='trackio', project=''))
    """
    kind, colon, project = text.partition(":")
    if kind not in TRACKER_CLASSES or bool(colon) != bool(project.strip()):
        allowed = ", ".join(TRACKER_CLASSES)
        raise ArgumentError(
            f"expected one of {allowed}, or one with a project or folder as in wandb:digits, "
            f"got {text!r}"
        )
    return Target(kind, project.strip())


def describe_place(target: Target, name: str) -> str:
    """Return where a run of this name will be, and how to look at it.

    >>> describe_place(Target("tensorboard"), "digits")
    'runs/digits. To look at it: `tensorboard --logdir runs`'
    """
    return _PLACES[target.kind].format(project=target.used_project, name=name)


def require_package(kind: str) -> None:
    """Check that the tracker's package is installed, without importing it.

    Raises:
        RequestError: the package is missing; the message has the command that installs it.
    """
    importlib.invalidate_caches()  # the package may have just been installed
    try:
        found = importlib.util.find_spec(kind)
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin is None:  # a folder ./wandb is not the package
        raise RequestError(
            f"publishing to {kind} needs the package {kind}: `pip install 'nbddp[{kind}]'`"
        )


class PublishError(Exception):
    """A tracker refused the data; the text is for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """The name and the facts of a run.

    Attributes:
        name: the name of its folder, with a number if it was published there before.
        project: the project, experiment or folder.
        start_time: in ``time.time()``.
        settings: the current settings of ``nbddp.config``, and facts of the run as ``nbddp.*``.
    """

    name: str
    project: str
    start_time: float
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """The outcome of a run.

    Attributes:
        outcome: ``ok``, ``failed``, ``interrupted``, ``killed``, ``running``, ...
        why: the reason, in one line.
        is_live: whether the run goes on.
        end_time: in ``time.time()``.
        totals: steps, restarts, heals, failures, seconds lost.
        events: the events in their order, each with its ``time.time()`` and a sentence.
    """

    outcome: str
    why: str
    is_live: bool
    end_time: float
    totals: Mapping[str, float]
    events: Sequence[tuple[float, str]]

    @property
    def text(self) -> str:
        """The outcome and its reason in one line."""
        return f"{self.outcome}: {self.why}" if self.why else self.outcome


class Tracker(Protocol):
    """The target of a publication: ``start`` is called first and ``finish`` last, each once."""

    def start(self, run: RunIdentity) -> str:
        """Create a run in the tracker; return its location, for the user."""

    def update_config(self, settings: Mapping[str, Any]) -> None:
        """Send new or changed settings."""

    def log_steps(self, steps: Sequence[AggregatedStep]) -> None:
        """Send the next steps, in the order in which they began; step numbers may decrease."""

    def log_event(self, at: float, text: str) -> None:
        """Send an event while the run goes on, such as a restart, a heal or a failure."""

    def finish(self, outcome: RunOutcome) -> None:
        """Send the outcome, and return when the tracker has received everything."""


# ---- settings and events as Markdown


def settings_text(settings: Mapping[str, Any]) -> str:
    """Return the settings as a table.

    >>> print(settings_text({"lr": 0.1}))
    | setting | value |
    |---|---|
    | lr | 0.1 |
    """
    rows = [f"| {_cell(name)} | {_cell(value)} |" for name, value in settings.items()]
    return "\n".join(["| setting | value |", "|---|---|", *rows])


def events_text(events: Sequence[tuple[float, str]]) -> str:
    """Return the events as a list, with times in the local time zone.

    >>> events_text([]), events_text([(0.0, "stopped")])[:4]
    ('', '- 19')
    """
    times = [time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) for at, _ in events]
    lines = zip(times, events, strict=True)
    return "\n".join(f"- {when} {' '.join(text.split())}" for when, (_, text) in lines)


def plain_name(name: str) -> str:
    """Return a name with characters and a length that MLflow accepts; a name may look like a path.

    >>> plain_name("val/acc@5 (%)"), plain_name("/train//loss"), plain_name("../loss")
    ('val/acc_5 ___', 'train/loss', 'loss')
    """
    parts = [part for part in _NOT_ALLOWED.sub("_", name).split("/") if part.strip(".")]
    plain = "/".join(parts).lstrip(".") or "_"
    if len(plain) <= MAX_NAME_LENGTH:
        return plain
    half = MAX_NAME_LENGTH // 2
    return f"{plain[:half]}_{plain[-(half - 1) :]}"  # keep the end, which may be /min


def _cell(value: object) -> str:
    return " ".join(str(value).replace("|", "\\|").split())
