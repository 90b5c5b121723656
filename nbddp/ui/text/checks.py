"""What was found by checks, as plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from nbddp.checks.registry import Finding
from nbddp.ui.words import say_number_of

MAX_SHOWN = 3  # under a cell: more would be a wall that nobody reads
WIDTH = 92


def findings_title(findings: Sequence[Finding]) -> str:
    """How many there are.

    >>> findings_title([])
    'nothing to find fault with'
    """
    wrong = sum(not each.is_fact for each in findings)
    return f"{say_number_of(wrong, 'thing')} to look at" if wrong else "nothing to find fault with"


def findings_text(findings: Sequence[Finding], *, what: str = "", shown: int = MAX_SHOWN) -> str:
    """Each in a line, and how to mend it; empty if there is none, and nobody asked.

    Args:
        findings: in their order.
        what: what was looked at, if somebody asked.
        shown: how many of them are listed.
    """
    if not findings and not what:
        return ""
    asks = f" in {what}" if what else ""
    lines = [f"nbddp: {findings_title(findings)}{asks}"]
    for each in findings[:shown]:
        lines.append(f"  {each.headline}")
        lines += textwrap.wrap(
            "" if each.is_fact else each.fix,
            WIDTH,
            initial_indent=" " * 6,
            subsequent_indent=" " * 6,
        )
    return "\n".join([*lines, *_more(findings, shown)])


def _more(findings: Sequence[Finding], shown: int) -> list[str]:
    if not findings:
        return []
    left = len(findings) - shown
    said = f"  and {left} more: `%ddp check` shows them all" if left > 0 else ""
    return [said] if said else [f"  `%ddp check --explain {findings[0].rule}` tells more"]
