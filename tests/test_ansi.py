"""Whatever a rank prints, the HTML of it is well formed, harmless, and reads the same."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nbddp.ui.ansi import strip, to_html

FRAGMENTS = [
    *("\x1b", "\x1b[", "\x1b]", "\x1b\\", "\x1bP", "\x9b", "\x07", "\x08", "\r", "\n", "\t", "\0"),
    *("0", "1", "4", "7", "9", "22", "31", "38", "48", "58", "2", "5", "97", "255", "256", "9999"),
    *(";", ":", "m", "?", "K", "(B", " ", "<b>", "</span>", '"', "'", "&amp;", "x", "é", "٣"),
    *("\u202e", "\u2069", "\u2028", "\ud800", "\U0001f600"),
]
HOSTILE = st.lists(st.sampled_from(FRAGMENTS), max_size=40).map("".join) | st.text()

CLASSES = re.compile(
    r"ansi-(bold|underline"
    r"|default-inverse-[fb]g"
    r"|(black|red|green|yellow|blue|magenta|cyan|white)(-intense)?-[fb]g)"
)
STYLES = re.compile(
    r"opacity: 0\.6|font-style: italic|text-decoration: (underline )?line-through"
    r"|(background-)?color: rgb\(\d{1,3},\d{1,3},\d{1,3}\)"
)


class Page(HTMLParser):
    """What a browser makes of some HTML: its tags in order, and the text to be read."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.append((tag, dict(attrs)))
        assert len(attrs) == len(dict(attrs))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def unknown_decl(self, data):
        raise AssertionError(data)

    handle_comment = handle_decl = handle_pi = unknown_decl


def span(attributes: str, text: str = "x") -> str:
    return f"<span {attributes}>{text}</span>"


def drawn(order: str) -> str:
    """What becomes of an x after this SGR sequence."""
    return to_html(f"\x1b[{order}mx")


@given(HOSTILE)
@example("\x1b[38;1:2mx")
@example("\x1b[" + "9" * 5000 + "mx")
@example("\x1b[" + "1;" * 5000 + "mx")
def test_only_our_own_tags_are_in_the_page_and_they_are_balanced(text: str) -> None:
    page = Page(to_html(text))
    assert page.open == []
    for tag, attributes in page.tags:
        assert tag == "span"
        assert {"class", "style"} >= set(attributes) != set()
        assert all(CLASSES.fullmatch(name) for name in (attributes.get("class") or "").split())
        styles = filter(None, (attributes.get("style") or "").split("; "))
        assert all(STYLES.fullmatch(style) for style in styles)


@given(HOSTILE)
def test_what_is_read_in_the_page_is_the_plain_text(text: str) -> None:
    assert Page(to_html(text)).text == strip(text)


@given(HOSTILE)
def test_plain_text_holds_nothing_that_a_terminal_or_a_page_obeys(text: str) -> None:
    plain = strip(text)
    assert re.search("[\0-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]", plain) is None
    assert plain.encode().decode() == plain
    assert plain.count("\n") == text.count("\n")
    assert strip(plain) == plain


@given(st.text(alphabet=st.characters(exclude_categories=["C", "Zl", "Zp"])))
def test_text_without_sequences_is_left_as_it_is(text: str) -> None:
    assert strip(text) == text
    assert Page(to_html(text)).tags == []


def test_markup_is_text() -> None:
    assert to_html("<img src=x onerror=\"a()\"> & 'b'") == (
        "&lt;img src=x onerror=&quot;a()&quot;&gt; &amp; &#x27;b&#x27;"
    )


def test_a_tag_that_is_cut_by_a_sequence_stays_text() -> None:
    assert (
        to_html("<scr\x1b[mipt>\x1b[1m<b") == '&lt;script&gt;<span class="ansi-bold">&lt;b</span>'
    )


@pytest.mark.parametrize(
    ("order", "html"),
    [
        ("30", span('class="ansi-black-fg"')),
        ("36", span('class="ansi-cyan-fg"')),
        ("41", span('class="ansi-red-bg"')),
        ("97", span('class="ansi-white-intense-fg"')),
        ("100", span('class="ansi-black-intense-bg"')),
        ("33;44", span('class="ansi-yellow-fg ansi-blue-bg"')),
        ("38;5;1", span('class="ansi-red-fg"')),
        ("48;5;12", span('class="ansi-blue-intense-bg"')),
        ("38;5;16", span('style="color: rgb(0,0,0)"')),
        ("38;5;208", span('style="color: rgb(255,135,0)"')),
        ("38;5;231", span('style="color: rgb(255,255,255)"')),
        ("38;5;232", span('style="color: rgb(8,8,8)"')),
        ("48;5;255", span('style="background-color: rgb(238,238,238)"')),
        ("38;5;", span('class="ansi-black-fg"')),
        ("38;2;1;20;255", span('style="color: rgb(1,20,255)"')),
        ("38:2::1:20:255", span('style="color: rgb(1,20,255)"')),
        ("38:2:1:20:255", span('style="color: rgb(1,20,255)"')),
        ("48:2:7:1:20:255:0:1", span('style="background-color: rgb(1,20,255)"')),
        ("38:5:208;1", span('class="ansi-bold" style="color: rgb(255,135,0)"')),
        ("38;2;1;2;3;48;5;9", span('class="ansi-red-intense-bg" style="color: rgb(1,2,3)"')),
    ],
)
def test_colours_are_drawn(order: str, html: str) -> None:
    assert drawn(order) == html


@pytest.mark.parametrize(
    ("order", "html"),
    [
        ("1", span('class="ansi-bold"')),
        ("4", span('class="ansi-underline"')),
        ("4:3", span('class="ansi-underline"')),
        ("21", span('class="ansi-underline"')),
        ("2", span('style="opacity: 0.6"')),
        ("3", span('style="font-style: italic"')),
        ("9", span('style="text-decoration: line-through"')),
        ("4;9", span('class="ansi-underline" style="text-decoration: underline line-through"')),
        ("01;031", span('class="ansi-red-intense-fg ansi-bold"')),
        ("58;5;3;1", span('class="ansi-bold"')),
        ("58:2::1:2:3;1", span('class="ansi-bold"')),
    ],
)
def test_styles_are_drawn(order: str, html: str) -> None:
    assert drawn(order) == html


@pytest.mark.parametrize(
    ("order", "html"),
    [
        ("7", span('class="ansi-default-inverse-fg ansi-default-inverse-bg"')),
        ("7;31", span('class="ansi-default-inverse-fg ansi-red-bg"')),
        ("31;47;7", span('class="ansi-white-fg ansi-red-bg"')),
        ("7;38;2;1;2;3;44", span('class="ansi-blue-fg" style="background-color: rgb(1,2,3)"')),
    ],
)
def test_inverse_swaps_the_colours(order: str, html: str) -> None:
    assert drawn(order) == html


@pytest.mark.parametrize(
    "order",
    [
        *("", "0", "31;0", "31;", "31;39", "41;49", "1;22", "2;22", "3;23", "4;24", "21;24"),
        *("4;4:0", "7;27", "9;29", "38;5;99;39", "5", "8", "53", "73", "110", "999", "10000"),
        *("38", "38;", "38;5", "38;5;256", "38;2;1;2", "38;2;1;2;256", "38;7;1", "38;1:2", "38:9"),
        *("38:5:256", "38:2::1:2:999", "48;2;;;;49"),
    ],
)
def test_what_is_reset_or_unknown_is_drawn_like_the_page(order: str) -> None:
    assert drawn(order) == "x"


def test_a_wrong_colour_leaves_the_one_there_was() -> None:
    assert drawn("31;38;5;999") == span('class="ansi-red-fg"')


def test_a_style_goes_on_until_it_is_reset_and_ends_with_the_text() -> None:
    assert to_html("a\x1b[31mb\x1b[1mc\x1b[md\x1b[4me\nf") == (
        'a<span class="ansi-red-fg">b</span>'
        '<span class="ansi-red-intense-fg ansi-bold">c</span>'
        'd<span class="ansi-underline">e\nf</span>'
    )


def test_the_same_style_again_takes_no_second_span() -> None:
    assert to_html("\x1b[31ma\x1b[31mb\x1b[m\x1b[0;31mc\x1b[Kd") == (
        '<span class="ansi-red-fg">abcd</span>'
    )


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("\x1b[2K\x1b[1A\x1b[?25l\x1b[10;20Hx", "x"),
        ("\x1b[>4;2mx\x1b[?4mx", "xx"),
        ("\x1b[0 qx", "x"),
        ("\x1b]0;title\x07x", "x"),
        ("\x1b]0;title\x1b\\x", "x"),
        ("\x1b]8;;https://a.b/?c\x1b\\link\x1b]8;;\x1b\\ on", "link on"),
        ("\x1bPq#0;2\x1b\\x\x1b_apc\x1b\\y\x1b^pm\x1b\\\x1bXsos\x1b\\z", "xyz"),
        ("\x1b(Bx\x1b)0y\x1b%Gz", "xyz"),
        ("\x1b7x\x1b8\x1b=\x1bcy", "xy"),
        ("x\x1b", "x"),
        ("x\x1b\x1b[0my\x1b[", "xy"),
        ("\x1bé", "é"),
        ("a\x08b\x07c\0d\x7fe\x85f\r\ng\x0b\x0ch\ti", "abcdef\ngh\ti"),
    ],
)
def test_other_sequences_and_control_characters_are_left_out(text: str, plain: str) -> None:
    assert strip(text) == plain
    assert to_html(text) == plain


def test_a_title_without_an_end_hides_nothing() -> None:
    assert strip("\x1b]0;title\nmore\x07") == "0;title\nmore"
    assert strip("\x1b]0;title \x1b[31mred") == "0;title red"


@pytest.mark.parametrize("character", "\u202a\u202e\u2066\u2069\u2028\u2029\ud800\udfff")
def test_what_could_make_text_read_otherwise_is_shown(character: str) -> None:
    assert to_html(f"a{character}b") == strip(f"a{character}b") == "a\ufffdb"


@pytest.mark.parametrize(
    "piece",
    [
        *(
            "\x1b",
            "\x1b]",
            "\x1b]x",
            "\x1b[",
            "\x1b[0;",
            "\x1b[31mx",
            "\x1bP\n",
            "\0",
            "\u202e",
            "<",
        ),
        "\x1b[1mx\x1b[22mx",
    ],
)
def test_hostile_text_takes_no_more_than_its_length(piece: str) -> None:
    text = piece * (300_000 // len(piece))
    began = time.perf_counter()
    to_html(text)
    strip(text)
    assert time.perf_counter() - began < 5  # linear takes 0.1 s, quadratic takes minutes


@pytest.mark.parametrize("begin", ["\x1b]", "\x1b[", "\x1b[1;", "\x1b(", "\x1bP"])
@pytest.mark.parametrize("body", ["x", "1;", "1:", " ", "1"])
def test_a_sequence_of_a_megabyte_takes_no_more_than_its_length(begin: str, body: str) -> None:
    text = begin + body * (1_000_000 // len(body))
    began = time.perf_counter()
    to_html(text)
    to_html(text + "m")
    assert time.perf_counter() - began < 5
