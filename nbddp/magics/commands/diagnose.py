"""``%ddp check`` and ``%ddp trace``: look at the last cell, or at the next one."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

from nbddp.checks.checker import checklist, explain, rule_of
from nbddp.checks.registry import Finding
from nbddp.errors import FindingsError, RequestError
from nbddp.group.checking import check_cell, check_script
from nbddp.magics.notebook_state import NotebookState
from nbddp.ui.report.findings import findings_report, findings_title
from nbddp.ui.report.render import render_text
from nbddp.wire.trace_messages import TraceSteps

NO_CELL = "no cell has run yet: `%ddp check FILE` looks at a script, `--explain` has the checklist"
NO_TRACE = "no trace is requested: `%ddp trace --steps 10:15` traces these steps of the next cell"


def check(desk: NotebookState, args: Namespace) -> None:
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
        said = f"{findings_title(wrong)} in {what}: {wrong[0].headline}"
        raise FindingsError(said, report=f"nbddp: {report}")
    desk.views.show(findings_report(findings, what))


def _look(desk: NotebookState, script: str | None) -> tuple[list[Finding], str]:
    if script is not None:
        return check_script(script), script
    if desk.last_request is None:
        raise RequestError(NO_CELL)
    number = desk.last_request.execution_count
    findings = check_cell(
        desk.last_request,
        {} if desk.last_request.has_own_ranks else desk.group.survey(),
        world_size=len(desk.group.life.ranks),
        is_ok=desk.went_well,
        is_asked=True,
    )
    return findings, f"cell [{number}]"


def steer_trace(desk: NotebookState, args: Namespace) -> str:
    """Set or cancel which steps are traced; return a sentence about it."""
    if args.off:
        before, desk.next_trace = desk.next_trace, None
        return NO_TRACE if before is None else "the next cell is not traced"
    if args.steps is not None:
        desk.next_trace = replace(args.steps, with_memory=args.memory)
        return _say_steps(desk.next_trace)
    if desk.next_trace is None:
        return NO_TRACE
    return f"{_say_steps(desk.next_trace)}; `%ddp trace --off` takes that back"


def _say_steps(steps: TraceSteps) -> str:
    memory = ", with memory" if steps.with_memory else ""
    return f"the next cell is traced: {steps}{memory}"
