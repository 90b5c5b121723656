"""Colours that a page's theme decides: text in them has at least 4.5 to 1 against the page.

A page that is known to be light or dark, as Jupyter's, VS Code's and Colab's say they are, gets
a set of its own. Any other has colours in the middle, which stand inline too.
"""

from __future__ import annotations

from nbddp.charts.palette import DARK, LIGHT, rank_class

_WORDS = ("ok", "bad", "warn", "busy")
LIGHT_WORDS = ("#1e7a30", "#c62828", "#9a5200", "#1565c0")
DARK_WORDS = ("#66bb6a", "#ff8a80", "#ffb74d", "#64b5f6")
_ANY_WORDS = ("#3a8f45", "#dd4444", "#b9690f", "#2f86dd")

_IS_LIGHT = ':is([data-jp-theme-light="true"], .vscode-light, .notebook_app, [theme="light"])'
_IS_DARK = ':is([data-jp-theme-light="false"], .vscode-dark, [theme="dark"])'
_PLACE = ":is(.nbddp, .nbddp-panel, .nbddp-aftermath)"

OK, BAD, WARN, BUSY = (f"var(--nbddp-{each})" for each in _WORDS)


def _words(colors: tuple[str, ...]) -> str:
    pairs = zip(_WORDS, colors, strict=True)
    return " ".join(f"--nbddp-{name}: {color};" for name, color in pairs)


def _ranks(where: str, colors: tuple[str, ...]) -> str:
    # important: the colour for any page stands inline, for pages that drop this sheet
    return "\n".join(
        f"{where} .{rank_class(rank)} {{ --nbddp-rank: {color}; color: {color} !important; }}"
        for rank, color in enumerate(colors)
    )


RULES = f"""{_PLACE} {{ {_words(_ANY_WORDS)} }}
{_IS_LIGHT} {_PLACE} {{ {_words(LIGHT_WORDS)} }}
{_IS_DARK} {_PLACE} {{ {_words(DARK_WORDS)} }}
{_ranks(_IS_LIGHT, LIGHT)}
{_ranks(_IS_DARK, DARK)}
:is({_IS_LIGHT}, {_IS_DARK}) :is(.nbddp-line, .nbddp-smooth)[class*="nbddp-r"] path[stroke] {{
  stroke: var(--nbddp-rank); }}
:is({_IS_LIGHT}, {_IS_DARK}) .nbddp-line[class*="nbddp-r"] :is(path:not([stroke]), g) {{
  fill: var(--nbddp-rank); }}
.nbddp-bar > span {{ background: var(--nbddp-rank, currentColor) !important; }}
{_IS_DARK} :is(.nbddp-shots, .nbddp-charts) img {{ filter: brightness(1.35); }}
@media (prefers-reduced-motion: reduce) {{
  .nbddp *, .nbddp-panel * {{ animation: none !important; transition: none !important;
    scroll-behavior: auto !important; }} }}"""
