"""Golden walks of scripts: the effect of the options of ``%ddp run``."""

import json
import re
from pathlib import Path

import pytest
from golden.walks import KEEP, all_text, assert_ranks_work, run_folders, run_json
from notebook import Notebook, Reply

pytestmark = pytest.mark.multiproc

# prints its environment; with the argument ``dies`` rank 1 dies, if the file does not exist yet
SEES = """
import json, os, sys, torch, torch.distributed as dist

dist.init_process_group()
total = torch.ones(1)
dist.all_reduce(total)
print(json.dumps([__name__, sys.argv[1:], int(total.item())]))
print("MINE is", os.environ.get("MINE"))
print("restarts", os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.barrier()  # all have printed
if "dies" in sys.argv and os.environ["RANK"] == "1" and not os.path.exists(sys.argv[-1]):
    open(sys.argv[-1], "w").close()
    os._exit(3)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def base(notebook: Notebook, tmp_path: Path) -> Path:
    """A folder of its own for each test, with the scripts."""
    notebook.run(f"%cd -q {tmp_path}")
    (tmp_path / "script.py").write_text(SEES)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "go.py").write_text(SEES)
    return tmp_path


def seen(reply: Reply) -> list[list[object]]:
    lines = [line for rank in range(2) for line in reply.lines(rank)]
    return [json.loads(line) for line in lines if line.startswith("[")]


def restarts(reply: Reply, rank: int) -> list[int]:
    """Return torchrun's count of restarts, as a rank printed it each time that the script ran."""
    return [int(line.split()[1]) for line in reply.lines(rank) if line.startswith("restarts")]


def test_script_gets_the_options_of_ddp_run(notebook: Notebook, base: Path) -> None:
    options = "--nproc 2 --env MINE=yes --name tried --timeout 50"
    reply = notebook.run(f"%ddp run {options} script.py --env other --lr 0.1")
    assert reply.status == "ok", all_text(reply)
    assert seen(reply) == [["__main__", ["--env", "other", "--lr", "0.1"], 2]] * 2
    assert "MINE is yes" in reply.lines(0)
    assert "MINE is yes" in reply.lines(1)
    [folder] = run_folders(base, "tried")
    facts = run_json(folder)
    assert (facts["name"], facts["env"], facts["timeout"]) == ("tried", ["MINE"], 50.0)

    assert notebook.run(f"%%ddp\n{KEEP}").status == "ok"
    reply = notebook.run("%ddp run -m pack.go -m x")
    assert reply.status == "ok", all_text(reply)
    assert seen(reply) == [["__main__", ["-m", "x"], 2]] * 2
    assert_ranks_work(notebook)


def test_a_script_that_loses_a_rank_runs_again(notebook: Notebook, base: Path) -> None:
    notebook.run(f"%%ddp --nproc 2\n{KEEP}")
    for option, mark in (("--max-restarts", "restarted"), ("--heal", "healed")):
        reply = notebook.run(f"%ddp run {option} 1 script.py dies {mark}")
        assert reply.status == "ok", all_text(reply)
        assert seen(reply) == [["__main__", ["dies", mark], 2]] * 4
        for rank in range(2):
            first, second = restarts(reply, rank)
            assert option != "--max-restarts" or second == first + 1
        assert_ranks_work(notebook)

    reply = notebook.run("%ddp run script.py dies alone")
    assert reply.status == "error"
    assert re.search(r"\brank 1\b.*\b3\b", reply.error), all_text(reply)
    assert "%ddp heal" in reply.traceback
    assert (base / "alone").exists()
    assert notebook.run("%ddp heal").status == "ok"
    assert_ranks_work(notebook)
