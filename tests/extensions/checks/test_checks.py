"""Each rule finds its wrong example, accepts its right example, and describes its finding."""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from checked_code import assert_found, assert_no_findings
from pages import readable
from refusals import refusal
from syrupy.assertion import SnapshotAssertion

from nbddp.errors import RequestError
from nbddp.extensions.checks import checker
from nbddp.extensions.checks.facts import (
    GroupFacts,
    LoaderFacts,
    ModelFacts,
    OptimizerFacts,
    RankFacts,
    ScalerFacts,
    TrainerFacts,
    kinds_by_name,
)
from nbddp.extensions.checks.notebook import check_script, findings_below_cell, findings_report
from nbddp.extensions.checks.registry import TEXT, Finding, Rule
from nbddp.extensions.checks.source import CellSource
from nbddp.ui.report.render import blocks_html, render_html, render_text, text_lines

TRAINS = "for x, y in train:\n    model(x).sum().backward()\n"


def ranks_with(
    *things: dict[str, Any], text: str = "", is_ok: bool = True, **facts: Any
) -> GroupFacts:
    """Ranks that have these things, one dict for each."""
    common = {"ddp_ranks": [len(things)], "host": "here", "cores": 8, "gpus": 2, **facts}
    ranks = {rank: RankFacts(objects=each, **common) for rank, each in enumerate(things)}
    return GroupFacts(ranks=ranks, world_size=len(things), source=CellSource(text), is_ok=is_ok)


def of_each(
    name: str, kind: type[Any], of_ranks: Iterable[dict[str, Any]], text: str = "", **options: Any
) -> GroupFacts:
    """Ranks that have such a thing under one name, with these facts."""
    return ranks_with(*[{name: kind(**facts)} for facts in of_ranks], text=text, **options)


def gpus_with(*sizes: int) -> GroupFacts:
    """Ranks with DDP whose GPUs have held this many bytes."""
    ranks = {
        rank: RankFacts(ddp_ranks=[len(sizes)], gpu_bytes=size) for rank, size in enumerate(sizes)
    }
    return GroupFacts(ranks=ranks, world_size=len(sizes), source=CellSource("loss.backward()"))


def divided(**facts: Any) -> dict[str, Any]:
    return {"sampler": "dealt", **facts}


Facts = dict[str, Any] | list[dict[str, Any]]  # of both ranks alike, or of each


def example(
    kind: type[Any], name: str, *facts: Facts, text: str = "", **options: Any
) -> tuple[GroupFacts, ...]:
    """Two ranks that have such a thing under one name, with wrong facts and with right ones."""
    of_ranks = [each if isinstance(each, list) else [each] * 2 for each in facts]
    return tuple(of_each(name, kind, each, text, **options) for each in of_ranks)


STEP = "model(x).sum().backward()"
UNUSED = {"ranks": 2, "with_gradient": 4, "without_gradient": 2, "unused": ["b"]}
ON_GPU = {"ranks": 2, "device": "GPU-1"}
SAMPLE = {"ranks": 2, "sample": [0.5], "shapes": "s"}


def train_set(samples: int = 9, **columns: int) -> dict[str, Any]:
    """A trainer whose train set has these checksums by column."""
    return {"world_size": 2, "samples": samples, "columns": columns}


loader = partial(example, LoaderFacts)
trainer = partial(example, TrainerFacts, "Trainer", text="trainer.train()")
# by rule, the facts in which it finds its mistake, and those in which it finds none
EXAMPLES: dict[str, tuple[GroupFacts, ...]] = {
    "ND201": loader(
        "train",
        {"sampler": "random", "data": "a", "samples": 64},
        divided(data="a", num_replicas=2),
        text=TRAINS,
    ),
    "ND202": loader(
        "a", [divided(seed=seed, shuffles=True) for seed in (1, 2)], divided(seed=1, shuffles=True)
    ),
    "ND203": loader(
        "a",
        divided(num_replicas=2, sampler_rank=0),
        [divided(num_replicas=2, sampler_rank=rank) for rank in (0, 1)],
    ),
    "ND205": loader(
        "a", [divided(data=data, samples=9) for data in "ab"], divided(data="a", samples=9)
    ),
    "ND206": loader("train", [{"batches": 4}, {"batches": 5}], {"batches": 4}, text=TRAINS),
    "ND207": example(ModelFacts, "m", [SAMPLE, SAMPLE | {"sample": [0.6]}], SAMPLE),
    "ND208": example(
        OptimizerFacts, "sgd", [{"rates": [rate]} for rate in (0.1, 0.2)], {"rates": [0.1]}
    ),
    "ND209": example(ModelFacts, "m", ON_GPU, [ON_GPU | {"device": f"GPU-{n}"} for n in "ab"]),
    "ND210": loader("a", divided(shuffles=True, epochs=[0, 0]), divided(shuffles=True)),
    "ND212": (ranks_with({}, {}, threads=8), ranks_with({}, {}, threads=4)),
    "ND213": loader("train", {"workers": 8}, {"workers": 4}),
    "ND214": example(ModelFacts, "model", {"ranks": 2, "is_nested": True}, {"ranks": 2}),
    "ND215": example(OptimizerFacts, "adam", {"replaced_model": "model"}, {}, text="adam.step()"),
    "ND216": example(ModelFacts, "model", UNUSED, {"ranks": 2, "with_gradient": 6}, text=STEP),
    "ND217": loader(
        "train", divided(shuffles=True, batch_size=32), divided(batch_size=32), text=TRAINS
    ),
    "ND218": trainer({"world_size": 1}, {"world_size": 2}),
    "ND219": trainer({"world_size": 2, "gpus": 2}, {"world_size": 2}),
    "ND220": (gpus_with(1 << 30, 0), gpus_with(1 << 30, 1 << 20)),
    "ND221": trainer({"world_size": 2, "is_bf16": True}, {"world_size": 2}, has_bf16=False),
    "ND222": trainer({"world_size": 2, "unused": "FSDP"}, {"world_size": 2}),
    "ND223": trainer(
        [train_set(text=number, label=number) for number in (1, 2)],
        [train_set(text=number, label=1) for number in (1, 2)],  # a random augmentation
    ),
    "ND224": loader(
        "train", divided(draws="1"), [divided(draws=draw) for draw in "12"], text=TRAINS
    ),
    "ND225": (ranks_with({}, {}, own_backend="shm"), ranks_with({}, {})),
}


ROOT = Path(__file__).parents[3]
RULES = list(checker.ALL_RULES.values())


def programs(rule: Rule) -> Iterator[CellSource]:
    """The wrong and the right program of a rule, with what ranks report of their names."""
    section = TEXT[TEXT.index(f"## {rule.id}") :].partition("\n## ")[0]
    options_of = dict(re.findall(r"^```python (wrong|right)(.*)$", section, re.MULTILINE))
    for word in ("wrong", "right"):
        kinds = dict(each.replace("-", " ").split("=") for each in options_of[word].split())
        yield CellSource(rule.programs[word], kinds)


@pytest.mark.parametrize("rule", checker.CODE_RULES, ids=lambda each: each.id)
def test_a_rule_reports_its_wrong_program_and_no_rule_reports_its_right_program(
    rule: Rule, snapshot: SnapshotAssertion
) -> None:
    bad, good = programs(rule)
    found = [each for each in checker.check_source(bad) if each.rule == rule.id]
    assert found
    assert [each.headline for each in found] == snapshot
    assert checker.check_source(good) == []
    assert checker.needs_check(bad.text) or bad.kinds  # the ranks have reported it


@pytest.mark.parametrize("rule", checker.FACT_RULES, ids=lambda each: each.id)
def test_a_fact_rule_finds_only_its_mistake(rule: Rule, snapshot: SnapshotAssertion) -> None:
    bad, good = EXAMPLES[rule.id]
    found = list(rule.findings(bad))
    assert found
    assert [each.headline for each in found] == snapshot
    assert list(rule.findings(good)) == []


def test_a_rule_has_a_reason_a_fix_and_a_notebook_and_an_unknown_rule_is_refused() -> None:
    for rule in RULES:
        assert (ROOT / "notebooks" / rule.notebook).exists(), rule
        assert rule.title[0].isalpha(), rule
        assert rule.why.endswith("."), rule
        assert rule.fix.endswith("."), rule
        text = checker.explain(rule)
        assert rule.why in text
        assert ("wrong:" in text) is ("right:" in text) is (rule in checker.CODE_RULES)
    assert checker.find_rule("nd101") is checker.ALL_RULES["ND101"]
    reason = refusal(RequestError, checker.find_rule, "ND999")
    assert "ND999" in reason
    assert "`%ddp check --explain`" in reason


def test_the_checklist_names_only_rules_and_lists_each_rule(snapshot: SnapshotAssertion) -> None:
    named = [each for _, _, rules in checker.CHECKLIST for each in rules]
    assert len(named) == len(set(named))
    assert set(named) <= set(checker.ALL_RULES)
    assert all(f"{each.id}  {each.title}" in checker.checklist() for each in RULES)
    assert checker.checklist() == snapshot
    assert checker.explain(checker.ALL_RULES["ND101"]) == snapshot


# ---- findings in code


def test_a_comment_silences_a_rule_on_its_line_or_in_all_of_the_cell() -> None:
    text = "if rank == 0:\n    dist.barrier(){}\n    dist.barrier()\n"
    assert_found("ND101 ND101", text.format(""), text.format("  # nbddp: ok ND102"))
    assert_found("ND101", text.format("  # nbddp: ok ND101"))
    assert_no_findings("# nbddp: ok ND102, ND101\n" + text.format(""))


def test_a_long_cell_is_not_searched_for_the_cause_of_a_hang() -> None:
    code = "if rank == 0:\n    dist.barrier()\n"
    assert len(checker.hang_causes(code)) == 1
    assert checker.hang_causes(code + "#" * checker.MAX_LENGTH) == []  # 1 MB would take 5 s


def test_ipython_magics_and_shell_lines_are_not_syntax_errors() -> None:
    text = (
        "%time x = 1\n!ls\ny = !ls\nx?\nawait z\nif rank == 0:\n    %time x\n    dist.barrier()\n"
    )
    [found] = checker.check_source(CellSource(text))
    assert (found.rule, found.line) == ("ND101", 8)
    assert_no_findings("%%bash\nif [ x ]; then\n")


def test_names_local_to_functions_are_not_shared_names() -> None:
    text = (
        "def fit(model, *rest, **more):\n    optimizer = make(model, rest, more)\n"
        "    def step():\n        optimizer.step(scaler)\n    return step\n\nfit(net)\n"
    )
    assert CellSource(text).shared_names == {"make": 2, "scaler": 4, "fit": 7, "net": 7}


def found(*rules: str) -> list[Finding]:
    return [
        Finding(rule=rule, line=3, text="<b> hangs.", why="Why.", fix="Mend it.") for rule in rules
    ]


def test_a_bounded_number_of_findings_is_shown_with_remedies(snapshot: SnapshotAssertion) -> None:
    many = found("ND101", "ND102", "ND103", "ND104")
    one = "\n".join(text_lines(findings_below_cell(found("ND101"))))
    text = "\n".join(text_lines(findings_below_cell(many)))
    html = blocks_html(findings_below_cell(many))
    assert findings_below_cell([]) == []
    assert render_text(findings_report([], "cell [3]")) == "no mistakes found in cell [3]"
    assert one == snapshot(name="one, as text")
    assert text == snapshot(name="many, as text")
    assert readable(html) == snapshot(name="many, as html")
    for shown in (text, html):
        assert "ND103" in shown
        assert "ND104" not in shown
    assert "<b>" not in html
    asked = render_html(findings_report(many, "a.py"))
    assert "in a.py" in asked
    assert "ND104" in asked


# ---- scripts


def test_a_script_is_decoded_with_its_declared_encoding(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(
        b"# coding: latin-1\nimport torch.distributed as dist\n# \xe4\n"
        b"rank = dist.get_rank()\nif rank == 0:\n    dist.barrier()\n"
    )
    assert [each.line for each in check_script(str(script))] == [6]


def test_check_refuses_files_other_than_scripts(folder: Path, snapshot: SnapshotAssertion) -> None:
    contents = {
        "half.py": b"for x in\n",
        "null.py": b"x = 1\0",
        "sum.py": b"x = " + b"1 +" * 9000 + b" 1\n",
        "minus.py": b"x = " + b"-" * 50_000 + b"1\n",
        "lesson.ipynb": b'{"cells": []}',  # is Python, too
        "job.sh": b'{"cells": []}',
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    os.mkfifo("pipe.py")  # may never begin, and the next one has no end
    names = (*contents, "nothing.py", "pipe.py", "/dev/zero")
    refused = {name: refusal(RequestError, check_script, name) for name in names}
    assert all(name in text for name, text in refused.items())
    assert "line 1" in refused.pop("half.py")  # the rest is Python's own
    assert refused.pop("null.py")
    assert "%%ddp" in refused["lesson.ipynb"]
    assert "!bash" in refused["job.sh"]
    assert refused == snapshot


# ---- findings in rank facts


def test_rules_over_code_know_optimizers_and_scalers_from_other_cells_by_any_name() -> None:
    facts = {0: RankFacts(objects={"adam": OptimizerFacts(), "amp": ScalerFacts()})}
    step = "for i in range(9):\n    net(x).backward()\n    if i % 4 == 0:\n        adam.step()"
    scaled = "amp.scale(loss).backward()\nadam.step()"
    assert_found("ND121", step, kinds=kinds_by_name(facts))
    assert_found("ND124", scaled, kinds=kinds_by_name(facts))


@pytest.mark.parametrize(
    ("text", "model", "is_found"),
    [
        ("fit(model)", {"without_gradient": 2, "unused": ["a", "b"], "is_refused": True}, True),
        ("fit(model)", {"without_gradient": 2, "unused": ["a", "b"]}, False),
        ("fit(other)", {"without_gradient": 2, "unused": ["a", "b"], "is_refused": True}, False),
    ],
)
def test_only_parameters_that_ddp_reported_are_found_after_a_failed_cell(
    text: str, model: dict[str, Any], *, is_found: bool
) -> None:
    models = [{"ranks": 2, "with_gradient": 2, **model}] * 2
    found = checker.check_facts(of_each("model", ModelFacts, models, text, is_ok=False))
    assert [each.rule for each in found] == (["ND216"] if is_found else [])
    assert all("a, b" in each.text for each in found)


@pytest.mark.parametrize(
    ("sets", "is_found"),
    [
        ([train_set(8), train_set(9)], True),
        ([train_set(-1), train_set(9)], False),  # the trainer of rank 0 gives no shares
        ([train_set(text=1), train_set(text=2)], True),
        ([train_set(text=1), train_set(text=1, label=2)], False),  # the rank's few labels are equal
        ([train_set(text=1), train_set(label=2)], False),
        ([train_set(), train_set()], False),
    ],
)
def test_train_sets_are_compared_between_ranks(
    sets: list[dict[str, Any]], *, is_found: bool
) -> None:
    found = checker.check_facts(of_each("Trainer", TrainerFacts, sets, "trainer.train()"))
    assert [each.rule for each in found] == (["ND223"] if is_found else [])


@pytest.mark.parametrize(
    ("loaders", "rule"),
    [
        ([{"sampler": "stream", "data": "A 1"}] * 2, "ND201"),
        ([{"sampler": "stream", "data": "A 1"}, {"sampler": "stream", "data": "A 2"}], ""),
        ([{"sampler": "stream"}] * 2, ""),
        ([{"sampler": "dealt", "order": "1 2"}, {"sampler": "dealt", "order": "1 3"}], "ND205"),
        ([{"sampler": "dealt", "order": "1 2"}] * 2, ""),
        ([{"sampler": "dealt", "order": "1 2"}, {"sampler": "dealt", "order": "4 3"}], ""),
    ],
)
def test_loader_streams_and_sample_orders_are_compared_between_ranks(
    loaders: list[dict[str, Any]], rule: str, snapshot: SnapshotAssertion
) -> None:
    facts = [{"num_replicas": 2, "sampler_rank": rank, **loaders[rank]} for rank in (0, 1)]
    found = checker.check_facts(of_each("train", LoaderFacts, facts, TRAINS))
    assert [each.rule for each in found] == rule.split()
    if found:
        assert found[0].text == snapshot


def test_models_of_pipeline_stages_may_differ() -> None:
    stages = [{"sample": [rank / 2], "shapes": "s"} for rank in (0, 1)]
    sums = "for p in m.parameters():\n    dist.all_reduce(p.grad{})\n"
    for text, rules in (("", ["ND207"]), (", group=data_parallel", [])):
        facts = of_each("m", ModelFacts, stages, sums.format(text))
        assert [each.rule for each in checker.check_facts(facts)] == rules


def test_ranks_that_share_models_in_subgroups_need_not_have_equal_settings() -> None:
    for rule in ("ND201", "ND206", "ND208", "ND217"):
        facts = EXAMPLES[rule][0]
        ranks = {rank: replace(each, ddp_ranks=[1]) for rank, each in facts.ranks.items()}
        assert list(checker.ALL_RULES[rule].findings(replace(facts, ranks=ranks))) == []


def test_sharing_a_gpu_is_not_reported_if_there_are_fewer_gpus_than_ranks() -> None:
    facts = of_each("m", ModelFacts, [ON_GPU] * 2, gpus=1)
    assert list(checker.ALL_RULES["ND209"].findings(facts)) == []
