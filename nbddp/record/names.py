"""Which names the source of a cell makes."""

from __future__ import annotations

import symtable

SET_IN_EACH_RANK = frozenset(
    {"rank", "local_rank", "world_size", "device", "torch", "dist", "nbddp"}
)


def assigned_names(source: str) -> set[str]:
    """The names that source binds outside its functions.

    >>> sorted(assigned_names("import os.path; x = [i for i in range(2)]; (z := 1)"))
    ['os', 'x', 'z']
    """
    top = symtable.symtable(source, "cell", "exec")
    return {
        each.get_name()
        for each in top.get_symbols()
        if each.is_assigned() or each.is_imported() or each.is_namespace()
    }
