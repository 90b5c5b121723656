"""The style sheet of the panel and of all that stays in a notebook.

Where a front end takes it away, as GitHub does, what is left are plain tables and lists.
"""

from __future__ import annotations

from importlib.resources import files

SHEET = f"<style>\n{files('nbddp.ui').joinpath('panel.css').read_text(encoding='utf-8')}</style>"
