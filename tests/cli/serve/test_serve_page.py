"""The page: what the browser is told, and that nothing in its files could do more than that."""

import re
import shutil
import subprocess

import pytest
from command import TEXT


@pytest.fixture(scope="module")
def files(server):
    """What a browser loads for the page, by path, with the headers that it comes with."""
    found = {"/": server.ask("GET", "/")}
    while wanted := {path for reply in found.values() for path in named_in(reply)} - found.keys():
        found |= {path: server.ask("GET", path) for path in wanted}
    return found


def named_in(reply):
    """The paths that a page or a script loads."""
    text = reply.body.decode()
    return {f"/{name}" for name in re.findall(r"""(?:src=|href=|from )"\.?/?([\w./-]+)\"""", text)}


def texts(files, kind):
    return [reply.body.decode() for reply in files.values() if kind in reply.headers["content-type"]]


def test_the_page_comes_with_a_policy_that_lets_nothing_else_in(server, files):
    assert len(files) > 2 and {reply.status for reply in files.values()} == {200}, files.keys()
    for path, reply in files.items():
        policy = dict(one.strip().split(" ", 1) for one in reply.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert "unsafe" not in reply.headers["content-security-policy"]
        assert server.ask("GET", path, Host="evil.example").status == 403


def test_the_page_needs_no_key_and_what_it_asks_for_does(serving, files):
    with serving(api_key="secret") as server:
        assert {server.ask("GET", path).status for path in files} == {200}
        assert server.ask("GET", "/v1/models").status == server.ask("GET", "/v1/contexts").status == 401


def test_its_files_load_nothing_from_elsewhere_and_put_in_text_as_text(files):
    (html,), script = texts(files, "html"), "".join(texts(files, "javascript"))
    for text in (html, script, *texts(files, "css")):
        assert not re.search(r"https?:|[\"'(]//|@import|url\(", text)
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert way not in script
    assert not re.search(r"<script(?! src=)|<style| on\w+=| style=", html)


def test_every_part_that_the_script_uses_is_in_the_page_and_has_a_name(files):
    (html,), script = texts(files, "html"), "".join(texts(files, "javascript"))
    used = set(re.findall(r'\bat\("([\w-]+)"\)', script)) | set(re.findall(r'\["(.+?)"\]', script)[0].split('", "'))
    assert used and used <= set(re.findall(r'id="([\w-]+)"', html))
    for part in re.findall(r"<(?:textarea|input|progress|main)[^>]*>", html):
        assert "aria-label" in part


@pytest.mark.slow
def test_its_scripts_are_well_formed(files):
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here to look at it")
    for script in texts(files, "javascript"):
        subprocess.run([node, "--input-type=module", "--check"], input=script.encode(), check=True, timeout=60)


@pytest.fixture
def browser():
    """A headless Chromium, and what assertions about its pages are made with."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no Chromium here")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield found, api.expect
        found.close()


@pytest.fixture
def window(browser, tmp_path, monkeypatch):
    """Opens the page in a window of some width; no script of it may fail."""
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path / "home"))
    faults = []

    def open_page(server, width=1280):
        found = browser[0].new_context(viewport={"width": width, "height": 800}).new_page()
        found.on("pageerror", lambda error: faults.append(str(error)))
        found.goto(f"http://127.0.0.1:{server.port}/")
        browser[1](found.locator("#model")).to_have_text("target")
        return found

    yield open_page
    assert faults == []


def ask(window, expect, question, answers=1):
    window.fill("#question", question)
    window.keyboard.press("Enter")
    expect(window.locator(".assistant .figures")).to_have_count(answers)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_a_conversation_in_a_browser(serving, browser, tmp_path, monkeypatch, width):
    expect = browser[1]
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path))
    (tmp_path / "a book.txt").write_text(TEXT)
    with serving(api_key="secret", max_new_tokens=8) as server:
        window = browser[0].new_context(viewport={"width": width, "height": 800}).new_page()
        faults = []
        window.on("pageerror", lambda error: faults.append(str(error)))
        window.goto(f"http://127.0.0.1:{server.port}/")
        window.fill("#key", "secret")
        window.keyboard.press("Enter")
        expect(window.locator("#model")).to_have_text("target")
        window.set_input_files("#file", tmp_path / "a book.txt")
        expect(window.locator("#status")).to_have_text(re.compile("^read: a book, "))
        window.fill("#question", "<img src=x onerror=alert(1)>")
        window.keyboard.press("Enter")
        expect(window.locator(".assistant .figures")).to_have_count(1)
        assert window.locator(".user").inner_text() == "<img src=x onerror=alert(1)>"
        assert window.locator("main img").count() == 0
        window.click("#retry")
        expect(window.locator("#stop")).to_be_hidden()
        expect(window.locator(".assistant .figures")).to_have_count(1)
        assert window.evaluate("document.documentElement.scrollWidth") <= width
        assert faults == []


@pytest.mark.slow
def test_conversations_outlast_a_reload_and_are_deleted_one_by_one(serving, browser, window):
    expect = browser[1]
    with serving(max_new_tokens=8) as server:
        page_of = window(server)
        ask(page_of, expect, "First?")
        answer = page_of.locator(".assistant .text").inner_text()
        page_of.click("#new")
        expect(page_of.locator(".turn")).to_have_count(0)
        ask(page_of, expect, "Second?")
        ask(page_of, expect, "And third?", 2)
        page_of.reload()
        expect(page_of.locator(".user")).to_have_text(["Second?", "And third?"])
        expect(page_of.locator("#conversations .open")).to_have_text(["Second?", "First?"])
        page_of.get_by_role("button", name="First?", exact=True).click()
        expect(page_of.locator(".assistant .text")).to_have_text(answer)
        page_of.click("[aria-label='Delete the conversation: First?']")
        page_of.get_by_role("button", name="Delete", exact=True).click()
        expect(page_of.locator("#conversations .open")).to_have_text(["Second?"])
        expect(page_of.locator(".turn")).to_have_count(0)


@pytest.mark.slow
def test_a_text_is_dropped_talked_about_and_deleted(serving, browser, window):
    expect = browser[1]
    with serving(max_new_tokens=4) as server:
        page_of = window(server)
        drop = """text => {
            const data = new DataTransfer();
            data.items.add(new File([text], "tale.txt"));
            dispatchEvent(new DragEvent("drop", { dataTransfer: data, cancelable: true }));
        }"""
        page_of.evaluate(drop, TEXT)
        expect(page_of.locator("#status")).to_have_text(re.compile("^read: tale, "))
        assert page_of.locator("#context").input_value() == "tale"
        ask(page_of, expect, "Who?")
        page_of.reload()
        expect(page_of.locator("#context")).to_have_value("tale")
        page_of.click("#remove")
        page_of.get_by_role("button", name="Delete", exact=True).click()
        expect(page_of.locator("#status")).to_have_text("deleted: tale")
        assert server.ask("GET", "/v1/contexts").json["data"] == []
        page_of.get_by_role("button", name="Who?", exact=True).click()
        expect(page_of.locator("#context option:checked")).to_have_text("tale (not there any more)")


@pytest.mark.slow
def test_an_answer_is_plotted_stopped_with_escape_and_copied(serving, browser, window, lasting):
    expect = browser[1]
    with serving(lasting, max_new_tokens=60_000) as server:
        page_of = window(server)
        page_of.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page_of.fill("#question", "Why?")
        page_of.keyboard.press("Enter")
        expect(page_of.locator("#tbt")).to_have_text(re.compile(r"^TBT [\d.]+ ms"))
        expect(page_of.locator("polyline.tbt")).to_have_attribute("points", re.compile(r"^\S+ \S+"))
        assert "TBT" in page_of.locator("#plot").get_attribute("aria-label")
        page_of.keyboard.press("Escape")
        expect(page_of.locator("#status")).to_have_text("stopped")
        page_of.click("[aria-label='Copy this answer']")
        expect(page_of.locator("#status")).to_have_text("copied")
        copied = page_of.evaluate("navigator.clipboard.readText()")
        assert copied == page_of.locator(".assistant .text").text_content()


@pytest.mark.slow
def test_everything_is_reached_by_keyboard_and_has_a_name(serving, browser, window):
    with serving(max_new_tokens=4) as server:
        page_of = window(server)
        ask(page_of, browser[1], "Why?")
        page_of.evaluate("document.activeElement.blur()")
        reached = set()
        for _ in range(20):
            page_of.keyboard.press("Tab")
            reached.add(page_of.evaluate("document.activeElement.id || document.activeElement.ariaLabel"))
        wanted = {"context", "file", "new", "turns", "question", "send", "retry", "Copy this answer"}
        assert wanted <= reached, wanted - reached
        unnamed = """() => [...document.querySelectorAll("button, input, select, textarea, progress, svg, nav, main")]
            .filter((one) => !(one.ariaLabel || one.textContent.trim() || one.labels?.length)).map((one) => one.id)"""
        assert page_of.evaluate(unnamed) == []
