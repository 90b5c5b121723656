"""A real SLURM: the jobs that ``%ddp nodes`` and ``%ddp export`` write run as they are.

``pytest -m soak tests/multiproc/test_slurm.py``, as root, with Debian's slurm-wlm and munge.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from notebook import Notebook
from processes import wait_until
from slurm_here import Cluster, slurm_cluster, why_not

pytestmark = [pytest.mark.multiproc, pytest.mark.soak, pytest.mark.timeout(600)]

JOB = Path("nbddp-nodes.sbatch")
SUMS = "import os\nimport socket\nones = torch.ones(1)\ndist.all_reduce(ones)"
WHERE = f"%%ddp\n{SUMS}\nos.environ['GROUP_RANK'], socket.gethostname(), int(ones)"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two hosts, which SLURM numbers against the order of their names."""
    if reason := why_not():
        pytest.skip(reason)
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), ["zeta", "alpha"]) as made:
        yield made


@pytest.fixture
def notebook(cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    """A kernel as a kernelspec starts it: PATH lacks the folder of the environment's programs."""
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    for name, text in cluster.env.items():
        monkeypatch.setenv(name, text)
    with Notebook(folder) as made:
        yield made
        assert made.run("%ddp stop").status == "ok"
    cluster.end_jobs()
    os.chdir(folder.parent)


@pytest.mark.parametrize(
    ("prefix", "held", "first", "second"),
    [
        pytest.param("", 0, "zeta", "alpha", id="by SLURM_NODEID"),
        pytest.param("env -u SLURM_NODEID ", 1, "alpha", "zeta", id="by name"),
    ],
)
def test_ranks_are_in_order_though_the_second_node_arrives_first(
    notebook: Notebook, cluster: Cluster, prefix: str, held: int, first: str, second: str
) -> None:
    door = f"%ddp nodes --nnodes 2 --nproc-per-node 2 --host {cluster.address} --slurm"
    assert f"`!sbatch {JOB}`" in notebook.run(door).text
    JOB.write_text(JOB.read_text().replace("srun ", f"srun {prefix}"))
    cluster.hold(held)
    assert "Submitted batch job" in notebook.run(f"!sbatch {JOB}").text
    assert wait_until(lambda: f"\n{second} " in notebook.run("%ddp nodes").text, timeout=120), (
        logs()
    )
    cluster.let_go(held)
    reply = notebook.run("%ddp nodes --wait 110")
    assert "2 nodes" in reply.text, (reply, logs())
    reply = notebook.run(WHERE)
    assert f"Out [ranks 0-1] ('0', '{first}', 4)\n" in reply.text, reply.error
    assert f"Out [ranks 2-3] ('1', '{second}', 4)\n" in reply.text, reply.error
    table = notebook.run("%ddp nodes").text
    assert re.findall(r"^(\w+) .* (\d-\d) ", table, re.MULTILINE) == [
        (first, "0-1"),
        (second, "2-3"),
    ]
    assert notebook.run("%ddp stop").status == "ok"
    assert cluster.await_jobs(), "the job goes on without its notebook"


def test_an_exported_script_runs_on_two_hosts(notebook: Notebook, cluster: Cluster) -> None:
    cell = f"{SUMS}\nprint(f'rank {{rank}} on {{socket.gethostname()}}: {{int(ones)}}')"
    assert notebook.run(f"%%ddp --nproc 2\n{cell}").status == "ok"
    assert notebook.run("%ddp export train.py --slurm").status == "ok"
    assert "Submitted batch job" in notebook.run("!sbatch train.sbatch").text
    assert cluster.await_jobs()
    said = re.findall(r"rank \d on (\w+): (\d)", logs())
    assert sorted(said) == [("alpha", "4")] * 2 + [("zeta", "4")] * 2, logs()


def logs() -> str:
    """What the jobs have written."""
    return "".join(path.read_text() for path in Path().glob("*.out")) + "".join(
        path.read_text() for path in Path().glob("*.log")
    )
