"""The colours of ranks: read on the page, and told apart by everybody."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from nbddp.ui.palette import DARK, LIGHT, rank_class, rank_color, terminal_color
from nbddp.ui.panel.theme import DARK_WORDS, LIGHT_WORDS

# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision
# Deficiency", IEEE TVCG 15 (6), 2009: their matrices for severity 1.0, on linear RGB
MACHADO = {
    "all colours": np.eye(3),
    "no red (protanopia)": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "no green (deuteranopia)": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "no blue (tritanopia)": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
TO_XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
)
ANY = tuple(rank_color(rank) for rank in range(8))
BEFORE = ["#0087d7", "#d75f00", "#00af5f", "#af5faf", "#00afaf", "#d70087", "#af8700", "#5f87ff"]


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


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """CIEDE2000, after Sharma, Wu and Dalal, 2005."""
    (light1, a1, b1), (light2, a2, b2) = one, other
    mean = (np.hypot(a1, b1) + np.hypot(a2, b2)) / 2
    stretch = 1.5 - 0.5 * np.sqrt(mean**7 / (mean**7 + 25.0**7))
    chroma1, chroma2 = np.hypot(a1 * stretch, b1), np.hypot(a2 * stretch, b2)
    hue1 = np.degrees(np.arctan2(b1, a1 * stretch)) % 360
    turn = (np.degrees(np.arctan2(b2, a2 * stretch)) - hue1 + 180) % 360 - 180
    light, chroma, hue = (light1 + light2) / 2, (chroma1 + chroma2) / 2, hue1 + turn / 2
    waves = (
        1
        - 0.17 * np.cos(np.radians(hue - 30))
        + 0.24 * np.cos(np.radians(2 * hue))
        + 0.32 * np.cos(np.radians(3 * hue + 6))
        - 0.2 * np.cos(np.radians(4 * hue - 63))
    )
    by_light = (light2 - light1) / (1 + 0.015 * (light - 50) ** 2 / np.hypot(20**0.5, light - 50))
    by_chroma = (chroma2 - chroma1) / (1 + 0.045 * chroma)
    across = 2 * np.sqrt(chroma1 * chroma2) * np.sin(np.radians(turn / 2))
    by_hue = across / (1 + 0.015 * chroma * waves)
    bend = 30 * np.exp(-((((hue % 360) - 275) / 25) ** 2))
    twist = -2 * np.sqrt(chroma**7 / (chroma**7 + 25.0**7)) * np.sin(np.radians(2 * bend))
    total = by_light**2 + by_chroma**2 + by_hue**2 + twist * by_chroma * by_hue
    return float(np.sqrt(total))


def nearest(colors: tuple[str, ...] | list[str], eye: str) -> float:
    """How far apart the two are that are most alike to an eye."""
    seen = [lab(MACHADO[eye] @ linear(color)) for color in colors]
    return min(distance(one, other) for one, other in combinations(seen, 2))


def test_the_distance_is_the_one_that_its_authors_publish() -> None:
    one, other = np.array([50.0, 2.6772, -79.7751]), np.array([50.0, 0.0, -82.7485])
    assert distance(one, other) == pytest.approx(2.0425, abs=1e-4)
    one, other = np.array([60.2574, -34.0099, 36.2677]), np.array([60.4626, -34.1751, 39.4387])
    assert distance(one, other) == pytest.approx(1.2644, abs=1e-4)


@pytest.mark.parametrize("eye", MACHADO)
@pytest.mark.parametrize("colors", [LIGHT, DARK, ANY], ids=["light", "dark", "any"])
def test_no_two_of_eight_ranks_look_alike(colors: tuple[str, ...], eye: str) -> None:
    assert len(colors) == 8
    assert nearest(colors, eye) > 9.5  # below 2.3 two colours are hard to tell side by side


def test_red_and_green_blind_people_saw_ranks_1_and_6_as_one() -> None:
    assert min(nearest(BEFORE, eye) for eye in MACHADO) < 1.5


@pytest.mark.parametrize(
    ("colors", "page"),
    [
        *((LIGHT, page) for page in ("#ffffff", "#f5f5f5")),
        *((LIGHT_WORDS, page) for page in ("#ffffff", "#f5f5f5")),
        *((DARK, page) for page in ("#000000", "#111111", "#1e1e1e", "#303030")),
        *((DARK_WORDS, page) for page in ("#000000", "#111111", "#1e1e1e", "#303030")),
    ],
)
def test_words_are_read_on_their_page(colors: tuple[str, ...], page: str) -> None:
    assert min(contrast(color, page) for color in colors) >= 4.5


@pytest.mark.parametrize("page", ["#ffffff", "#000000"])
def test_on_a_page_that_is_not_known_they_are_read_in_light_and_in_dark(page: str) -> None:
    assert min(contrast(color, page) for color in ANY) > 3


def test_after_eight_ranks_the_colours_repeat() -> None:
    assert terminal_color(8) == terminal_color(0)
    assert rank_color(11) == rank_color(3)
    assert rank_class(11) == rank_class(3) == "nbddp-r3"
