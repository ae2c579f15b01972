"""Several ranks behind one address: the answers of one rank, and together to the end."""

import json
import os
import signal
import socket
import time

import psutil
import pytest
from command import check_refusal, run_fork
from triforce.tp import PeerError

TEXT = "It was the best of times, it was the worst of times. " * 12
ASKED = [
    {"prompt": "It was", "max_tokens": 30, "temperature": 0},
    {"prompt": "It was", "max_tokens": 20, "seed": 5},
    {"prompt": TEXT, "max_tokens": 25, "seed": 6},
    {"prompt": TEXT + "It", "max_tokens": 10, "temperature": 0, "n": 2},
    {"prompt": "And", "max_tokens": 40, "temperature": 0},
]


def texts(answer):
    return [choice["text"] for choice in answer["choices"]]


@pytest.mark.slow
def test_two_ranks_answer_as_one_whoever_comes_and_goes(server, process):
    alone = [texts(server.ask("POST", "/v1/completions", asked).json) for asked in ASKED]
    ranks = process("--host-memory", 1, ranks=2)
    assert ranks.metric("free_memory_bytes") > server.metric("free_memory_bytes") + 2**26  # rank 0 has its share
    assert [texts(json.load(ranks.post(asked))) for asked in ASKED] == alone
    leaves = ranks.post({"prompt": TEXT + TEXT[:90], "max_tokens": 200, "stream": True})
    leaves.readline()

    def ask(asked):
        return lambda: texts(json.load(ranks.post(asked)))

    assert server.at_once(*(ask(asked) for asked in ASKED), leaves.close) == [*alone, None]
    assert ranks.upload("by-two-ranks", TEXT).status == server.upload("by-two-ranks", TEXT).status == 201
    about = {"prompt": "Who?", "context": "by-two-ranks", "max_tokens": 20, "temperature": 0}
    on_ranks = ranks.complete(**about).json
    assert texts(on_ranks) == texts(server.complete(**about).json)
    assert on_ranks["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    assert ranks.ask("DELETE", "/v1/contexts/by-two-ranks").status == 200
    ranks.signal(signal.SIGTERM)
    assert [fork.wait(30) for fork in ranks.forks] == [143, 0], ranks.log


@pytest.mark.slow
def test_a_rank_that_ends_while_nobody_asks_ends_the_server_with_the_next_request(process):
    ranks = process(ranks=2)
    ranks.forks[1].kill()
    reply = ranks.complete()
    assert (reply.status, reply.json["error"]["code"]) == (500, "rank_ended")
    assert ranks.fork.wait(30) == PeerError.exit_code
    assert "Traceback" not in ranks.log


@pytest.mark.slow
def test_no_rank_outlives_a_server_that_cannot_begin(pair):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        began = time.monotonic()
        outcome = run_fork(
            "serve", "--model", pair[0], "--draft", "none", "--device", "cpu", "--gpus", 2, "--port", port
        )
    check_refusal(outcome, 1, f"--port {port}", "in use")
    assert time.monotonic() - began < 25, "the launcher waited for a rank that waits for rank 0"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_prompt_that_nobody_waits_for_is_not_read_to_its_end(process, lasting, ranks):
    server = process(ranks=ranks, models=lasting)
    leaves = server.post({"prompt": TEXT * 180, "max_tokens": 5, "stream": True, "return_progress": True})
    progress = json.loads(leaves.readline().removeprefix(b"data: "))["prompt_progress"]
    while not 0 < progress["processed"] < progress["total"] / 4 or progress["time_ms"] < 100:
        leaves.readline()  # between events
        progress = json.loads(leaves.readline().removeprefix(b"data: "))["prompt_progress"]
    leaves.close()
    began = time.monotonic()
    assert texts(json.load(server.post(ASKED[0])))
    seconds = time.monotonic() - began
    # The last tokens of a prompt, which see all others, take longer than the first.
    whole_s = progress["time_ms"] / 1e3 * progress["total"] / progress["processed"]
    assert seconds < whole_s / 2, f"{seconds:.1f} s: it was read on, which takes more than {whole_s:.1f} s"
    server.signal(signal.SIGTERM)
    assert [fork.wait(30) for fork in server.forks] == [143, 0][:ranks], server.log


@pytest.mark.slow
def test_an_answer_that_takes_too_long_is_cut_on_all_ranks(process, lasting):
    ranks = process("--grace", 0.5, ranks=2, models=lasting)
    lines, thread = ranks.stream(60_000)
    ranks.signal(signal.SIGTERM)
    assert [fork.wait(30) for fork in ranks.forks] == [143, 0], ranks.log
    thread.join(10)
    assert json.loads(lines[-1].removeprefix(b"data: "))["error"]["code"] == "stopping"


@pytest.mark.slow
@pytest.mark.parametrize("end", ["killed rank", "signal to all"])
def test_the_launcher_ends_with_rank_0(process, lasting, end):
    server = process("--gpus", 2, models=lasting)
    ranks = {
        int(child.environ()["RANK"]): child
        for child in psutil.Process(server.fork.pid).children()
        if "RANK" in child.environ()
    }
    lines, thread = server.stream(60_000 if end == "killed rank" else 300)
    if end == "killed rank":
        ranks[1].send_signal(signal.SIGKILL)
        code, words = 1, "error: rank 1 was killed by SIGKILL"
    else:  # as a terminal does, and a service manager; that rank 0 gets it twice is one signal
        for pid in (server.fork.pid, ranks[0].pid, ranks[1].pid):
            os.kill(pid, signal.SIGTERM)
        code, words = 143, "stopping: 1 answers"
    assert server.fork.wait(60) == code, server.log
    thread.join(10)
    log = server.log
    assert words in log and "Traceback" not in log
    _, alive = psutil.wait_procs(ranks.values(), timeout=10)
    assert not alive
    if end == "killed rank":
        assert log.count("error:") == 1, log
        assert json.loads(lines[-1].removeprefix(b"data: "))["error"]["code"] == "rank_ended"
    else:
        assert lines[-1] == b"data: [DONE]\n"
