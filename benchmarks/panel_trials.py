"""One round of each case: its steps on the page, and the samples that it yields."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import panel_work
from browser.lab import Lab
from panel_page import RANKS, BenchError, BenchPage, opened

PANEL, TEXT, QUIET, PLAIN = "panel", "text", "--quiet", "plain cell"
SILENT, CHATTY, FLOODING = "panel, silent ranks", "panel, chatty ranks", "panel, flooding ranks"
CROWDED, CROWD = "panel, 64 ranks", 64
LAB, LAB_PLAIN = "JupyterLab's stop", "JupyterLab's stop, plain cell"
BUSY_FRACTION = 0.5  # longest part of a second between a cell's line and the press of a button
WARM_UP = 1.5  # seconds of chatter

# measure and contender -> samples
Samples = defaultdict[tuple[str, str], list[float]]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The amount of work in each case."""

    ticks: int
    presses: int
    busy_seconds: float
    flood_lines: int
    patience: float  # seconds that a page has to show the output of a cell after its end


FULL = Sizes(ticks=25, presses=2, busy_seconds=10.0, flood_lines=20_000, patience=20.0)
QUICK = Sizes(ticks=6, presses=1, busy_seconds=1.5, flood_lines=1_000, patience=5.0)


def select_view(page: BenchPage, view: str) -> None:
    """Select the view of later cells."""
    page.run(f"%ddp view {view}")


def cell(call: str, options: str = "") -> str:
    """Return a cell that makes this call on every rank."""
    return f"%%ddp {options}\nimport panel_work\npanel_work.{call}"


# ---- print to DOM


def time_prints(page: BenchPage, contender: str, sizes: Sizes, samples: Samples) -> None:
    """Measure the time of single lines from ``print`` to the page."""
    call = f"ticks({sizes.ticks} if rank == 0 else 0)"
    source = cell(call)
    if contender == PLAIN:
        source = f"panel_work.ticks({sizes.ticks}, flush=True)"
    else:
        select_view(page, contender)
    page.ask("lookFor(it)", r"(tick|first) \d+\.\d+ \.")
    page.run(source)
    page.ask("lookAway()")
    delays = defaultdict(list)
    for text, at in page.ask("seen").items():
        kind, printed, _ = text.split()
        delays[kind].append(at - float(printed))
    if len(delays["tick"]) != sizes.ticks:
        raise BenchError(f"{len(delays['tick'])} of {sizes.ticks} ticks were seen, as {contender}")
    samples["print", contender] += delays["tick"]
    samples["first", contender].append(min(delays["first"]))


# ---- buttons


def pause() -> None:
    """Sleep for a random time that matches no period."""
    time.sleep(0.3 + random.uniform(0, BUSY_FRACTION))


def start_interruptible(page: BenchPage, work: str, label: str) -> list[str]:
    """Start a cell that records its interrupt; return the files of its ranks."""
    page.begin(cell(f"wait_for_interrupt(f'{label}-{{rank}}', panel_work.{work})"))
    names = [f"{label}-{rank}" for rank in range(RANKS)]
    for name in names:
        page.wait_for_file(f"{name}.up")
    return names


def record_interrupts(
    page: BenchPage, contender: str, names: list[str], pressed: float, samples: Samples
) -> None:
    """Record how long the last rank took to be interrupted."""
    page.finish()
    at = [float((page.folder / name).read_text()) for name in names]
    samples["interrupt", contender].append(max(at) - pressed)


def time_log_selector(page: BenchPage, samples: Samples) -> None:
    """Measure the log selector and Hold in a running panel."""
    page.wait_for_text("up", count=RANKS)
    page.ask("noteChanges(it)", ".nbddp-scroll")
    for label, value in (("rank 1", "1"), ("all", "-1")):
        pause()
        pressed = page.press(page.notebook.button(label))
        samples["choose", PANEL].append(page.handled(value, pressed) - pressed)
        changes = page.wait_until(
            lambda since=pressed: [at for at in page.ask("changes") if at > since], "another log"
        )
        samples["chosen", PANEL].append(changes[0] - pressed)
    page.ask("lookAway()")
    for value in ("True", "False"):
        pause()
        pressed = page.press(page.notebook.button("Hold"))
        samples["hold", PANEL].append(page.handled(value, pressed) - pressed)


def time_buttons(page: BenchPage, turn: str, samples: Samples) -> None:
    """Press every button once, JupyterLab's included."""
    select_view(page, "panel")
    names = start_interruptible(page, "idle", f"panel-{turn}")
    time_log_selector(page, samples)
    time_interrupt(page, PANEL, names, samples)
    time_interrupt(page, CHATTY, start_interruptible(page, "chatter", f"chatty-{turn}"), samples)
    time_interrupt(page, FLOODING, start_interruptible(page, "flood", f"flood-{turn}"), samples)
    time_stop(page, LAB, start_interruptible(page, "idle", f"lab-{turn}"), samples)
    page.begin(f"panel_work.wait_for_interrupt('plain-{turn}', panel_work.idle)")
    page.wait_for_file(f"plain-{turn}.up")
    time_stop(page, LAB_PLAIN, [f"plain-{turn}"], samples)
    time_kill(page, turn, samples)


def time_interrupt(page: BenchPage, contender: str, names: list[str], samples: Samples) -> None:
    """Press the panel's Interrupt button."""
    pause()
    pressed = page.press(page.notebook.button("Interrupt"))
    samples["handler", contender].append(page.handled("Interrupt", pressed) - pressed)
    record_interrupts(page, contender, names, pressed, samples)


def time_stop(page: BenchPage, contender: str, names: list[str], samples: Samples) -> None:
    """Press JupyterLab's stop button."""
    pause()
    record_interrupts(page, contender, names, page.press(page.stop_button()), samples)


def time_kill(page: BenchPage, turn: str, samples: Samples) -> None:
    """Kill a rank, and restart the group."""
    start_interruptible(page, "idle", f"kill-{turn}")
    victim = random.randrange(RANKS)
    page.page.locator(".nbddp-buttons select").select_option(str(victim))
    pause()
    page.notebook.button("Kill").click()
    pressed = page.press(page.notebook.button(r"Kill\?"))
    samples["kill", PANEL].append(page.exited(victim, pressed) - pressed)
    page.finish(fails=True)
    page.run("%ddp restart")


# ---- CPU


def meter_cpu(page: BenchPage, contender: str, sizes: Sizes, samples: Samples) -> None:
    """Measure the CPU time of kernel and browser per second of a cell."""
    work = "silence" if contender == SILENT else "chatter"
    source = cell(f"{work}({sizes.busy_seconds})", "--quiet" if contender == QUIET else "")
    if contender == PLAIN:
        source = f"panel_work.chatter({sizes.busy_seconds}, times={RANKS})"
    select_view(page, TEXT if contender in (TEXT, QUIET) else PANEL)
    before = page.browser_seconds()
    cost = page.run_metered(source, limit=sizes.patience)
    browser = page.browser_seconds() - before
    if cost.seconds > 1.2 * sizes.busy_seconds + 1:
        raise BenchError(f"the ranks could not keep pace: {cost.seconds:.1f} s, as {contender}")
    samples["kernel", contender].append(cost.cpu / cost.seconds)
    samples["browser", contender].append(browser / cost.seconds)
    samples["lag", contender].append(cost.lag)


def meter_crowd(lab: Lab, name: str, sizes: Sizes, samples: Samples) -> None:
    """Measure the CPU time with many ranks that together print as much as four chatty ones."""
    with opened(lab, name, CROWD) as page:
        select_view(page, PANEL)
        page.run(cell(f"murmur({WARM_UP})"))
        cost = page.run_metered(cell(f"murmur({sizes.busy_seconds})"), limit=sizes.patience)
        samples["crowd", CROWDED].append(cost.cpu / cost.seconds)


# ---- flood


def warm_up(page: BenchPage) -> None:
    """Load and use everything once before CPU and memory are measured."""
    page.run(cell(f"chatter({WARM_UP})"))


def flood(lab: Lab, name: str, contender: str, sizes: Sizes, samples: Samples) -> None:
    """Print as fast as possible on all ranks, in a separate kernel: it does not return memory."""
    with opened(lab, name) as page:
        select_view(page, contender)
        warm_up(page)
        page.ask("watchFrames()")
        with page.watching_memory() as rss:
            cost = page.run_metered(cell(f"flood({sizes.flood_lines})"), limit=sizes.patience)
        samples["frame", contender].append(page.ask("longestFrame()"))
        samples["flood", contender].append(cost.seconds)
        samples["flood lag", contender].append(cost.lag)
        samples["rss", contender].append((max(rss) - rss[0]) / 2**20)
        samples["shown", contender].append(page.ask("text()").count("xxxx\n"))
        samples["logs", contender].append(share_in_logs(page, sizes))
        samples["metrics", contender].append(share_in_metrics(page, sizes))


def share_in_logs(page: BenchPage, sizes: Sizes) -> float:
    """Return the share of lines in the ranks' logs that are whole and in order."""
    good = 0
    for rank in range(RANKS):
        lines = (page.run_folder() / f"rank{rank}.log").read_text().splitlines()
        lines = lines[-sizes.flood_lines :]  # after those of the warm-up
        wanted = [panel_work.line(number) for number in range(sizes.flood_lines)]
        good += sum(line == want for line, want in zip(lines, wanted, strict=False))
    return good / (RANKS * sizes.flood_lines)


def share_in_metrics(page: BenchPage, sizes: Sizes) -> float:
    """Return the share of rows in ``metrics.jsonl`` that come once and in order for each rank."""
    rows = page.metrics("flood")
    good = 0
    for rank in range(RANKS):
        steps = [step for each, step in rows if each == rank]
        good += bool(steps) + sum(after - before == 2 for before, after in pairwise(steps))
    return good / (RANKS * sizes.flood_lines / 2)
