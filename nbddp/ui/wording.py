"""Durations, rates, states and events in words, for text and for the panel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from nbddp.formatting import (
    format_bytes,
    format_line,
    format_ranks,
    format_seconds,
    list_some,
    plural,
)
from nbddp.record.collectives.collective_matcher import Straggler
from nbddp.record.collectives.stragglers import StragglerLag
from nbddp.record.metrics import spread
from nbddp.record.rank_monitor import LoopProgress
from nbddp.record.run_events import RanksStarted, RunEvent
from nbddp.record.snapshot import RankSnapshot, Snapshot

MAX_NAMED = 20  # metrics that are not shown


def format_rate(per_second: float) -> str:
    """Format a rate; return an empty text for an unknown rate, which is 0.

    >>> format_rate(1234.5), format_rate(12.34), format_rate(0.05), format_rate(0)
    ('1,234/s', '12.3/s', '20.0 s each', '')
    """
    if per_second <= 0:
        return ""
    if per_second < 0.2:
        return f"{format_seconds(1 / per_second)} each"
    return f"{per_second:,.0f}/s" if per_second >= 100 else f"{per_second:.1f}/s"


def format_last(values: Mapping[int, float]) -> str:
    """Return the mean over ranks, and the lowest and highest value if they differ.

    >>> [format_last(each) for each in ({0: 1.0, 1: 2.0}, {0: 0.5}, {}, {0: float("nan")})]
    ['1.5 (1 to 2)', '0.5', '', 'nan']
    """
    if not values:
        return ""
    mean, low, high = (f"{value:.4g}" for value in spread(values).values())
    return mean if low == high else f"{mean} ({low} to {high})"


def note_hidden_metrics(names: Sequence[str], count: int) -> list[str]:
    """Return a line that names metrics that are not shown; no line if ``count`` is 0."""
    named = list_some(names, MAX_NAMED, more=count - len(names))
    many = f"{plural(count, 'more metric')} ({named})"
    show = f"{many}: `%ddp show --metrics NAME` shows them, metrics.jsonl has them all"
    return [show] if count else []


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format the rows of a table as lines with aligned columns.

    >>> align_columns([("rank", "state"), ("10", "ready")])
    ['rank  state', '10    ready']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def format_rank_tag(ranks: Sequence[int], mark: str = "") -> str:
    """Return the tag before a line that these ranks printed.

    >>> format_rank_tag((0,)), format_rank_tag((0, 1, 2), "Out")
    ('[rank 0]', 'Out [ranks 0-2]')
    """
    return " ".join(filter(None, (mark, f"[{format_ranks(ranks)}]")))


def format_step(rank: RankSnapshot) -> str:
    """Return the step of a rank and its steps per second."""
    if rank.step is None:
        return ""
    rate = format_rate(rank.steps_per_second)
    return f"{rank.step:.0f}" + (f" · {rate}" if rate else "")


def describe_lag(lag: StragglerLag) -> str:
    """Say why a rank is marked as slow.

    >>> describe_lag(StragglerLag(0.384, 11.6))
    'slow: the others wait for it 38 % of the time, over 11.6 s'
    >>> describe_lag(StragglerLag(0.25, 9.7, is_waited_for=False))
    'slow: 25 % fewer steps a second than the others, over 9.7 s'
    """
    over = f"over {format_seconds(lag.seconds)}"
    if lag.is_waited_for:
        return f"slow: the others wait for it {100 * lag.share:.0f} % of the time, {over}"
    return f"slow: {100 * lag.share:.0f} % fewer steps a second than the others, {over}"


def describe_armed(faults: Sequence[str]) -> str:
    """List the armed faults, and say how to disarm them.

    >>> describe_armed(["kill@rank=1,step=30"])
    'armed faults: kill@rank=1,step=30; `%ddp fault off` disarms all'
    """
    if not faults:
        return "no fault is armed"
    return f"armed faults: {' '.join(faults)}; `%ddp fault off` disarms all"


def describe_straggler(straggler: Straggler) -> str:
    """Say which rank the others wait for, how long, before which collective, and at which line.

    >>> call = "all_reduce float [72]"
    >>> describe_straggler(Straggler(2, 0.384, 8.3, 100, call, (9, ""), numbers=(7, 106)))
    'rank 2 made the others wait 38 % of the last 100 steps, mostly before all_reduce float [72] \
(#7 to #106), while it was at line 9'
    >>> describe_straggler(Straggler(1, 0.5, 8.3, 0, "barrier", (9, "train.py"), is_loading=True))
    'rank 1 made the others wait 50 % of the last 8.3 s, mostly before barrier, \
while it waited for data at train.py line 9'
    """
    over = f"{straggler.steps} steps" if straggler.steps > 1 else format_seconds(straggler.seconds)
    percent = f"{100 * straggler.share:.0f} %"
    waits = f"rank {straggler.rank} made the others wait {percent} of the last {over}"
    before = f"mostly before {straggler.title}{_numbers(straggler)}" if straggler.title else ""
    at = f"at {format_line(*straggler.place)}" if straggler.place else ""
    activity = "while it waited for data" if straggler.is_loading else "while it was" if at else ""
    return ", ".join(filter(None, (waits, before, " ".join(filter(None, (activity, at))))))


def _numbers(straggler: Straggler) -> str:
    first, last = straggler.numbers or (0, 0)
    if not last:
        return ""
    return f" (#{first})" if first == last else f" (#{first} to #{last})"


def format_progress_bar(
    bar: LoopProgress, *, is_short: bool = False, is_active: bool = True
) -> str:
    """Return the count of a loop, its rate, and the time left while it runs.

    >>> format_progress_bar(LoopProgress("epoch 1", 20, 80, 4.0))
    'epoch 1 20/80 · 5.0/s · 12.0 s left'
    >>> format_progress_bar(LoopProgress("", 20, 0, 4.0))
    '20 · 5.0/s'
    """
    count = f"{bar.done}/{bar.total}" if bar.total else f"{bar.done}"
    seconds = bar.seconds_left if is_active else None
    rest = f"{format_seconds(seconds)} left" if seconds else ""
    rate = "" if is_short and rest else format_rate(bar.per_second)
    parts = (f"{bar.label} {count}".strip(), rate, rest)
    return " · ".join(filter(None, parts))


def describe_group(snapshot: Snapshot) -> list[str]:
    """Return the facts about a group: ranks, backend, devices and attempt."""
    count = len(snapshot.ranks)
    nodes = len({each.node for each in snapshot.ranks if each.node})
    on = f" on {plural(nodes, 'node')}" if nodes else ""
    ranks = f"{plural(count, 'rank')}{on}"
    facts = [ranks, snapshot.backend, format_devices(snapshot)]
    return [*filter(None, facts), f"attempt {snapshot.attempt}"]


def format_devices(snapshot: Snapshot) -> str:
    """Return the devices of all ranks.

    >>> from nbddp.lifecycle.group_state import GroupState
    >>> format_devices(Snapshot(state=GroupState.IDLE, devices=("cuda:0", "cuda:1")))
    'cuda:0,1'
    """
    kinds: dict[str, list[str]] = {}
    for device in dict.fromkeys(snapshot.devices):
        kind, _, index = device.partition(":")
        kinds.setdefault(kind, []).append(index)
    return ", ".join(f"{kind}:{','.join(at)}" if any(at) else kind for kind, at in kinds.items())


def describe_refused(count: int) -> str:
    """Say how many forged messages were rejected; return an empty text for none."""
    if not count:
        return ""
    what = "message was" if count == 1 else "messages were"
    return f"{count} {what} refused: not signed by this group"


def relative_path(path: str) -> str:
    """Return a path relative to the notebook's folder, if it is in that folder."""
    with suppress(ValueError, FileNotFoundError):
        return str(Path(path).relative_to(Path.cwd()))
    return path


def describe_events(snapshot: Snapshot) -> list[tuple[RunEvent, str, str]]:
    """Return the events to show, each with its time after the start and its text."""
    return [
        (event, format_seconds(max(0.0, event.time - snapshot.began)), text)
        for event in snapshot.events
        if (text := event.describe())
        # the title has the attempt
        if not (isinstance(event, RanksStarted) and event.time <= snapshot.began)
    ]


def gpu_facts(rank: RankSnapshot) -> Iterator[str]:
    """Yield facts about the GPU, the most important first: a narrow table cuts the end."""
    usage = rank.gpu_usage
    if not rank.gpu:
        return
    if usage.load >= 0:
        yield f"{usage.load:.0f} %"
    if rank.gpu_memory:
        yield format_bytes(rank.gpu_memory)
    if rank.gpu_ranks:
        yield f"shared with {format_ranks(rank.gpu_ranks)}"
    if usage.used_by_others > 0:
        yield f"others {format_bytes(usage.used_by_others)}"
    yield rank.gpu.removeprefix("NVIDIA ").removeprefix("Tesla ").removeprefix("GeForce ")


def format_gpu_facts(rank: RankSnapshot) -> str:
    """Return all facts about the GPU, one on each line."""
    usage = rank.gpu_usage
    tensors, reserved = format_bytes(rank.gpu_memory), format_bytes(rank.gpu_reserved)
    lines = [rank.gpu, f"rank {rank.rank}: {tensors} in tensors, {reserved} reserved by torch"]
    if usage.used_by_others >= 0:
        lines.append(f"other processes: {format_bytes(usage.used_by_others)}")
    if usage.total:
        lines.append(f"in use: {format_bytes(usage.used)} of {format_bytes(usage.total)}")
    if usage.load >= 0:
        lines.append(f"busy: {usage.load:.0f} % of the last second")
    if rank.gpu_ranks:
        lines.append(f"shared with {format_ranks(rank.gpu_ranks)}")
    return "\n".join(lines)
