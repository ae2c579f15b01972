"""The page: what the browser is told, and that nothing in its files could do more than that."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from command import TEXT
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


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_a_conversation_in_a_browser(serving, tmp_path, monkeypatch, width):
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no Chromium here")
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path))
    (tmp_path / "a book.txt").write_text(TEXT)
    with serving(api_key="secret", max_new_tokens=8) as server, api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        window = browser.new_context(viewport={"width": width, "height": 800}).new_page()
        faults = []
        window.on("pageerror", lambda error: faults.append(str(error)))
        window.goto(f"http://127.0.0.1:{server.port}/")
        window.fill("#key", "secret")
        window.keyboard.press("Enter")
        api.expect(window.locator("#model")).to_have_text("target")
        window.set_input_files("#file", tmp_path / "a book.txt")
        api.expect(window.locator("#status")).to_have_text(re.compile("^read: a book, "))
        window.fill("#question", "<img src=x onerror=alert(1)>")
        window.keyboard.press("Enter")
        api.expect(window.locator(".assistant .figures")).to_have_count(1)
        assert window.locator(".user").inner_text() == "<img src=x onerror=alert(1)>"
        assert window.locator("main img").count() == 0
        window.click("#retry")
        api.expect(window.locator("#stop")).to_be_hidden()
        api.expect(window.locator(".assistant .figures")).to_have_count(1)
        assert window.evaluate("document.documentElement.scrollWidth") <= width
        assert faults == []
        browser.close()
