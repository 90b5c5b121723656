"""The base class of messages and events."""

from __future__ import annotations

from dataclasses import Field, dataclass, field
from typing import Any, ClassVar, dataclass_transform


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class Frozen:
    """Makes each subclass a frozen dataclass, whose arguments are passed by name.

    >>> class Moved(Frozen):
    ...     rank: int
    >>> Moved(rank=2) == Moved(rank=2)
    True
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)
