"""Transferred values: functions with source lines, and values above the store's limit."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from drivers.inside import imported
from drivers.ranks import Capture, MakeRanks, Ranks
from notebook import Notebook
from processes import wait_until
from torch import nn

from nbddp import RequestError
from nbddp.train import log_and_track

pytestmark = pytest.mark.multiproc
SHARES_KERNEL = True

MB = 1_000_000


def is_free_of_traces(text: str) -> bool:
    """Return whether the text has no error trace of torch's store."""
    return not any(word in text for word in ("TCPStore", "c10d", "frame #", "Exception raised"))


def stop_when(condition: Callable[[], bool]) -> None:
    """Send SIGINT to this process as soon as a condition is true."""
    assert wait_until(condition)
    os.kill(os.getpid(), signal.SIGINT)


# ---- on a page


def test_nine_megabyte_value_is_cut_and_torch_prints_nothing(notebook: Notebook) -> None:
    reply = notebook.run("%%ddp --nproc 2\n'x' * 9_000_000")
    assert reply.status == "ok"
    tag, value, said = reply.text.splitlines()
    assert (tag, value) == ("Out [ranks 0-1]", "'" + "x" * 99_999)
    assert "8,900,002" in said
    assert "`%ddp pull _`" in said
    pulled = notebook.run("whole = %ddp pull _\n[len(each) for each in whole]")
    assert pulled.result == "[9000000, 9000000]"


def test_twelve_megabyte_picture_arrives_complete_and_in_order(notebook: Notebook) -> None:
    reply = notebook.run(
        "%%ddp --nproc 2 --ranks 0\nfrom IPython.display import display\nprint('before')\n"
        "display({'image/png': 'A' * 12_000_000}, raw=True)\nprint('after')"
    )
    assert reply.status == "ok"
    assert [len(data["image/png"]) for data in reply.displays if "image/png" in data] == [12 * MB]
    assert [line for line in reply.lines(0) if line] == ["before", "after"]
    assert is_free_of_traces(reply.text)


def test_nine_megabyte_error_fails_the_cell(notebook: Notebook) -> None:
    reply = notebook.run("%%ddp --nproc 2\nname = 7\nraise ValueError('y' * 9_000_000)")
    assert reply.status == "error"
    assert "ValueError: yyyy" in reply.error
    assert len(reply.traceback) < 200_000
    assert "`sys.last_value`" in reply.traceback
    whole = "%%ddp\nimport sys\nlen(str(sys.last_value)), name"
    assert notebook.run(whole).text == "Out [ranks 0-1] (9000000, 7)\n"


@pytest.mark.full
def test_a_source_of_twelve_megabytes_runs(notebook: Notebook) -> None:
    reply = notebook.run("%%ddp --nproc 2\nz = '" + "q" * 12 * MB + "'\nlen(z)")
    assert reply.text == "Out [ranks 0-1] 12000000\n"


def test_out_and_push_carry_values_of_any_size(notebook: Notebook) -> None:
    assert notebook.run("v = bytes(30_000_000)").status == "ok"
    reply = notebook.run("%%ddp --nproc 2 --push v --out sizes --quiet\nv + bytes([rank])")
    assert reply.status == "ok"
    assert notebook.run("[(len(each), each[-1]) for each in sizes]").result == (
        "[(30000001, 0), (30000001, 1)]"
    )


def test_output_flood_can_be_interrupted_and_the_page_names_the_log_file(
    notebook: Notebook,
) -> None:
    assert notebook.run("%ddp start --nproc 4").status == "ok"
    request = notebook.begin("%%ddp\nline = 'x' * 99\nwhile True:\n    print(line)")
    notebook.finish(request, until="x" * 99)
    time.sleep(3)
    notebook.interrupt()
    reply = notebook.finish(request)
    assert reply.seconds < 25  # 7 s on two cores; 30 s and more when the page was sent all of it
    assert reply.status == "error"
    assert "CellInterruptedError" in reply.error
    assert re.search(r"\brank\d\.log", reply.text)
    assert is_free_of_traces(reply.text)
    after = notebook.run("%%ddp\nprint('next')")
    assert sorted(after.text.splitlines()) == [f"[rank {rank}] next" for rank in range(4)]


# ---- in a script


def test_large_metrics_events_and_expressions_are_delivered(shared_group: Ranks) -> None:
    group = shared_group
    group.run(
        "for step in range(3):\n    nbddp.log(step=step, **{'m' * 9_000_000: step})\n"
        f"{imported(log_and_track)}log_and_track.record_event('mine', text='h' * 9_000_000)\n"
    )
    assert group.last_step == 2
    told = [each for each in group.events() if each.kind == "mine"]
    assert sorted(each.facts["rank"] for each in told) == [0, 1]
    assert group.pull("'" + "e" * 9 * MB + "'[-3:]", rank=0) == "eee"


def test_nine_megabyte_error_of_a_pull_is_cut(shared_group: Ranks) -> None:
    shared_group.run("def fail():\n    raise ValueError('y' * 9_000_000)")
    with pytest.raises(RequestError, match=r"^rank 1: ValueError: yyyy.*\n.*8,990,012") as caught:
        shared_group.pull("fail()", rank=1)
    assert len(str(caught.value)) < 20_000


def test_unsendable_cell_result_is_reported_and_the_cell_ends(group: Ranks) -> None:
    handle = group.begin(
        "from IPython import get_ipython\nhook = get_ipython().displayhook\n"
        "type(hook).write_format_data = lambda self, data, md=None: "
        "setattr(self, 'bundle', {'data': {'text/plain': {1, 2}}})\n5",
        ranks=(0,),
    )
    messages = [getattr(each, "message", None) for each in handle.notices()]
    [text] = [each.data["text/plain"] for each in messages if each is not None]
    assert text.startswith("nbddp: a CellEnded ")
    assert handle.result is not None
    assert handle.result.is_ok


def test_rank_that_dies_while_sending_a_large_picture_ends_the_cell(group: Ranks) -> None:
    error = group.failure_of(
        "import os, signal, threading\nfrom IPython.display import display\n"
        "if rank == 1:\n"
        "    threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()\n"
        "    while True: display({'image/png': 'A' * 12_000_000}, raw=True)",
        quiet=True,
    )
    assert re.search("rank 1 .*SIGKILL", str(error))
    group.restart()
    assert group.pull("rank") == [0, 1]


# ---- a flood


FLOOD = "line = 'x' * 99\nwhile True:\n    print(line)\n"


@pytest.mark.full
def test_output_flood_does_not_delay_heartbeats_or_an_interrupt(make_group: MakeRanks) -> None:
    group = make_group(4)
    handle = group.begin(FLOOD)  # and its output is not read
    memory = psutil.Process().memory_info().rss

    def signs() -> list[float]:
        """Return the time of each rank's last heartbeat in this cell."""
        last = [group.last_heartbeat(rank) for rank in range(4)]
        number = handle.number
        return [each.at if each and each.status.cell == number else 0.0 for each in last]

    time.sleep(4)
    for _ in range(3):  # a rank that was blocked sends its next heartbeat then
        before = time.monotonic()
        assert wait_until(lambda before=before: all(at > before for at in signs()), timeout=8.0)
    began = time.monotonic()
    group.interrupt()
    assert wait_until(lambda: handle.is_finished, timeout=30)
    assert time.monotonic() - began < 15.0  # 4 on two cores
    assert psutil.Process().memory_info().rss - memory < 150 << 20
    assert handle.exits == {}
    assert group.run("rank", quiet=True).is_ok


def test_abandoned_pull_does_not_delay_the_next_cell(group: Ranks) -> None:
    group.run(
        "import pathlib, time\nclass Slow:\n    def __reduce__(self):\n"
        "        pathlib.Path(f'begun{rank}').touch()\n        time.sleep(0.1)\n"
        "        return bytes, (bytes(100_000),)\n"
        "kept, value = rank, [Slow() for _ in range(600)]"  # a minute
    )
    begun = [Path(f"begun{rank}") for rank in range(2)]
    stopper = threading.Thread(target=stop_when, args=[lambda: all(map(Path.exists, begun))])
    stopper.start()
    with pytest.raises(KeyboardInterrupt):
        group.pull("value")
    stopper.join()
    began = time.monotonic()
    assert group.pull("kept") == [0, 1]
    group.run("dist.barrier()")
    assert time.monotonic() - began < 20


NOTE = re.compile(r"nbddp: (.*): .*\bDistributedDataParallel\b.*")  # that a model comes without it


def test_pull_of_a_ddp_model_returns_the_inner_module(shared_group: Ranks, capsys: Capture) -> None:
    group = shared_group
    group.run("model = nbddp.prepare(torch.nn.Linear(2, 1))")
    models = group.pull("model")
    assert [type(each) for each in models] == [nn.Linear] * 2
    assert models[0].weight.tolist() == group.pull("model.module.weight.tolist()", rank=1)
    assert NOTE.findall(capsys.readouterr().out) == ["model"]
    assert isinstance(group.pull("{'nets': [model]}", rank=0)["nets"][0], nn.Linear)


def test_last_value_of_a_cell_can_be_a_ddp_model(notebook: Notebook) -> None:
    reply = notebook.run("%%ddp --nproc 2 --out nets\nnbddp.prepare(torch.nn.Linear(2, 1));")
    assert len(NOTE.findall(reply.text)) == len(reply.text.splitlines()) == 2
    assert notebook.run("[type(each).__name__ for each in nets]").result == "['Linear', 'Linear']"
    notebook.run("%%ddp\nmodel = nbddp.prepare(torch.nn.Linear(2, 1))")
    reply = notebook.run("%ddp pull model --rank 1")
    assert NOTE.findall(reply.text) == ["model"]
    assert reply.result == "Linear(in_features=2, out_features=1, bias=True)"


def test_pull_of_a_sharded_model_suggests_code_that_gets_its_parameters(
    shared_group: Ranks,
) -> None:
    group = shared_group
    group.run(
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "net = fully_shard(torch.nn.Linear(2, 1), mesh=init_device_mesh('cpu', (world_size,)))"
    )
    with pytest.raises(RequestError) as caught:
        group.pull("net")
    assert str(caught.value).startswith("rank 0: PicklingError: net ")
    imports, way = re.findall("`(.*?)`", str(caught.value))
    group.run(imports)
    assert group.pull(way, rank=None)[1]["weight"].shape == (1, 2)


ONLY_THERE = (
    "import os\nif 'RANK' not in os.environ: raise ImportError('ranks only')\nclass T: pass\n"
)


def test_value_that_the_notebook_cannot_unpickle_is_reported_in_one_line(
    notebook: Notebook,
) -> None:
    notebook.run(f"%%writefile only_there.py\n{ONLY_THERE}")
    assert notebook.run("%%ddp --nproc 2\nimport only_there\nt = only_there.T()").status == "ok"
    for cell in ("%ddp pull t", "%%ddp --out kept\nt;"):
        [line] = notebook.run(cell).text.splitlines()
        assert line.startswith("UsageError: ")
        assert "ImportError: ranks only" in line
        assert "state_dict()" in line
    assert notebook.run("%ddp pull 'rank + 1'").result == "[1, 2]"


def test_unpicklable_last_value_fails_the_cell_without_nbddp_frames(notebook: Notebook) -> None:
    reply = notebook.run("%%ddp --nproc 1 --out kept\n{'a': (each for each in ())}")
    assert re.match(r"CellFailedError: rank 0: PicklingError: .*generator", reply.error)
    assert "nbddp/" not in reply.traceback


def test_traceback_of_a_pushed_function_shows_its_source_lines(notebook: Notebook) -> None:
    notebook.run("def inner(x):\n    # of a cell of its own\n    return 1 / x")
    defined = notebook.run("def outer(count):\n    return [inner(each) for each in range(count)]")
    [number] = defined.counts
    for line in ("%%ddp --nproc 2 --push outer", "%%ddp --fresh --push outer", "%%ddp"):
        told = notebook.run(f"{line}\nouter(3)").traceback
        where = f"cell [{number - 1}] line 3"
        assert told.startswith(f"ranks 0-1: ZeroDivisionError: division by zero, {where}\n")
        assert f"\ncell [{number}] line 2, in outer\n" in told
        assert f"\n{where}, in inner\n" in told
        assert "----> 3     return 1 / x" in told
    notebook.run("%ddp restart --replay")
    assert "return 1 / x" in notebook.run("%%ddp\nouter(3)").traceback
    text = notebook.run("%%ddp --ranks 0\nimport inspect\ninspect.getsource(outer)").text
    assert "return [inner(each)" in text


def test_error_in_a_function_of_an_earlier_cell_names_that_cell(notebook: Notebook) -> None:
    defined = notebook.run("%%ddp --nproc 2\ndef half(x):\n    return 1 / x")
    [number] = defined.counts
    told = notebook.run("%%ddp\n\nhalf(rank)").traceback
    assert told.startswith(f"rank 0: ZeroDivisionError: division by zero, cell [{number}] line 3\n")
    told = notebook.run("%%ddp\n\ndef third(x):\n    return x / 0\nthird(rank)").traceback
    assert told.startswith("ranks 0-1: ZeroDivisionError: division by zero, line 4\n")
