"""What checks found: `%ddp check`, and the same folded below a cell."""

from __future__ import annotations

from collections.abc import Sequence

from nbddp.checks.registry import Finding
from nbddp.formatting import plural
from nbddp.ui.report.blocks import Block, Cell, Details, Dot, Report, Text, note
from nbddp.ui.report.render import text_lines

MAX_SHOWN = 3  # below a cell


def findings_title(findings: Sequence[Finding]) -> str:
    """Say how many mistakes there are.

    >>> findings_title([])
    'no mistakes found'
    """
    wrong = sum(not each.is_fact for each in findings)
    return f"{plural(wrong, 'possible mistake')} found" if wrong else "no mistakes found"


def findings_report(findings: Sequence[Finding], what: str, *, shown: int | None = None) -> Report:
    """Report the findings in ``what``; ``shown`` limits how many are listed."""
    listed = findings[:shown]
    place = f" in {what}" if what else ""
    rules = dict.fromkeys(each.rule for each in listed)
    is_well = all(each.is_fact for each in findings)
    title = " · ".join([f"{findings_title(findings)}{place}", *rules])
    return Report(
        Cell(title, dot=Dot.OK if is_well else Dot.WARN),
        [*map(_finding, listed), *_more(findings, len(listed))],
    )


def findings_below_cell(findings: Sequence[Finding]) -> list[Block]:
    """Fold the first findings under their title; nothing if there are none."""
    if not findings:
        return []
    report = findings_report(findings, "", shown=MAX_SHOWN)
    return [Details(report.title, report.blocks)]


def findings_text(findings: Sequence[Finding]) -> str:
    """Return what a cell as text shows of its findings."""
    lines = [*text_lines(findings_below_cell(findings))]
    return f"nbddp: {chr(10).join(lines)}" if lines else ""


def _finding(each: Finding) -> Details:
    why = " ".join(filter(None, [each.why, each.fix]))
    return Details(each.headline, [note(why)], is_open=True)


def _more(findings: Sequence[Finding], listed: int) -> list[Text]:
    if not findings:
        return []
    more = len(findings) - listed
    if more:
        return [note(f"and {more} more: `%ddp check` shows them all")]
    return [note(f"`%ddp check --explain {findings[0].rule}` tells more")]
