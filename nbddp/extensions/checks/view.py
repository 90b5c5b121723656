"""The findings of the checks: `%ddp check`, and the folded list below a cell."""

from __future__ import annotations

from collections.abc import Sequence

from nbddp.extensions.checks.registry import Finding
from nbddp.formatting import plural
from nbddp.ui.report.blocks import Block, Cell, Details, Dot, Report, note
from nbddp.ui.report.render import text_lines

MAX_SHOWN = 3  # below a cell


def findings_title(findings: Sequence[Finding]) -> str:
    """Return the number of possible mistakes as a title.

    >>> findings_title([])
    'no mistakes found'
    """
    wrong = sum(not each.is_fact for each in findings)
    return f"{plural(wrong, 'possible mistake')} found" if wrong else "no mistakes found"


def findings_report(findings: Sequence[Finding], what: str, *, shown: int | None = None) -> Report:
    """Report the findings in ``what``; ``shown`` is the maximum number in the list."""
    listed = findings[:shown]
    place = f" in {what}" if what else ""
    rules = dict.fromkeys(each.rule for each in listed)
    is_well = all(each.is_fact for each in findings)
    headline = f"{findings_title(findings)}{place}" if shown is None else _first(findings)
    title = " · ".join([headline, *rules])
    advice = f"`%ddp check --explain {findings[0].rule}` tells more" if findings else ""
    if more := len(findings) - len(listed):
        advice = f"and {more} more: `%ddp check` shows them all"
    details = [
        Details(f.headline, [note(" ".join(filter(None, [f.why, f.fix])))], is_open=True)
        for f in listed
    ]
    return Report(Cell(title, dot=Dot.OK if is_well else Dot.WARN), [*details, note(advice)])


def _first(findings: Sequence[Finding]) -> str:
    """Return the first mistake, which is seen while the list below a cell is folded."""
    first = findings[0]
    line = f"line {first.line}: " if first.line else ""
    if len(findings) == 1:
        return f"possible mistake, {line}{first.text}"
    return f"{plural(len(findings), 'possible mistake')}, the first: {line}{first.text}"


def findings_below_cell(findings: Sequence[Finding]) -> list[Block]:
    """Return the first findings, folded under a title; no block if there are none."""
    if not findings:
        return []
    report = findings_report(findings, "", shown=MAX_SHOWN)
    return [Details(report.title, report.blocks)]


def findings_text(findings: Sequence[Finding]) -> str:
    """Return the findings for the text view of a cell."""
    lines = "\n".join(text_lines(findings_below_cell(findings)))
    return f"nbddp: {lines}" if lines else ""
