"""Reports: the same content as text and as HTML, and nothing in it is taken for markup."""

from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from pages import TEXT, Page, readable

from nbddp.magics import presenter as presenter_module
from nbddp.magics.presenter import Presenter, ViewChoice
from nbddp.ui import frontend
from nbddp.ui.report import blocks
from nbddp.ui.report.render import render_html, render_text


def drawn() -> tuple[bytes, int]:
    return b"PNG", 300


def report(text: str = "a <b>") -> blocks.Report:
    rows = [
        [blocks.Cell("0", rank=0), blocks.Cell(text, blocks.Mood.BAD, blocks.Dot.WARN)],
        ["1", blocks.Cell("", html="<i></i>")],
    ]
    return blocks.Report(
        blocks.Cell(f"{text} · 2 ranks", dot=blocks.Dot.OK),
        [
            blocks.Text(text, blocks.Mood.WARN),
            blocks.Table(["rank", "state"], rows, text),
            blocks.Picture(drawn, text, text="####"),
            blocks.Picture(drawn, text, html=lambda: "<svg></svg>"),
            blocks.Card(text),
            blocks.Code(f"-{text}\n+new", is_diff=True),
            blocks.Markup(lambda: "<ul></ul>", "a list"),
            blocks.Details(text, [blocks.note(f"{text} " * 40), blocks.Code(text)]),
            blocks.note("`%ddp show` has more"),
        ],
    )


def test_every_report_block_as_text_and_as_html(snapshot: Any) -> None:
    assert render_text(report()) == snapshot(name="text")
    assert readable(render_html(report())) == snapshot(name="html")


@given(TEXT)
def test_text_in_reports_is_escaped(text: str) -> None:
    html = render_html(report(text)).replace("data:image/png", "data:image/svg+xml")
    page = Page(html)
    assert page.holds(text)
    assert len(page.by_tag["td"]) == 4


def presenter(choice: ViewChoice, *, has_kernel: bool) -> Presenter:
    made = Presenter(Mock(spec=["kernel", "execution_count"] if has_kernel else []))
    made.print_line = Mock()  # type: ignore[method-assign]
    made.choice = choice
    return made


def test_a_report_is_shown_as_html_as_a_picture_or_as_console_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text, published = render_text(report()), Mock()
    for module in (presenter_module, frontend):
        monkeypatch.setattr(module, "publish_display_data", published)
    presenter(ViewChoice.PANEL, has_kernel=True).show(report())
    [data] = published.call_args.args
    assert data == {"text/html": render_html(report()), "text/plain": text}
    presenter(ViewChoice.TEXT, has_kernel=True).show(report())
    data, metadata = published.call_args.args
    assert data == {"image/png": "UE5H", "text/plain": text}
    assert metadata == {"image/png": {"width": 300}}
    assert published.call_count == 2
    for has_kernel, shown in ((False, report()), (True, blocks.Report("no picture"))):
        console = presenter(ViewChoice.TEXT, has_kernel=has_kernel)
        console.show(shown)
        console.print_line.assert_called_once_with(render_text(shown))  # type: ignore[attr-defined]
    assert published.call_count == 2
