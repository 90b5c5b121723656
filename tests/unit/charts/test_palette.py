"""The colours of ranks are legible and distinguishable, also with impaired colour vision."""

import re
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest

from nbddp.charts.palette import ALERT, DARK, INK, LIGHT, rank_class, rank_color, terminal_color
from nbddp.ui.html_pieces import STYLE_SHEET

# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision
# Deficiency", IEEE TVCG 15 (6), 2009: their matrices for severity 1.0, on linear RGB
MACHADO = {
    "all colours": "1 0 0  0 1 0  0 0 1",
    "no red (protanopia)": "0.152286 1.052583 -0.204868  0.114503 0.786281 0.099216 "
    "-0.003882 -0.048116 1.051998",
    "no green (deuteranopia)": "0.367322 0.860646 -0.227968  0.280085 0.672501 0.047413 "
    "-0.011820 0.042940 0.968881",
    "no blue (tritanopia)": "1.255528 -0.076749 -0.178779  -0.078411 0.930809 0.147602 "
    "0.004733 0.691367 0.303900",
}
XYZ = "0.4124564 0.3575761 0.1804375  0.2126729 0.7151522 0.0721750  0.0193339 0.1191920 0.9503041"


def matrix(numbers: str) -> np.ndarray:
    return np.array(numbers.split(), dtype=float).reshape(3, 3)


TO_XYZ = matrix(XYZ)
ANY = tuple(rank_color(rank) for rank in range(8))
SETS = [re.findall(r"#[0-9a-f]{6}", STYLE_SHEET)[start : start + 12] for start in (0, 12, 24)]
WORDS = [colors[:4] for colors in SETS]  # of the sheet: on any page, on light and on dark pages


def linear(color: str) -> np.ndarray:
    """Red, green and blue as amounts of light."""
    parts = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""
    low, high = sorted(float(linear(each) @ TO_XYZ[1]) for each in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(light: np.ndarray) -> np.ndarray:
    """CIE L*a*b*, under daylight."""
    parts = TO_XYZ @ np.clip(light, 0, 1) / np.array([0.95047, 1.0, 1.08883])
    x, y, z = np.where(parts > 216 / 24389, np.cbrt(parts), (24389 / 27 * parts + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def nearest(colors: Sequence[str], eye: str) -> float:
    """How far apart the two are that are most alike to an eye; below 2.3 they look the same."""
    seen = [lab(matrix(MACHADO[eye]) @ linear(color)) for color in colors]
    return min(float(np.linalg.norm(one - other)) for one, other in combinations(seen, 2))


@pytest.mark.parametrize("eye", MACHADO)
@pytest.mark.parametrize("colors", [LIGHT, DARK, ANY], ids=["light", "dark", "any"])
def test_the_colours_of_eight_ranks_are_distinguishable(colors: tuple[str, ...], eye: str) -> None:
    assert len(colors) == 8
    assert nearest(colors, eye) > 12


@pytest.mark.parametrize(
    ("colors", "pages", "least"),
    [
        ([*LIGHT, *WORDS[1]], ["#ffffff", "#f5f5f5"], 4.5),
        ([*DARK, *WORDS[2]], ["#000000", "#111111", "#1e1e1e", "#303030"], 4.5),
        ([*ANY], ["#ffffff", "#000000"], 3),
        ([INK, ALERT], ["#ffffff", "#111111"], 3.5),
    ],
    ids=["light", "dark", "a page that is not known", "charts"],
)
def test_colours_have_enough_contrast(colors: list[str], pages: list[str], least: float) -> None:
    assert min(contrast(color, page) for color in colors for page in pages) >= least


def test_bold_colors_of_output_and_arrows_of_choices_are_legible_on_dark_pages() -> None:
    rule = r"\.ansi-(\w+)-intense-fg { color: var\(--nbddp-(\w+)\) !important"  # over JupyterLab's
    bold = dict(re.findall(rule, STYLE_SHEET))
    assert bold == {"red": "bad", "green": "ok", "blue": "busy", "magenta": "r3"}, "as above"
    [stroke] = re.findall(r"stroke='%23([0-9a-f]{6})'", STYLE_SHEET)
    assert contrast(f"#{stroke}", "#303030") > 4.5


def test_the_style_sheet_has_the_colours_of_the_palette_which_repeat() -> None:
    assert [tuple(colors[4:]) for colors in SETS] == [ANY, LIGHT, DARK]
    assert terminal_color(8) == terminal_color(0)
    assert rank_color(11) == rank_color(3)
    assert rank_class(11) == rank_class(3) == "nbddp-r3"
