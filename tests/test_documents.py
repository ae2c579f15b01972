"""Pages keep their word: blocks run or say why not, links and names lead somewhere, quoted errors are in the code.

A block is run as it stands, in a new folder that has `book.txt`. A ` ```text ` block right after it is part of what it
prints, where a line `…` stands for what is left out. A block that is not run has a comment above it:
`<!-- not run: the reason -->`.
"""

from __future__ import annotations

import ast
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from command import Fork, run_here, triforce, undocumented

ROOT = Path(__file__).parents[1]

PAGES = [
    *(
        ROOT / name
        for name in (
            "README.md",
            "CONTRIBUTING.md",
            "CHANGELOG.md",
            "tp/embedded/README.md",
            "tests/README.md",
            "examples/README.md",
            "examples/train/pair/README.md",
        )
    ),
    *sorted((ROOT / "docs").glob("*.md")),
]

PACKAGES = ("kernels", "tp", "offload", "triforce_cli")

NOT_RUN = re.compile(r"<!-- not run: (\S.+) -->")

TEXT = (
    "Mr. Weston was a native of the village, and had been well to do for many years. He rose early and went out before "
    "the others; nobody asked where. “You will find it in the drawer,” she said, “if it is anywhere.” It rained. "
)

BOOK = f"{TEXT * 12}\n\nThe pass key is 48217.\n\n{TEXT * 12}"
"""About 2,000 tokens of the embedded pair."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    why_not: str | None
    """The reason why it is not run, if there is one."""
    printed: str | None
    """The text block that follows, if any."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    fences = [number for number, line in enumerate(lines) if line.startswith("```")]
    assert len(fences) % 2 == 0, f"{page.name} has a block without an end"
    pairs = list(zip(fences[::2], fences[1::2], strict=True))
    for index, (first, last) in enumerate(pairs):
        above = first
        while above > 0 and lines[above - 1].startswith("<!--"):
            above -= 1
        reasons = [found[1] for line in lines[above:first] if (found := NOT_RUN.fullmatch(line))]
        printed = None
        if index + 1 < len(pairs):
            start, stop = pairs[index + 1]
            if lines[start] == "```text" and not "".join(lines[last + 1 : start]).strip():
                printed = "\n".join(lines[start + 1 : stop])
        yield Block(
            str(page.relative_to(ROOT)),
            first + 1,
            lines[first].removeprefix("```"),
            "\n".join(lines[first + 1 : last]),
            reasons[0] if reasons else None,
            printed,
        )


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
RUN = [block for block in BLOCKS if block.language in ("bash", "python") and block.why_not is None]


def test_every_block_says_what_it_is():
    for block in BLOCKS:
        assert block.language in ("bash", "python", "text"), f"{block}: is it something to run?"


CLIENT = """\
#!{python} -SE
import os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({server!r})
socket.send_fds(server, ["\\0".join([os.getcwd(), *sys.argv[1:]]).encode()], [0, 1, 2])
sys.exit(int(server.recv(16)))
"""
"""`triforce` for blocks: asks the process that runs the tests for a fork of itself, which has PyTorch already."""


@dataclass(frozen=True)
class Commands:
    folder: Path
    """Has `triforce` and `python` as they are in this environment."""
    asked: socket.socket
    """Where `triforce` asks for a process."""

    def run(self, program: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str, str]:
        """The exit code of a program that may use them, and what it prints."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = subprocess.Popen(
                program, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
            try:
                while process.poll() is None:
                    with suppress(TimeoutError):
                        self._serve(self.asked.accept()[0], environment)
            finally:
                process.kill()
                process.wait()
            for file in (out, err):
                file.seek(0)
            return process.returncode, out.read(), err.read()

    @staticmethod
    def _serve(client: socket.socket, environment: dict[str, str]) -> None:
        """Runs one command to its end: blocks run one after the other, and pipes hold what they print."""
        with client:
            request, streams, _, _ = socket.recv_fds(client, 2**16, 3)
            folder, *arguments = request.decode().split("\0")
            fork = Fork(triforce(*arguments), (streams[0], streams[1], streams[2]), environment, folder=folder)
            for stream in streams:
                os.close(stream)
            try:
                code = fork.wait(900)  # of a machine with much else to do
            finally:
                fork.kill()
            client.send(str(code).encode())


@pytest.fixture(scope="session")
def commands(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    with tempfile.TemporaryDirectory(prefix="triforce-") as short, socket.socket(socket.AF_UNIX) as asked:
        server = f"{short}/asked"  # the system takes no path of a socket above 107 bytes
        asked.bind(server)
        asked.listen()
        asked.settimeout(0.05)
        (folder / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        (folder / "triforce").write_text(CLIENT.format(python=sys.executable, server=server))
        for name in ("python", "triforce"):
            (folder / name).chmod(0o755)
        yield Commands(folder, asked)


@pytest.mark.slow
@pytest.mark.parametrize("block", RUN, ids=str)
def test_a_block_runs_as_it_stands(block, commands, tmp_path):
    (tmp_path / "book.txt").write_text(BOOK, encoding="utf-8")
    program = ["bash", "-euo", "pipefail", "-c"] if block.language == "bash" else [sys.executable, "-P", "-c"]
    environment = {"PATH": f"{commands.folder}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment |= {"COLUMNS": "200", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    code, out, err = commands.run([*program, block.text], tmp_path, {**os.environ, **environment})
    assert code == 0, f"{block}\n{block.text}\n{out[-2000:]}\n{err[-2000:]}"
    printed = {" ".join(line.split()) for line in out.splitlines()}
    for line in (block.printed or "").splitlines():
        assert line == "…" or " ".join(line.split()) in printed, f"{block} does not print {line!r} but\n{out}"


def test_the_readme_is_short_and_says_what_it_is_and_its_limits_before_one_installs():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= 90, f"README.md has {len(lines)} lines"
    opening, limits = text.split("## Start")[0].split("**Limits.**")
    what, whom = " ".join(opening.split("\n\n")[1].split()).split(". ")[:2]
    for words in ("larger than the GPU's memory", "for the request that runs now", "without approximation"):
        assert words in what
    assert whom.startswith("It is for ")
    for words in ("host memory", "PCIe"):
        assert words in opening
    assert "have not run on a GPU yet" in " ".join(limits.split())


def test_the_index_has_every_page_in_the_order_of_the_site():
    hook = ast.parse((ROOT / "docs" / "site.py").read_text(encoding="utf-8")).body
    values = [one.value for one in hook if isinstance(one, ast.Assign)]
    others = next(ast.literal_eval(value) for value in values if isinstance(value, ast.Dict))
    links = (os.path.normpath(f"docs/{target}") for _, target in links_of(ROOT / "docs" / "index.md"))
    listed = [others.get(path, path.removeprefix("docs/")) for path in links]
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:")[1]
    assert ["index.md", *listed] == re.findall(r"^ +- (\S+\.md)$", site, re.MULTILINE)
    assert {path.name for path in PAGES if path.parent.name == "docs"} <= {"index.md", *listed}


def test_ci_finds_its_command_in_the_readme():
    after = (ROOT / "README.md").read_text(encoding="utf-8").split("<!-- test command -->\n")[1]
    assert re.match(r"```bash\n[^`]*pytest[^`]*\n```\n", after)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_in_a_list_is_indented_as_the_site_wants_it(page):
    """Markdown on GitHub takes two spaces, too; the site's would make other items, or rows of a table, of it."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for nested in (r"^ {1,3}(?:[*-]|\d+\.) .*", r"\n\n {1,3}\S.*", r"^ *\|.*\n *(?:[*-]|\d+\.) .*"):
        found = re.search(nested, text, re.MULTILINE)
        assert not found, f"four spaces, and an empty line behind a table: {found}"


def links_of(page: Path) -> Iterator[tuple[str, str]]:
    """Text and target of the links to files of this repository, outside blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for name, target in re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", text):
        if not re.match(r"\w+:", target):
            yield name, target


def anchors_of(page: Path) -> set[str]:
    """Those of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for name, target in links_of(page):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"[{name}]({target})"
        assert not anchor or anchor in anchors_of(file), f"[{name}]({target})"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_link_to_code_names_is_there(page):
    for text, target in links_of(page):
        if not target.endswith((".py", ".c", ".h")) or "`" not in text:
            continue
        source = (page.parent / target).read_text(encoding="utf-8")
        for name in re.findall(r"`([^`]+)`", text):
            if re.fullmatch(r"[\w.]+", name) and "(" not in name and not name.startswith("app."):
                pattern = rf"^\s*(?:class |def |async def |)\b{re.escape(name.split('.')[-1])}\b *(?:[(:=\[]|$)"
                assert re.search(pattern, source, re.MULTILINE), f"{target} does not define {name}"
            else:
                assert name in source, f"{target} does not have {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_in_a_page_exist(page):
    text = page.read_text(encoding="utf-8")
    code = [*re.findall(r"`([^`\n]+)`", text), *(block.text for block in blocks_of(page))]
    for path in re.findall(
        r"(?<![\w./-])(?:kernels|tp|offload|triforce_cli|tests|examples|docs)/[\w./-]*", "\n".join(code)
    ):
        assert (ROOT / path).exists(), path


CALL = re.compile(r"^[│├└─ ]*([\w.]+(?:, \.\w+)*)(?: of the \w+)? {2,}([\w/]+\.py)", re.MULTILINE)
"""A line of a path in docs/architecture.md: what is called, and the file it is in, below `offload/` if nothing else."""


def test_the_paths_of_the_architecture_name_what_is_there():
    calls = CALL.findall((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("## Four paths")[1])
    assert len(calls) > 30
    for called, file in calls:
        path = next((path for path in (ROOT / "offload" / file, ROOT / file) if path.is_file()), None)
        assert path, f"there is no {file}"
        owner, *names = re.split(r"\W+", called)
        text = path.read_text(encoding="utf-8")
        for name in (owner, *names):
            assert re.search(rf"(def|class) {name}\b", text), f"{file} has no {name}"


def messages() -> Iterator[str]:
    """Every text in the code, as one line, with `…` for what is put in."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                    yield "".join(map(str, parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                    yield node.value


def test_errors_that_are_explained_are_in_the_code():
    rows = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").splitlines()
    quoted = [found[1] for row in rows if (found := re.match(r"\| `(.+?)` \|", row))]
    assert len(quoted) > 30
    written = list(messages())
    for message in quoted:
        pieces = [piece.strip(" ;,()") for piece in message.split("…")]
        pattern = re.compile(".*".join(re.escape(piece) for piece in pieces if piece), re.DOTALL)
        assert any(pattern.search(text) for text in written), f"no error says {message!r}"


def test_every_key_that_models_and_doctor_write_is_documented(capfd):
    models, doctor = (json.loads(run_here(capfd, command, "--json", "-").out) for command in ("models", "doctor"))
    assert not undocumented(models, "json.md")
    assert not undocumented(doctor, "json.md", but="versions")


def test_a_commit_is_checked_with_the_tested_ruff():
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    tested = re.search(r"^ruff==(.+)$", constraints, re.MULTILINE)
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert tested and f"ruff-pre-commit\n    rev: v{tested[1]}\n" in hooks


def test_the_changelog_knows_this_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"\n## {project['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
