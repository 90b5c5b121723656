"""Stores that the notebook kept and told its ranks of: in the script, rank 0 keeps others there."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

KEEP = '''{ports} = {{}}  # of the notebook's stores, and of those that rank 0 keeps in their place
{stores} = []


def {keep_store}(port):
    """Have rank 0 keep a store in the place of the notebook's, and tell all ranks its port."""
    if port in {ports}:
        return
    new = [0]
    if {dist}.get_rank() == 0:  # multi_tenant: a group may meet there, too
        {stores}.append({dist}.TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True))
        new = [{stores}[-1].port]
    {dist}.broadcast_object_list(new)
    {ports}[port] = new[0]'''


def port_in(value: Any, ports: Collection[int]) -> int | None:
    """The port of a store that a value is, or that an address in it names.

    >>> port_in(4711, {4711}), port_in("tcp://127.0.0.1:4711", {4711})
    (4711, 4711)
    >>> port_in(4711.0, {4711}), port_in("tcp://127.0.0.1:47110", {4711})
    (None, None)
    """
    if type(value) is int and value in ports:
        return value
    if isinstance(value, str):
        return next((port for port in ports if re.search(_pattern(port), value)), None)
    return None


def with_new_port(value: Any, port: int, new: str) -> str:
    """The expression for a value with another port in it.

    >>> with_new_port(4711, 4711, "ports[4711]")
    'ports[4711]'
    >>> with_new_port("tcp://127.0.0.1:4711", 4711, "ports[4711]")
    "'tcp://127.0.0.1:' + str(ports[4711])"
    """
    if isinstance(value, int):
        return new
    parts = re.split(_pattern(port), value)
    return f" + str({new}) + ".join(map(repr, parts)).removesuffix(" + ''")


def _pattern(port: int) -> str:
    return rf"(?<=:){port}(?!\d)"
