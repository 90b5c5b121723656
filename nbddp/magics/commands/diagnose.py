"""``%ddp check`` and ``%ddp trace``: check the last cell, trace the next one."""

from __future__ import annotations

from dataclasses import replace

from nbddp.errors import FindingsError, RequestError
from nbddp.extensions.checks.checker import checklist, explain, find_rule
from nbddp.extensions.checks.notebook import check_cell, check_script
from nbddp.extensions.checks.registry import Finding
from nbddp.extensions.checks.view import findings_report, findings_title
from nbddp.extensions.trace.messages import TraceSteps
from nbddp.magics.command_arguments import CheckArguments, TraceArguments
from nbddp.magics.notebook_state import NotebookState
from nbddp.ui.report.render import render_text

NO_CELL = "no cell has run yet: `%ddp check FILE` checks a script, `--explain` shows the checklist"
NO_TRACE = "no trace is requested: `%ddp trace --steps 10:15` traces these steps of the next cell"


def check(notebook: NotebookState, args: CheckArguments) -> None:
    """Check the last cell or a script, and show the findings.

    Raises:
        RequestError: there is nothing to check.
        FindingsError: there are findings and ``--strict`` is set.
    """
    if args.explain is not None:
        rules = explain(find_rule(args.explain)) if args.explain else checklist()
        notebook.presenter.print_line(rules)
        return
    findings, what = _find_mistakes(notebook, args.script)
    wrong = [each for each in findings if not each.is_fact]
    if args.strict and wrong:
        report = render_text(findings_report(wrong, what))
        summary = f"{findings_title(wrong)} in {what}: {wrong[0].headline}"
        raise FindingsError(summary, report=f"nbddp: {report}")
    notebook.presenter.show(findings_report(findings, what))


def _find_mistakes(notebook: NotebookState, script: str | None) -> tuple[list[Finding], str]:
    if script is not None:
        return check_script(script), script
    if notebook.last_request is None:
        raise RequestError(NO_CELL)
    number = notebook.last_request.execution_count
    findings = check_cell(
        notebook.last_request,
        {} if notebook.last_request.has_own_ranks else notebook.group.collect_facts(),
        world_size=len(notebook.group.life.ranks),
        is_ok=notebook.last_succeeded,
        is_asked=True,
    )
    return findings, f"cell [{number}]"


def set_trace_steps(notebook: NotebookState, args: TraceArguments) -> str:
    """Set or cancel the steps to trace; return a sentence about it."""
    if args.off:
        before, notebook.next_trace = notebook.next_trace, None
        return NO_TRACE if before is None else "the next cell is not traced"
    if args.steps is not None:
        notebook.next_trace = replace(args.steps, with_memory=args.memory)
        return _describe_steps(notebook.next_trace)
    if notebook.next_trace is None:
        return NO_TRACE
    return f"{_describe_steps(notebook.next_trace)}; `%ddp trace --off` cancels it"


def _describe_steps(steps: TraceSteps) -> str:
    memory = ", with memory" if steps.with_memory else ""
    return f"the next cell is traced: {steps}{memory}"
