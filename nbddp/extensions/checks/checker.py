"""Run all rules over a source or over facts, and explain rules."""

from __future__ import annotations

import re
from collections.abc import Iterable

from nbddp.errors import RequestError
from nbddp.extensions.checks import (  # each registers its rules  # noqa: F401
    collective_rules,
    evaluation_rules,
    rank_fact_rules,
    shared_file_rules,
    trainer_rules,
    training_rules,
)
from nbddp.extensions.checks.facts import GroupFacts
from nbddp.extensions.checks.registry import RULES, TEXT, Finding, Rule
from nbddp.extensions.checks.source import CellSource

MAX_LENGTH = 50_000  # characters; longer cells are checked only on request
ALL_RULES = dict(sorted(RULES.items()))
CODE_RULES = [each for each in ALL_RULES.values() if each.id.startswith("ND1")]
FACT_RULES = [each for each in ALL_RULES.values() if each.id.startswith("ND2")]

# each point of the checklist: its name, its text, and the rules that check it
CHECKLIST = [
    (name, text, re.findall(r"ND\d+", rules))
    for name, text, rules in re.findall(
        r"^- \*\*(.+?)\*\*: (.+?)(?: \((ND.+)\))?$", TEXT, re.MULTILINE
    )
]


# code without any of these words cannot violate a rule
_RELEVANT_WORDS = re.compile(
    r"dist|reduce|gather|barrier|broadcast|scatter|new_group|backward|DataLoader|Sampler|random_split"
    r"|save|eval|no_grad|cuda|scale|DataParallel|BatchNorm|isend|irecv|threads|device_map|nbddp"
    r"|open|write_|to_csv|to_json|to_parquet|to_pickle|\.(?:train|fit|predict|validate|test)\("
)


# rules that do not apply to a cell that only some ranks run
RULES_FOR_ALL_RANKS = frozenset(f"ND{number}" for number in (*range(101, 105), 108, 126, 133, 141))


def needs_check(text: str) -> bool:
    """Return whether a rule may find anything in this code.

    >>> needs_check("x = 1"), needs_check("dist.barrier()")
    (False, True)
    """
    return _RELEVANT_WORDS.search(text) is not None


def check_source(source: CellSource) -> list[Finding]:
    r"""Return the findings of the rules over code, in the order of the lines.

    >>> [each.headline for each in check_source(CellSource("dist.all_reduce(x, async_op=True)"))]
    ['ND105 line 1: the handle of this dist.all_reduce is dropped, so no code can wait for it.']
    """
    found = [each for rule in CODE_RULES for each in rule.findings(source)]
    return sort_findings(each for each in found if not source.is_silenced(each.rule, each.line))


def hang_causes(code: str, *, first_line: int = 1) -> list[str]:
    r"""Return the headlines of rule ND101, about calls that only some ranks make.

    >>> hang_causes("if rank == 0:\n    dist.barrier()")[0]
    'ND101 line 2: dist.barrier is under `if rank == 0` (line 1): the other ranks do not reach it.'
    """
    if len(code) > MAX_LENGTH:
        return []
    try:
        found = check_source(CellSource(code, first_line=first_line))
    except SyntaxError:  # IPython accepts more than Python
        return []
    return [finding.headline for finding in found if finding.rule == "ND101"]


def check_facts(facts: GroupFacts) -> list[Finding]:
    """Return the findings of the rules over the ranks' facts, for the cell that they concern.

    Findings about variables that are not in the cell are omitted, unless the user requested
    a check.
    """
    rules = [rule for rule in FACT_RULES if facts.is_requested or not rule.is_fact]
    found = [each for rule in rules for each in rule.findings(facts)]
    return sort_findings(
        finding
        for finding in found
        if not facts.source.is_silenced(finding.rule, finding.line or -1)
        and (finding.line or facts.is_requested or finding.rule == "ND212")
    )


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by line: findings without a line come last, and facts come after mistakes."""
    return sorted(findings, key=lambda each: (each.is_fact, each.line or 10**9, each.rule))


def find_rule(name: str) -> Rule:
    """Return the rule with this id.

    Raises:
        RequestError: there is no such rule.
    """
    if name.upper() not in ALL_RULES:
        raise RequestError(f"there is no rule {name}; `%ddp check --explain` lists them")
    return ALL_RULES[name.upper()]


def checklist() -> str:
    """Return the checklist for a training script on several ranks, with the rules."""
    lines = ["Checklist for a script on several ranks, with the rules that check each point:", ""]
    width = max(len(name) for name, _, _ in CHECKLIST)
    for name, text, rules in CHECKLIST:
        rules_text = f" [{', '.join(rules)}]" if rules else ""
        lines.append(f"  [ ] {name:<{width}}  {text}{rules_text}")
    lines += ["", "All rules (`%ddp check --explain ND101` explains one of them):", ""]
    lines += [f"  {each.id}  {each.title}" for each in ALL_RULES.values()]
    lines += [
        "",
        "`# nbddp: ok ND101` at the end of a line silences a rule there. On a line of its",
    ]
    return "\n".join([*lines, "own, it silences the rule in the whole cell or file."])


def explain(rule: Rule) -> str:
    """Return the explanation of a rule, with its two examples."""
    lines = [f"{rule.id}: {rule.title}", "", rule.why, "", rule.fix]
    for word, program in rule.programs.items():
        text = program.rstrip().replace("\n", "\n    ")
        lines += ["", f"{word}:", "", f"    {text}"]
    return "\n".join([*lines, "", f"more in notebooks/{rule.notebook}"])
