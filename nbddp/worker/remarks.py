"""What a rank has to tell its user in nbddp's own words."""

from __future__ import annotations

from nbddp.wire.messages import Display


def remark(text: str, cell: int = 0) -> Display:
    """A line under a cell, or of no cell in particular."""
    return Display(cell=cell, data={"text/plain": f"nbddp: {text}"}, metadata={})
