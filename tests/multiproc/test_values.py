"""Pushed and pulled values: unchanged, of any size, collected once, and removed from the store."""

import re
import time
from typing import Any

import pytest
from drivers.ranks import Capture, MakeRanks, Ranks
from notebook import Notebook
from torch import nn

from nbddp import ArgumentError, CellFailedError, RequestError

SHARES_KERNEL = True


def kept_in_store(group: Ranks) -> int:
    store = group.store
    names = [
        f"a1/payload/{rank}/{kind}{number}"
        for rank in (0, 1)
        for number in range(50)
        for kind in ("cell", "request")
    ]
    names += [f"push/{number}" for number in range(50)]
    return sum(store.check([f"{name}/0"]) for name in names)


CLASSES = """
import abc, dataclasses, enum
class Kind(enum.Enum):
    SMALL = 1
    LARGE = 2
class Flag(enum.IntFlag):
    READ = 1
@dataclasses.dataclass
class Settings:
    rate: float = 0.5
    kind: Kind = Kind.LARGE
class Base(abc.ABC):
    @abc.abstractmethod
    def size(self): ...
class Box(Base):
    def __init__(self): self.parts = {1, 2}
    def size(self): return len(self.parts)
    def __eq__(self, other): return type(self) is type(other) and self.parts == other.parts
    __hash__ = None
class Own:
    mine = rank
"""


def test_pulled_values_of_two_ranks_share_one_class(shared_group: Ranks) -> None:
    shared_group.run(CLASSES)
    nested = "{'a': [Settings(), Kind.SMALL]}"
    for expression in ("Kind.LARGE", "Flag.READ", "Settings(2.0)", "Box()", nested):
        first, second = shared_group.pull(expression)
        assert first == second
        assert type(first) is type(second)
        assert shared_group.pull(expression, rank=1) == first
        assert shared_group.evaluate(expression) == [first, second]
        shared_group.push({"back": first})
        assert shared_group.pull(f"back == {expression}") == [True, True]


def test_class_that_differs_among_ranks_is_pulled_per_rank(shared_group: Ranks) -> None:
    shared_group.run(CLASSES)
    assert [each.mine for each in shared_group.pull("Own")] == [0, 1]
    before = shared_group.pull("Settings()", rank=0)
    shared_group.run(
        "@dataclasses.dataclass\nclass Settings:\n    rate: float = 0.5\n    more: int = 3"
    )
    after = shared_group.pull("Settings()", rank=0)
    assert (after.more, hasattr(before, "more"), before == after) == (3, False, False)


def test_failed_pull_on_one_rank_leaves_no_values_in_the_store(group: Ranks) -> None:
    group.run("bytes(9)", wants_value=True, quiet=True)
    assert kept_in_store(group) == 2
    with pytest.raises(RequestError, match="rank 1: ZeroDivisionError"):
        group.pull("bytes(5_000_000) if rank == 0 else 1 / 0")
    with pytest.raises(CellFailedError):
        group.run("1 / 0 if rank else bytes(5_000_000)", wants_value=True, quiet=True)
    assert group.pull("rank") == [0, 1]
    group.push({"x": 1})
    assert kept_in_store(group) == 2


REFUSED = {
    "rank": "set by nbddp",
    "dist": "set by nbddp",
    1: "not a valid name",
    "a b": "not a valid name",
    "for": "not a valid name",
}


def test_a_push_overwrites_no_name_of_nbddp_and_needs_names(shared_group: Ranks) -> None:
    for name, words in REFUSED.items():
        values: dict[Any, int] = {"fine": 1, name: 5}
        with pytest.raises(ArgumentError, match=words):
            shared_group.push(values)
    assert shared_group.pull("'fine' in globals()") == [False, False]


class Counted:
    times = 0

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        Counted.times += 1
        return int, (7,)


def test_replay_sends_the_recorded_bytes_without_pickling(group: Ranks) -> None:
    Counted.times = 0
    pushed = [1, Counted()]
    group.push({"pushed": pushed})
    pushed.append(3)
    for _ in range(2):
        entries = group.replay_log
        group.restart()
        group.replay(entries)
        assert group.pull("pushed") == [[1, 7], [1, 7]]
    assert Counted.times == 1


class Deadly:
    def __init__(self, group: Ranks) -> None:
        self._group = group

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        self._group.kill(1)
        return int, (7,)


class Opened:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return eval, ("__import__('os').environ['RANK'] == '1' and __import__('os')._exit(3)",)


def failed_push(group: Ranks, value: object) -> str:
    with pytest.raises(RequestError) as caught:
        group.push({"x": value})
    ways = ("group.heal()", "group.restart()", "group.run(..., ranks=[0, 2])")
    for words in ("ranks 0,2 only", "rank 1", *ways):
        assert words in str(caught.value)
    return str(caught.value)


def test_push_names_a_rank_that_died_before_sending_and_the_receivers(
    make_group: MakeRanks,
) -> None:
    group = make_group(3)
    assert "killed by you" in failed_push(group, Deadly(group))
    assert [group.pull("x", rank=rank) for rank in (0, 2)] == [7, 7]
    group.push({"y": 8})  # an earlier death is not reported again
    assert group.pull("y") == [8, 8]
    assert len(group.replay_log) == 1


def test_push_names_a_rank_that_died_unpickling_and_the_receivers(make_group: MakeRanks) -> None:
    group = make_group(3)
    assert "code 3" in failed_push(group, Opened())
    assert group.pull("x") == [False, False]
    assert group.replay_log == ()


def test_loader_workers_return_classes_and_functions_of_a_cell(group: Ranks) -> None:
    group.run(
        "from enum import Enum\nfrom torch.utils.data import DataLoader, Dataset\n"
        "class Kind(Enum):\n    ODD = 1\n"
        "class Batch:\n    class Part: pass\n    def __init__(self, items): self.items = items\n"
        "def name(): return 'name'\n"
        "def collate(items): return Batch([*items, Kind.ODD, name, Batch.Part()])\n"
        "class Rows(Dataset):\n    def __len__(self): return 2\n"
        "    def __getitem__(self, at): return at\n"
    )
    group.run(  # a batch that cannot be sent would never arrive
        "loader = DataLoader(Rows(), 2, num_workers=1, collate_fn=collate, timeout=30)\n"
        "[batch] = loader\n*rows, kind, function, part = batch.items\n"
        "assert type(batch) is Batch and type(part) is Batch.Part and kind is Kind.ODD\n"
        "assert rows == [0, 1] and function() == 'name'"
    )


def test_each_rank_has_random_states_of_its_own(group: Ranks) -> None:
    group.run("import random\nimport numpy as np")
    for draw in ("torch.rand(1).item()", "np.random.rand()", "random.random()"):
        first, second = group.pull(draw)
        assert first != second


def is_free_of_traces(text: str) -> bool:
    return not any(word in text for word in ("TCPStore", "c10d", "frame #", "Exception raised"))


# ---- on a page


def test_nine_megabyte_value_is_cut_and_torch_prints_nothing(notebook: Notebook) -> None:
    reply = notebook.run("%%ddp --nproc 2\n'x' * 9_000_000")
    assert reply.status == "ok"
    tag, value, text = reply.text.splitlines()
    assert (tag, value) == ("Out [ranks 0-1]", "'" + "x" * 99_999)
    assert "8,900,002" in text
    assert "`%ddp pull _`" in text
    pulled = notebook.run("whole = %ddp pull _\n[len(each) for each in whole]")
    assert pulled.result == "[9000000, 9000000]"


def test_twelve_megabyte_picture_arrives_complete_and_in_order(notebook: Notebook) -> None:
    reply = notebook.run(
        "%%ddp --nproc 2 --ranks 0\nfrom IPython.display import display\nprint('before')\n"
        "display({'image/png': 'A' * 12_000_000}, raw=True)\nprint('after')"
    )
    assert reply.status == "ok"
    assert [len(data["image/png"]) for data in reply.displays if "image/png" in data] == [
        12_000_000
    ]
    assert [line for line in reply.lines(0) if line] == ["before", "after"]
    assert is_free_of_traces(reply.text)


def test_figures_of_an_animation_replace_one_another(notebook: Notebook) -> None:
    reply = notebook.run(
        "%%ddp --nproc 2\nimport matplotlib.pyplot as plt\n"
        "from IPython.display import clear_output\n"
        "figure, axes = plt.subplots(figsize=(2, 1))\nfor step in range(40):\n"
        "    axes.plot([step, rank])\n    clear_output(wait=True)\n    display(figure)"
    )
    assert reply.status == "ok"
    assert sum("image/png" in data for data in reply.displays) == 2
    assert sum("image/png" in data for data in reply.updates) == 2 * 39


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


# ---- pulled values


def test_nine_megabyte_error_of_a_pull_is_cut(shared_group: Ranks) -> None:
    shared_group.run("def fail():\n    raise ValueError('y' * 9_000_000)")
    with pytest.raises(RequestError, match=r"^rank 1: ValueError: yyyy.*\n.*8,990,012") as caught:
        shared_group.pull("fail()", rank=1)
    assert len(str(caught.value)) < 20_000


def test_pull_of_a_ddp_model_returns_the_inner_module(shared_group: Ranks, capsys: Capture) -> None:
    group = shared_group
    group.run("model = nbddp.prepare(torch.nn.Linear(2, 1))")
    models = group.pull("model")
    assert [type(each) for each in models] == [nn.Linear] * 2
    assert models[0].weight.tolist() == group.pull("model.module.weight.tolist()", rank=1)
    output = capsys.readouterr().out  # that the model comes without DDP
    assert re.findall(r"nbddp: (.*): .*\bDistributedDataParallel\b", output) == ["model"]
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


def test_value_that_the_notebook_cannot_unpickle_is_reported_in_one_line(
    notebook: Notebook,
) -> None:
    (notebook.folder / "only_there.py").write_text(
        "import os\nif 'RANK' not in os.environ: raise ImportError('ranks only')\nclass T: pass"
    )
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
