"""Sweeps and scaling: each combination and each world size is a run, independent of the others."""

import json
import random
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conditions import when
from drivers.ranks import Ranks
from notebook import Notebook, Reply

from nbddp import ArgumentError, CellFailedError, CellInterruptedError, Run, compare, runs
from nbddp.extensions.runs.summary import summarize
from nbddp.extensions.sweeps import sweep
from nbddp.extensions.sweeps.grid import SweepEntry
from nbddp.lifecycle.group_state import GroupState

pytestmark = pytest.mark.timeout(400)

SETUP = """%%ddp --nproc 2
def train(lr, batch):
    for step in range(4):
        nbddp.log(step=step, loss=lr * batch + step + rank / 10)
        dist.barrier()
lr = 7
"""
SIX = "%%ddp --sweep lr=0.1,0.2,0.3 --sweep batch=16,64"


def runs_in(base: Path) -> dict[str, dict[str, Any]]:
    """Return the content of each ``run.json`` by run name, without the time; oldest first."""
    found = sorted((base / ".nbddp" / "runs").glob("*/run.json"))
    return {path.parent.name[16:]: json.loads(path.read_text()) for path in found}


def swept(base: Path) -> dict[str, dict[str, Any]]:
    return {name: facts for name, facts in runs_in(base).items() if "sweep" in facts}


LR = "%%ddp --once\nlr"
AS_BEFORE = "Out [ranks 0-1] 7\n"  # what ``LR`` shows of the ranks that ``SETUP`` made


def table(reply: Reply) -> list[str]:
    lines = reply.text[reply.text.rindex("sweep of ") :].splitlines()
    return [line for line in lines if re.match(r"\d{8}-\d{6}-lr", line)]


def test_each_combination_of_a_sweep_is_a_run(notebook: Notebook, base: Path) -> None:
    notebook.run(SETUP)
    reply = notebook.run(f"{SIX}\ntrain(lr, batch)\nnbddp.log(lr_was=lr)")
    assert reply.status == "ok", reply.traceback
    rows = swept(base)
    names = [f"lr{lr}-batch{batch}" for lr in (0.1, 0.2, 0.3) for batch in (16, 64)]
    assert list(rows) == names
    assert [facts["config"] for facts in rows.values()] == [
        {"lr": lr, "batch": batch} for lr in (0.1, 0.2, 0.3) for batch in (16, 64)
    ]
    assert [facts["last"]["lr_was"]["mean"] for facts in rows.values()] == [
        *(0.1, 0.1, 0.2, 0.2, 0.3, 0.3)
    ]
    assert [facts["outcome"] for facts in rows.values()] == ["ok"] * 6
    assert all("ended" in facts for facts in rows.values())
    assert re.search(r"^nbddp: 6 runs\b.*\bcell ", reply.text, re.MULTILINE)
    assert re.search(r"^nbddp: .*\b3 of 6: lr=0.2, batch=16; 3\b", reply.text, re.MULTILINE)
    assert [line.split()[0][16:] for line in table(reply)] == names
    comparison, *others = reversed(reply.displays)
    assert not any("image/png" in each for each in others), "it has the curves of all runs"
    labels = r" +".join(f"batch={batch}, lr={lr}" for lr in (0.1, 0.2, 0.3) for batch in (16, 64))
    assert re.search(rf"differs +{labels}", comparison["text/plain"])
    assert comparison["image/png"]
    assert notebook.run(LR).text == AS_BEFORE  # as before
    notebook.run("%ddp export train.py")
    assert "def train(lr, batch):" in (base / "train.py").read_text()


def test_sweep_survives_a_killed_rank_an_exception_and_an_interrupt(
    notebook: Notebook, base: Path
) -> None:
    notebook.run(SETUP)
    cell = f"""{SIX}
import os, signal, time
if (lr, batch) == (0.1, 64) and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if (lr, batch) == (0.2, 16) and rank == 0:
    raise ValueError("diverged")
train(lr, batch)
if (lr, batch) == (0.3, 16):
    open(f"here{{rank}}", "w").close()
    time.sleep(60)
"""
    reply = notebook.run_and_stop_at(cell, f"{base}/here0", f"{base}/here1")
    assert reply.error.startswith("CellInterruptedError: ended by you: sweep of ")
    assert re.search("sweep of 6: 2 ok, 2 failed, 1 .*, 1 ", reply.error)
    assert notebook.run(LR).text == AS_BEFORE
    outcomes = [facts["outcome"] for facts in swept(base).values()]
    assert outcomes[0] == outcomes[3] == "ok"
    assert len(outcomes) == 5
    assert len(table(reply)) == 5
    failures = (
        ("lr=0.1, batch=64", "rank 1 .*SIGKILL"),
        ("lr=0.2, batch=16", "rank 0: ValueError"),
    )
    for (setting, failure), outcome in zip(failures, outcomes[1:], strict=False):
        assert re.search(failure, outcome)
        assert re.search(f"{setting}: .*{failure}", reply.text)


def test_seeds_control_random_numbers_of_the_cell_and_earlier_cells(
    notebook: Notebook, base: Path
) -> None:
    notebook.run("%%ddp --nproc 2\nweight = torch.rand(1).item()")
    cell = (
        "%%ddp --repeat 2\nimport random, numpy\n"
        "nbddp.log(weight=weight, drawn=torch.rand(1).item() + random.random(), seed_was=seed,"
        " numpy=numpy.random.rand())"
    )
    assert notebook.run(cell).status == "ok"
    assert notebook.run(cell.replace("2\n", "2 --start-over\n", 1)).status == "ok"
    found: dict[int, set[str]] = {}
    for path in (base / ".nbddp" / "runs").glob("*seed*/run.json"):
        facts = json.loads(path.read_text())
        assert all(each["low"] == each["high"] for each in facts["last"].values())
        found.setdefault(facts["config"]["seed"], set()).add(json.dumps(facts["last"]))
    assert sorted(found) == [0, 1]
    assert all(len(each) == 1 for each in found.values())
    one, other = (json.loads(each.pop()) for each in found.values())
    assert all(one[name] != other[name] for name in ("weight", "drawn", "numpy", "seed_was"))


def test_metrics_of_replayed_cells_are_no_part_of_a_combination(
    notebook: Notebook, base: Path
) -> None:
    notebook.run(SETUP)
    notebook.run("%%ddp\nfor step in range(50):\n    nbddp.log(step=step, loss=100.0, other=1)")
    reply = notebook.run("%%ddp --sweep lr=1,2,3\nif lr < 3:\n    train(lr, 10)")
    assert reply.status == "ok", reply.traceback
    first, _, silent = swept(base).values()
    assert first["steps"] == 4
    assert first["last"] == {"loss": {"mean": 13.05, "low": 13.0, "high": 13.1}}
    assert first["curves"]["loss"][0][0] in (10.0, 10.1)
    assert "last" not in silent
    assert "other" not in reply.text
    compared = reply.displays[-1]["text/plain"]
    assert "13.05" in compared
    assert "other" not in compared
    run = Run(next((base / ".nbddp" / "runs").glob("*lr1")))
    assert len(run.metrics()["loss"]) == 2 * 4
    assert len(run.cells) == 3
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2 * 4


def test_failed_replay_fails_only_its_combination(notebook: Notebook, base: Path) -> None:
    notebook.run(
        "%%ddp --nproc 2\nimport pathlib\npath = pathlib.Path(f'times{rank}')\n"
        "times = int(path.read_text()) if path.exists() else 0\n"
        "path.write_text(str(times + 1))\nassert times != 2"
    )
    reply = notebook.run("%%ddp --sweep lr=1,2,3\nnbddp.log(x=lr)")
    assert "sweep of 3: 2 ok, 1 failed" in reply.text
    assert re.search("lr=2: failed: .*ranks 0-1: AssertionError", reply.text), reply.text
    assert len(swept(base)) == 3


ENDED = re.compile(r"(ended by you: sweep of |`%%ddp` was interrupted)[^\n]+")
# Python prints this if an interrupt comes while it runs the callback of a weak reference
IGNORED = re.compile(r"Exception ignored in: <function Weak.*?KeyboardInterrupt: \n", re.DOTALL)


@pytest.mark.parametrize("presses", [4, pytest.param(50, marks=pytest.mark.full)])
def test_interrupt_of_a_sweep_prints_one_line_and_keeps_all_names(
    notebook: Notebook, base: Path, presses: int
) -> None:
    notebook.run(SETUP)
    notebook.run("%%ddp\nfailed = 5\n1 / 0")
    notebook.run("pushed = 3\n%ddp push pushed")
    names = "%%ddp --once\nimport os\nlr, failed, pushed, callable(train), os.getpid()"
    before = notebook.run(names).text
    assert "(7, 5, 3, True, " in before
    cell = "%%ddp --start-over --sweep lr=1,2,3\ntrain(lr, 1)"
    whole, chance = notebook.run(cell).seconds, random.Random(7)
    for _ in range(presses):
        seconds = chance.random() * whole
        reply = notebook.run_and_stop(cell, seconds)
        where = f"after {seconds:.3f} s of {whole:.3f}: {reply.text}{reply.traceback}"
        assert reply.status == "ok" or ENDED.fullmatch(reply.traceback), where
        assert "Traceback" not in IGNORED.sub("", reply.text), where
        assert notebook.run(names).text == before, where
    assert all(runs_in(base).values())


def test_sweep_after_a_stop_replays_the_cells_that_did_not_fail(
    notebook: Notebook, base: Path
) -> None:
    notebook.run("%%ddp --fresh --nproc 2\nkept = 7")
    notebook.run("%%ddp\n1 / 0")
    notebook.run("%%ddp --ranks 0\ninput()")
    notebook.run("%ddp stop")
    for option in ("--sweep lr=1,2", "--scale 1,2"):
        reply = notebook.run(f"%%ddp {option}\nnbddp.log(x=kept)")
        assert reply.status == "ok", reply.text + reply.traceback
    assert [facts["last"]["x"]["mean"] for facts in swept(base).values()] == [7, 7]
    assert len(runs_in(base)) == 1 + 2 + 6


@pytest.mark.full
def test_sweep_runs_on_nodes_and_keeps_them(notebook: Notebook, base: Path) -> None:
    opened = notebook.run("%ddp nodes --nnodes 2 --nproc-per-node 1 --local 2 --wait 60")
    assert opened.status == "ok", opened.traceback
    try:
        notebook.run("%%ddp\nkept = 5")
        reply = notebook.run("%%ddp --sweep lr=1,2\nnbddp.log(x=lr * kept, ranks=world_size)")
        assert reply.status == "ok", reply.traceback
        lasts = [facts["last"] for facts in swept(base).values()]
        assert [each["x"]["mean"] for each in lasts] == [5, 10]
        assert [each["ranks"]["mean"] for each in lasts] == [2, 2]
        assert notebook.run("%%ddp\nkept, world_size").text == "Out [ranks 0-1] (5, 2)\n"
        refused = notebook.run("%%ddp --scale 1,2\n1").text
        assert refused.startswith("UsageError: --scale ")
        assert "`%ddp stop`" in refused
    finally:
        notebook.run("%ddp stop")


# ---- from Python


def test_repeated_sweep_runs_only_failed_combinations(group: Ranks, folder: Path) -> None:
    group.stop()
    source = f"import pathlib\nassert lr == 1 or pathlib.Path({str(folder / 'there')!r}).exists()"
    first = group.sweep(source, {"lr": [1, 2]}, quiet=True)
    assert [run.outcome.partition(":")[0] for run in first] == ["ok", "ranks 0-1"]
    (folder / "there").touch()
    again = group.sweep(source, {"lr": [1, 2]}, quiet=True)
    assert again[0].path == first[0].path
    assert [run.outcome for run in again] == ["ok", "ok"]
    over = group.sweep(source, {"lr": [1, 2]}, start_over=True, quiet=True)
    assert not {run.path for run in over} & {run.path for run in again}
    assert not group.is_live


def test_sweep_with_repeat_and_fresh_uses_seeds_and_skips_earlier_cells(group: Ranks) -> None:
    group.run("x = 1", quiet=True)
    found = group.sweep("assert 'x' not in globals()", repeat=2, fresh=True, quiet=True)
    assert [run.config for run in found] == [{"seed": 0}, {"seed": 1}]


def run_of_interrupted_sweep(group: Ranks, source: str, condition: Callable[[], bool]) -> Run:
    """Interrupt a sweep in its first run, as soon as a condition is true; return this run."""
    main = threading.main_thread().ident or 0
    presser = when(condition, lambda: signal.pthread_kill(main, signal.SIGINT))
    with pytest.raises(CellInterruptedError, match="sweep of 2: 1 ended by you, 1 not run"):
        group.sweep(source, {"lr": [1, 2]})
    presser.join()
    [run] = [run for run in runs(Path.cwd()) if run.path != group.folder]
    return run


def test_sweep_interrupted_while_ranks_start_records_its_settings(group: Ranks) -> None:
    run = run_of_interrupted_sweep(
        group, "1", lambda: group.scripts.last_session.life.state is GroupState.STARTING
    )
    assert run.config == {"lr": 1}


# catches the interrupt if it is stuck, which it is only in a replay
CATCHES = """
import pathlib, time
folder = pathlib.Path({folder!r})
try:
    if (folder / 'again').exists():
        (folder / f'stuck{{rank}}').touch()
        time.sleep(60)
except KeyboardInterrupt:
    pass
"""


def test_run_is_recorded_as_ended_if_a_replayed_cell_catches_the_interrupt(
    group: Ranks, folder: Path
) -> None:
    group.run(CATCHES.format(folder=str(folder)))
    (folder / "again").touch()
    stuck = [folder / f"stuck{rank}" for rank in range(2)]
    run = run_of_interrupted_sweep(group, "lr", lambda: all(map(Path.exists, stuck)))
    assert run.outcome == "ended by you"
    assert run.ending == "stopped"
    summary = summarize(run.path)
    assert (summary.outcome, summary.why) == ("interrupted", "ended by you")


def test_interrupt_between_two_runs_ends_the_sweep(
    group: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def describe_row(_row: SweepEntry) -> str:
        group.interrupt()
        return "interrupted"

    monkeypatch.setattr(sweep, "describe_row", describe_row)
    with pytest.raises(CellInterruptedError, match="sweep of 2: 1 ok, 1 not run"):
        group.sweep("1", {"lr": [1, 2]})


INVALID_SWEEPS: list[Any] = [
    *({}, {"lr": []}, {"rank": [1]}, {"a b": [1]}, {"lr": 0.1}, {"net": "cnn"})
]
INVALID_SCALES: list[tuple[Any, int]] = [([2, 2], 3), ([1, 2], 2), ("1,2", 3), (2, 3)]


def test_invalid_sweep_is_refused_and_a_sweep_without_success_fails(group: Ranks) -> None:
    for settings in INVALID_SWEEPS:
        with pytest.raises(ArgumentError):
            group.sweep("1", settings)
    for sizes, rounds in INVALID_SCALES:
        with pytest.raises(ArgumentError):
            group.scale("1", sizes, rounds=rounds)
    for retries in ({"heal": -1}, {"max_restarts": -1}, {"heal": "1"}):
        with pytest.raises(ArgumentError):
            group.run("1", **retries)
    with pytest.raises(CellFailedError, match=r"none of the 1 runs succeeded; .*ZeroDivisionError"):
        group.sweep("1 / 0", {"lr": [1]}, quiet=True)
    with pytest.raises(ArgumentError):
        compare(*runs(Path.cwd())[:1])


# ---- one cell on several world sizes

STEPS = """
import time
loader = nbddp.loader(range(4096), batch_size=32 // world_size)
model = nbddp.prepare(torch.nn.Linear(1, 1))
for step in range(30):
    model(torch.ones(1)).sum().backward()
    time.sleep(0.04 / world_size * (2 if rank == 1 else 1))
    nbddp.log(step=step, loss=1.0)
"""


def scaled(base: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return run names and the content of ``run.json`` of the rounds, in order."""
    rounds = [(name, facts) for name, facts in runs_in(base).items() if "scale" in facts]
    return sorted(rounds, key=lambda each: (each[1]["scale"]["round"], each[1]["scale"]["ranks"]))


def scale_table(reply: Reply) -> list[list[str]]:
    """The cells of the table, in columns that are two blanks apart."""
    lines = reply.displays[-1]["text/plain"].splitlines()
    rows = [re.split(r"\s{2,}", each.strip()) for each in lines]
    head = next(at for at, row in enumerate(rows) if row[0] == "ranks")
    return [row for row in rows[head + 1 :] if row[0].isdecimal()]


@pytest.mark.full
def test_scale_records_each_round_as_a_run_and_shows_a_table(
    notebook: Notebook, base: Path
) -> None:
    reply = notebook.run(f"%%ddp --scale 1,2 --threads 1{STEPS}")
    assert reply.status == "ok", reply.traceback
    found = scaled(base)
    assert [name for name, _ in found] == [
        f"scale-{ranks}-round{number}" for number in (1, 2, 3) for ranks in ("1rank", "2ranks")
    ]
    facts = [(each["world_size"], each["samples_per_step"]) for _, each in found]
    assert facts == [(1, 32), (2, 32)] * 3
    assert re.search(r"^nbddp: .*\b3 of 6: ranks=1, round=2; 3\b", reply.text, re.MULTILINE)
    one, two = scale_table(reply)
    assert one[:1] + one[3:5] == ["1", "1.00", "100 %"]
    # rank 1 sleeps as long as one rank alone, so that nothing is won, and rank 0 waits for it
    assert two[0] == "2"
    assert 0.3 < float(two[3]) < 1.7
    waiting = float(two[5].removesuffix(" %"))
    assert 5 < waiting <= 50  # half of rank 0's time is a quarter of all
    assert "strong scaling" in reply.displays[-1]["text/plain"]
    assert ["image/png" in each for each in reply.displays].count(True) == 1


def test_scale_continues_after_a_world_size_that_fails(notebook: Notebook, base: Path) -> None:
    reply = notebook.run("%%ddp --scale 1-3\nassert world_size != 2, 'no pairs'\n1")
    assert reply.status == "ok", reply.traceback
    assert [row[0] for row in scale_table(reply)] == ["1", "3"]
    assert "scale of 9: 6 ok, 3 failed" in reply.text
    failure = "ranks=2, round=3: .*ranks 0-1: AssertionError: no pairs, line 2"
    assert re.search(failure, reply.text)
    assert len(scaled(base)) == 9


def test_interrupt_ends_the_scale_and_shows_finished_rounds(notebook: Notebook, base: Path) -> None:
    reply = notebook.run_and_stop_at(
        "%%ddp --scale 1,2\nimport time\nif world_size == 2:\n"
        "    open(f'here{rank}', 'w').close()\n    time.sleep(60)",
        *(f"{base}/here{rank}" for rank in range(2)),
    )
    assert re.search("ended by you: scale of 6: 1 ok, 1 .*, 4 ", reply.error)
    [only] = scale_table(reply)
    assert (only[0], only[-1]) == ("1", "0.0 % of 1")
    assert len(scaled(base)) == 2
    assert notebook.run("%%ddp --nproc 2\nworld_size").text == "Out [ranks 0-1] 2\n"


@pytest.mark.usefixtures("base")
@pytest.mark.gate_runs("folder")
@pytest.mark.parametrize(
    "lose",
    [
        "for path in glob.glob('.nbddp/runs/*-scale-*/events.jsonl'): os.truncate(path, 0)\n"
        "nbddp.log(loss=1.0)",
        "if rank == 0:\n    [path] = glob.glob('.nbddp/runs/*-scale-*')\n    shutil.rmtree(path)\n"
        "dist.barrier()",
    ],
    ids=["record", "folder"],
)
def test_scale_uses_the_cell_time_if_a_round_has_no_record(notebook: Notebook, lose: str) -> None:
    notebook.run("%%ddp --nproc 2\nkept = 7")
    reply = notebook.run(f"%%ddp --scale 1,2\nimport glob, os, shutil\n{lose}")
    assert reply.status == "ok", reply.text + reply.traceback
    assert [row[0] for row in scale_table(reply)] == ["1", "2"]
    assert notebook.run("%%ddp\nkept").text == "Out [ranks 0-1] 7\n"
