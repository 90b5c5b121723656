"""Panels in a real kernel without a page: the messages that are sent, and their form."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from queue import Empty
from typing import Any

import psutil
import pytest
from drivers.inside import imported
from limits import limit, limits_source
from notebook import Notebook, Reply

from nbddp.magics.notebook_ranks import NotebookRanks
from nbddp.ui.comms.dispatcher import CommDispatcher
from nbddp.ui.comms.kernel_stream import DispatchMode
from nbddp.ui.frontend import EMPTY_OUTPUT
from nbddp.ui.panel.panel_view import PANELS_KEPT

pytestmark = pytest.mark.multiproc

WIDGET = "application/vnd.jupyter.widget-view+json"
ALL_WIDGETS = """
from ipywidgets.widgets import widget
all_widgets = widget._instances if hasattr(widget, "_instances") else widget.Widget.widgets
"""
FALLBACK = '<div class="nbddp-fallback">'
FLOOD = """
for step in range(20_000):
    print(f"{step:05} " + "x" * 60)
    if step % 2:
        nbddp.log(step=step, loss=1 / (step + 1), rank_times_step=rank * step)
"""
WAIT = "buttons wait"  # the panel's text about the buttons
DONE = "done on ranks 0-1"
GO_ON = "import pathlib, time\nwhile not pathlib.Path('go_on').exists(): time.sleep(0.02)\n"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with Notebook(tmp_path_factory.mktemp("page"), is_page=True) as page:
        yield page


@pytest.fixture
def page(kernel: Notebook) -> Iterator[Notebook]:
    """The page, with two ranks, which are stopped after each test."""
    assert kernel.run("%ddp start --nproc 2").status == "ok"
    yield kernel
    assert kernel.run("%ddp view auto").status == "ok"
    assert kernel.run("%ddp stop").status == "ok"


def final(reply: Any) -> dict[str, Any]:
    [shown] = panels(list(reply.places.values()))
    return shown


def panels(bundles: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the line that says how to get a record, and the buttons under a failure's."""
    return [
        bundle
        for bundle in bundles
        if FALLBACK not in bundle.get("text/html", "")
        and not (WIDGET in bundle and not bundle["text/plain"])
    ]


def fallbacks(bundles: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in bundles if FALLBACK in each.get("text/html", "")]


@contextmanager
def no_panel_opens(page: Notebook) -> Iterator[None]:
    """Any cell is a short one, however slow the machine is: a second is a minute."""
    page.run(limits_source(panel_opens_after=60.0))
    yield
    page.run(limits_source(panel_opens_after=limit("panel_opens_after")))


def has_panel(reply: Reply) -> bool:
    return any(WIDGET in each for each in (*reply.displays, *reply.updates))


def test_long_cell_shows_widgets_until_its_record(page: Notebook) -> None:
    reply = page.run_until(f"%%ddp\n{GO_ON}print('late')", has_panel)
    assert WIDGET in reply.displays[0]
    assert "`%ddp view text`" in reply.displays[0]["text/plain"]
    [line] = fallbacks(reply.displays)
    way = re.match(r"`(%ddp show \S+ --cell \d+)`", line["text/plain"])
    assert way is not None
    assert {each["text/plain"] for each in fallbacks(reply.updates)} == {""}, "the record is there"
    assert "rank 1\n  late" in page.run(way[1]).displays[0]["text/plain"]
    assert "late" in final(reply)["text/html"]


def test_widgets_of_finished_cells_are_closed_after_later_cells(page: Notebook) -> None:
    page.run(
        f"{ALL_WIDGETS}{imported(CommDispatcher)}"
        "CommDispatcher.for_shell(get_ipython())._to_close.clear()\n"
        "widget.Widget.close_all()"
    )
    counts = []
    for _ in range(PANELS_KEPT + 2):
        page.run_until(f"%%ddp\n{GO_ON}", has_panel)
        counts.append(int(page.run("len(all_widgets)").result))
    grown = [after - before for before, after in pairwise(counts)]
    assert grown[-1] < grown[0] / 10


def test_cell_of_half_a_second_shows_its_output_without_widgets(page: Notebook) -> None:
    early = ["[rank 0] early", "[rank 1] early"]

    def has_lines(reply: Reply) -> bool:
        drawn = [*reply.displays, *reply.updates]
        return any(sorted(each["text/plain"].splitlines()) == early for each in drawn)

    with no_panel_opens(page):
        reply = page.run_until(f"%%ddp\nprint('early')\n{GO_ON}print('late')", has_lines)
        silent = page.run("%%ddp\nimport time\ntime.sleep(0.6)\nworld_size")
    assert not has_panel(reply)
    assert "running" in reply.displays[0]["text/html"]
    assert "<details>" in reply.displays[0]["text/html"], "folded, as the record will be"
    assert set(reply.displays[0]["text/plain"].splitlines()) <= set(early)
    assert DONE in final(reply)["text/html"]
    assert fallbacks(reply.displays) == []
    # a cell that prints nothing shows nothing until it is over, or a second has gone
    [shown] = silent.displays
    assert shown["text/plain"] == "Out [ranks 0-1] 2"
    assert DONE in shown["text/html"]
    assert (silent.updates, silent.text) == ([], "")


def test_death_of_a_rank_is_an_event_and_not_a_line_of_the_log(page: Notebook) -> None:
    died = page.run(
        "%%ddp\nimport os, time\nif rank: os._exit(4)\nprint('so', 'long', flush=True)\n"
        "time.sleep(1)"
    )
    shown = final(died)["text/html"]
    assert "so long" in shown
    assert '"nbddp-events"' in shown
    assert "nbddp: rank 1" not in shown


def test_capture_hides_neither_a_failure_nor_a_refused_cell(page: Notebook) -> None:
    died = page.run("%%capture\n%%ddp\nif rank: import os; os._exit(4)")
    refused = page.run("%%capture\n%%ddp\nrank")
    for reply in (died, refused):
        assert "rank 1 exited with code 4" in reply.traceback
        assert "%ddp heal" in reply.traceback


def test_cell_that_starts_ranks_announces_the_start_in_its_panel(page: Notebook) -> None:
    page.run("%ddp stop")
    failed = page.run("%%ddp --nproc 2 --backend nccl\nrank")
    assert "starting 2 ranks" in failed.displays[0]["text/html"]
    assert failed.updates[-1] == EMPTY_OUTPUT
    assert "nccl" in failed.text
    for magic, words in (
        ("%%ddp --nproc 3", "starting 3 ranks"),
        ("%%ddp --fresh --nproc 1", "restarting 1 rank"),
    ):
        reply = page.run(f"{magic}\nrank")
        for kind in ("text/html", "text/plain"):
            assert words in reply.displays[0][kind]
        assert "done on rank" in final(reply)["text/html"]
        assert "starting" not in final(reply)["text/html"]
    with no_panel_opens(page):
        assert page.run("%%ddp\nrank").updates == []  # they are there


def run_twice(page: Notebook, source: str, first_shows: str) -> tuple[str, Reply]:
    """Run a cell, and again once it shows a text: JupyterLab drops what the first one shows."""
    (page.folder / "go_on").unlink(missing_ok=True)
    request = page.begin(source)
    assert page.read_until(
        request, Reply(), lambda it: first_shows in str(it.displays + it.updates)
    )
    return page.begin(source), Reply()


@pytest.mark.parametrize("moment", ["early", "starting 2 ranks"])
def test_cell_that_is_run_again_before_its_panel_opens_is_shown_and_keeps_its_record(
    page: Notebook, moment: str
) -> None:
    if moment != "early":
        page.run("%ddp stop")
    cell = f"%%ddp --nproc 2\nprint('early')\n{GO_ON}"
    with no_panel_opens(page):
        again, reply = run_twice(page, cell, moment)
        assert page.read_until(again, reply, lambda it: "early" in str(it.places))
        page.interrupt()
        page.finish(again, so_far=reply)
    assert reply.status == "aborted"
    assert "interrupted" in final(reply)["text/html"]


def test_cell_that_is_run_again_during_a_start_that_fails_shows_the_error(page: Notebook) -> None:
    page.run(
        f"{imported(NotebookRanks)}import time\nensure = NotebookRanks.ensure_started\n"
        "def fail(ranks, *_, **__):\n    view = ranks.presenter._starting_panel\n"
        "    while view._served.rerun is None:\n"  # until the kernel has the second request
        "        view._comms.process_pending()\n        time.sleep(0.02)\n"
        "    raise OSError('no ranks')\n"
        "NotebookRanks.ensure_started = fail"
    )
    page.run("%ddp stop")
    again, reply = run_twice(page, "%%ddp --nproc 2\nrank", "starting 2 ranks")
    page.finish(again, so_far=reply)
    page.run("NotebookRanks.ensure_started = ensure")
    assert "OSError: no ranks" in reply.error
    assert list(reply.places.values()) == [EMPTY_OUTPUT]


def test_rich_output_is_shown_below_the_panel(page: Notebook) -> None:
    cell = (
        "%%ddp\nfrom IPython.display import HTML, display\n"
        "if rank == 1: display(HTML('<b>bold</b>'))\n"
        f"{GO_ON}HTML('<i>value</i>')"  # it still runs when that is shown
    )
    with no_panel_opens(page):
        reply = page.run_until(cell, lambda it: "<b>bold</b>" in str(it.displays))
    kinds = [next(iter(set(each) - {"text/plain"})) for each in panels(reply.displays)]
    assert kinds == ["text/html"] * 3
    first, *others = panels(reply.displays)
    assert "running" in first["text/html"]
    assert [each["text/html"] for each in others] == ["<b>bold</b>", "<i>value</i>"]
    assert reply.text == "[rank 1]\n[ranks 0-1]\n"


def test_findings_are_shown_in_the_record_and_by_ddp_check(page: Notebook) -> None:
    html = final(page.run("%%ddp\ntorch.save({}, 'model.pt')"))["text/html"]
    assert "possible mistake, line 2: " in html
    assert "every rank writes &#x27;model.pt&#x27;" in html
    [checked] = page.run("%ddp check").displays
    assert "every rank writes &#x27;model.pt&#x27;" in checked["text/html"]


def test_failure_is_shown_in_the_record_and_in_one_line_below(page: Notebook) -> None:
    reply = page.run("%%ddp\nif rank == 1: raise ValueError('<b>no</b>')\ndist.barrier()")
    assert reply.status == "error"
    assert reply.traceback == "rank 1: ValueError: <b>no</b>, line 2 (more above)"
    html = final(reply)["text/html"]
    assert "rank 1: ValueError: &lt;b&gt;no&lt;/b&gt;, line 2" in html
    assert "<b>" not in html


def test_restarted_cell_has_one_record_that_begins_with_the_outcome(page: Notebook) -> None:
    reply = page.run(
        "%%ddp --max-restarts 2\nimport time\nfrom pathlib import Path\n"
        "saved = Path('saved')\nbegin = int(saved.read_text()) if saved.exists() else 0\n"
        "for step in range(begin, 6):\n"
        "    nbddp.log(step=step, loss=step)\n    time.sleep(0.2)\n    dist.barrier()\n"
        "    if step in (2, 4) and begin < step and rank == 1:\n"
        "        saved.write_text(str(step)); raise ValueError(step)"
    )
    assert (reply.status, reply.text) == ("ok", "")
    html = final(reply)["text/html"]
    assert re.search(rf"{DONE} .*\b2 restarts, \d+\.\d s lost</span>", html)
    for step in (2, 4):
        folded = rf"<summary>[^/]*</span><span [^>]*>attempt \d+: rank 1: ValueError: {step}, "
        assert re.search(folded, html)
    assert html.count('class="nbddp-image" alt="loss"') == 1
    assert "%ddp restart" not in html
    assert re.search("rank 1: ValueError: 4, line 11;.* 2 of 2", html)


def test_view_switches_to_text_and_back_and_quiet_cells_show_only_values(page: Notebook) -> None:
    page.run("%ddp view text")
    assert page.run("%%ddp --ranks 0\nprint(1)").text == "[rank 0] 1\n"
    page.run("%ddp view panel")
    assert "[rank 0] 1" in final(page.run("%%ddp --ranks 0\nprint(1)"))["text/plain"]
    assert "'loud'" in page.run("%ddp view loud").text
    assert page.run("%%ddp --quiet\nprint('x')\nrank * 0").text == "Out [ranks 0-1] 0\n"


def test_error_of_the_panel_is_told_once_and_the_cell_is_followed_on(page: Notebook) -> None:
    parts = "drawn.rank_blocks, shown.record_html"
    page.run(
        "import nbddp.ui.panel.widgets as drawn, nbddp.ui.panel.panel_view as shown\n"
        f"were = {parts}\n{parts} = [lambda *_, **__: 1 / 0] * 2"
    )
    reply = page.run_until(f"%%ddp\n{GO_ON}", has_panel)
    assert reply.status == "ok"
    assert reply.text.count("cannot be shown (ZeroDivisionError: division by zero)") == 1
    reply = page.run("%%ddp\nraise ValueError('of the user')")
    assert "ValueError: of the user, line 2" in reply.traceback
    page.run(f"{parts} = were")


def test_output_flood_is_complete_in_files_and_bounded_in_kernel_memory(page: Notebook) -> None:
    page.run("%%ddp --fresh --name flood\nnbddp.log(step=0, warm=1)\nprint('warm')")  # matplotlib
    kernel = psutil.Process(page.pid)
    before = kernel.memory_info().rss
    reply = page.run(f"%%ddp\n{FLOOD}")
    assert reply.status == "ok"
    assert kernel.memory_info().rss - before < 100 << 20
    assert len(final(reply)["text/html"]) < 1 << 20
    earlier = r"^\d+,\d+ .* \.nbddp/runs/\S+/rank\*\.log$"
    assert re.search(earlier, final(reply)["text/plain"], re.MULTILINE)
    [run] = (page.folder / ".nbddp" / "runs").glob("*-flood")
    for rank in range(2):
        assert len((run / f"rank{rank}.log").read_text().splitlines()) == 20_001
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert Counter(row["rank"] for row in rows if "loss" in row) == {0: 10_000, 1: 10_000}


def test_panel_in_an_unknown_kernel_says_that_buttons_wait(page: Notebook) -> None:
    page.run(
        f"{imported(CommDispatcher, DispatchMode)}live = CommDispatcher.for_shell(get_ipython())\n"
        "known, live._kernel_mode = live._kernel_mode, DispatchMode.NONE"
    )
    reply = page.run_until(f"%%ddp\n{GO_ON}", has_panel)
    assert any(WAIT in text for text in reply.widget_texts)
    page.run("live._kernel_mode = known")
    reply = page.run_until(f"%%ddp\n{GO_ON}", has_panel)
    assert not any(WAIT in text for text in reply.widget_texts)


def test_kernel_shut_down_with_an_open_panel_prints_no_traceback(tmp_path: Path) -> None:
    with Notebook(tmp_path, is_page=True) as page:
        request, reply = page.begin(f"%%ddp --nproc 2\n{GO_ON}"), Reply()
        assert page.read_until(request, reply, has_panel)
        page.shut_down()
        with suppress(Empty):
            page.finish(request, so_far=reply, timeout=3)
    assert "Traceback" not in reply.text
    assert "nbddp/" not in reply.text
    assert any("interrupted" in str(each) for each in (*reply.displays, *reply.updates))
