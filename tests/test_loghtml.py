"""Lines with their ranks in front, in a page with styles, one without, and as plain text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import Page

from nbddp.charts.palette import rank_color
from nbddp.errors import say_ranks
from nbddp.ui.ansi import strip
from nbddp.ui.log_lines import Line, log_html, log_text

BEGIN = '<div class="jp-RenderedText"><pre class="nbddp-log">'
END = "</pre></div>"
EARLIER = "12,345 earlier lines in rank0.log"
LINES = st.lists(
    st.builds(
        Line,
        st.lists(st.integers(0, 9), max_size=3, unique=True).map(tuple),
        st.text() | st.text(alphabet="<>&\"'\x1b[1;m\n\r\u202ex"),
        st.sampled_from(["", "Out", "<b>"]),
    )
)


def tag(rank: int, text: str) -> str:
    return f'<span class="nbddp-tag nbddp-r{rank}" style="color:{rank_color(rank)}">{text}</span>'


@pytest.mark.parametrize(
    ("lines", "html", "text"),
    [
        ([], [""], ""),
        (
            [Line((0,), "a"), Line((3,), "b")],
            [f"{tag(0, '[rank 0]')} a", f"{tag(3, '[rank 3]')} b"],
            "[rank 0] a\n[rank 3] b",
        ),
        (
            [Line((0, 1, 2, 3), "1.5", "Out")],
            [f"{tag(0, 'Out [ranks 0-3]')} 1.5"],
            "Out [ranks 0-3] 1.5",
        ),
        (
            [Line((1,), "a\nb", "Out")],
            [tag(1, "Out [rank 1]"), "a", "b"],
            "Out [rank 1]\na\nb",
        ),
        (
            [Line((), "rank 1 <died>")],
            ['<span class="nbddp-said">nbddp: rank 1 &lt;died&gt;</span>'],
            "nbddp: rank 1 <died>",
        ),
        (
            [Line((0,), "\x1b[32mok"), Line((0,), "next \x08<b>")],
            [
                f'{tag(0, "[rank 0]")} <span class="ansi-green-fg">ok</span>',
                f"{tag(0, '[rank 0]')} next &lt;b&gt;",
            ],
            "[rank 0] ok\n[rank 0] next <b>",
        ),
    ],
    ids=["none", "two ranks", "shared", "of several lines", "nbddp's own", "in colours"],
)
def test_lines_with_their_ranks_in_front(lines: list[Line], html: list[str], text: str) -> None:
    assert log_html(lines) == BEGIN + "\n".join(html) + END
    assert log_text(lines) == text
    told = f'<span class="nbddp-earlier">{EARLIER}</span>'
    assert log_html(lines, earlier=EARLIER) == BEGIN + "\n".join([told, *filter(None, html)]) + END
    assert log_text(lines, earlier=EARLIER) == "\n".join(filter(None, [EARLIER, text]))


@given(LINES, st.sampled_from(["", "3 earlier lines in <rank0>.log"]))
def test_a_page_reads_like_the_plain_text_and_has_our_tags_only(
    lines: list[Line], earlier: str
) -> None:
    page = Page(log_html(lines, earlier=earlier))
    assert page.text == log_text(lines, earlier=earlier)
    names, classes = zip(
        *((name, known.get("class", "")) for name, known in page.tags), strict=True
    )
    assert classes[:2] == ("jp-RenderedText", "nbddp-log")
    assert {*names[2:]} <= {"span"}
    kinds = {"nbddp-tag", "nbddp-said", "nbddp-earlier"}
    tags = [name for each in classes for name in each.split() if name in kinds]
    assert len(tags) == bool(earlier) + sum(
        1 if each.mark and each.ranks else len(each.text.split("\n")) for each in lines
    )


@given(LINES)
def test_every_line_is_a_row_that_begins_with_whose_it_is(lines: list[Line]) -> None:
    rows = iter(log_text(lines).split("\n") if lines else [])
    for line in lines:
        begin = f"[{say_ranks(line.ranks)}]" if line.ranks else "nbddp:"
        first, *others = line.text.split("\n")
        if line.ranks and line.mark and others:
            assert next(rows).endswith(begin)
            assert [next(rows) for _ in (first, *others)] == [*map(strip, (first, *others))]
        else:
            for text in (first, *others):
                assert next(rows).endswith(f"{begin} {strip(text)}")
    assert [*rows] == []
