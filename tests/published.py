"""Read published runs with the packages of the trackers, and compute the expected values."""

import json
import math
import sqlite3
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from processes import wait_until

from nbddp.extensions.publish.publisher import read_published

BLOCK, WANDB_HEAD, RECORD_HEAD = 32768, 7, struct.Struct("<IHB")  # checksum, size, kind
WHOLE, LAST = 1, 4

Curves = dict[str, list[tuple[int, float]]]  # by name, each value with its step
NOT_NUMBERS = frozenset({"time", "rank", "attempt", "step"})

FAKE = """
import json, os, sys, time
HOW = os.environ["FAKE_WANDB"]
if HOW == "broken": raise ImportError("no such library")
class Settings:
    def __init__(self, **options): self.sync_dir = "there"
class Table:
    def __init__(self, columns, data): self.data = data
class _Run:
    url, settings, config, summary = "", Settings(), {}, {}
    def define_metric(self, *names, **options): pass
    def log(self, values):
        if HOW == "fails": raise RuntimeError("the disk is full\\nand more")
        if HOW == "blocks": time.sleep(1000)
        if HOW == "dies": os._exit(7)
        print(json.dumps({name: its for name, its in values.items() if name != "nbddp/record"}))
    def finish(self, exit_code): print("finished", exit_code, flush=True)
def init(**options):
    print("noise")
    if HOW == "no key": raise RuntimeError("no API key")
    return _Run()
"""


def run_folder(base: Path) -> Path:
    [folder] = (base / ".nbddp" / "runs").iterdir()
    return folder


def await_whole(folder: Path, tracker: str) -> dict[str, Any]:
    """Wait until a run is published to its end. Return what is recorded of that."""
    has_ended = wait_until(
        lambda: bool(read_published(folder, tracker).get("is_whole")), timeout=120
    )
    assert has_ended, f"see publish-{tracker}.log in {folder}"
    return read_published(folder, tracker)


def fake_wandb(base: Path) -> Path:
    folder = base / "packages" / "wandb"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(FAKE)
    return folder.parent


def expected(folder: Path, *, is_retried: bool) -> Curves:
    """Return the curves of ``metrics.jsonl``, if each attempt has one cell with rising steps.

    Steps that begin again continue after those of the earlier attempts, if they are not retried.
    """
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps: dict[int, set[int]] = defaultdict(set)
    for row in rows:
        steps[row["attempt"]].add(row["step"])
    offsets, end = {}, -1
    for attempt in sorted(steps):
        offsets[attempt] = 0 if is_retried else max(0, end + 1 - min(steps[attempt]))
        end = max(steps[attempt]) + offsets[attempt]
    groups: dict[tuple[str, int, int], dict[int, float]] = defaultdict(dict)
    for row in rows:
        for name in row.keys() - NOT_NUMBERS:
            step = row["step"] + offsets[row["attempt"]]
            groups[name, row["attempt"], step][row["rank"]] = row[name]
    found: Curves = defaultdict(list)
    for (name, _, step), values in groups.items():
        found[name].append((step, sum(values.values()) / len(values)))
        if len(values) > 1:
            found[f"{name}/rank0"].append((step, values[0]))
            found[f"{name}/min"].append((step, min(values.values())))
            found[f"{name}/max"].append((step, max(values.values())))
    return {name: sorted(curve) for name, curve in found.items()}


def same(curve: Sequence[tuple[int, float]], wanted: Sequence[tuple[int, float]]) -> bool:
    """Return whether these are equal in 32-bit precision, which TensorBoard uses."""
    ours, theirs = sorted(curve), sorted(wanted)
    return len(ours) == len(theirs) and all(
        step == wanted_step
        and (math.isclose(value, other, rel_tol=1e-6) or (value != value and other != other))
        for (step, value), (wanted_step, other) in zip(ours, theirs, strict=True)
    )


def of_tensorboard(folder: Path, *, hides: bool = False) -> tuple[Curves, dict[str, str]]:
    """Return curves and texts of a run; with ``hides``, without the data that TensorBoard hides."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [file] = folder.iterdir()
    read = EventAccumulator(
        str(file), size_guidance={"scalars": 0, "tensors": 0}, purge_orphaned_data=hides
    )
    read.Reload()
    curves = {
        tag: [(each.step, each.value) for each in read.Scalars(tag)]
        for tag in read.Tags()["scalars"]
    }
    texts = {
        tag: read.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
        for tag in ("settings", "record", "outcome")
        if tag in read.Tags()["tensors"]
    }
    return curves, texts


def of_wandb(folder: Path) -> tuple[Curves, dict[str, Any], dict[str, Any]]:
    """Return curves, config and summary of the only offline run; check that steps only rise."""
    from wandb.proto.wandb_internal_pb2 import Record

    [file] = (folder / "wandb").glob("offline-run-*/*.wandb")
    curves: Curves = defaultdict(list)
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    last = -1
    for data in _records(file.read_bytes()):
        record = Record.FromString(data)
        for update in (record.run.config.update, record.config.update):
            config |= {each.key: json.loads(each.value_json) for each in update if each.key}
        updates = record.summary.update
        summary |= {_key(each): json.loads(each.value_json) for each in updates}
        values = {_key(each): json.loads(each.value_json) for each in record.history.item}
        if "step" in values:
            assert values["_step"] > last
            last = values["_step"]
            for name, value in values.items():
                if name[0] != "_" and name != "step" and isinstance(value, int | float):
                    curves[name].append((values["step"], float(value)))
    return dict(curves), config, summary


def _records(data: bytes) -> Iterator[bytes]:
    """Return the records of a W&B file, a LevelDB log whose records can span blocks."""
    at, begun = WANDB_HEAD, b""
    while at < len(data):
        room = BLOCK - at % BLOCK
        if room < RECORD_HEAD.size:
            at += room
            continue
        _, size, kind = RECORD_HEAD.unpack_from(data, at)
        at += RECORD_HEAD.size + size
        begun += data[at - size : at]
        if kind in (WHOLE, LAST):
            yield begun
            begun = b""


def _key(item: Any) -> str:
    return item.key or ".".join(item.nested_key)


def of_trackio(folder: Path, project: str, run: str) -> tuple[Curves, dict[str, Any], list[str]]:
    """Return curves, config and reports of the only run of a project."""
    with sqlite3.connect(folder / f"{project}.db") as base:
        rows = base.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
        configs = base.execute("SELECT run_name, config FROM configs").fetchall()
    base.close()
    assert {name for name, *_ in rows} == {run}
    curves: Curves = defaultdict(list)
    reports = []
    for _, step, metrics in rows:
        for name, value in json.loads(metrics).items():
            if isinstance(value, Mapping):
                reports.append(value["_value"])
            else:
                curves[name].append((step, float(value)))
    [(_, config)] = configs
    return dict(curves), json.loads(config), reports


def of_mlflow(uri: str, experiment: str) -> tuple[Curves, dict[str, str], dict[str, str], str]:
    """Return curves, parameters, tags and status of the only run of an experiment."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    [run] = client.search_runs([found.experiment_id])
    curves = {
        name: [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }
    return curves, run.data.params, run.data.tags, run.info.status
