"""Work that waits: a bounded queue, round-robin over clients, so that one who asks a lot delays the others little. What
has several parts is popped once for each, and in between comes what others wait for. It also knows what was popped and
has not ended, so that any thread can break that off."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """A piece of work that can wait."""

    @property
    def client(self) -> str:
        """Whose it is."""
        ...


W = TypeVar("W", bound=Waiting)


class FairQueue(Generic[W]):
    """For any number of threads that put, and one that pops."""

    def __init__(
        self, most: int, begin: Callable[[W], bool] = lambda _: True, refuse: Callable[[W], None] = lambda _: None
    ) -> None:
        """Args:
        most: pieces of work that wait; one of which parts are still to begin counts as one.
        begin: takes note that a part of a piece of work begins; whether that was the last one.
        refuse: tells a piece of work that it waits no more, as its place was given to another client.
        """
        self._most, self._begin, self._refuse = most, begin, refuse
        self._by_client: OrderedDict[str, deque[W]] = OrderedDict()
        self._popped: dict[W, None] = {}  # and not removed since
        self._changed = threading.Condition()  # of a lock that its holder may take again
        self._closed = False

    def __len__(self) -> int:
        with self._changed:
            return sum(map(len, self._by_client.values()))

    def has_room(self, client: str) -> bool:
        """Whether work of a client would be taken now."""
        with self._changed:
            return not self._closed and (len(self) < self._most or self._replaceable(client) is not None)

    def put(self, work: W) -> bool:
        """Whether there was room, and the queue is open. Where it is full, the last piece of work of the client that
        has most there makes room, if that client has more than this one even then."""
        replaced = None
        with self._changed:
            if self._closed:
                return False
            if len(self) >= self._most:
                replaced = self._replaceable(work.client)
                if replaced is None:
                    return False
                self.remove(replaced)
            self._by_client.setdefault(work.client, deque()).append(work)
            self._changed.notify()
        if replaced is not None:
            self._refuse(replaced)
        return True

    def _replaceable(self, client: str) -> W | None:
        """The work that makes room for this client's."""
        most = max(self._by_client.values(), key=len, default=deque[W]())
        if len(most) < len(self._by_client.get(client, ())) + 2:
            return None
        return next((work for work in reversed(most) if work not in self._popped), None)

    def next(self) -> W | None:
        """The next piece of work, waited for; `None` once the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._by_client or self._closed)
            return self.pop()

    def pop(self, fits: Callable[[W], bool] = lambda _: True) -> W | None:
        """The next piece of work that fits now, if there is one, of which a part begins; those that do not fit are
        passed by."""
        with self._changed:
            work = next((one for waiting in self._by_client.values() for one in waiting if fits(one)), None)
            if work is None:
                return None
            client = work.client
            waiting = self._by_client[client]
            waiting.remove(work)
            self._by_client.move_to_end(client)
            self._popped[work] = None
            if not self._begin(work):
                waiting.append(work)
            if not waiting:
                del self._by_client[client]
            return work

    def remove(self, work: W) -> None:
        """Forgets a piece of work that waits or was popped: it has ended, or nobody wants it."""
        with self._changed:
            self._popped.pop(work, None)
            waiting = self._by_client.get(work.client)
            if waiting and work in waiting:
                waiting.remove(work)
                if not waiting:
                    del self._by_client[work.client]

    def close(self, keeps: Callable[[W], bool] = lambda _: False) -> list[W]:
        """Takes no more; what was waiting, but for what it `keeps` to be popped yet."""
        with self._changed:
            self._closed = True
            left = [work for waiting in self._by_client.values() for work in waiting if not keeps(work)]
            for work in left:
                self.remove(work)
            self._changed.notify_all()
            return left

    def clear(self) -> list[W]:
        """Closes it and forgets all; what was waiting, and what was popped and has not ended."""
        with self._changed:
            popped = list(self._popped)
            self._popped.clear()
            return list(dict.fromkeys([*popped, *self.close()]))
