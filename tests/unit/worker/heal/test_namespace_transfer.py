"""One rank's variables in another rank: the same objects, bound to the other rank's globals."""

import logging
import subprocess
import threading
from contextlib import ExitStack, closing
from multiprocessing import Pipe, Process, resource_tracker
from multiprocessing.managers import DictProxy, SyncManager
from multiprocessing.shared_memory import ShareableList, SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from nbddp.worker.heal.namespace_transfer import UnpickleError, load_namespace, pickle_namespace

Names = dict[str, Any]

CELLS = """
import functools, torch
from torch import nn
scale = 2
def times(x): return x * scale
def fact(n): return n * fact(n - 1) if n else 1
def counter():
    count = 0
    def tick(by=1, *, twice=False):
        "Count."
        nonlocal count
        count += by * (2 if twice else 1)
        return count
    return tick
tick = counter(); tick()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
    def forward(self, x): return times(self.layer(x))
class Wide(Net):
    def __init__(self):
        super().__init__()
        self.wide = True
model = Wide()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
for _ in range(2):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step(); schedule.step()
half = functools.partial(times, 0.5)
weight = model.layer.weight
view = weight.detach()[0]
"""


def namespace(source: str = CELLS) -> Names:
    names: Names = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(source, names)
    return names


def packed(names: Names) -> Any:
    return pickle_namespace(names, exclude=["__name__", "__builtins__"])


def opened(carried: Any) -> Names:
    """The transferred variables, in another rank."""
    names: Names = {"__name__": "__main__", "__builtins__": __builtins__}
    load_namespace(carried.data, names, carried.storages)
    return names


@pytest.fixture
def there() -> Names:
    """Another rank's names, which had every one of this one's, carried."""
    carried = packed(namespace())
    assert carried.not_carried == {}
    return opened(carried)


def test_transferred_functions_use_the_globals_of_the_new_rank(there: Names) -> None:
    assert there["times"](1) == 2
    there["scale"] = 5
    assert there["times"](1) == 5
    assert there["half"]() == 2.5
    assert there["fact"](5) == 120
    assert there["times"].__globals__ is there
    assert there["__builtins__"] is __builtins__


def test_a_transferred_closure_keeps_its_variables_docstring_and_name(there: Names) -> None:
    tick = there["tick"]
    told = tick(twice=True), tick.__doc__, tick.__qualname__
    assert told == (3, "Count.", "counter.<locals>.tick")


def test_a_transferred_optimizer_refers_to_the_transferred_model(there: Names) -> None:
    model, optimizer = there["model"], there["optimizer"]
    of_model = [id(each) for each in model.parameters()]
    assert [id(each) for group in optimizer.param_groups for each in group["params"]] == of_model
    assert there["schedule"].optimizer is optimizer
    assert there["weight"] is model.layer.weight
    assert optimizer.state[there["weight"]]["step"] == 2
    view, weight = (there[name].untyped_storage() for name in ("view", "weight"))
    assert view.data_ptr() == weight.data_ptr()


def test_transferred_instances_and_subclasses_refer_to_the_same_transferred_class(
    there: Names,
) -> None:
    assert type(there["model"]) is there["Wide"]
    assert issubclass(there["Wide"], there["Net"])
    assert there["model"](torch.ones(1, 2)).shape == (1, 2)
    assert there["Net"]().layer.in_features == 2


def test_a_cached_function_is_transferred_without_its_cache() -> None:
    source = (
        "import functools\nscale = 2\n"
        "@functools.lru_cache(maxsize=5)\ndef times(x): return x * scale"
    )
    there = opened(packed(namespace(source)))
    there["scale"] = 3
    assert there["times"](4) == 12
    assert there["times"].cache_parameters() == {"maxsize": 5, "typed": False}


def test_code_that_runs_during_unpickling_finds_its_globals() -> None:
    source = (
        "class Guarded:\n"
        "    def __getstate__(self): return {'value': 3}\n"
        "    def __setstate__(self, state):\n"
        "        vars(self).update(state)\n"
        "        self.gate = checked(threading.Lock())\n"
        "guarded = Guarded()\n"
        "import threading\n"
        "def checked(gate): return gate\n"
    )
    there = opened(packed(namespace(source)))
    assert there["guarded"].value == 3
    assert not there["guarded"].gate.locked()


def test_a_failed_unpickling_names_the_variable_and_changes_nothing() -> None:
    source = (
        "class Here:\n    def __reduce__(self): return made, ()\n"
        "def made():\n    raise OSError('not on this machine')\nkept, here = [1], Here()"
    )
    names, there = namespace(source), {"mine": 1}
    carried = packed(names)
    with pytest.raises(UnpickleError, match="not on this machine") as failure:
        load_namespace(carried.data, there, carried.storages)
    assert failure.value.name == "here"
    assert there == {"mine": 1}


TRAINER = """
import threading, queue, os, math
class Trainer:
    def __init__(self):
        self.model, self.gate, self.log = [1, 2], threading.Lock(), open('/dev/null', 'w')
        self.mail, self.stream = queue.Queue(), (each for each in range(3))
        self.inner = {'deep': threading.Event()}
        self.join, self.root, self.out = os.path.join, math.sqrt, queue.Queue.put
trainer = Trainer()
same = trainer.model
"""


def test_an_object_is_transferred_without_parts_that_cannot_be_pickled(
    snapshot: SnapshotAssertion,
) -> None:
    names = namespace(TRAINER)
    carried = packed(names)
    names["trainer"].log.close()
    there = opened(carried)
    assert {"trainer.gate", "trainer.log", "trainer.stream"} <= {*carried.not_carried}
    assert carried.not_carried["trainer.stream"] == "cannot pickle 'generator' object"
    trainer = there["trainer"]
    assert trainer.model is there["same"]
    assert (trainer.join("a", "b"), trainer.root(4)) == ("a/b", 2)
    for kind, error, use in (
        ("lock", RuntimeError, lambda: ExitStack().enter_context(trainer.gate)),
        ("generator", RuntimeError, lambda: next(trainer.stream)),
        ("TextIOWrapper", AttributeError, lambda: trainer.log.write("")),
        ("", RuntimeError, lambda: trainer.mail.put(1)),
        ("", RuntimeError, lambda: trainer.inner["deep"].set()),
    ):
        with pytest.raises(error, match=f"{kind} .*did not copy to this rank"):
            use()
    assert repr(trainer.gate) == snapshot


def test_the_memory_of_large_arrays_is_not_in_the_pickle() -> None:
    large, small, fixed = np.arange(5000.0), np.arange(3), np.arange(2000.0)
    fixed.setflags(write=False)
    names = {"large": large, "same": large, "small": small, "fixed": fixed}
    carried, there = pickle_namespace(names), Names()
    assert [each.nbytes() for each in carried.storages] == [40_000]
    assert len(carried.data) < 20_000
    load_namespace(carried.data, there, [each.clone() for each in carried.storages])
    assert there["large"] is there["same"]
    there["large"][0] = 7
    assert (there["large"][:2].tolist(), large[0]) == ([7.0, 1.0], 0.0)
    assert there["small"].tolist() == [0, 1, 2]
    assert there["fixed"].sum() == fixed.sum()


def test_operators_of_torch_are_transferred_by_name() -> None:
    with FlopCounterMode(display=False) as counter:
        torch.ones(4, 4) @ torch.ones(4, 4)
    operators = [torch.ops.aten.mm, torch.ops.aten.add.Tensor]
    carried = packed({"counter": counter, "operators": operators})
    assert carried.not_carried == {}
    there = opened(carried)
    assert there["operators"] == operators
    assert there["counter"].get_flop_counts() == counter.get_flop_counts()


def test_a_logger_is_transferred_with_its_level() -> None:
    log = logging.getLogger("tests.carried")
    log.setLevel(logging.INFO)
    carried, there = pickle_namespace({"log": log}), Names()
    log.setLevel(logging.NOTSET)
    load_namespace(carried.data, there, carried.storages)
    assert there["log"] is log
    assert log.level == logging.INFO
    assert carried.not_carried == {}


def test_objects_that_cannot_be_transferred_are_named_with_the_reason(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    names = {
        "kept": [1],
        "batches": iter(DataLoader([1, 2])),
        "waiting": threading.Thread(target=print),
        "lock": threading.Lock(),
        "child": Process(target=print),
        "process": psutil.Process(),
        "stream": (each for each in ()),
    }
    path = tmp_path / "text"
    with path.open("w+") as text, path.open("rb") as raw, subprocess.Popen(["true"]) as popen:
        names |= {"text": text, "raw": raw, "inside": {"deep": [raw, popen]}}
        carried = pickle_namespace(names)
    assert carried.names == ("kept", "inside")
    assert carried.not_carried == snapshot


def test_mapped_and_shared_memory_is_named_and_never_shared_with_the_donor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    for name in ("register", "unregister"):  # they would start a process
        monkeypatch.setattr(resource_tracker, name, lambda *_: None)
    path = tmp_path / "data.npy"
    np.save(path, np.zeros(5000))
    with closing(SharedMemory(create=True, size=80)) as segment:
        shared_list = ShareableList([1])
        mapped = np.load(path, mmap_mode="r+")
        names = {"copy": mapped.copy(), "own": torch.from_file(str(path), shared=False, size=5)}
        lost = {
            "segment": segment,
            "shared_list": shared_list,
            "manager": SyncManager(),
            "proxy": DictProxy.__new__(DictProxy),
            "pipe": Pipe()[0],
            "mapped": mapped,
            "raw": segment.buf,
            "inside": np.asarray(mapped[10:]),
            "array": np.frombuffer(segment.buf, np.uint8),
            "tensor": torch.from_file(str(path), shared=True, size=5),
        }
        carried = pickle_namespace({**names, **lost, "dataset": {"rows": mapped}})
        del lost["raw"], lost["array"], names
        segment.unlink()
        shared_list.shm.unlink()
    assert carried.names == ("copy", "own", "dataset")
    assert carried.not_carried == snapshot


def test_untransferable_parts_without_a_name_are_numbered() -> None:
    gates = {(number for number in ()) for _ in range(3)}  # elements of a set have no name
    names = ["a generator in gates", "a generator in gates (2)", "a generator in gates (3)"]
    assert list(pickle_namespace({"gates": gates}).not_carried) == names
