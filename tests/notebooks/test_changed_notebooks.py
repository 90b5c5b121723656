"""Notebooks with changes: each assert can fail, and none calls a lesson of the text false."""

import re
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from assert_probe import with_probes
from lessons import NOTEBOOKS, execute, python_of, sources_of
from nbclient.exceptions import CellExecutionError

pytestmark = [
    pytest.mark.full,
    pytest.mark.notebook,
    pytest.mark.multiproc,
    pytest.mark.timeout(600),
]

NUMBERS = [path.name.partition("_")[0] for path in NOTEBOOKS]
NUMBERS.remove("A2")  # it needs other packages
NPROC = r"^(%%?ddp .*--nproc )(\d)"
REFUSAL = r"Error: .* ranks?\b.*: use --nproc \d|ValueError: 3 ranks cannot share 4 heads equally"
RATES = {  # of the trainings: each last number
    "1.1": "lr=3e-3",
    "1.4": "LR = 3407, 0.001",
    "2.1": "lr=1e-2",
    "2.2": "lr=0.1, momentum",
    "2.7": "lr=3e-3",
    "3.1": "lr=0.05",
    "3.3": "lr=0.01",
    "3.4": "lr=0.01",
    "3.5": "lr=3e-3",
    "3.6": "lr=4e-3",
    "4.4": "STEPS, BEFORE, LR = 60, 8, 0.01",
    "A1": "self.model.parameters(), lr=0.1",
    "A3": "lr=0.1",
}
ASKS = "it asks torch, nbddp, a file, or an object that has no plain value"
BOUND = "a bound that is far from the value, as machines differ"
ABSENT = "a text or a difference that no small change brings back"
HOLD = {  # the beginnings of asserts that hold for all changes, and why
    "len(data.train) + len(data.test) == 1797": ASKS,
    "store.timeout == timedelta(minutes=5)": ASKS,
    "any(('/cpu//0/3' in key for key in meeting.list_keys()))": ASKS,
    "meeting.num_keys() >= 4": ASKS,
    "spawned.": ASKS,
    "resumed.step == 20": ASKS,
    "'parts' not in globals()": ASKS,
    "{each['TORCHELASTIC_USE_AGENT_STORE'] for each in environments_of(": ASKS,
    "isinstance(handler_of('c10d'), DynamicRendezvousHandler)": ASKS,
    "(handler.get_run_id(), handler.get_backend()) == ": ASKS,
    "not make_handler('another job').is_closed()": ASKS,
    "all((agent.ppid() == os.getpid() for agent in agents))": ASKS,
    "found() == ": ASKS,
    "torch.load('calm/weights.pt').keys() == ": ASKS,
    "(inside.dtype, outside.dtype) == ": ASKS,
    "counts_of(forward) == counts_of(backward) == ": ASKS,
    "is_close(ours.weight.grad, theirs.weight.grad)": ASKS,
    "is_right()": ASKS,
    "torch.allclose(model(x), in_one_piece(x), atol=0.0001)": ASKS,
    "len(list(alone.parameters())) == len(alone.state_dict()) - 1": ASKS,
    "local(two[0].weight).numel() == 64 * 64 // 4": ASKS,
    "sharded_along(two[": ASKS,
    "bytes_of(own) == bytes_of(zero.optim)": ASKS,
    "first.of('allreduce') == theirs.of('allreduce') == []": ASKS,
    "in_forward.get_total_counts() == 4": ASKS,
    "len(one.buckets) == 1 < len(many.buckets)": ASKS,
    "sum(one.buckets) == sum(many.buckets) == ": ASKS,
    "optimizer.param_groups[0]['lr'] == 0.001": ASKS,
    "output.dtype == torch.bfloat16": ASKS,
    "three.to_here() == 1 + 2": ASKS,
    "x.grad is None": ASKS,
    "max(waited) < 60": BOUND,
    "trained < untrained": BOUND,
    "math.isfinite(mean)": BOUND,
    "n_deaths < 6": BOUND,
    "took < 60": BOUND,
    "64 in {count for ": BOUND,
    "repeated <= 2 * 5": BOUND,
    "sum(losses[-": BOUND,
    "('nccl' in backends[0]) == torch.cuda.is_available()": ABSENT,
    "max(averages) > min(averages)": ABSENT,
    "not torch.equal(saved[0], whole(model)[0].cpu())": ABSENT,
    "outcome != 'done'": ABSENT,
    "'self._remaining_restarts' not in healthy": ABSENT,
    "not torch.equal(model.module[1].weight, before)": ABSENT,
}


def execute_changed(number: str, folder: Path, change: Callable[[str], str]) -> str:
    """Execute a notebook with changed cells. Return the error of a cell that should not fail."""
    [path] = [path for path in NOTEBOOKS if path.name.startswith(f"{number}_")]
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code" and not cell.source.startswith("%%writefile"):
            cell.source = change(cell.source)
    try:
        execute(notebook, folder)
    except CellExecutionError as error:
        return str(error)
    return ""


def numbers_with(pattern: str) -> list[str]:
    """Return the notebooks whose cells have this pattern."""
    sources = {number: "\n".join(sources_of(number)) for number in NUMBERS}
    return [number for number in NUMBERS if re.search(pattern, sources[number], re.MULTILINE)]


def begins(test: str) -> str:
    """Return the entry of HOLD for an assert, or the assert."""
    return next((begin for begin in HOLD if test.startswith(begin)), test)


@pytest.mark.parametrize("number", NUMBERS)
def test_each_assert_fails_after_a_change_of_a_variable(
    number: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = folder / "tmp" / "results"
    results.parent.mkdir()
    results.touch()
    monkeypatch.setenv("PROBED", str(results))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=":")
    changed = execute_changed(number, folder, lambda source: with_probes(source, python_of(source)))
    assert changed == ""
    rows = [line.split("\t") for line in results.read_text().splitlines()]
    can_fail = {test for kind, test in rows if kind == "can fail"}
    assert len(rows) >= 5
    assert {begins(test) for _, test in rows if test not in can_fail} <= {*HOLD}


@pytest.mark.parametrize("number", numbers_with(NPROC))
def test_a_notebook_runs_with_three_ranks_or_says_how_many_it_needs(
    number: str, folder: Path
) -> None:
    found = re.search(NPROC, "\n".join(sources_of(number)), re.MULTILINE)
    assert found is not None
    ranks = found[2]
    other = "2" if ranks == "3" else "3"
    error = execute_changed(
        number,
        folder,
        lambda source: re.sub(NPROC.replace(r"\d", ranks), rf"\g<1>{other}", source, flags=re.M),
    )
    assert error == "" or re.search(REFUSAL, error), error


@pytest.mark.parametrize("factor", [10, 0.1])
@pytest.mark.parametrize("number", RATES)
def test_no_assert_calls_a_lesson_false_at_another_rate(
    number: str, factor: float, folder: Path
) -> None:
    rate = RATES[number]
    assert any(rate in source for source in sources_of(number))
    other = re.sub(r"\d[\d.e-]*(?=\D*$)", lambda found: f"{float(found[0]) * factor:g}", rate)
    assert execute_changed(number, folder, lambda source: source.replace(rate, other)) == ""
