"""What was found by checks, as HTML: a line that unfolds."""

from __future__ import annotations

import re
from collections.abc import Sequence

from nbddp.checks.registry import Finding
from nbddp.ui.panel.bare import STRONG, dot
from nbddp.ui.panel.html import escape
from nbddp.ui.panel.style import SHEET
from nbddp.ui.text.checks import MAX_SHOWN, findings_title


def findings_html(
    findings: Sequence[Finding], *, what: str = "", shown: int = MAX_SHOWN, is_open: bool = False
) -> str:
    """The findings under a line that says how many; empty if there is none, and nobody asked.

    Args:
        findings: in their order.
        what: what was looked at, if somebody asked.
        shown: how many of them are listed.
        is_open: whether they are seen at once.
    """
    if not findings and not what:
        return ""
    asks = f" in {escape(what)}" if what else ""
    is_well = all(each.is_fact for each in findings)
    title = f"{dot('nbddp-ok' if is_well else 'nbddp-warn')}{findings_title(findings)}{asks}"
    if not findings:
        return f"<div>{title}</div>"
    first = findings[0]
    rules = " · ".join(dict.fromkeys(each.rule for each in findings[:shown]))
    told = first.headline if len(findings) == 1 else rules
    rows = "".join(map(_row, findings[:shown]))
    left = len(findings) - shown
    more = f"and {left} more: <code>%ddp check</code> shows them all" if left > 0 else ""
    return (
        f'<details class="nbddp-checks"{" open" if is_open else ""}><summary>{title} '
        f'<span class="nbddp-muted">· {_prose(told)}</span></summary>'
        f'<ul class="nbddp-events">{rows}</ul><div class="nbddp-muted">{more}</div></details>'
    )


def check_html(findings: Sequence[Finding], what: str) -> str:
    """What ``%ddp check`` shows: all of them, open."""
    shown = findings_html(findings, what=what, shown=len(findings), is_open=True)
    return f'{SHEET}<div class="nbddp">{shown}</div>'


def _row(each: Finding) -> str:
    place = f" line {each.line}" if each.line else ""
    return (
        f'<li style="margin:4px 0"><span style="{STRONG}">{escape(each.rule)}{place}</span> '
        f'{_prose(each.text)}<div class="nbddp-muted">{_prose(f"{each.why} {each.fix}")}</div></li>'
    )


def _prose(text: str) -> str:
    """A sentence with code in it."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))
