"""A store in memory, with the calls of a TCPStore that queues and values need."""

from collections import defaultdict, deque


class MemoryStore:
    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}
        self.queues: defaultdict[str, deque[bytes]] = defaultdict(deque)

    def set(self, key: str, value: bytes) -> None:
        self.keys[key] = value

    def get(self, key: str) -> bytes:
        return self.keys[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.keys for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.keys.pop(key, None) is not None

    def queue_push(self, key: str, value: bytes) -> None:
        self.queues[key].append(value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        if not self.queues[key]:
            assert not block, "this call would block forever"
            raise RuntimeError("queue is empty")  # torch's QueueEmptyError is one
        return self.queues[key].popleft()

    def queue_len(self, key: str) -> int:
        return len(self.queues[key])
