"""What the program says and writes is what was recorded; README.md in this folder says how, and when it is recorded
anew."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import golden_commands
import golden_http
import golden_store
import golden_texts
import pytest
from filelock import FileLock
from golden_models import save_checkpoints
from golden_process import RECORDED, difference, read_entries, versions
from golden_rules import settled

VERSIONS: dict[str, dict[str, str]] = json.loads((RECORDED / "versions.json").read_text(encoding="utf-8"))

LEVELS = [level for level in golden_texts.LEVELS if f"texts/{level}" in VERSIONS]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all workers of a run."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def models(shared: Path) -> Path:
    """The checkpoints, which the first worker writes."""
    with FileLock(shared / "golden-models.lock"):
        return (
            shared / "golden-models"
            if (shared / "golden-models").exists()
            else save_checkpoints(shared / "golden-models")
        )


def check(name: str, path: Path, found: str) -> None:
    """Compares an entry with what was recorded of it."""
    want = read_entries(path).get(name)
    assert want is not None, f"{name} was never recorded: python tests/golden/record.py, see tests/golden/README.md"
    problem = difference(name, want, settled(want, found))
    if problem:
        pytest.fail(problem, pytrace=False)


def skip_other_versions(recorded: str, *packages: str) -> None:
    """Skips where what is compared follows from packages, and these are not those that it was recorded with."""
    want = {name: found for name, found in VERSIONS[recorded].items() if name in packages}
    if want != versions(*packages):
        pytest.skip(
            f"recorded with {want}, and here are {versions(*packages)}: record it anew with these on a commit that "
            "is known to be right (tests/golden/README.md)"
        )


@pytest.mark.parametrize("session", golden_commands.SESSIONS, ids=lambda session: session.name)
@pytest.mark.slow(keep=("generate/json", "generate/bad-option", "help/read", "plan/json", "batch/answers"))
def test_command_lines_say_what_they_said(session: golden_commands.Session, models: Path, tmp_path: Path):
    skip_other_versions("commands", *session.packages)
    found = golden_commands.record(session, models, tmp_path)
    check(session.name, RECORDED / "commands" / f"{session.group}.txt", found)


@pytest.mark.parametrize("session", golden_store.SESSIONS, ids=lambda session: session.name)
@pytest.mark.slow(keep=("store/raw",))
def test_the_saved_store_is_read_and_answers(session: golden_commands.Session, models: Path, tmp_path: Path):
    check(session.name, RECORDED / "store.txt", golden_commands.record(session, models, tmp_path))


@pytest.mark.parametrize("scenario", golden_http.SCENARIOS, ids=lambda scenario: scenario.name)
@pytest.mark.slow(keep=("chat/streamed", "errors/bodies"))
def test_the_server_answers_what_it_answered(scenario: golden_http.Scenario, models: Path, tmp_path: Path):
    check(scenario.name, RECORDED / "http" / f"{scenario.group}.txt", golden_http.record(scenario, models, tmp_path))


@pytest.fixture(scope="session")
def texts_of(request: pytest.FixtureRequest, shared: Path, models: Path) -> Any:
    """The texts of a level, by name: those of this run's tests, computed at once by the worker that needs one first."""
    items: list[Any] = request.session.items
    names = {item.callspec.params["name"] for item in items if item.originalname == TEXTS_TEST}

    def compute(level: str) -> dict[str, str]:
        path = shared / f"golden-texts-{level}.json"
        with FileLock(f"{path}.lock"):
            if not path.exists():
                names_of_level = [text.name for text in golden_texts.TEXTS if text.name in names]
                path.write_text(json.dumps(golden_texts.texts_of(level, models, names_of_level)), encoding="utf-8")
        return json.loads(path.read_text(encoding="utf-8"))

    return compute


@pytest.fixture(scope="session")
def highest_level(models: Path) -> str:
    return golden_texts.highest_level(models)


TEXTS_TEST = "test_texts_have_the_tokens_that_they_had"


CASES = [(text.name, level) for level in LEVELS for text in golden_texts.TEXTS]
NOT_RECORDED = [("all", level) for level in golden_texts.LEVELS if level not in LEVELS]


@pytest.mark.parametrize(("name", "level"), CASES + NOT_RECORDED)
@pytest.mark.slow(keep=("float32/three-tiers-seeded-avx2", "bfloat16/three-tiers-exact-avx2"))
def test_texts_have_the_tokens_that_they_had(name: str, level: str, highest_level: str, texts_of: Any):
    if level not in LEVELS:
        pytest.skip(
            f"the texts of {level} were not recorded: python tests/golden/record.py texts --level {level}, where the "
            "processor has it"
        )
    if golden_texts.LEVELS.index(level) > golden_texts.LEVELS.index(highest_level):
        pytest.skip(f"the compiled kernels have {highest_level} here; {level} needs a processor that has it")
    skip_other_versions(f"texts/{level}", *golden_texts.ARITHMETIC)
    check(name, RECORDED / "texts" / f"{level}.txt", texts_of(level)[name])
