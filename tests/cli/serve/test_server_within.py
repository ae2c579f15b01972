"""A server from within: its limits, lowered, and what it says when something here fails."""

import asyncio
import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from command import TEXT
from hooked_disk import HookedDisk
from served_within import serving_within
from triforce.cli.serve import run
from triforce.cli.serve.answering import jobs
from triforce.cli.serve.answering.answering import Answering
from triforce.cli.serve.answering.arrivals import Arrivals
from triforce.cli.serve.http_limits import ServerLimits
from triforce.cli.serve.web.events import Events
from triforce.cli.serve.web.gate import Body, Held
from triforce.cli.session.session import Failed, Finished, Task, Written
from triforce.cli.session.wire import BodyError
from triforce.cli.terminal.stopping import Signals
from triforce.offload import Run
from triforce.offload.batch.sequence import BatchSequence
from triforce.offload.contexts.use import ContextUse
from triforce.tp.errors import CapacityError, PeerError

COMPLETION = "/v1/completions"


@pytest.fixture
def slow_rounds(monkeypatch):
    """A round of the engine takes at least 10 ms."""
    next_round = Run.__next__

    def slowly(batch):
        time.sleep(0.01)
        return next_round(batch)

    monkeypatch.setattr(Run, "__next__", slowly)


def test_bodies_are_bounded_each_and_together(pair):
    with serving_within(pair, limits={"body_bytes": 4000, "held_bytes": 2000}) as server:
        assert server.complete("x" * 5000).status == server.upload("a", "x" * 5000).status == 413
        reply = server.complete("x" * 3000)
        assert reply.status == 503 and "retry-after" in reply.headers
        assert [server.complete(user="x" * 1500).status for _ in range(3)] == [200] * 3, "what is answered is not held"


def test_the_most_that_a_body_may_have_holds_as_many_tokens_as_the_model():
    for positions, most in ((2048, 2**22), (2**17, 2**23), (2**18, 2**24), (2**20, 2**25), (2**30, 2**25)):
        assert ServerLimits().of_model(positions).body_bytes == most
    assert ServerLimits(body_bytes=4000).of_model(2**20).body_bytes == 4000


def test_a_fault_here_is_answered_without_its_text(pair, monkeypatch):
    def fail():
        raise ZeroDivisionError("nobody may see this")

    with serving_within(pair) as server:
        monkeypatch.setattr(server.server.service.store, "names", fail)
        reply = server.ask("GET", "/v1/contexts")
    assert reply.status == 500 and reply.json["error"]["code"] == "internal_error" and b"nobody" not in reply.body


def test_an_error_after_the_first_token_ends_the_stream_with_an_event(pair, monkeypatch, slow_rounds):
    whole = Run.__next__

    def fail(batch):
        if any(len(one.statistics.token_ids) > 3 for one in batch.live):
            raise ZeroDivisionError("of something that nobody may see")
        return whole(batch)

    with serving_within(pair) as server:
        with monkeypatch.context() as patched:
            patched.setattr(Run, "__next__", fail)
            reply = server.complete(max_tokens=200, stream=True)
        assert reply.status == 200 and reply.events[-1]["error"]["code"] == "internal_error"
        assert b"nobody" not in reply.body and b"Traceback" not in reply.body
        assert server.complete().status == 200, "the server goes on"


def test_while_nobody_asks_nothing_of_the_last_request_is_held(pair, monkeypatch, tmp_path):
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path))

    def held():
        gc.collect()
        kinds = {jobs.Job, jobs.Upload, Task, BatchSequence, ContextUse, Events}
        return [one for one in gc.get_objects() if type(one) in kinds and id(one) not in before]

    before = set[int]()
    left = held()  # of other tests
    before.update(map(id, left))
    with serving_within(pair) as server:
        asked = server.complete, partial(server.complete, stream=True), partial(server.complete, context="book")
        assert server.upload("book", TEXT).status == 201
        server.wait_for(lambda: not held())
        for ask in asked:
            assert ask().status == 200
            server.wait_for(lambda: not held())


def test_nothing_is_answered_while_the_model_loads(pair):
    with serving_within(pair, load=False) as server:
        health = server.ask("GET", "/health")
        assert (health.status, health.json) == (503, {"status": "loading"})
        reply = server.chat()
        assert reply.status == 503 and reply.json["error"]["code"] == "loading" and "retry-after" in reply.headers


def test_a_comment_keeps_a_silent_stream_alive(pair, monkeypatch):
    begin = Answering._begin

    def late(answering, work):
        time.sleep(0.2)
        return begin(answering, work)

    monkeypatch.setattr(Answering, "_begin", late)
    with serving_within(pair, limits={"keep_alive_s": 0.02, "first_event_s": 0.01}) as server:
        reply = server.complete(stream=True)
        asked = {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 4, "stream": True}
        message = server.ask("POST", "/v1/messages", asked)
    assert b"\n\n: keep-alive\n\n" in b"\n\n" + reply.body and reply.events[-1] == "[DONE]"
    assert b'\n\nevent: ping\ndata: {"type":"ping"}\n\n' in message.body and b"keep-alive" not in message.body


def test_a_comment_keeps_a_stream_alive_while_a_prompt_is_read(pair, monkeypatch):
    """Whoever does not ask how it is read is sent nothing else meanwhile."""
    send, sent = Answering._send_progress, []

    def late(answering, task, share):
        for part in range(1, 6 if not sent else 1):
            time.sleep(0.15)  # less than the time after which a comment is due
            send(answering, task, share * part / 6)
        sent.append(share)
        send(answering, task, share)

    monkeypatch.setattr(Answering, "_send_progress", late)
    with serving_within(pair, limits={"keep_alive_s": 0.25, "first_event_s": 0.01}) as server:
        reply = server.complete("It was " * 200, stream=True, max_tokens=1)
    assert reply.body.count(b": keep-alive\n\n") >= 2 and reply.events[-1] == "[DONE]"


def test_who_waits_for_an_answer_that_ends_as_all_is_cut_is_told(pair, monkeypatch):
    send = Answering._send_piece
    with serving_within(pair) as server:

        def send_and_cut(answering, event):
            send(answering, event)
            server.server.worker._cut_by = jobs.stopping()

        monkeypatch.setattr(Answering, "_send_piece", send_and_cut)
        reply = server.complete(max_tokens=1)
    assert reply.status == 503 and reply.json["error"]["code"] == "stopping"


def test_answers_that_a_lost_rank_cuts_are_told_so(pair, slow_rounds):
    ranks = [0, 1]
    with serving_within(pair, ranks_here=lambda: ranks) as server:
        ranks.pop()

        def stop():
            server.wait_for(lambda: server.worker.running)
            assert server.server.cut(run._let_end(server.server, 60.0, Signals()))

        reply, _ = server.at_once(lambda: server.complete(max_tokens=900, stream=True), stop)
        told = reply.events[-1] if reply.status == 200 else reply.json  # it may end before it has begun
        assert told["error"]["code"] == "rank_ended"


@pytest.mark.parametrize("make", [jobs.stopping, jobs.rank_ended, lambda: jobs.as_body_error(PeerError("gone"))])
def test_what_everybody_is_told_at_the_end_is_made_anew(make):
    """What is raised again and again collects the frames of every request."""
    first, second = make(), make()
    assert first is not second and str(first) == str(second)
    with pytest.raises(jobs.BodyError):
        raise first
    assert second.__traceback__ is None


def slow_reads(monkeypatch):
    """From here on reading keys and values from a disk takes long; how many were read, as it grows."""
    preadv, reads = os.preadv, []

    def slowly(descriptor, buffers, offset):
        if sum(map(len, buffers)) > 2**11:
            reads.append(offset)
            time.sleep(0.02)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", slowly)
    return reads


@pytest.fixture
def with_book(pair, tmp_path, monkeypatch):
    """A server that has saved a text in many segments."""
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path))
    with serving_within(pair, limits={"verifications": 1}) as server:
        engine = server.worker.engine
        assert engine and engine.contexts
        engine.contexts.store.segment_tokens = 64
        assert server.upload("book", BOOK).status == 201
        assert len(list((tmp_path / "contexts" / "book").glob("*.safetensors"))) >= 5
        yield server


BOOK = "It was the best of times. " * 60


def test_no_more_than_so_many_wait_for_a_verification(with_book, monkeypatch):
    slow_reads(monkeypatch)
    replies = with_book.at_once(*[lambda: with_book.upload("book", BOOK)] * 4)
    statuses = [reply.status for reply in replies]
    assert statuses.count(201) in (1, 2) and statuses.count(429) == 4 - statuses.count(201), "one beside one that waits"
    refused = next(reply for reply in replies if reply.status == 429)
    assert refused.json["error"]["code"] == "queue_full" and "retry-after" in refused.headers
    assert with_book.upload("book", BOOK).status == 201


def test_a_verification_that_nobody_waits_for_is_given_up(with_book, monkeypatch):
    reads = slow_reads(monkeypatch)
    assert with_book.upload("book", BOOK).status == 201
    whole = len(reads)
    del reads[:]
    parts = ('name="name"\r\n\r\nbook', f'name="file"; filename="a"\r\n\r\n{BOOK}')
    body = "".join(f"--edge\r\nContent-Disposition: form-data; {part}\r\n" for part in parts) + "--edge--\r\n"
    kind = "multipart/form-data; boundary=edge"
    connection = with_book.connect("POST", "/v1/contexts", body.encode(), Content_Type=kind)
    with_book.wait_for(lambda: reads)
    connection.close()
    before = 0
    while before < len(reads):
        before = len(reads)
        time.sleep(0.5)
    assert len(reads) < whole
    assert with_book.upload("book", BOOK).status == 201, "its place is free again"


def test_a_verification_ends_as_the_server_stops(with_book, monkeypatch):
    reads = slow_reads(monkeypatch)

    def stop():
        with_book.wait_for(lambda: reads)
        with_book.worker.stop()

    reply, _ = with_book.at_once(lambda: with_book.upload("book", BOOK), stop)
    assert reply.status == 503 and reply.json["error"]["code"] == "stopping"


def test_a_text_whose_client_has_left_is_taken_again_though_the_disk_stood_still(pair, monkeypatch, tmp_path):
    """The first one has the name until the disk goes on; others are answered meanwhile."""
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path))
    stands, goes_on = threading.Event(), threading.Event()

    def hook(kind, *_):
        if kind == "sync" and not stands.is_set():
            stands.set()
            assert goes_on.wait(30)

    with serving_within(pair) as server:
        engine = server.worker.engine
        assert engine and engine.contexts
        _ = engine.contexts.fingerprint
        engine.contexts.store.disk = HookedDisk(hook)
        text = "It was a long and rainy day. " * 8
        with ThreadPoolExecutor(1) as pool:
            connection = server.connect_to_upload("book", text)
            assert stands.wait(30)
            connection.close()
            again = pool.submit(server.upload, "book", text)
            assert [server.complete().status for _ in range(3)] == [200] * 3
            assert not again.done()
            goes_on.set()
            assert again.result(30).status == 201
        assert [one["name"] for one in server.ask("GET", "/v1/contexts").json["data"]] == ["book"]


@pytest.mark.parametrize(
    ("others", "waited"),
    [
        ({}, 0.0),
        ({-0.02: 0.005}, 0.005),  # it arrived 20 ms ago, and is in the queue 5 ms later
        ({-0.01: 0.008, 0.004: 0.012}, 0.012),
        ({-10.0: 5.0}, 0.0),  # it stalls
        ({-0.01: 5.0}, 0.02),
        ({when / 100: 5.0 for when in range(100)}, 0.03),  # one comes after the other
    ],
)
def test_an_idle_engine_waits_a_moment_for_requests_that_have_just_arrived(others, waited):
    """Args: `others`: when each arrives, and is in the queue."""
    now = 0.0

    def sleep(seconds):
        nonlocal now
        now += seconds
        come()

    def come():
        for arrives, queued in others.items():
            if arrives in left and arrives <= now:
                left.remove(arrives)
                arrivals._since[arrives] = arrives
            if queued <= now:
                arrivals.drop(arrives)

    left, arrivals = set(others), Arrivals(lambda: now, sleep)
    come()
    arrivals.wait()
    assert now == pytest.approx(waited, abs=0.0004)


@pytest.mark.parametrize(
    ("follows", "abandoned", "running", "looks"),
    [
        (False, False, 2, 3),
        (True, False, 2, 0),  # another first token comes before the round
        (False, True, 2, 0),  # nobody takes it
        (False, False, 0, 0),  # no round follows
    ],
)
def test_a_round_waits_until_first_tokens_are_taken(follows, abandoned, running, looks):
    looked, waits = [], []

    def is_taken():
        looked.append(1)
        waits.append(answering.waits_for_streams)
        return len(looked) >= 3

    answering, job, _ = answering_with_first_token(is_taken, running)
    job.abandoned = abandoned
    answering._let_first_tokens_go(fake(run=fake(first_tokens_follow=follows)))
    assert len(looked) == looks and bool(answering._firsts) == follows
    assert all(waits) and not answering.waits_for_streams


def test_a_round_does_not_wait_long_for_first_tokens_that_are_not_taken():
    answering, _job, waited = answering_with_first_token(lambda: False, 1)
    answering._let_first_tokens_go(fake(run=None))
    assert not answering._firsts and sum(waited) == pytest.approx(0.003, abs=0.0003)


def answering_with_first_token(is_taken, running):
    """One that writes so many answers, a job whose first token it has sent, and the seconds for which it waits."""
    nothing: Any = None
    waited: list[float] = []
    arrivals = Arrivals(lambda: sum(waited), waited.append)
    options: Any = {"most": 8, "save_prompts": False, "cut_by": lambda: None}
    found = Answering(nothing, nothing, nothing, arrivals, nothing, nothing, **options)
    found._session = fake(tasks=dict.fromkeys(range(running)))
    job = jobs.Job("one", lambda event: None, nothing, (), is_taken=is_taken)
    found._firsts.add(job)
    return found, job, waited


@pytest.mark.parametrize("then", [Finished, Failed, None])
def test_first_tokens_of_one_pass_are_sent_together_and_before_what_follows_them(then):
    """The second answer ends with its first token, or fails; or no answer is under way any more."""
    answering, job, waited = answering_with_first_token(lambda: False, 3)
    sent: list[Any] = []
    job.send, job.request = sent.append, fake(answers=1)
    answering._firsts.clear()
    answering._engine = fake(target=fake(is_on_one_cpu=True))
    answering._queue = fake(remove=lambda work: None)
    answering._metrics = fake(add_first_token=lambda s: None, add_prompt=lambda s: None)
    answering._count_traffic = lambda session: None
    answering._judge = lambda event: None
    answering._send_end = lambda task: sent.append(task)
    session = fake(run=fake(first_tokens_follow=True), end=lambda task: None)
    named = {"owner": job, "sequence": fake(statistics=None), "draw": 0, "take_logprobs": lambda: None}
    tasks = [fake(number=number, **named) for number in range(3)]
    answering._session = fake(tasks=dict.fromkeys(tasks))
    for task in tasks[:2]:
        answering._handle(Written(task, fake(index=0), str(task.number)), session)
    assert not sent
    ends = {Finished: [Finished(tasks[1])], Failed: [Failed(tasks[1], BodyError("no"))]}.get(then, [None])
    answering._handle(ends[0], session)
    assert [one.text for one in sent[:2]] == ["0", "1"] and len(sent) == 2 + (then is not None)
    assert not waited, "another first token follows"
    session.run.first_tokens_follow = False
    job.abandoned = False
    answering._handle(Written(tasks[2], fake(index=0), "2"), session)
    assert sent[-1].text == "2" and sum(waited) == pytest.approx(0.003, abs=0.0003)


def test_first_tokens_are_sent_before_an_error_that_ends_the_run():
    answering, job, _ = answering_with_first_token(lambda: True, 0)
    sent: list[Any] = []
    job.send = sent.append
    answering._queue = fake(remove=lambda work: None)
    answering._unsent.append((job, jobs.Piece(0, "a")))
    answering._session = fake(tasks={fake(owner=job): None})
    answering._fail_all(CapacityError("memory ran out"))
    assert [type(one) for one in sent] == [jobs.Piece, jobs.Failed]


async def _passed_on():
    """Whether an event counts as taken: before it comes, while it waits, while it is passed on, and afterwards."""
    events = Events(1000)
    taking = asyncio.ensure_future(events.next())
    await asyncio.sleep(0)
    found = [events.are_taken()]
    events.send(jobs.Piece(0, "a"))
    found.append(events.are_taken())
    await taking
    found.append(events.are_taken())
    taking = asyncio.ensure_future(events.next())
    await asyncio.sleep(0)
    found.append(events.are_taken())
    taking.cancel()
    return found


def test_an_event_counts_as_taken_once_the_next_one_is_asked_for():
    assert asyncio.run(_passed_on()) == [True, False, False, True]


class Fake:
    """An object with the attributes that are named."""

    def __init__(self, **named: object) -> None:
        vars(self).update(named)


def fake(**named: object) -> Any:
    return Fake(**named)


def test_no_request_counts_as_arriving_once_its_prompt_is_made_or_refused(pair):
    with serving_within(pair, limits={"body_bytes": 4000}) as server:
        assert server.complete().status == server.complete(stream=True).status == 200
        assert server.upload("a", "A text.").status == 201
        assert server.complete("x" * 5000).status == 413 and server.complete(max_tokens=-1).status == 400
        server.wait_for(lambda: not server.worker.arrivals)
        connection = server.connect("POST", COMPLETION, {"prompt": "It", "max_tokens": 300, "stream": True})
        connection.getresponse().read(10)
        assert not server.worker.arrivals, "it is being answered"
        connection.close()


def test_of_what_a_client_holds_the_longest_unread_stream_goes_first():
    held, cut = Held(ServerLimits(client_held_bytes=100, held_bytes=150)), []

    def begin(name, client="one"):
        found = Body(None, held, client, ServerLimits(), Arrivals())  # pyright: ignore[reportArgumentType]
        found.begin_stream(lambda: cut.append(name))
        return found

    bodies = {name: begin(name) for name in "abc"} | {"d": begin("d", "other")}
    for name, unread in {"a": 20, "b": 60, "d": 90, "c": 19}.items():
        bodies[name].hold_unread(unread)
    assert cut == [], "99 of 100"
    bodies["c"].hold_unread(22)
    assert cut == ["b"], "not the one that grows"
    bodies["b"].hold_unread(70)
    bodies["a"].hold_unread(10)
    held.add("one", 80)  # a body
    assert cut == ["b", "c"]
    with pytest.raises(BodyError, match="long requests") as refused:
        held.add("one", 30)
    assert refused.value.status == 429 and cut == ["b", "c"], "it would not have helped to cut a stream"
    held.drop("one", 30)
    bodies["a"].hold_unread(30)
    assert cut == ["b", "c", "a"], "its own"
    held.add("other", 5)
    with pytest.raises(BodyError) as refused:
        held.add("third", 70)
    assert refused.value.status == 503, "of bodies, 150 together; answers do not count"
    held.drop("third", 70)
    held.drop("other", 5)
    held.drop("one", 80)
    for body in bodies.values():
        body.end()
    assert not held._by_client and not held._bodies and not held.streams


@pytest.mark.parametrize("engine_computes", [True, False])
def test_the_http_thread_pauses_as_long_as_it_has_computed_if_the_engine_computes(engine_computes):
    def pause():
        with run.SharingSelector(lambda: engine_computes) as selector:
            ends = time.thread_time() + 0.2
            while time.thread_time() < ends:
                pass
            began = time.monotonic()
            selector.select(0)
            return time.monotonic() - began

    if engine_computes:
        assert pause() >= 0.2
    else:
        assert min(pause() for _ in range(3)) < 0.1  # this thread may have to wait for a core
