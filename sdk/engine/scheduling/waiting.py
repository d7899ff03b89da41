"""The requests that wait, in the queues of the policy."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from operator import attrgetter

from sdk.api.scheduling_policy import Position, SchedulingPolicy
from sdk.engine.scheduling.request import Request

#: A queue is sorted by it: smaller runs first.
ORDER = attrgetter("order")


class WaitingRequests:
    """Requests without pages. Iterating yields them in the order in which they should start."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._queues: dict[Hashable, list[Request]] = {}  # none is empty
        self.count = 0  # how many

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Request]:
        """Requests may be removed or started, and positions may change, while one is looked at."""
        if len(self._queues) == 1:  # positions do not matter
            [(name, queue)] = self._queues.items()
            return self._rest(name, queue)
        return self.in_order(self._policy)

    def _rest(self, name: Hashable, queue: list[Request]) -> Iterator[Request]:
        index = 0
        while index < len(queue):
            request = queue[index]
            yield request
            index += index < len(queue) and queue[index] is request

    def in_order(self, policy: SchedulingPolicy) -> Iterator[Request]:
        """The same with the positions of ``policy``."""
        heap: list[tuple[Position, object, int, list[Request], Hashable]] = [
            (policy.position(name), queue[0].order, 0, queue, name)
            for name, queue in list(self._queues.items())
        ]
        heapq.heapify(heap)
        while heap:
            _, _, index, queue, name = heap[0]
            request = queue[index]
            yield request
            index += index < len(queue) and queue[index] is request
            if index < len(queue):
                entry = policy.position(name), queue[index].order, index, queue, name
                heapq.heapreplace(heap, entry)
            else:
                heapq.heappop(heap)

    def snapshot(self) -> list[Request]:
        """All of them in any order, also for another thread while a step runs."""
        return [request for queue in list(self._queues.values()) for request in list(queue)]

    def first(self) -> Request | None:
        """The one that should start next."""
        return next(iter(self), None)

    def add(self, request: Request) -> None:
        """Queue a request. :raises TypeError: its queue is not hashable or its order no number."""
        insort(self._queues.setdefault(request.queue, []), request, key=ORDER)
        self.count += 1

    def remove(self, request: Request) -> None:
        """Remove one that waits."""
        queue = self._queues[request.queue]
        del queue[bisect_left(queue, request.order, key=ORDER)]
        self.count -= 1
        if not queue:
            del self._queues[request.queue]

    def check(self) -> None:
        """Assert that the queues agree (tests)."""
        assert self.count == sum(map(len, self._queues.values())), "wrong count"
        for name, queue in self._queues.items():
            assert queue, "an empty queue"
            assert queue == sorted(queue, key=ORDER), "a queue is out of order"
            assert all(request.queue == name for request in queue), "in a wrong queue"
