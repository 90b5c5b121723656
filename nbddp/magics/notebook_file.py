"""The notebook's own file, if the page says which it is: the text between its cells."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nbddp.record.cell import CellRequest


def text_above(requests: Iterable[CellRequest], names: Mapping[str, Any]) -> dict[int, str]:
    """What stands above each cell in Markdown, by the number of its prompt.

    Args:
        requests: what ran.
        names: of the notebook.

    Returns:
        Nothing where the file is not known, or cannot be read.
    """
    path = _path(names)
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"] if path else []
    except (OSError, ValueError, KeyError):
        return {}
    by_source: dict[str, str] = {}
    above: list[str] = []
    for cell in cells:
        text = "".join(cell.get("source", ""))
        if cell.get("cell_type") == "markdown":
            above.append(text)
        elif cell.get("cell_type") == "code":
            by_source[_code(text)] = "\n\n".join(above)
            above = []
    found = {each.execution_count: by_source.get(_code(each.source), "") for each in requests}
    return {number: text for number, text in found.items() if text}


def _path(names: Mapping[str, Any]) -> Path | None:
    """Jupyter's server tells the kernel in a variable, VS Code in a name."""
    told = os.environ.get("JPY_SESSION_NAME") or names.get("__vsc_ipynb_file__")
    path = Path(str(told)) if told else None
    return path if path is not None and path.suffix == ".ipynb" else None


def _code(source: str) -> str:
    """A cell's source as it is told apart from others: without the line of the magic."""
    first, _, rest = source.partition("\n")
    return (rest if first.startswith("%%ddp") else source).strip()
