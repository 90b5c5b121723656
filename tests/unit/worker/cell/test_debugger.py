"""The last error that a rank keeps for its debugger."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch.utils.checkpoint

from nbddp.worker.cell.debugger import Debuggers, clear_last_error

CHECKPOINT = """
def checkpoint(function):  # as torch 2.12 and earlier do it
    call = generator()
    next(call)
    function()
"""


def test_the_hook_of_a_failed_checkpointed_call_is_removed_with_the_error_kept() -> None:
    def generator() -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            yield

    def has_hook() -> bool:
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
        return hooks(True) is not None

    def fail() -> None:
        assert has_hook()
        raise ValueError("in the model")

    names: dict[str, Any] = {"generator": generator}
    exec(compile(CHECKPOINT, torch.utils.checkpoint.__file__, "exec"), names)
    with pytest.raises(ValueError, match="in the model") as raised:
        names["checkpoint"](fail)
    debuggers = Debuggers(Mock(), 0, Mock())
    debuggers.keep_exception(raised.value, is_interrupt=False)
    try:
        assert not has_hook()
    finally:
        clear_last_error()
