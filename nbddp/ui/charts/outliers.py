"""Which lines of very many stand apart: those are drawn, of all others the band tells enough."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from nbddp.ui.charts.lines import Line

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

MOST = 5  # lines that stand apart; of more the furthest
PLACES = 48  # along the chart, where lines are compared
APART = 4.0  # standard deviations of the others, for half of the way or of its last quarter
LEAST = 0.01  # of the value itself: what is nearer is the same
_DEVIATIONS = 1.4826  # a standard deviation in median absolute deviations, of normal numbers


def outliers(lines: Mapping[int, Line]) -> dict[int, Line]:
    """Those that are far from most for long, or of late, in order of rank.

    Far is measured by the median and the median absolute deviation of all ranks, which no few
    ranks can move.
    """
    newest = max(line.steps[-1] for line in lines.values())
    oldest = min(line.steps[0] for line in lines.values())
    places = np.linspace(oldest, newest, PLACES)
    values = np.array([_at(line, places) for line in lines.values()])
    is_shown = np.isfinite(values).sum(axis=0) > len(lines) / 2  # else there is no middle
    if not is_shown.any():
        return {}
    values = values[:, is_shown]
    middle = np.nanmedian(values, axis=0)
    away = np.abs(values - middle)
    usual = np.maximum(_DEVIATIONS * np.nanmedian(away, axis=0), LEAST / APART * np.abs(middle))
    scores = np.divide(away, usual, out=np.where(away > 0, np.inf, 0.0), where=usual > 0)
    furthest = np.maximum(_median(scores), _median(scores[:, -(scores.shape[1] + 3) // 4 :]))
    ranks = sorted(zip(-furthest, lines, strict=True))[:MOST]
    return {rank: lines[rank] for rank in sorted(rank for score, rank in ranks if -score > APART)}


def _at(line: Line, places: Numbers) -> Numbers:
    """Its values there; NaN where it has none."""
    values: Numbers = np.interp(places, line.steps, line.values, left=np.nan, right=np.nan)
    return values


def _median(scores: Numbers) -> Numbers:
    """Of each row; 0 where it has no number: what is not finite has a mark of its own."""
    known = np.where(np.isnan(scores), 0.0, scores)
    return np.asarray(np.median(known, axis=1), dtype=np.float64)
