"""For any output of a rank, the HTML is well formed, harmless, and has the same text."""

import re
import time
from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pages import Page
from syrupy.assertion import SnapshotAssertion

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
STYLES = re.compile(r"font-style: italic|(background-)?color: rgb\(\d{1,3},\d{1,3},\d{1,3}\)")


def drawn(order: str) -> str:
    """What becomes of an x after this SGR sequence."""
    return to_html(f"\x1b[{order}mx")


@given(HOSTILE)
@example("\x1b[" + "9" * 5000 + "mx")
@example("\x1b[" + "1;" * 5000 + "mx")
def test_ansi_html_has_the_stripped_text_and_only_nbddp_tags(text: str) -> None:
    page = Page(to_html(text))
    assert page.text == strip(text)
    for tag, attributes in page.tags:
        assert tag == "span"
        assert {"class", "style"} >= set(attributes) != set()
        assert all(CLASSES.fullmatch(name) for name in attributes.get("class", "").split())
        styles = filter(None, attributes.get("style", "").split("; "))
        assert all(STYLES.fullmatch(style) for style in styles)


@given(HOSTILE)
def test_plain_text_has_no_control_characters(text: str) -> None:
    plain = strip(text)
    assert re.search("[\0-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]", plain) is None
    assert plain.encode().decode() == plain
    assert plain.count("\n") == text.count("\n")
    assert strip(plain) == plain


@given(st.text(alphabet=st.characters(exclude_categories=["C", "Zl", "Zp"])))
def test_text_without_ansi_sequences_is_unchanged(text: str) -> None:
    assert strip(text) == text
    assert Page(to_html(text)).tags == []


DRAWN = """
30 36 41 97 100 33;44 38;5;1 48;5;12 38;5;16 38;5;208 38;5;231 38;5;232 48;5;255 38;5; 38;2;1;20;255
38;2;1;2;3;48;5;9 31;38;5;999 1 4 3 01;031 58;5;3;1 58;2;1;2;3;4 7 7;31 31;47;7
7;38;2;1;2;3;44
"""


def test_colours_and_styles_are_drawn(snapshot: SnapshotAssertion) -> None:
    assert {order: drawn(order) for order in DRAWN.split()} == snapshot


def test_the_green_of_pygments_becomes_one_that_fits_dark_pages_too() -> None:
    assert drawn("38;5;28") == drawn("92")
    assert drawn("1;38;5;28") == drawn("1;92")


@pytest.mark.parametrize(
    "order",
    [
        *("", "0", "31;0", "31;", "31;39", "41;49", "1;22", "3;23", "4;24", "7;27", "38;5;99;39"),
        *("2", "5", "8", "9", "21", "53", "73", "98", "108", "110", "999", "10000"),
        *("4:3", "38:5:1", "1;38:2::1:2:3", "38;5;1000;49", "48;2;;;;49"),
        *("38", "38;", "38;5", "38;5;256", "38;2;1;2", "38;2;1;2;256", "38;7;1"),
    ],
)
def test_reset_and_unknown_styles_are_drawn_as_plain_text(order: str) -> None:
    assert drawn(order) == "x"


MARKUP = (
    "a\x1b[31mb\x1b[1mc\x1b[md\x1b[4me\nf",  # a style goes on until it is reset
    "\x1b[31ma\x1b[31mb\x1b[m\x1b[0;31mc\x1b[Kd",
    "<i x=\"a()\"> & 'b'",
    "<scr\x1b[mipt>\x1b[31m<b",
)
REMOVED = (
    *("\x1b[2K\x1b[1A\x1b[?25l\x1b[10;20Hx", "\x1b[>4;2mx\x1b[?4mx", "\x1b[0 qx"),
    *("\x1b]0;title\x07x", "\x1b]0;title\x1b\\x", "\x1b]0;title\nmore\x07"),
    *("\x1b]0;title \x1b[2Kmore", "\x1b]8;;https://a.b/?c\x1b\\link\x1b]8;;\x1b\\ on"),
    *("\x1bPq#0;2\x1b\\x\x1b_apc\x1b\\y\x1b^pm\x1b\\\x1bXsos\x1b\\z", "\x1b(Bx\x1b)0y\x1b%Gz"),
    *("\x1b7x\x1b8\x1b=\x1bcy", "x\x1b", "x\x1b\x1b[0my\x1b[", "\x1bé"),
    "a\x08b\x07c\0d\x7fe\x85f\r\ng\x0b\x0ch\ti",
)


def test_styles_and_markup_become_html_and_other_sequences_go(snapshot: SnapshotAssertion) -> None:
    assert {ascii(text): to_html(text) for text in MARKUP} == snapshot(name="html")
    plain = {ascii(text): strip(text) for text in REMOVED}
    assert plain == snapshot(name="plain text")
    assert {ascii(text): to_html(text) for text in REMOVED} == plain


@pytest.mark.parametrize("character", "\u202a\u202e\u2066\u2069\u2028\u2029\ud800\udfff")
def test_characters_that_change_the_text_direction_are_replaced(character: str) -> None:
    assert to_html(f"a{character}b") == strip(f"a{character}b") == "a\ufffdb"


PIECES = ["\x1b", "\x1b]", "\x1b]x", "\x1b[", "\x1b[0;", "\x1b[31mx", "\x1bP\n", "\0", "<"]
LONG = [("", piece) for piece in [*PIECES, "\x1b[1mx\x1b[22mx"]]
LONG += product(["\x1b]", "\x1b[", "\x1b[1;", "\x1b(", "\x1bP"], ["x", "1;", "1:", " ", "1"])


@pytest.mark.parametrize(("begin", "piece"), LONG)
def test_hostile_text_takes_no_more_than_its_length(begin: str, piece: str) -> None:
    text = begin + piece * (200_000 // len(piece))
    began = time.perf_counter()
    strip(text)
    to_html(text)
    to_html(text + "m")
    assert time.perf_counter() - began < 5  # linear takes 0.1 s, quadratic takes minutes
