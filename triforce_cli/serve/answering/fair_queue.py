"""A bounded queue of waiting work, round-robin over clients, so that a client with many requests delays others little.

Work with several parts is popped once for each part, and work of other clients comes in between. The queue also keeps
the work that was popped and has not ended, so that any thread can interrupt it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """A piece of work that can wait."""

    @property
    def client(self) -> str:
        """The client that it belongs to."""
        ...


W = TypeVar("W", bound=Waiting)


class FairQueue(Generic[W]):
    """A queue for any number of threads that put work, and one thread that pops work."""

    def __init__(
        self, most: int, begin: Callable[[W], bool] = lambda _: True, refuse: Callable[[W], None] = lambda _: None
    ) -> None:
        """Args:
        most: maximum number of pieces of work that wait. Work counts as one piece while some of its parts wait.
        begin: notes that a part of a piece of work begins, and returns whether it is the last part.
        refuse: called with a piece of work that was removed because its place was given to another client.
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
        """Whether the queue would accept work of a client."""
        with self._changed:
            return not self._closed and (len(self) < self._most or self._replaceable(client) is not None)

    def put(self, work: W) -> bool:
        """Adds a piece of work. Returns false if there is no room, or the queue is closed. If the queue is full, the
        last piece of work of the client with the most work is removed, if that client still has more than this one
        afterwards."""
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
        """The work that is removed to make room for work of this client; `None` if there is none."""
        most = max(self._by_client.values(), key=len, default=deque[W]())
        if len(most) < len(self._by_client.get(client, ())) + 2:
            return None
        return next((work for work in reversed(most) if work not in self._popped), None)

    def next(self) -> W | None:
        """Waits for the next piece of work, and returns it; `None` if the queue is closed and has no work left."""
        with self._changed:
            self._changed.wait_for(lambda: self._by_client or self._closed)
            return self.pop()

    def pop(self, fits: Callable[[W], bool] = lambda _: True) -> W | None:
        """Begins a part of the next piece of work that fits, and returns the work; `None` if there is none. Work that
        does not fit is skipped."""
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
        """Removes a piece of work that waits or was popped, because it has ended or nobody waits for it."""
        with self._changed:
            self._popped.pop(work, None)
            waiting = self._by_client.get(work.client)
            if waiting and work in waiting:
                waiting.remove(work)
                if not waiting:
                    del self._by_client[work.client]

    def close(self, keeps: Callable[[W], bool] = lambda _: False) -> list[W]:
        """Closes the queue, and returns the waiting work. Work for which `keeps` is true stays and can be popped."""
        with self._changed:
            self._closed = True
            left = [work for waiting in self._by_client.values() for work in waiting if not keeps(work)]
            for work in left:
                self.remove(work)
            self._changed.notify_all()
            return left

    def clear(self) -> list[W]:
        """Closes and empties the queue. Returns the work that was waiting, and the popped work that has not ended."""
        with self._changed:
            popped = list(self._popped)
            self._popped.clear()
            return list(dict.fromkeys([*popped, *self.close()]))
