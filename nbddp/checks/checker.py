"""All rules, and what is said of them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from nbddp.checks import (  # each registers its rules  # noqa: F401
    collective_rules,
    evaluation_rules,
    rank_fact_rules,
    shared_file_rules,
    training_rules,
)
from nbddp.checks.facts import GroupFacts
from nbddp.checks.registry import RULES, TEXT, Finding, Rule
from nbddp.checks.source import CellSource
from nbddp.errors import RequestError

ALL_RULES = dict(sorted(RULES.items()))
CODE_RULES = [each for each in ALL_RULES.values() if each.id.startswith("ND1")]
FACT_RULES = [each for each in ALL_RULES.values() if each.id.startswith("ND2")]

# of each point its name, what it says, and the rules that look after it
CHECKLIST = [
    (name, text, re.findall(r"ND\d+", rules))
    for name, text, rules in re.findall(
        r"^- \*\*(.+?)\*\*: (.+?)(?: \((ND.+)\))?$", TEXT, re.MULTILINE
    )
]


# without any of these, no rule has anything to say
_RELEVANT_WORDS = re.compile(
    r"dist|reduce|gather|barrier|broadcast|scatter|new_group|backward|DataLoader|Sampler|random_split"
    r"|save|eval|no_grad|cuda|scale|DataParallel|BatchNorm|isend|irecv|threads|nbddp"
)


# what is no mistake where one rank runs the cell, or a few
RULES_FOR_ALL_RANKS = frozenset(f"ND{number}" for number in (*range(101, 105), 126, 133, 141))


def may_find(text: str) -> bool:
    """Whether code is worth to be read at all.

    >>> may_find("x = 1"), may_find("dist.barrier()")
    (False, True)
    """
    return _RELEVANT_WORDS.search(text) is not None


def check_source(source: CellSource) -> list[Finding]:
    r"""What the rules over code find there, in the order of its lines.

    >>> [each.headline for each in check_source(CellSource("dist.all_reduce(x, async_op=True)"))]
    ['ND105 line 1: the handle of this dist.all_reduce is dropped, so no code can wait for it.']
    """
    found = [each for rule in CODE_RULES for each in rule.findings(source)]
    return sort_findings(each for each in found if not source.is_silenced(each.rule, each.line))


def check_facts(facts: GroupFacts) -> list[Finding]:
    """What the rules over the ranks' facts find; said by the cell that has to do with it.

    What is found of names that the cell does not have is left out, unless somebody asked.
    """
    rules = [rule for rule in FACT_RULES if facts.is_requested or not rule.is_fact]
    found = [each for rule in rules for each in rule.findings(facts)]
    return sort_findings(
        each
        for each in found
        if not facts.source.is_silenced(each.rule, each.line or -1)
        and (each.line or facts.is_requested or each.rule == "ND212")
    )


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """By line, those of no line last, and facts after all that is wrong."""
    return sorted(findings, key=lambda each: (each.is_fact, each.line or 10**9, each.rule))


def find_rule(name: str) -> Rule:
    """The rule of this id.

    Raises:
        RequestError: there is none.
    """
    if name.upper() not in ALL_RULES:
        raise RequestError(f"there is no rule {name}; `%ddp check --explain` lists them")
    return ALL_RULES[name.upper()]


def checklist() -> str:
    """What a training script on several ranks needs, and the rules that look after it."""
    lines = ["What a script on several ranks needs, and which rules look after it:", ""]
    width = max(len(name) for name, _, _ in CHECKLIST)
    for name, text, rules in CHECKLIST:
        rules_text = f" [{', '.join(rules)}]" if rules else ""
        lines.append(f"  [ ] {name:<{width}}  {text}{rules_text}")
    lines += ["", "All rules (`%ddp check --explain ND101` tells more of one):", ""]
    lines += [f"  {each.id}  {each.title}" for each in ALL_RULES.values()]
    lines += ["", "`# nbddp: ok ND101` behind a line silences a rule there, on a line of its own"]
    return "\n".join([*lines, "in the whole cell, or file."])


def explain(rule: Rule) -> str:
    """A rule, at length, with its two examples."""
    lines = [f"{rule.id}: {rule.title}", "", rule.why, "", rule.fix]
    for word, program in rule.programs.items():
        text = program.rstrip().replace("\n", "\n    ")
        lines += ["", f"{word}:", "", f"    {text}"]
    return "\n".join([*lines, "", f"more in notebooks/{rule.notebook}"])
