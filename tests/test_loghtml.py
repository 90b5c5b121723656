"""Lines with their ranks in front, in a page with styles, one without, and as plain text."""

from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from nbddp.ui.ansi import strip
from nbddp.ui.palette import rank_color
from nbddp.ui.panel.loghtml import log_html, log_text
from nbddp.ui.tails import Line

BEGIN = '<div class="jp-RenderedText"><pre class="nbddp-log">'
END = "</pre></div>"
LINES = st.lists(
    st.builds(
        Line,
        st.lists(st.integers(0, 9), max_size=3, unique=True).map(tuple),
        st.text() | st.text(alphabet="<>&\"'\x1b[1;m\n\r\u202ex"),
        st.sampled_from(["", "Out", "<b>"]),
    )
)


class Page(HTMLParser):
    """The tags and the text of some HTML."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.append((tag, dict(attrs).get("class")))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def tag(rank: int, text: str) -> str:
    return f'<span class="nbddp-tag nbddp-r{rank}" style="color:{rank_color(rank)}">{text}</span>'


def rows(*lines: Line, earlier: str = "") -> list[str]:
    """What stands between the tags, row by row."""
    html = log_html(lines, earlier=earlier)
    assert html.startswith(BEGIN)
    assert html.endswith(END)
    return html[len(BEGIN) : -len(END)].split("\n")


def test_every_line_has_its_rank_in_front_in_the_colour_of_the_rank() -> None:
    assert rows(Line((0,), "a"), Line((3,), "b")) == [
        f"{tag(0, '[rank 0]')} a",
        f"{tag(3, '[rank 3]')} b",
    ]


def test_a_value_that_ranks_share_has_all_of_them_in_front() -> None:
    line = Line((0, 1, 2, 3), "1.5", "Out")
    assert rows(line) == [f"{tag(0, 'Out [ranks 0-3]')} 1.5"]
    assert log_text([line]) == "Out [ranks 0-3] 1.5"


def test_a_value_of_several_lines_has_its_ranks_before_each() -> None:
    line = Line((1,), "a\nb", "Out")
    assert rows(line) == [f"{tag(1, 'Out [rank 1]')} a", f"{tag(1, 'Out [rank 1]')} b"]
    assert log_text([line]) == "Out [rank 1] a\nOut [rank 1] b"


def test_words_of_nbddp_are_under_its_own_name() -> None:
    line = Line((), "rank 1 <died>")
    assert rows(line) == ['<span class="nbddp-said">nbddp: rank 1 &lt;died&gt;</span>']
    assert log_text([line]) == "nbddp: rank 1 <died>"


def test_earlier_lines_are_told_of_first() -> None:
    earlier = "12,345 earlier lines in rank0.log"
    assert rows(Line((0,), "a"), earlier=earlier) == [
        f'<span class="nbddp-earlier">{earlier}</span>',
        f"{tag(0, '[rank 0]')} a",
    ]
    assert log_text([Line((0,), "a")], earlier=earlier) == f"{earlier}\n[rank 0] a"


def test_no_lines_are_an_empty_block() -> None:
    assert log_html([]) == BEGIN + END
    assert log_text([]) == ""


def test_colours_that_a_rank_printed_are_drawn_and_end_with_the_line() -> None:
    assert rows(Line((0,), "\x1b[32mok"), Line((0,), "next")) == [
        f'{tag(0, "[rank 0]")} <span class="ansi-green-fg">ok</span>',
        f"{tag(0, '[rank 0]')} next",
    ]


def test_plain_text_has_no_sequences() -> None:
    assert log_text([Line((0,), "\x1b[32mok\x1b[m \x08<b>")]) == "[rank 0] ok <b>"


@given(LINES, st.sampled_from(["", "3 earlier lines in <rank0>.log"]))
def test_a_page_reads_like_the_plain_text_and_has_our_tags_only(
    lines: list[Line], earlier: str
) -> None:
    page = Page(log_html(lines, earlier=earlier))
    assert page.text == log_text(lines, earlier=earlier)
    assert page.open == []
    assert page.tags[:2] == [("div", "jp-RenderedText"), ("pre", "nbddp-log")]
    assert {name for name, _ in page.tags[2:]} <= {"span"}
    tags = [
        name
        for _, names in page.tags
        for name in (names or "").split()
        if name in {"nbddp-tag", "nbddp-said", "nbddp-earlier"}
    ]
    assert len(tags) == (len(page.text.split("\n")) if page.text else 0)


@given(LINES)
def test_every_line_is_a_row_that_begins_with_whose_it_is(lines: list[Line]) -> None:
    pieces = [(line.ranks, text) for line in lines for text in line.text.split("\n")]
    found = log_text(lines).split("\n") if lines else []
    assert len(found) == len(pieces)
    for row, (ranks, text) in zip(found, pieces, strict=True):
        assert row.endswith(f" {strip(text)}")
        assert ("[rank" in row) if ranks else row.startswith("nbddp: ")
