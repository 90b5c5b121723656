import sys
from types import ModuleType

import pytest

from nbddp.worker import lazy_preload


def test_a_rank_finds_the_modules_that_it_has_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.setattr(lazy_preload, "inherited_modules", set())
    monkeypatch.setattr(lazy_preload, "_newest_inherited", [])
    lazy_preload._record_inherited()
    assert lazy_preload.imported_modules() == []
    modules = [ModuleType("first"), ModuleType("second")]
    sys.modules.update(zip(("first", "second"), modules, strict=True))
    sys.modules["json"] = sys.modules.pop("json")  # as after a second import of the module
    assert lazy_preload.imported_modules() == modules[::-1]
    sys.modules.popitem()
    del sys.modules[lazy_preload._newest_inherited[0][0]]
    assert lazy_preload.imported_modules() == modules[::-1]
