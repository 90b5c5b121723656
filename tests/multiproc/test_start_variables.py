"""Variables that Python, torch and NumPy's libraries read only when they start."""

import logging
import subprocess
import sys

import pytest
from drivers.ranks import Ranks, WarmLauncher
from notebook import Notebook

SHARES_KERNEL = True

# variable: its value, an expression on the rank, and the value of the expression
EFFECTS = {
    "TORCH_LOGS": ("+dynamo", "logging.getLogger('torch._dynamo').level", logging.DEBUG),
    "TORCH_SHOW_CPP_STACKTRACES": (
        "1",
        "'Exception raised from' in error_of(torch.ones(2).view, 3)",
        True,
    ),
    "TORCHDYNAMO_VERBOSE": ("1", "torch._dynamo.config.verbose", True),
    "TORCHINDUCTOR_MAX_AUTOTUNE": ("1", "torch._inductor.config.max_autotune", True),
    "PYTHONWARNINGS": (
        "error::PendingDeprecationWarning",  # IPython gives one in the forkserver's preload
        "sys.warnoptions",
        ["error::PendingDeprecationWarning"],
    ),
    "PYTHONOPTIMIZE": ("1", "sys.flags.optimize", 1),
    "PYTHONIOENCODING": (
        "utf-8:replace",
        "(sys.stdout.errors, sys.stderr.errors)",
        ("replace", "backslashreplace"),
    ),
    "TZ": ("Asia/Tokyo", "time.tzname[0]", "JST"),
    "OPENBLAS_NUM_THREADS": ("3", "(pools(), pools_of_loader_worker())", ([3], [3])),
    "OMP_NUM_THREADS": ("4", "torch.get_num_threads()", 1),  # --threads decides
    # no library here shows the effect of these two
    "MKL_CBWR": ("COMPATIBLE", "'MKL_CBWR=COMPATIBLE' in variables_at_start()", True),
    "NUMEXPR_NUM_THREADS": (
        "5",
        "(os.environ['NUMEXPR_NUM_THREADS'], 'numexpr' in sys.modules)",  # it reads them later
        ("5", False),
    ),
}
BAD = {  # with the reason why no process can start
    "%%ddp --fresh --env PYTHONHASHSEED=banana\nx": "Fatal Python error: config_init_hash_seed",
    "%ddp restart --env PYTHONHOME=/nowhere": "No module named 'encodings'",
    "%%ddp --fresh --name other --env TORCH_LOGS=banana\nx": "Invalid log settings: banana",
    "%ddp restart --env GLOO_DEVICE_TRANSPORT=banana": "unsupported gloo device",
}
REFUSED = {
    "%%ddp --fresh --env TORCH_DISTRIBUTED_DEBUG=WRONG\nx": "TORCH_DISTRIBUTED_DEBUG must be OFF",
    "%%ddp --fresh --name other --env GLOO_SOCKET_IFNAME=eth9\nx": "GLOO_SOCKET_IFNAME=eth9: this",
    "%ddp restart --env GLOO_SOCKET_IFNAME=lo,eth9": "GLOO_SOCKET_IFNAME=lo,eth9: this machine has",
}
FUNCTIONS = """
import logging, os, sys, time
import torch._dynamo.config, torch._inductor.config
from pathlib import Path
from threadpoolctl import threadpool_info
from torch.utils.data import DataLoader

def pools(_=None):
    return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]

def pools_of_loader_worker():
    return next(iter(DataLoader([0], num_workers=1, collate_fn=pools)))

def variables_at_start():
    pids = os.getppid(), os.getpid()  # of the forkserver, or of a spawned rank
    return "".join(Path(f"/proc/{pid}/environ").read_text() for pid in pids).split("\\0")

def error_of(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        return str(error)
"""


def test_variables_that_are_read_at_the_start_have_an_effect_on_ranks(
    launcher: WarmLauncher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read = ", ".join(f"{name!r}: {expression}" for name, (_, expression, _) in EFFECTS.items())
    env = {name: value for name, (value, _, _) in EFFECTS.items()}
    env["TORCH_DISABLE_ADDR2LINE"] = "1"  # symbols of a C++ stack take seconds
    with caplog.at_level(logging.WARNING, "nbddp"):
        with Ranks(launcher=launcher, nproc=1, threads=2) as group:
            group.run(FUNCTIONS)
            assert group.pull("pools(), pools_of_loader_worker()") == [([2], [2])]
        monkeypatch.setenv("PYTHONHASHSEED", "7")  # as %env does
        with Ranks(launcher=launcher, nproc=1, threads=1, env=env) as group:
            imports_ddp = "'torch._dynamo' in __import__('sys').modules"
            assert group.pull(imports_ddp) == [launcher.forkserver is not None]
            group.restart()  # starts no second new process
            group.run(FUNCTIONS)
            [found] = group.pull(f"{{{read}}}")
            assert found == {name: effect for name, (_, _, effect) in EFFECTS.items()}
            hashed = [sys.executable, "-c", "print(hash('a'))"]
            assert group.pull("hash('a')") == [int(subprocess.check_output(hashed))]
        monkeypatch.delenv("PYTHONHASHSEED")
        with Ranks(launcher=launcher, nproc=1, threads=1) as group:
            group.run(FUNCTIONS)
            assert group.pull("sys.flags.optimize, pools(), torch.get_num_threads()") == [
                (0, [1], 1)
            ]
    warnings = " ".join(each.getMessage() for each in caplog.records)
    if launcher.forkserver is None:  # a spawned rank always starts with them
        assert warnings == ""
        return
    assert warnings.count("new process") == 1
    assert warnings.startswith("MKL_CBWR, PYTHONHASHSEED, PYTHONOPTIMIZE, PYTHONWARNINGS, TORCH")
    assert "TZ" not in warnings


def test_a_bad_variable_is_named_and_ends_no_ranks(notebook: Notebook) -> None:
    notebook.run("%%ddp --nproc 2\nx = 3")
    for cell, reason in BAD.items():
        reply = notebook.run(cell)
        assert reply.error.startswith("StartError: the process from which ranks are forked has "), (
            cell
        )
        assert reason in reply.error, cell
        assert "banana" in reply.error or "/nowhere" in reply.error, cell
        assert reply.error.endswith("removes such a variable"), cell
        assert "Traceback" not in reply.text, cell
        assert "Fatal" not in reply.text, cell
        assert notebook.run("%%ddp\nx").text == "Out [ranks 0-1] 3\n", cell
    for cell, reason in REFUSED.items():
        assert notebook.run(cell).text.startswith(f"UsageError: {reason}"), cell
        assert notebook.run("%%ddp\nx").text == "Out [ranks 0-1] 3\n", cell
    notebook.run("import os; os.environ['TORCH_DISTRIBUTED_DEBUG'] = '1'")  # as %env does
    assert "OFF, INFO or DETAIL, got '1'" in notebook.run("%ddp restart").text
    notebook.run("del os.environ['TORCH_DISTRIBUTED_DEBUG']")
    assert notebook.run("%%ddp\nx").text == "Out [ranks 0-1] 3\n"
    notebook.run("%ddp stop")
    (notebook.folder / "empty.py").write_text("")
    for line, end in (
        ("%%ddp", "\n1"),
        ("%%ddp --sweep lr=1,2", "\nlr"),
        ("%ddp run", " empty.py"),
    ):
        reply = notebook.run(f"{line} --env PYTHONHASHSEED=banana{end}")
        assert reply.error.startswith("StartError: "), line
    assert notebook.run("%%ddp --env GLOO_DEVICE_TRANSPORT=\n4").text == "Out [ranks 0-1] 4\n"
