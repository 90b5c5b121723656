"""Models that are bound to a process group, on their way to the notebook."""

from __future__ import annotations

import re

import pytest
from drivers.ranks import Ranks
from notebook import Notebook
from torch import nn

from nbddp import RequestError

pytestmark = pytest.mark.multiproc
SHARES_KERNEL = True

NOTE = re.compile(r"nbddp: (.*): .*\bDistributedDataParallel\b.*")  # that a model comes without it


def test_a_wrapped_model_comes_as_the_module_in_it(
    shared_group: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    group = shared_group
    group.run("model = nbddp.prepare(torch.nn.Linear(2, 1))")
    models = group.pull("model")
    assert [type(each) for each in models] == [nn.Linear] * 2
    assert models[0].weight.tolist() == group.pull("model.module.weight.tolist()", rank=1)
    assert NOTE.findall(capsys.readouterr().out) == ["model"]
    assert isinstance(group.pull("{'nets': [model]}", rank=0)["nets"][0], nn.Linear)


def test_a_cells_last_value_may_be_a_wrapped_model(notebook: Notebook) -> None:
    reply = notebook.run("%%ddp --nproc 2 --out nets\nnbddp.prepare(torch.nn.Linear(2, 1));")
    assert len(NOTE.findall(reply.text)) == len(reply.text.splitlines()) == 2
    assert notebook.run("[type(each).__name__ for each in nets]").result == "['Linear', 'Linear']"
    notebook.run("%%ddp\nmodel = nbddp.prepare(torch.nn.Linear(2, 1))")
    reply = notebook.run("%ddp pull model --rank 1")
    assert NOTE.findall(reply.text) == ["model"]
    assert reply.result == "Linear(in_features=2, out_features=1, bias=True)"


def test_of_a_sharded_model_the_way_to_its_parameters_is_said_and_leads_there(
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


def test_a_value_that_the_notebook_cannot_open_is_said_in_one_line(notebook: Notebook) -> None:
    notebook.run(f"%%writefile only_there.py\n{ONLY_THERE}")
    assert notebook.run("%%ddp --nproc 2\nimport only_there\nt = only_there.T()").status == "ok"
    for cell in ("%ddp pull t", "%%ddp --out kept\nt;"):
        [line] = notebook.run(cell).text.splitlines()
        assert line.startswith("UsageError: ")
        assert "ImportError: ranks only" in line
        assert "state_dict()" in line
    assert notebook.run("%ddp pull 'rank + 1'").result == "[1, 2]"


def test_a_last_value_that_cannot_be_sent_fails_the_cell_without_a_line_of_ours(
    notebook: Notebook,
) -> None:
    reply = notebook.run("%%ddp --nproc 1 --out kept\n{'a': (each for each in ())}")
    assert re.match(r"CellFailedError: rank 0: PicklingError: .*generator", reply.error)
    assert "nbddp/" not in reply.traceback


def test_a_function_that_was_pushed_fails_with_its_own_lines_also_when_it_is_pushed_again(
    notebook: Notebook,
) -> None:
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


def test_the_line_of_an_earlier_cells_function_is_named_with_its_cell(notebook: Notebook) -> None:
    defined = notebook.run("%%ddp --nproc 2\ndef half(x):\n    return 1 / x")
    [number] = defined.counts
    told = notebook.run("%%ddp\n\nhalf(rank)").traceback
    assert told.startswith(f"rank 0: ZeroDivisionError: division by zero, cell [{number}] line 3\n")
    told = notebook.run("%%ddp\n\ndef third(x):\n    return x / 0\nthird(rank)").traceback
    assert told.startswith("ranks 0-1: ZeroDivisionError: division by zero, line 4\n")
