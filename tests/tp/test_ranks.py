"""Several CPU ranks share a model: the same tokens as one, few collectives, and together to the end."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
import spmd
from command import TRIFORCE, check_refusal, first_on_path, run_command, run_fork
from spmd import ENVIRONMENT, run_jobs, torchrun
from tiny import greedy_oracle, random_tokens, save_llama
from triforce.offload import Engine, Sampling

PROMPT = random_tokens(150, seed=3)
NEW_TOKENS = 16
SHAPES = {
    "mha": {},
    "gqa": {"num_key_value_heads": 2, "intermediate_size": 90, "tie_word_embeddings": True},
    "mqa": {"num_key_value_heads": 1},
}
"""With 4 ranks: heads to each, two ranks to a key/value head, one key/value head for all; MLP and vocabulary ragged."""


def to_run_first(folder, code):
    """The `PYTHONPATH` with which each interpreter runs `code` first, which `folder` takes."""
    (folder / "sitecustomize.py").write_text(code)
    return first_on_path(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of random models by name, "draft" among them, and greedy tokens according to transformers."""
    root = tmp_path_factory.mktemp("models")
    save_llama(root / "draft", seed=9, num_hidden_layers=1, hidden_size=32)
    oracles = {
        name: greedy_oracle(save_llama(root / name, seed=1, **changes), PROMPT, NEW_TOKENS)
        for name, changes in SHAPES.items()
    }
    return root, oracles


def job(root, model, **changes):
    given = {
        "model": str(root / model),
        "draft": str(root / "draft"),
        "prompt": PROMPT,
        "new_tokens": NEW_TOKENS,
        "settings": {"budget": 48},
    }
    return given | changes


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks_and_reports(request, models):
    """How many ranks, and what they report of a greedy run of every shape in three tiers and one, and sampled ones."""
    root, _ = models
    jobs = [job(root, name) for name in SHAPES]
    jobs += [job(root, name, draft=None, settings={"tiers": 1}) for name in SHAPES]
    jobs += [job(root, name, temperature=1.0, seed=5) for name in SHAPES]
    return request.param, run_jobs(jobs, request.param)


def test_greedy_tokens_on_every_rank_equal_those_of_transformers(models, ranks_and_reports):
    _, oracles = models
    ranks, reports = ranks_and_reports
    for tiers, of_jobs in (("three tiers", reports[:3]), ("one tier", reports[3:6])):
        for name, of_ranks in zip(SHAPES, of_jobs, strict=True):
            assert [report["token_ids"] for report in of_ranks] == [oracles[name]] * ranks, (name, tiers)
            assert {report["world_size"] for report in of_ranks} == {ranks}


def test_same_seed_gives_the_same_sampled_tokens_as_one_rank(models, ranks_and_reports):
    root, _ = models
    for name, of_ranks in zip(SHAPES, ranks_and_reports[1][6:], strict=True):
        engine = Engine.load(root / name, root / "draft", device="cpu", dtype="float32", budget=48)
        alone = engine.generate(PROMPT, Sampling(1.0, 1.0, 0, 5), NEW_TOKENS)
        assert [report["token_ids"] for report in of_ranks] == [alone.token_ids] * len(of_ranks), name


def test_a_layer_sums_twice_a_forward_gathers_once_and_a_round_broadcasts_once(ranks_and_reports):
    """As PyTorch is asked for it."""
    for of_ranks in ranks_and_reports[1][:6]:
        for report in of_ranks:
            collectives = report["collectives"]
            passes = collectives["all_gather"]
            assert collectives["all_reduce"] == 2 * 3 * passes  # three layers
            of_the_prefill = collectives["broadcast"] - report["rounds"]
            # One at its end, and one before each half of a second of it, in which rank 0 may be asked to end: before
            # one layer, the next two and the rest, as it is not known yet how long they take.
            assert 2 <= of_the_prefill <= 4 + 2 * report["prefill_s"]
            assert collectives["broadcast_object_list"] == 1  # the prompt
            assert passes > report["rounds"]


@pytest.mark.slow
def test_two_launches_of_torchrun_are_one_run(models):
    root, oracles = models
    jobs = json.dumps([job(root, "mha")])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = [
        subprocess.Popen(
            torchrun(
                *("--nnodes", 2, "--node-rank", node, "--nproc-per-node", 1),
                *("--master-addr", "127.0.0.1", "--master-port", port),
                *(spmd.__file__, jobs),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | ENVIRONMENT,
        )
        for node in (0, 1)
    ]
    for node in nodes:
        out, err = node.communicate(timeout=120)
        assert node.returncode == 0, err
        assert json.loads(out)["token_ids"] == oracles["mha"]


@pytest.mark.slow
def test_heads_that_do_not_divide_are_refused_with_the_counts_that_work(pair):
    outcome = run_fork("generate", "--model", pair[0], "--prompt", "A", "--device", "cpu", "--gpus", 3)
    check_refusal(outcome, 2, "4 heads", "3 ranks", "1, 2, 4")


@pytest.mark.slow
def test_heads_are_checked_before_any_rank_is_started(pair, tmp_path):
    path = to_run_first(tmp_path, "import os\nif 'RANK' in os.environ:\n    print('a rank')\n")
    arguments = ("generate", "--model", pair[0], "--prompt", "A", "--device", "cpu", "--gpus", 16)
    check_refusal(run_fork(*arguments, PYTHONPATH=path), 2, "4 heads", "16 ranks")


@pytest.mark.slow
def test_interrupt_that_an_import_swallows_still_ends_the_launcher(tmp_path):
    """Modules written in C may drop what a signal handler raises while they are imported."""
    swallowing = """
import importlib.abc, os, signal, sys
class Interrupted(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch" and "RANK" not in os.environ:
            sys.meta_path.remove(self)
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except BaseException:
                pass
sys.meta_path.insert(0, Interrupted())
"""
    path = to_run_first(tmp_path, swallowing)
    arguments = ("generate", "--device", "cpu", "--gpus", 2, "--prompt", "A", "--max-new-tokens", 5)
    outcome = run_command(*arguments, PYTHONPATH=path)
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "interrupted\n")


def test_engine_refuses_ranks_that_nobody_started(pair):
    with pytest.raises(Exception, match="torchrun --nproc-per-node 2"):
        Engine.load(pair[0], gpus=2, device="cpu")


@pytest.mark.slow
def test_command_joins_torchrun_and_rank_0_alone_speaks(pair):
    arguments = ("generate", "--model", pair[0], "--prompt", "It was", "--temperature", 0, "--dtype", "float32")
    alone = run_fork(*arguments, "--max-new-tokens", 20)
    command = torchrun("--standalone", "--nproc-per-node", 2, "-m", "triforce.cli", *arguments)
    joined = subprocess.run(
        [*command, "--max-new-tokens", "20"], capture_output=True, timeout=120, env=os.environ | ENVIRONMENT
    )
    assert joined.returncode == 0, joined.stderr
    assert joined.stdout.decode() == alone.out
    assert joined.stderr.decode().count("TTFT") == 1


@pytest.mark.slow
def test_port_that_is_taken_is_named_with_the_remedy(pair):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = ("generate", "--model", pair[0], "--prompt", "A", "--device", "cpu")
        outcome = run_fork(*command, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    check_refusal(outcome, 1, f"127.0.0.1:{port}", "taken", "--master-port")


@pytest.mark.slow
def test_rank_that_ends_early_does_not_take_the_group_apart(pair, tmp_path):
    """Where the interpreter exits in order, Gloo's threads now and then abort it; here its exit always aborts."""
    abort = "import atexit, os\nif os.environ.get('RANK') == '0':\n    atexit.register(os.abort)\n"
    path = to_run_first(tmp_path, abort)
    arguments = ("generate", "--model", pair[0], "--prompt", "A", "--device", "cpu", "--gpus", 2)
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*TRIFORCE, *map(str, arguments)],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )
    assert done.returncode == 1
    assert done.stderr.count(b"error:") == 1, done.stderr
    assert b"standard output cannot be written" in done.stderr


LONG_RUN = ("generate", "--device", "cpu", "--gpus", "2", "--prompt", "It was", "--max-new-tokens", "60000")
LONG_RUN += ("--ignore-eos", "--temperature", "0", "--tiers", "1")


class Running:
    """`triforce` on two ranks, once its first text is out."""

    def __init__(self, **environment):
        self.process = subprocess.Popen(
            [*TRIFORCE, *LONG_RUN],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        )
        assert self.process.stdout is not None
        self.first = b"".join(self.process.stdout.read(1) for _ in range(120))  # some rounds' text
        self.ranks = {
            int(child.environ()["RANK"]): child
            for child in psutil.Process(self.process.pid).children(recursive=True)
            if "RANK" in child.environ()
        }

    def end(self):
        """Exit code, text, messages, and seconds until the end; no rank is left then."""
        began = time.monotonic()
        out, err = self.process.communicate(timeout=60)
        seconds = time.monotonic() - began
        _, alive = psutil.wait_procs(self.ranks.values(), timeout=max(0.0, 10 - seconds))
        assert not alive, [(child.pid, child.status()) for child in alive]
        return self.process.returncode, (self.first + out).decode(), err.decode(), seconds


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.slow
def test_killed_rank_ends_the_run_everywhere(rank):
    running = Running()
    running.ranks[rank].send_signal(signal.SIGKILL)
    code, _, err, seconds = running.end()
    assert (code, err.count("error:")) == (1, 1), err
    assert f"error: rank {rank} was killed by SIGKILL" in err
    assert "Traceback" not in err
    assert seconds < 10
    if rank == 1:
        assert "TBT" in err, "rank 0 should still say what it measured"


@pytest.mark.slow
def test_killed_rank_is_noticed_even_if_its_connections_stay_open(tmp_path):
    """As far as rank 0 can tell, this is what happens when Gloo misses that a connection was closed."""
    dying = """
import os, signal, time
def die(*_):
    if os.fork() == 0:  # it inherits the connections
        os.closerange(0, 3)
        time.sleep(15)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ.get("RANK") == "1":
    signal.signal(signal.SIGUSR1, die)
"""
    path = to_run_first(tmp_path, dying)
    running = Running(PYTHONPATH=path)
    running.ranks[1].send_signal(signal.SIGUSR1)
    code, _, err, seconds = running.end()
    assert (code, err.count("error:")) == (1, 1), err
    assert "error: rank 1 was killed by SIGKILL" in err
    assert "TBT" in err, "rank 0 should still say what it measured"
    assert seconds < 13  # the connections close after 15


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.slow
def test_signal_to_the_launcher_ends_all_ranks_cleanly(number, code):
    running = Running()
    running.process.send_signal(number)
    ended, text, err, seconds = running.end()
    assert (ended, err.count("error:"), seconds < 10) == (code, 0, True), err
    assert text.strip()
    assert "TBT" in err


@pytest.mark.slow
def test_run_under_nohup_outlives_its_terminal(pair):
    """A shell that ends hangs up on the launcher; the ranks have sessions of their own."""
    arguments = ("--model", pair[0], "--prompt", "A", "--device", "cpu", "--gpus", 2, "--max-new-tokens", 100)
    process = subprocess.Popen(
        [*TRIFORCE, "generate", *map(str, arguments), "--ignore-eos", "--tiers", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGHUP)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert b"100 tokens" in err


@pytest.mark.slow
def test_launcher_that_is_killed_takes_its_ranks_along():
    running = Running()
    running.process.kill()
    running.end()


FAULTS = {
    "a deliberate fault": """
import torch.distributed as module
reduce, calls = module.all_reduce, []
def failing(*given, **named):
    calls.append(None)
    if len(calls) > 200:
        raise ValueError("a deliberate fault")
    return reduce(*given, **named)
module.all_reduce = failing
""",
    "memory ran out": """
import torch as module
empty, calls = module.empty, []
def starving(*given, **named):
    calls.append(None)
    return empty(*given, **named) if len(calls) < 1000 else empty(2**60)
module.empty = starving
""",
}
"""What a rank has PyTorch do in the middle of a run."""


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.slow
def test_rank_that_fails_ends_the_run_with_its_error(fault, tmp_path):
    indented = "".join(f"    {line}\n" for line in FAULTS[fault].splitlines())
    path = to_run_first(tmp_path, f"import os\nif os.environ.get('RANK') == '1':\n    pass\n{indented}")
    began = time.monotonic()
    outcome = run_command(*LONG_RUN, PYTHONPATH=path)
    assert (outcome.code, outcome.err.count("error:")) == (1, 1), outcome.err
    assert "error: rank 1:" in outcome.err
    assert fault in outcome.err
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_request_refused_by_another_rank_first_is_still_a_usage_error(tmp_path):
    """All ranks check the request, and rank 0 may not have come to it when another has refused it."""
    delay = "import os, time\nif os.environ.get('RANK') == '0':\n    time.sleep(15)\n"
    path = to_run_first(tmp_path, delay)
    outcome = run_command(*LONG_RUN, "--refresh", "bogus", PYTHONPATH=path)
    check_refusal(outcome, 2, "refresh is 'bogus'")


@pytest.mark.slow
def test_no_rank_outlives_a_group_that_a_lone_member_waits_for():
    """A rank whose launcher dies while it waits for the others to come ends too."""
    script = (
        "import os, subprocess, sys\n"
        "place = {'RANK': '1', 'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '1'}\n"
        f"rank = subprocess.Popen({[*TRIFORCE, *LONG_RUN]!r}, env=os.environ | place)\n"
        "print(rank.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    rank = psutil.Process(int(launcher.stdout.readline()))
    deadline = time.monotonic() + 60
    while rank.num_threads() < 2 and time.monotonic() < deadline:  # the guard is a thread
        time.sleep(0.1)
    launcher.kill()
    launcher.wait()
    psutil.wait_procs([rank], timeout=10)
    assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
