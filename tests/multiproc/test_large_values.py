"""Transferred values: functions with source lines, and values above the store's limit."""

from __future__ import annotations

import re
import time

import pytest
from drivers.ranks import Capture, Ranks
from notebook import Notebook
from torch import nn

from nbddp import RequestError

SHARES_KERNEL = True

MB = 1_000_000


def is_free_of_traces(text: str) -> bool:
    """Return whether the text has no error trace of torch's store."""
    return not any(word in text for word in ("TCPStore", "c10d", "frame #", "Exception raised"))


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


def test_nine_megabyte_error_of_a_pull_is_cut(shared_group: Ranks) -> None:
    shared_group.run("def fail():\n    raise ValueError('y' * 9_000_000)")
    with pytest.raises(RequestError, match=r"^rank 1: ValueError: yyyy.*\n.*8,990,012") as caught:
        shared_group.pull("fail()", rank=1)
    assert len(str(caught.value)) < 20_000


# ---- a flood


NOTE = re.compile(r"nbddp: (.*): .*\bDistributedDataParallel\b.*")  # that a model comes without it


def test_pull_of_a_ddp_model_returns_the_inner_module(shared_group: Ranks, capsys: Capture) -> None:
    group = shared_group
    group.run("model = nbddp.prepare(torch.nn.Linear(2, 1))")
    models = group.pull("model")
    assert [type(each) for each in models] == [nn.Linear] * 2
    assert models[0].weight.tolist() == group.pull("model.module.weight.tolist()", rank=1)
    assert NOTE.findall(capsys.readouterr().out) == ["model"]
    assert isinstance(group.pull("{'nets': [model]}", rank=0)["nets"][0], nn.Linear)


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
