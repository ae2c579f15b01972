"""The queue: clients take turns, and it is bounded."""

import functools
import threading
import time

from triforce.cli.serve.answering.fair_queue import FairQueue


class Piece:
    def __init__(self, client, name):
        self.client, self.name = client, name


def test_requests_are_answered_round_robin_over_clients():
    queue = FairQueue(10)
    for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
        assert queue.put(Piece(name[0], name))
    popped = [queue.pop() for _ in range(6)]
    assert [piece and piece.name for piece in popped] == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert queue.pop() is None and len(queue) == 0


def test_the_client_with_most_work_makes_room_for_others():
    refused = []
    queue = FairQueue(4, begin=lambda piece: False, refuse=refused.append)
    pieces = [Piece("a", f"a{number}") for number in range(5)]
    assert all(queue.put(piece) for piece in pieces[:4]) and not queue.put(pieces[4]) and not queue.has_room("a")
    assert queue.put(Piece("b", "b1")) and refused == [pieces[3]]
    assert queue.put(Piece("c", "c1")) and refused == [pieces[3], pieces[2]]
    assert not queue.put(Piece("b", "b2")), "it would have as many as the one with most"
    begun = [queue.pop() for _ in range(4)]  # each has a part more, and waits for it
    assert set(begun) >= {pieces[0], pieces[1]}
    assert not queue.put(Piece("d", "d1")), "what has begun stays"
    assert len(queue) == 4


def test_a_queue_is_bounded_and_what_cannot_begin_yet_keeps_its_place():
    queue = FairQueue(2)
    first, second = Piece("a", "first"), Piece("b", "second")
    assert queue.put(first) and queue.put(second) and not queue.put(Piece("a", "third"))
    assert queue.pop(lambda piece: piece is None) is None
    assert queue.pop(lambda piece: piece is second) is second
    assert queue.put(second) and queue.pop() is first
    assert queue.put(first)
    queue.remove(second)
    queue.remove(second)
    assert queue.close() == [first]
    assert queue.next() is None and not queue.put(second)


def test_who_waits_and_who_has_begun_are_told_of_once_as_all_is_cleared_while_others_ask_and_end():
    """Each piece that was taken has ended, or is in what `clear` gives; nobody's is twice, and no thread fails."""
    for _ in range(50):
        queue, taken, ended, failures = FairQueue(10**6), [], [], []

        def watched(work, failures=failures):
            def run():
                try:
                    work()
                except BaseException as error:
                    failures.append(error)

            return threading.Thread(target=run)

        def ask(client, queue=queue, taken=taken):
            while queue.put(piece := Piece(client, len(taken))):
                taken.append(piece)

        def answer(queue=queue, ended=ended):
            while (piece := queue.next()) is not None:
                if piece.name % 2:
                    ended.append(piece)
                    queue.remove(piece)

        threads = [watched(answer), *(watched(functools.partial(ask, client)) for client in "abc")]
        for thread in threads:
            thread.start()
        while len(taken) < 100:
            time.sleep(0)
        told = queue.clear()
        for thread in threads:
            thread.join(10)
        assert not failures and not any(thread.is_alive() for thread in threads)
        assert len(told) == len(set(told)) and len(queue) == 0
        # One may end in the moment between its answer and its removal: it is then told of, too.
        assert set(taken) <= {*told, *ended} and len({*told} & {*ended}) <= 1
