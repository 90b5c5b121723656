"""Run the checks on a cell after its run, and on the file of a script."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from nbddp.controller.session import Session
from nbddp.errors import RequestError
from nbddp.extensions.checks import checker
from nbddp.extensions.checks.facts import GroupFacts, RankFacts, kinds_by_name
from nbddp.extensions.checks.registry import Finding
from nbddp.extensions.checks.source import CellSource
from nbddp.group.find_script import NOT_SCRIPTS, script_text
from nbddp.record.cell import CellHandle, CellRequest


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


def find_new(session: Session, handle: CellHandle) -> list[Finding]:
    """Return the findings to report below a cell of the session that has ended.

    The user did not ask for them. A finding about the state of the ranks is reported only once.
    """
    result = handle.result
    if result is None or handle.request.script or len(handle.request.source) > checker.MAX_LENGTH:
        return []
    ranks = {rank: RankFacts.from_reported(each.facts) for rank, each in result.reports.items()}
    has_things = any(each.objects for each in ranks.values())
    if not has_things and not checker.needs_check(handle.request.source):
        return []
    world_size, is_ok = len(session.life.ranks), result.is_ok
    check = partial(check_cell, handle.request, ranks, world_size=world_size, is_ok=is_ok)
    new, reported = [], session.reported_findings
    for finding in checker.checked(partial(check, is_asked=False)):
        key = handle.attempt, finding.rule, finding.text
        if finding.rule.startswith("ND1") or key not in reported:  # ND1: the code of the cell
            new.append(finding)
        reported.add(key)
    return new
