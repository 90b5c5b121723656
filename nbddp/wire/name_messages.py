"""What a rank is asked about its names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """Say which names fit at this place of this code."""

    request: int
    code: str
    cursor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect:
    """Say what the name at this place of this code is; ``detail`` 1 for its source too."""

    request: int
    code: str
    cursor: int
    detail: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectFacts:
    """Say what is known of all names: a :class:`~nbddp.checks.facts.RankFacts`, as a dict."""

    request: int
