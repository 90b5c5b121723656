"""Nodes that SLURM starts, on a cluster on this machine: a network namespace for each host."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from notebook import Notebook
from processes import wait_until
from virtual_networks import Cables, has_namespaces

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

NET = "10.207.84"
CONTROLLER, HOSTS = "head", ["zeta", "alpha"]  # SLURM numbers the hosts against their order
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
SETTLING = 90.0  # seconds for daemons to start, and for a job to end
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "sinfo")

CONF = """
ClusterName=nbddp
SlurmctldHost={controller}({net}.2)
AuthType=auth/none
CredType=cred/none
SlurmUser=root
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={folder}/prolog
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=5
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:4
"""
# one host waits, so that the other one arrives first
PROLOG = """#!/bin/sh
while [ -n "$SLURM_STEP_ID" ] && [ -e {folder}/hold-$SLURM_NODEID ]; do sleep 0.1; done
"""


def why_not() -> str:
    """Return why there can be no cluster here; empty if there can be one."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        return (
            f"not installed: {', '.join(missing)}; `apt-get install -y --no-install-recommends "
            "slurm-wlm iproute2`"
        )
    return "" if has_namespaces() else "needs root, and network namespaces"


class Cluster:
    """Two or more hosts; the notebook's machine can submit jobs.

    Attributes:
        folder: the daemons' files; the tasks of a host wait while ``hold-`` and its number exist.
        address: of the notebook's machine in the cluster's network.
        env: environment variables that a process needs to submit a job.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        self.address = address
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}

    def ask(self, *words: str) -> str:
        done = subprocess.run(
            words, env=os.environ | self.env, capture_output=True, text=True, check=True
        )
        return done.stdout

    def jobs(self) -> list[str]:
        return self.ask("squeue", "--noheader", "--format=%i").split()

    def await_jobs(self) -> bool:
        return wait_until(lambda: not self.jobs(), timeout=SETTLING)

    def end_jobs(self) -> None:
        for path in self.folder.glob("hold-*"):
            path.unlink()
        if jobs := self.jobs():
            self.ask("scancel", *jobs)
            self.await_jobs()

    def is_idle(self) -> bool:
        with suppress(subprocess.CalledProcessError):  # the controller does not answer yet
            states = self.ask("sinfo", "--noheader", "--Node", "--format=%T").split()
            return states == ["idle"] * len(HOSTS)
        return False


def _host(stack: ExitStack, cables: Cables) -> str:
    """Make a namespace in which all hosts have their names."""
    space = cables.add()
    etc = Path("/etc/netns") / space  # `ip netns exec` mounts these files over /etc
    etc.mkdir(parents=True)
    stack.callback(_remove, etc)
    stack.callback(_end_all_in, space)
    lines = [f"{NET}.{number + 3} {name} node{number}\n" for number, name in enumerate(HOSTS)]
    (etc / "hosts").write_text(f"127.0.0.1 localhost\n{NET}.2 {CONTROLLER}\n" + "".join(lines))
    return space


def _remove(etc: Path) -> None:
    shutil.rmtree(etc)
    with suppress(OSError):  # it holds those of others
        etc.parent.rmdir()


def _end_all_in(space: str) -> None:
    """Kill the remaining processes in a namespace of this cluster."""
    found = subprocess.run(
        ["ip", "netns", "pids", space], capture_output=True, text=True, check=False
    )
    for pid in found.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), 9)


def _write(folder: Path) -> None:
    nodes = [
        f"NodeName=node{number} NodeHostname={name} NodeAddr={NET}.{number + 3} CPUs=2 "
        "RealMemory=1000 State=UNKNOWN"
        for number, name in enumerate(HOSTS)
    ]
    conf = CONF.format(controller=CONTROLLER, net=NET, folder=folder, nodes="\n".join(nodes))
    (folder / "slurm.conf").write_text(conf)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # else it looks for one
    (folder / "state").mkdir()
    for number, _ in enumerate(HOSTS):
        (folder / f"spool-node{number}").mkdir()
    prolog = folder / "prolog"
    prolog.write_text(PROLOG.format(folder=folder))
    prolog.chmod(0o755)


def _start(stack: ExitStack, command: Sequence[str], folder: Path) -> None:
    """Start a daemon, which ends with the cluster."""
    with (folder / "daemons.log").open("ab") as log:
        daemon = subprocess.Popen(
            command,
            env=os.environ | {"PATH": PATH},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    stack.callback(daemon.wait, 30)
    stack.callback(daemon.terminate)


JOB = Path("nbddp-nodes.sbatch")
SUMS = "import os\nimport socket\nones = torch.ones(1)\ndist.all_reduce(ones)"
WHERE = f"%%ddp\n{SUMS}\nos.environ['GROUP_RANK'], socket.gethostname(), int(ones)"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start a cluster, and end all of it.

    SLURM knows the hosts as node0, node1 and so on: it would sort their own names.
    """
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    with ExitStack() as stack:
        cables = Cables(f"sl{os.getpid() % 100_000}x", NET)
        stack.callback(cables.close)
        names = [CONTROLLER, *HOSTS]
        spaces = [_host(stack, cables) for _ in names]
        _write(folder)
        cluster = Cluster(folder, cables.address)
        conf = str(folder / "slurm.conf")
        for space, name in zip(spaces, names, strict=True):
            daemon = f"slurmd -D -N node{HOSTS.index(name)}" if name in HOSTS else "slurmctld -D -c"
            command = ["unshare", "--uts", "sh", "-c", f"hostname {name}; exec {daemon} -f {conf}"]
            _start(stack, [*cables.inside(space), *command], folder)
        assert wait_until(cluster.is_idle, timeout=SETTLING), f"see the logs in {folder}"
        stack.callback(cluster.end_jobs)
        yield cluster


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
def test_ranks_follow_slurm_order_even_if_the_second_node_joins_first(
    notebook: Notebook, cluster: Cluster, prefix: str, held: int, first: str, second: str
) -> None:
    command = f"%ddp nodes --nnodes 2 --nproc-per-node 2 --host {cluster.address} --slurm"
    assert f"`!sbatch {JOB}`" in notebook.run(command).text
    JOB.write_text(JOB.read_text().replace("srun ", f"srun {prefix}"))
    hold = cluster.folder / f"hold-{held}"
    hold.touch()
    assert "Submitted batch job" in notebook.run(f"!sbatch {JOB}").text
    assert wait_until(lambda: f"\n{second} " in notebook.run("%ddp nodes").text, timeout=120), (
        logs()
    )
    hold.unlink()
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
    nodes = re.findall(r"rank \d on (\w+): (\d)", logs())
    assert sorted(nodes) == [("alpha", "4")] * 2 + [("zeta", "4")] * 2, logs()


def logs() -> str:
    return "".join(path.read_text() for path in [*Path().glob("*.out"), *Path().glob("*.log")])
