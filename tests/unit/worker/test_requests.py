"""Requests between cells: a cancelled request is not carried out."""

import sys
import threading
from typing import Any
from unittest.mock import MagicMock

import pytest

from nbddp.wire.request_messages import Complete, JoinGroup
from nbddp.worker.requests import CANCELLED, RequestHandler


def test_no_cancellation_is_lost_while_the_main_thread_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[Any] = []
    mocks = [MagicMock() for _ in range(4)]
    handler = RequestHandler(MagicMock(), MagicMock(), str, answers.append, *mocks)
    monkeypatch.setattr(handler, "_handle", lambda command: command)
    count = 3000
    cancelled = threading.Thread(target=lambda: [*map(handler.cancel, range(10, 10 + count))])
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        cancelled.start()
        while cancelled.is_alive():
            handler.answer(Complete(request=1, code="", cursor=0))
    finally:
        sys.setswitchinterval(before)
    answers.clear()
    for number in range(10, 10 + count):
        options = {"generation": 1, "donor": 0, "replacements": [1], "storages": []}
        handler.answer(JoinGroup(request=number, payload={}, own_values={}, **options))
    assert {each.error for each in answers} == {CANCELLED}
