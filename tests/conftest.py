"""What every test starts from, however pytest was started; and which tests run: the fast ones, all, or a campaign."""

import fcntl
import functools
import gc
import os
import random
import signal
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import hypothesis
import pytest

GPU_DRIVERS = ("nvidiactl", "nvhost-ctrl-gpu", "dxg", "kfd")
"""What is in /dev where a driver is that PyTorch may find a GPU by."""


@functools.cache
def has_gpu() -> bool:
    """Whether PyTorch sees a GPU. Where there is no driver, nobody waits for PyTorch's import: the process that
    distributes the tests to workers needs none."""
    if sys.platform == "linux" and not any(Path("/dev", name).exists() for name in GPU_DRIVERS):
        return False
    import torch

    return torch.cuda.is_available()


# OpenMP reads it when PyTorch is first imported. Where two tests run at a time, a thread that spins while it waits for
# others takes the processor from them: tests with several threads take ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if not has_gpu():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is first imported

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # tiny models: handing a hundred numbers to a second core costs more than it saves
    "COLUMNS": "80",
    "TERM": "xterm-256color",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
    # PyTorch asks for the name of every address that ranks meet at: 5 to 20 seconds where no name server answers.
    "RES_OPTIONS": "timeout:1 attempts:1",
}
"""Set for the tests and the processes they start."""

UNSET = {
    *("LINES", "NO_COLOR", "FORCE_COLOR", "PY_COLORS", "CLICOLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"),
    *("TTY_INTERACTIVE", "CI", "GITHUB_ACTIONS", "PYTHONSAFEPATH", "PYTHONIOENCODING", "PYTHONUNBUFFERED"),
    *("TRIFORCE_CONTEXTS_MAX",),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
}
"""Not set for them, as is every variable that begins with one of `UNSET_PREFIXES`."""

UNSET_PREFIXES = ("HF_", "HUGGINGFACE_", "HUGGING_FACE_", "TRANSFORMERS_", "TORCHELASTIC_")

SAMPLE = 1 / 20
"""Of the slow tests, what `--sample` runs."""

EXTENT = pytest.StashKey[str]()
LEFT_OUT = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser):
    group = parser.getgroup("triforce", "which tests run")
    group.addoption(
        "--sample",
        action="store_const",
        const="sample",
        dest="extent",
        help="and some of the slow ones, drawn anew",
    )
    group.addoption("--draw", type=int, metavar="NUMBER", help="which of them, with which seeds: what another run said")
    group.addoption("--full", action="store_const", const="full", dest="extent", help="all tests, the slow ones too")
    group.addoption(
        "--campaign", action="store_const", const="campaign", dest="extent", help="all, with 50 times as many examples"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Two processes where pytest-xdist is installed, unless only some tests or a debugger were asked for."""
    if hasattr(config, "workerinput"):
        return  # a worker of such a run, which must not start workers of its own
    option = config.option
    some = config.args_source is not pytest.Config.ArgsSource.TESTPATHS or option.keyword or option.markexpr
    watched = option.usepdb or option.capture == "no" or option.collectonly
    if getattr(option, "numprocesses", 0) is None and option.dist == "no" and not some and not watched:
        option.numprocesses, option.dist = 2, "worksteal"


def pytest_configure(config):
    if not getattr(config.option, "numprocesses", 0) or hasattr(config, "workerinput"):
        gc.disable()  # until all tests are imported; not in the process that only distributes tests to workers
    config.stash[EXTENT] = config.getoption("extent") or "fast"
    config.stash[LEFT_OUT] = Counter()
    if hasattr(config, "workerinput"):
        config.option.draw = config.workerinput["draw"]
    elif config.option.draw is None:
        config.option.draw = random.randrange(2**32)
    hypothesis.settings.register_profile("fast", deadline=None, derandomize=True)
    hypothesis.settings.register_profile("full", deadline=None, derandomize=False, print_blob=True)
    hypothesis.settings.register_profile("sample", hypothesis.settings.get_profile("full"))
    hypothesis.settings.register_profile("campaign", hypothesis.settings.get_profile("full"))
    hypothesis.settings.load_profile(config.stash[EXTENT])


def pytest_collection_finish():
    """What was imported stays: no later collection looks through it."""
    gc.freeze()
    gc.enable()


def pytest_sessionstart(session):
    for name in list(os.environ):
        if name in UNSET or name.startswith(UNSET_PREFIXES):
            del os.environ[name]
    home = tempfile.TemporaryDirectory(prefix="triforce-tests-")
    session.config.add_cleanup(home.cleanup)
    os.environ.update(ENVIRONMENT, HF_HOME=home.name, TRIFORCE_HOME=home.name)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) == signal.SIG_IGN:
            # As under nohup. It still has no effect here, but processes that tests start do not inherit a handler as
            # they inherit SIG_IGN.
            signal.signal(number, lambda *_: None)


def pytest_generate_tests(metafunc):
    """`@pytest.mark.drawn("seed", 50)`: 50 seeds, which the fast tests always have alike and every other run draws
    anew, as Hypothesis does with its examples."""
    from profiles import SHARES

    config = metafunc.config
    for marker in metafunc.definition.iter_markers("drawn"):
        name, count = marker.args
        seeds: Sequence[int] = range(count)
        if config.stash[EXTENT] != "fast":
            chance = random.Random(f"{config.option.draw} {metafunc.definition.nodeid}")
            seeds = chance.sample(range(10**9), count * round(max(1.0, SHARES[config.stash[EXTENT]])))
        metafunc.parametrize(name, seeds)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if not has_gpu():
        for item in items:
            if item.get_closest_marker("gpu"):  # keywords have the names of folders too
                item.add_marker(pytest.mark.skip(reason="PyTorch sees no CUDA device here"))
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        items[:] = long_ones_first(items)
    named = any("::" in argument for argument in config.args) or "slow" in config.getoption("markexpr")
    if config.stash[EXTENT] not in ("fast", "sample") or named:
        return
    slow = slow_cases(items, whole=not config.option.keyword and not config.option.markexpr)
    if config.stash[EXTENT] == "sample":
        chance = random.Random(config.option.draw)
        slow -= {item for item in items if item in slow and chance.random() < SAMPLE}
    config.hook.pytest_deselected(items=[item for item in items if item in slow])
    config.stash[LEFT_OUT].update(PurePosixPath(item.nodeid.partition("::")[0]).parts[1] for item in slow)
    items[:] = [item for item in items if item not in slow]


def long_ones_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """Two workers begin with half of the tests each, and whoever is done takes over half of what the other has left. So
    files with many slow tests are dealt to the beginnings of both halves, and the last tests are short. Those marked
    `alone` come at the very end, where nobody waits long for the other one's test."""
    files: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files["" if item.get_closest_marker("alone") else item.nodeid.partition("::")[0]].append(item)
    alone = files.pop("", [])
    slow = {name: sum(item.get_closest_marker("slow") is not None for item in of) for name, of in files.items()}
    halves: tuple[list[pytest.Item], list[pytest.Item]] = [], []
    for index, name in enumerate(sorted(files, key=lambda name: -slow[name])):
        half = halves[index % 2] if slow[name] else min(halves, key=len)
        half += files[name]
    return [*halves[0], *halves[1], *alone]


def slow_cases(items: list[pytest.Item], whole: bool) -> set[pytest.Item]:
    """Those marked `slow`, but the cases that `keep` lets stay: so many of a test's, always the same, or those with
    these ids. `whole`: all cases of a test are here, so that an id that none has is an error."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow"):
            tests[item.nodeid.partition("[")[0]].append(item)
    slow = set()
    for name, cases in tests.items():
        marker = cases[0].get_closest_marker("slow")
        keep = marker.kwargs.get("keep", 0) if marker else 0
        able = [case for case in cases if has_gpu() or not case.get_closest_marker("gpu")]
        if isinstance(keep, int):
            kept = random.Random(name).sample(able, min(keep, len(able)))
        else:
            named = {case.name.partition("[")[2].removesuffix("]"): case for case in cases}
            if whole and not named.keys() >= set(keep):
                raise pytest.UsageError(f"{name} has not all of the cases that are to be kept: {', '.join(keep)}")
            kept = [named[name] for name in keep if named.get(name) in able]
        slow.update(set(cases) - set(kept))
    return slow


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """With several workers of pytest-xdist, a test marked `alone` waits for the others, and they for it. The locks are
    those of POSIX: with `flock`, a process that a test has forked and left behind would hold the lock to its end."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    shared = Path(item.config.option.basetemp).parent
    with open(shared / "gate.lock", "a+") as gate, open(shared / "tests.lock", "a+") as tests:
        fcntl.lockf(gate, fcntl.LOCK_EX)  # who waits here for all others lets none of them begin a further test
        fcntl.lockf(tests, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        fcntl.lockf(gate, fcntl.LOCK_UN)
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Each worker of pytest-xdist draws the same."""
    node.workerinput["draw"] = node.config.option.draw


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """What a worker of pytest-xdist left out: each leaves out the same."""
    node.config.stash[LEFT_OUT] = Counter(getattr(node, "workeroutput", {}).get("left_out"))


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash[LEFT_OUT])


def pytest_terminal_summary(terminalreporter, config):
    left_out = config.stash[LEFT_OUT]
    if config.stash[EXTENT] in ("full", "campaign"):
        terminalreporter.write_line(f"cases drawn anew: these again with --draw {config.option.draw}")
    if left_out:
        parts = ", ".join(f"{folder} {count}" for folder, count in sorted(left_out.items()))
        again = f"these again: --draw {config.option.draw}, " if config.stash[EXTENT] == "sample" else ""
        words = f"left out: {left_out.total()} slow tests ({parts}); to run {again}all: pytest --full"
        terminalreporter.write_line(words)


@pytest.fixture(autouse=True)
def one_thread():
    """Whatever the test before has set: a fork of a process that computed with two waits for a thread it has not."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """Directories of a tiny target and its draft, with a tokenizer."""
    from command import save_pair

    return save_pair(tmp_path_factory.mktemp("pair"))
