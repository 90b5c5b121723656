"""Charts on a page: tooltips, highlighted ranks, scales, and the saved form."""

import re
from collections.abc import Iterator
from typing import Any

import nbformat
import pytest
from playwright.sync_api import Locator, expect

from browser.conftest import IN_BROWSER, START
from browser.lab import LabNotebook
from browser.lab_page import LabPage
from nbddp.charts.palette import LIGHT, rank_color

pytestmark = [pytest.mark.full, *IN_BROWSER]

LONG = """%%ddp
import time
from pathlib import Path
more = {f"m{number}": number for number in range(14)}
for step in range(4000):
    nbddp.log(step=step, loss=2 / (step + 1) + rank + 1, **more)
    time.sleep(0.05)
    if step % 50 == 0:
        print("step", step)
    if Path("enough").exists():
        break
"""
SHORT = """%%ddp
for step in range(400):
    nbddp.log(step=step, loss=2 / (step + 1) + rank + 1)
"""
FAILING = f"{SHORT}if rank == 1: raise ValueError('no more')"
RED = "rgb(216, 52, 52)"


@pytest.fixture
def notebook(lab_page: LabPage, request: pytest.FixtureRequest) -> Iterator[LabNotebook]:
    cells = [START, LONG, SHORT, FAILING, "1 + 1"]
    with lab_page.open(f"{request.node.name}.ipynb", *cells) as notebook:
        notebook.run(0)
        yield notebook


def shown(element: Locator, pseudo: str) -> str:
    """Return the generated content of the style sheet; a replaced element has no style."""
    script = f"each => getComputedStyle(each, '{pseudo}').content"
    return next(content for _ in range(50) if (content := str(element.evaluate(script))))


def chart_of(notebook: LabNotebook, name: str = "loss") -> Locator:
    chart = notebook.page.locator(".nbddp-chart")
    return chart.filter(has=notebook.page.locator(f"svg[aria-label^='{name}: ']"))


def points_at_values(notebook: LabNotebook) -> None:
    chart = chart_of(notebook)
    tip = chart.locator(".nbddp-plot:visible .nbddp-tip").first
    tip.hover()
    text = shown(tip, "::after")
    assert re.search(r"step \d+\\?.*mean .*rank 0 .*rank 1 ", text, re.DOTALL), text


def lets_a_rank_stand_out(notebook: LabNotebook) -> None:
    chart = chart_of(notebook)
    chart.locator(".nbddp-key.nbddp-r1").hover()
    plot = chart.locator(".nbddp-plot:visible")
    expect(plot.locator(".nbddp-curve.nbddp-r1")).to_have_css("opacity", "1")
    expect(plot.locator(".nbddp-curve.nbddp-r0")).to_have_css("opacity", "0.15")
    expect(plot.locator(".nbddp-curve").last).to_have_css("opacity", "0.15")
    color = hex_to_css(LIGHT[1])
    expect(chart.locator(".nbddp-key.nbddp-r1")).to_have_css("color", color)
    expect(plot.locator(".nbddp-curve.nbddp-r1 path[stroke]")).to_have_css("stroke", color)
    notebook.page.mouse.move(0, 0)


def fill_a_row(area: Locator) -> bool:
    """Whether the charts stand side by side, and are as wide as their place but for a gap."""
    charts: list[Any] = [
        chart.bounding_box() for chart in area.locator(".nbddp-chart:visible").all()
    ]
    place: Any = area.bounding_box()
    right = max(box["x"] + box["width"] for box in charts)
    is_one_row = len({round(box["y"]) for box in charts}) == 1
    return is_one_row and abs(place["x"] + place["width"] - right) < 14


def test_charts_of_a_cell_react_to_pointer_and_controls(
    lab_page: LabPage, notebook: LabNotebook
) -> None:
    notebook.begin(1)
    notebook.await_text(1, r"step 0$")
    chart = chart_of(notebook)
    expect(chart).to_contain_text("mean of 2 ranks")
    points_at_values(notebook)
    lets_a_rank_stand_out(notebook)
    panel = notebook.code_cell(1)
    smooth = chart.locator(".nbddp-smooth")
    expect(smooth).to_be_hidden()
    notebook.button("Smooth").click()
    expect(smooth).to_be_visible()
    panel.get_by_label("Highlight").select_option("rank 1")
    expect(chart.locator(".nbddp-curve.nbddp-r0")).to_have_css("opacity", "0.15")
    expect(chart.locator(".nbddp-curve.nbddp-r1")).to_have_css("opacity", "1")
    assert chart_of(notebook, "m13").count() == 0
    notebook.button("Metrics").click()
    panel.locator("select[multiple]").select_option(["loss", "m13"])
    expect(chart_of(notebook, "m13")).to_be_visible()
    expect(chart_of(notebook, "m3")).to_be_hidden()
    assert fill_a_row(panel.locator(".nbddp-shots"))
    (lab_page.notebooks / "enough").touch()
    notebook.await_idle()
    notebook.await_text(1, "^done on ranks 0-1")
    kept = panel.locator(".nbddp-charts")
    assert kept.locator(".nbddp-chart").count() == 2
    assert fill_a_row(kept), "they stand as they stood in the panel"
    notebook.await_text(1, r"\b13\b.*\(m0, .*\): `%ddp show --metrics NAME`")


def test_charts_of_a_record_react_without_a_kernel(notebook: LabNotebook) -> None:
    notebook.run(2)
    notebook.save()
    notebook.shut_down_kernel()
    notebook.reload()
    assert "done on ranks 0-1 · " in notebook.text(2)
    chart = chart_of(notebook)
    expect(chart).to_contain_text("mean of 2 ranks")
    expect(chart.locator("img")).to_be_hidden()
    points_at_values(notebook)
    lets_a_rank_stand_out(notebook)
    expect(chart.locator(".nbddp-smooth")).to_be_hidden()
    notebook.page.get_by_label("smooth").check()
    expect(chart.locator(".nbddp-smooth")).to_be_visible()
    chart.locator(".nbddp-key.nbddp-r1").click()
    notebook.page.mouse.move(0, 0)


def test_untrusted_page_shows_curves_and_red_failures(
    lab_page: LabPage, notebook: LabNotebook
) -> None:
    notebook.run(3)
    notebook.save()
    foreign = lab_page.saved(notebook.js("return panel.context.path"))
    for cell in foreign.cells:
        cell.metadata.pop("trusted", None)
    foreign.cells[3].outputs[0]["metadata"]["from"] = "elsewhere"  # makes it untrusted
    nbformat.write(foreign, lab_page.notebooks / "foreign.ipynb")
    with lab_page.open_alone("foreign.ipynb") as page:
        cell = page.code_cell(3)
        cell.locator(".nbddp").first.scroll_into_view_if_needed()
        assert page.js("return panel.content.widgets[3].model.trusted") is False
        assert cell.locator(".nbddp style, .nbddp svg").count() == 0
        expect(cell.locator(".nbddp input").first).to_be_hidden()
        image = cell.locator("img.nbddp-image")
        expect(image).to_be_visible()
        assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") == 360
        box: Any = image.bounding_box()
        assert (round(box["width"]), round(box["height"])) == (360, 190)
        assert "mean of 2 ranks" in page.text(3)
        card = cell.locator(".nbddp-card").first
        expect(card).to_have_css("border-left-color", RED)
        expect(cell.locator(".nbddp-dot").first).to_have_css("background-color", RED)
        expect(cell.locator(".nbddp-wrong").first).to_have_css("color", RED)
        expect(cell.locator(".nbddp-key.nbddp-r1")).to_have_css("color", hex_to_css(rank_color(1)))


def hex_to_css(color: str) -> str:
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgb({red}, {green}, {blue})"
