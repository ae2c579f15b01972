"""The page: what the browser is told, and that nothing in its files could do more than that."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from triforce.cli.serve.web import page

STATIC = Path(page.__file__).parent / "static"
PATHS = ["/", "/page.css", "/page.js"]


@pytest.mark.parametrize("path", PATHS)
def test_the_page_comes_with_a_policy_that_lets_nothing_else_in(server, path):
    reply = server.ask("GET", path)
    assert reply.status == 200 and reply.body == (STATIC / page.PAGE[path][0]).read_bytes()
    policy = dict(one.strip().split(" ", 1) for one in reply.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in reply.headers["content-security-policy"]
    assert server.ask("GET", path, Host="evil.example").status == 403


def test_the_page_needs_no_key_and_what_it_asks_for_does(serving):
    with serving(api_key="secret", load=False) as server:
        assert [server.ask("GET", path).status for path in PATHS] == [200, 200, 200]
        assert server.ask("GET", "/v1/models").status == server.ask("GET", "/v1/contexts").status == 401


def test_its_files_load_nothing_from_elsewhere_and_put_in_text_as_text():
    assert {path.name for path in STATIC.iterdir()} == {name for name, _ in page.PAGE.values()}
    html, script = (STATIC / "index.html").read_text(), (STATIC / "page.js").read_text()
    for text in (html, script, (STATIC / "page.css").read_text()):
        assert not re.search(r"https?:|[\"'(]//|@import|url\(", text)
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert way not in script
    assert not re.search(r"<script(?! src=)|<style| on\w+=| style=", html)


def test_every_part_that_the_script_uses_is_in_the_page_and_has_a_name():
    html, script = (STATIC / "index.html").read_text(), (STATIC / "page.js").read_text()
    used = set(re.findall(r'\bat\("([\w-]+)"\)', script)) | set(re.findall(r'\["(.+?)"\]', script)[0].split('", "'))
    assert used and used <= set(re.findall(r'id="([\w-]+)"', html))
    for part in re.findall(r"<(?:textarea|input|progress|main)[^>]*>", html):
        assert "aria-label" in part


@pytest.mark.slow
def test_the_script_is_well_formed():
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here to look at it")
    subprocess.run([node, "--check", STATIC / "page.js"], check=True, timeout=60)
