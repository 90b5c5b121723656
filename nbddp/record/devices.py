"""What is known of a GPU as a whole, whoever uses it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """A GPU at one moment.

    Attributes:
        load: percent of the last moments in which something ran on it; below 0 if not known.
        used: bytes of its memory that are in use, of ``total``.
        others: bytes that processes use which are no ranks of this group, such as the notebook's
            own; below 0 where that is not known, as in most containers.
    """

    load: float = -1.0
    used: int = 0
    total: int = 0
    others: int = -1


UNKNOWN = DeviceUse()
