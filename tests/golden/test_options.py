"""Golden walks through options: of lists, comparisons, trackers, faults, logs, the debugger."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from golden.walks import KEEP, all_text, assert_ranks_work, run_folders
from notebook import Notebook, Reply
from published import fake_wandb

pytestmark = pytest.mark.multiproc
SHARES_KERNEL = True

TRAINING = """
nbddp.config(lr={lr})
for step in range(10):
    nbddp.log({{"loss": {lr} * (10 - step), "val/loss": 1.0 + rank}}, step=step)
"""


@pytest.fixture
def base(notebook: Notebook, tmp_path: Path) -> Path:
    """A folder of its own for each test, where the kernel's runs are."""
    notebook.run(f"%cd -q {tmp_path}")
    return tmp_path


@pytest.fixture
def runs(notebook: Notebook, base: Path) -> Path:
    """The working folder, with two runs: first ``slow``, then ``fast``; the ranks go on."""
    for options, lr in (("--nproc 2 --name slow", 0.1), ("--fresh --name fast", 0.5)):
        cell = f"%%ddp {options}\n{KEEP}{TRAINING.format(lr=lr)}"
        assert notebook.run(cell).status == "ok"
    return base


def listed(notebook: Notebook, options: str = "") -> list[str]:
    reply = notebook.run(f"%ddp runs {options}")
    assert reply.status == "ok", all_text(reply)
    return re.findall(r"^\S*-(slow|fast)\b", reply.text, re.MULTILINE)


def test_runs_are_sorted_counted_noted_and_removed(notebook: Notebook, runs: Path) -> None:
    assert listed(notebook) == ["fast", "slow"]
    assert listed(notebook, "--sort lr") == ["slow", "fast"]
    assert listed(notebook, "--sort lr --down") == ["fast", "slow"]
    assert listed(notebook, "lr=0.1") == ["slow"]
    assert listed(notebook, "-n 1") == ["fast"]
    assert "%ddp runs -n 2" in notebook.run("%ddp runs -n 1").text

    [slow] = run_folders(runs, "slow")
    assert notebook.run("%ddp runs note slow the best so far").status == "ok"
    assert listed(notebook, "best") == ["slow"]
    assert json.loads((slow / "marks.json").read_text())["note"] == "the best so far"
    assert notebook.run("%ddp runs note slow --off").status == "ok"
    assert "best" not in notebook.run("%ddp runs").text

    reply = notebook.run("%ddp runs rm fast")
    assert reply.status == "error"
    assert "%ddp stop" in reply.text
    assert notebook.run("%ddp runs rm slow").status == "ok"
    assert not slow.exists()
    assert listed(notebook) == ["fast"]
    assert_ranks_work(notebook)


def compared(notebook: Notebook, options: str = "") -> dict[str, Any]:
    """Return the comparison of the two runs as text and as a picture."""
    reply = notebook.run(f"%ddp compare slow fast {options}")
    assert reply.status == "ok", all_text(reply)
    [shown] = reply.displays
    return shown


def test_compare_follows_its_options(notebook: Notebook, runs: Path) -> None:
    plain = compared(notebook)
    assert re.search(r"^.*\blr +0\.1 +0\.5$", plain["text/plain"], re.MULTILINE)
    assert "val/loss" in plain["text/plain"]
    picture = plain["image/png"]
    assert compared(notebook)["image/png"] == picture  # the same each time
    pictures = {
        options: compared(notebook, options)["image/png"]
        for options in (
            "--over time",
            "--smooth",
            "--scale log",
            "--scale linear",
            "--metrics val/*",
        )
    }
    assert picture not in {pictures[options] for options in ("--over time", "--smooth")}
    assert pictures["--scale log"] != pictures["--scale linear"]
    assert picture != pictures["--metrics val/*"]

    for name, begin in (("it.pdf", b"%PDF"), ("it.svg", b"<?xml"), ("it.png", b"\x89PNG")):
        reply = notebook.run(f"%ddp compare slow fast --save {name}")
        assert reply.status == "ok", all_text(reply)
        assert name in reply.text
        assert (runs / name).read_bytes().startswith(begin)
    assert notebook.run("%ddp compare slow").status == "error"
    assert_ranks_work(notebook)


@pytest.mark.usefixtures("runs")
def test_show_prints_a_run_or_a_part_of_it(notebook: Notebook) -> None:
    notebook.run("%%ddp\nprint('in the second cell')")
    text = notebook.run("%ddp show fast").text
    assert "in the second cell" in text
    assert re.search(r"\bval/loss\b", text)
    numbers = "[each['number'] for each in nbddp.Run('fast').events if each['kind'] == 'cell']"
    number = notebook.run(f"import nbddp\n{numbers}[-1]").result
    part = notebook.run(f"%ddp show fast --cell {number}").text
    assert "in the second cell" in part
    assert "val/loss" not in part
    some = notebook.run("%ddp show slow --metrics 'val/*'")
    assert some.status == "ok", all_text(some)
    assert "val/loss" in some.text
    assert not re.search(r"^loss\b", some.text, re.MULTILINE)
    assert_ranks_work(notebook)


@pytest.fixture
def tracker(notebook: Notebook, runs: Path) -> Iterator[None]:
    """A fake package ``wandb`` that prints the values it gets."""
    packages = str(fake_wandb(runs))
    notebook.run(
        f"import os, sys\nsys.path.insert(0, {packages!r})\nos.environ['FAKE_WANDB'] = 'well'"
    )
    yield
    notebook.run(f"sys.path.remove({packages!r})\ndel os.environ['FAKE_WANDB']")


@pytest.mark.usefixtures("tracker")
def test_run_is_published_again_only_with_the_again_option(notebook: Notebook, runs: Path) -> None:
    [slow] = run_folders(runs, "slow")

    def published() -> dict[str, Any]:
        facts: dict[str, Any] = json.loads((slow / "published-wandb.json").read_text())
        return facts

    assert notebook.run("%ddp publish wandb slow").status == "ok"
    first = published()
    assert (first["is_whole"], first["steps"]) == (True, 10)
    reply = notebook.run("%ddp publish wandb slow")
    assert reply.status == "error"
    assert "--again" in reply.text
    assert published() == first
    assert notebook.run("%ddp publish wandb slow --again").status == "ok"
    second = published()
    assert second["name"] != first["name"]
    assert (second["is_whole"], second["steps"]) == (True, 10)
    assert_ranks_work(notebook)


FASTER = 0.05  # seconds that a step takes without the fault
STEPS = f"""%%ddp
import time
seconds = []
for step in range(6):
    began = time.monotonic()
    time.sleep({FASTER})
    nbddp.log(step=step, loss=1.0)
    seconds.append(time.monotonic() - began)
"""


def test_a_fault_slows_a_rank_by_the_factor(notebook: Notebook, base: Path) -> None:
    assert base.exists()
    notebook.run(f"%%ddp --nproc 2\n{KEEP}")
    assert notebook.run("%ddp fault slow --rank 1 --step 2 --factor 6").status == "ok"
    assert notebook.run(STEPS).status == "ok"
    seconds = notebook.run("%ddp pull seconds --rank 1").result
    later = [float(each) for each in seconds.strip("[]").split(",")][4:]
    assert min(later) > 4 * FASTER  # at the default factor 2 it is 2 * FASTER
    assert_ranks_work(notebook)


@pytest.mark.usefixtures("base")
def test_logs_command_shows_the_requested_number_of_lines(notebook: Notebook) -> None:
    notebook.run(f"%%ddp --nproc 2\n{KEEP}\nfor i in range(9): print('line', i, 'of', rank)")
    text = notebook.run("%ddp logs 1 --lines 2").text
    assert re.findall(r"line (\d) of (\d)", text) == [("7", "1"), ("8", "1")]
    assert len(re.findall(r"line \d of 0", notebook.run("%ddp logs 0 --lines 9").text)) == 9
    assert_ranks_work(notebook)


@pytest.mark.usefixtures("base")
def test_debugger_runs_the_commands_of_the_command_line(notebook: Notebook) -> None:
    notebook.run(f"%%ddp --nproc 2\n{KEEP}")
    assert notebook.run("%%ddp\ndef fail(n):\n    1 / n\nfail(rank - 1)").status == "error"
    reply: Reply = notebook.converse("%ddp debug --command 'p n, kept' --command q")
    assert reply.status == "ok", all_text(reply)
    assert "(0, 10)" in reply.text
    assert not reply.asked
    assert_ranks_work(notebook)


def test_each_rank_has_the_same_work_in_weak_scaling(notebook: Notebook, base: Path) -> None:
    notebook.run(f"%%ddp --nproc 2\n{KEEP}")
    reply = notebook.run(
        "%%ddp --scale 1,2 --weak --rounds 4\nimport time\n"
        "for step in range(5):\n    time.sleep(0.01)\n    nbddp.log(step=step, loss=1.0)"
    )
    assert reply.status == "ok", all_text(reply)
    facts = [json.loads((each / "run.json").read_text()) for each in run_folders(base)]
    rounds = [each["scale"] for each in facts if "scale" in each]
    expected = [(ranks, number, 4, True) for number in range(1, 5) for ranks in (1, 2)]
    found = [(each["ranks"], each["round"], each["of"], each["is_weak"]) for each in rounds]
    assert sorted(found) == sorted(expected)
    assert "weak scaling" in reply.displays[-1]["text/plain"]
    assert_ranks_work(notebook)
