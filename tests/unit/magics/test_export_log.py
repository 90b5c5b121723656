"""The items of an export that are not in the replay log."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from nbddp.magics.export_log import ExportLog


def test_the_port_of_a_store_is_known_after_the_notebook_has_dropped_the_store() -> None:
    no_session: Any = None
    log = ExportLog(no_session)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    log.record_store_ports({"store": store, "rate": 0.1})
    log.record_store_ports({"rate": 0.1})
    assert log.store_ports == {store.port}
