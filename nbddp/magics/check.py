"""``%ddp check``: what is wrong before it breaks."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from nbddp.checks.book import checklist, explain, rule_of
from nbddp.checks.registry import Finding
from nbddp.errors import FindingsError, RequestError
from nbddp.group.checking import check_cell, check_script
from nbddp.magics.desk import Desk
from nbddp.ui.report.findings import findings_report, findings_title
from nbddp.ui.report.render import render_text

NOTHING = "no cell has run yet: `%ddp check FILE` looks at a script, `--explain` has the checklist"


def check(desk: Desk, args: Namespace) -> None:
    """Look, and show what was found.

    Raises:
        RequestError: there is nothing to look at.
        FindingsError: something is wrong, and it is to be strict.
    """
    if args.explain is not None:
        desk.views.say(explain(rule_of(args.explain)) if args.explain else checklist())
        return
    findings, what = _look(desk, args.script)
    wrong = [each for each in findings if not each.is_fact]
    if args.strict and wrong:
        report = render_text(findings_report(wrong, what))
        raise FindingsError(_told(wrong, what), report=f"nbddp: {report}")
    desk.views.show(findings_report(findings, what))


def _look(desk: Desk, script: str | None) -> tuple[list[Finding], str]:
    if script is not None:
        return check_script(script), script
    if desk.last_request is None:
        raise RequestError(NOTHING)
    number = desk.last_request.execution_count
    findings = check_cell(
        desk.last_request,
        {} if desk.last_request.has_own_ranks else desk.group.survey(),
        world_size=len(desk.group.life.ranks),
        is_ok=desk.went_well,
        is_asked=True,
    )
    return findings, f"cell [{number}]"


def _told(findings: Sequence[Finding], what: str) -> str:
    return f"{findings_title(findings)} in {what}: {findings[0].headline}"
