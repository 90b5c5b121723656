"""``%ddp check``, and the findings below each cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from weakref import WeakKeyDictionary

from nbddp.controller.rank_requests import ask_all
from nbddp.controller.session import Session
from nbddp.errors import NbddpError, RequestError
from nbddp.extensions.checks import CheckArguments, checker
from nbddp.extensions.checks.facts import GroupFacts, RankFacts, kinds_by_name
from nbddp.extensions.checks.registry import Finding
from nbddp.extensions.checks.source import CellSource
from nbddp.formatting import plural
from nbddp.group.find_script import NOT_SCRIPTS, script_text
from nbddp.group.notebook_events import CellShown, NotebookEvent
from nbddp.group.notebook_half import Notebook, NotebookHalf
from nbddp.lifecycle.group_state import GroupState
from nbddp.record.cell import CellHandle, CellRequest
from nbddp.ui.report.blocks import Block, Cell, Details, Dot, Report, note
from nbddp.ui.report.render import render_text
from nbddp.wire.request_messages import CollectFacts

NO_CELL = "no cell has run yet: `%ddp check FILE` checks a script, `--explain` shows the checklist"
MAX_SHOWN = 3  # below a cell

Reported = set[tuple[int, str, str]]  # the attempt, the rule and the text of each finding


class FindingsError(NbddpError):
    """Strict checks have findings; ``report`` lists them."""

    def __init__(self, message: str, *, report: str) -> None:
        super().__init__(message)
        self.report = report

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of the controller's traceback."""
        return self.report.splitlines()


class Checks(NotebookHalf):
    """Checks the last cell or a script if asked, and each cell that is shown."""

    def __init__(self, notebook: Notebook) -> None:
        super().__init__(notebook)
        self._reported = WeakKeyDictionary[Session, Reported]()  # below the cells so far

    def on_event(self, event: NotebookEvent) -> None:
        """Show the findings of a cell below it."""
        if isinstance(event, CellShown):
            reported = self._reported.setdefault(event.session, set())
            world_size = len(event.session.life.ranks)
            event.add(findings_below_cell(find_new(event.handle, world_size, reported)))

    def check(self, args: CheckArguments) -> None:
        """Check the last cell or a script, and show the findings.

        Raises:
            RequestError: there is nothing to check.
            FindingsError: there are findings and ``--strict`` is set.
        """
        if args.explain is not None:
            name = args.explain
            text = checker.explain(checker.find_rule(name)) if name else checker.checklist()
            self.notebook.print_line(text)
            return
        findings, what = self._find_mistakes(args.script)
        wrong = [each for each in findings if not each.is_fact]
        if args.strict and wrong:
            report = render_text(findings_report(wrong, what))
            summary = f"{findings_title(wrong)} in {what}: {wrong[0].headline}"
            raise FindingsError(summary, report=f"nbddp: {report}")
        self.notebook.show(findings_report(findings, what))

    def _find_mistakes(self, script: str | None) -> tuple[list[Finding], str]:
        if script is not None:
            return check_script(script), script
        notebook, request = self.notebook, self.notebook.last_request
        if request is None:
            raise RequestError(NO_CELL)
        findings = check_cell(
            request,
            {} if request.has_own_ranks else collect_facts(notebook.group.session),
            world_size=len(notebook.group.life.ranks),
            is_ok=notebook.last_succeeded,
            is_asked=True,
        )
        return findings, f"cell [{request.execution_count}]"


def collect_facts(session: Session) -> dict[int, RankFacts]:
    """Return the facts of every rank; empty if the ranks are busy or gone."""
    if session.life.state is not GroupState.IDLE or not session.life.alive:
        return {}
    answers = ask_all(session, session.life.alive, CollectFacts())
    return {rank: RankFacts.from_reported(each.content) for rank, each in answers.items()}


def check_script(name: str) -> list[Finding]:
    """Return the findings of a script that can be seen in its code.

    Args:
        name: the file of the script.

    Raises:
        RequestError: the file cannot be read or is not a Python script.
    """
    if instead := NOT_SCRIPTS.get(Path(name).suffix):
        raise RequestError(f"{name} is not checked as a script: {instead}")
    file = Path(name).expanduser()
    with script_text(file, name) as text:
        return checker.check_source(CellSource(text, is_cell=False))


def check_cell(
    request: CellRequest,
    ranks: Mapping[int, RankFacts],
    *,
    world_size: int,
    is_ok: bool,
    is_asked: bool,
) -> list[Finding]:
    """Return the findings of a cell: in its code, and in the objects that it left on the ranks.

    Args:
        request: the request that ran the cell.
        ranks: the check facts of each rank; empty if no rank reported any.
        world_size: the number of ranks.
        is_ok: whether the cell succeeded.
        is_asked: whether the user asked for the check. If so, all variables on the ranks are
            checked, and facts are reported too.

    Raises:
        RequestError: the script that the cell ran no longer exists.
        SyntaxError: the cell is not valid Python.
    """
    first_rank = ranks[min(ranks)] if ranks else RankFacts()
    source = CellSource(
        "" if request.script is not None else request.source,
        kinds_by_name(ranks),
        first_line=request.first_line,
        aliases=first_rank.aliases,
    )
    facts = GroupFacts(
        ranks=ranks, world_size=world_size, source=source, is_ok=is_ok, is_requested=is_asked
    )
    is_for_all = request.ranks is None or set(request.ranks) == set(range(world_size))
    found = [
        finding
        for finding in [*checker.check_source(source), *checker.check_facts(facts)]
        if (is_for_all and world_size != 1) or finding.rule not in checker.RULES_FOR_ALL_RANKS
    ]
    if is_asked and request.script is not None and request.script.path:
        found += check_script(request.script.path)
    return checker.sort_findings(each for each in found if is_asked or not each.is_fact)


def find_new(handle: CellHandle, world_size: int, reported: Reported) -> list[Finding]:
    """Return the findings to report below a cell that has ended.

    The user did not ask for them. A finding about the state of the ranks is reported only once.

    Args:
        handle: the cell.
        world_size: the number of ranks.
        reported: the findings so far; the new ones are added.
    """
    result = handle.result
    if result is None or handle.request.script or len(handle.request.source) > checker.MAX_LENGTH:
        return []
    ranks = {rank: RankFacts.from_reported(each.facts) for rank, each in result.reports.items()}
    has_things = any(each.objects for each in ranks.values())
    if not has_things and not checker.needs_check(handle.request.source):
        return []
    new: list[Finding] = []
    with suppress(SyntaxError):  # IPython accepts more than Python
        for finding in check_cell(
            handle.request, ranks, world_size=world_size, is_ok=result.is_ok, is_asked=False
        ):
            key = handle.attempt, finding.rule, finding.text
            if finding.rule.startswith("ND1") or key not in reported:  # ND1: the code of the cell
                new.append(finding)
            reported.add(key)
    return new


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
