"""The page: what the browser is told, and that nothing in its files could do more than that."""

import base64
import json
import re
import shutil
import signal
import subprocess

import pytest
from command import TEXT
from templates import CALLING, with_added, with_template
from triforce.offload import Engine, Sampling
from triforce.tp import Tokenizer


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
def run_script(server):
    """Runs a script that uses exported names of the page's `module`, which needs no browser; what it returns."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here to run it")

    def run(module, names, body, given):
        source = base64.b64encode(server.ask("GET", module).body).decode()
        script = f"""
            const {{ {names} }} = await import("data:text/javascript;base64,{source}");
            const use = (given) => {{ {body} }};
            console.log(JSON.stringify(use({json.dumps(given)})));
        """
        command = [node, "--input-type=module"]
        return json.loads(subprocess.run(command, input=script.encode(), capture_output=True, check=True).stdout)

    return run


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


def test_answers_that_failed_and_their_questions_are_not_sent_again(run_script):
    turns = [
        turn("user", "whole?"), turn("assistant", "yes", end="stop"),
        turn("user", "refused?"), turn("assistant", "", end="failed", error="too many requests wait already"),
        turn("user", "lost?"), turn("assistant", "half an ans", end="failed", error="the connection was lost"),
        turn("user", "empty?"), turn("assistant", "", end="stop"),
        turn("user", "left before an answer?"),
        turn("user", "cut?"), turn("assistant", "a long", end="length"),
        turn("user", "stopped early?"), turn("assistant", "", end="stopped"),
        turn("user", "stopped?"), turn("assistant", "some text", end="stopped"),
        turn("user", "kept without an end?"), turn("assistant", "by an earlier page"),
        turn("user", "last?"),
    ]  # fmt: skip
    sent = run_script("/kept.js", "messagesOf", "return messagesOf({ turns: given });", turns)
    wanted = ["whole?", "yes", "cut?", "a long", "stopped?", "some text", "kept without an end?", "by an earlier page"]
    assert [one["content"] for one in sent] == [*wanted, "last?"]
    assert [one["role"] for one in sent] == ["user", "assistant"] * 4 + ["user"]
    assert all(set(one) == {"role", "content"} for one in sent)


CALLS = [
    {"id": "first0001", "name": "look", "arguments": '{"at": "sea"}'},
    {"id": "second002", "name": "wait", "arguments": "{}"},
]


def result(call, content="fog"):
    return turn("tool", content, id=call["id"], name=call["name"])


def test_calls_are_sent_with_their_results_and_else_left_out_with_their_question(run_script):
    called = turn("assistant", "", end="tool_calls", calls=CALLS, reasoning="Hm, so.")
    turns = [
        turn("user", "answered?"), called, *map(result, CALLS), turn("assistant", "Fog.", end="stop"),
        turn("user", "without results?"), called,
        turn("user", "with one of two?"), called, result(CALLS[0]), turn("assistant", "Fog.", end="stop"),
        turn("user", "failed behind them?"), called, *map(result, CALLS), turn("assistant", "F", end="failed"),
        turn("user", "stopped within?"), turn("assistant", "I", end="stopped", calls=CALLS[:1]),
        turn("user", "only reasoned?"), turn("assistant", "", end="length", reasoning="Hm"),
        turn("user", "last?"), called, *map(result, CALLS),
    ]  # fmt: skip
    sent = run_script("/kept.js", "messagesOf", "return messagesOf({ turns: given });", turns)
    roles = ["user", "assistant", "tool", "tool"]
    assert [one["role"] for one in sent] == [*roles, "assistant", *roles]
    assert [one["content"] for one in sent if one["role"] == "user"] == ["answered?", "last?"]
    for at in (1, 6):
        asked, *results = sent[at : at + 3]
        assert asked["content"] == "" and asked["reasoning_content"] == "Hm, so."
        functions = [{"name": one["name"], "arguments": one["arguments"]} for one in CALLS]
        assert [one["function"] for one in asked["tool_calls"]] == functions
        assert {one["type"] for one in asked["tool_calls"]} == {"function"}
        ids = [one["id"] for one in CALLS]
        assert [one["id"] for one in asked["tool_calls"]] == [one["tool_call_id"] for one in results] == ids
        assert all(set(one) == {"role", "content", "tool_call_id"} for one in results)
    assert sent[4] == {"role": "assistant", "content": "Fog."}


def test_an_answer_grows_by_what_a_stream_brings(run_script):
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm, "}, {"reasoning_content": "so."}, {"content": "I "}, {"content": "look."},
        *({"tool_calls": [{"index": index, "id": one["id"], "type": "function",
                           "function": {"name": one["name"], "arguments": ""}}]} for index, one in enumerate(CALLS)),
        *({"tool_calls": [{"index": index, "function": {"arguments": part}}]}
          for index, one in enumerate(CALLS) for part in one["arguments"]),
        {},
    ]  # fmt: skip
    body = "const turn = { content: '' }; return [given.map((one) => addDelta(turn, one)), turn];"
    grown, found = run_script("/parts.js", "addDelta", body, deltas)
    assert found == {"content": "I look.", "reasoning": "Hm, so.", "calls": CALLS}
    assert list(dict.fromkeys(grown)) == ["", "reasoning", "writing", "calling a tool"] and grown[-1] == ""


def test_arguments_are_set_in_lines_as_they_are_written(run_script):
    signs = '{[,:]} \\" \n'
    values = [{}, [], {"a": []}, {"a": {"b": [1, "x", None], signs: signs}, "d": -2.5}, [{}, [[]], [signs]], signs]
    separators = ((",", ":"), (" , ", " : "), (",\n\t", ":\n"))
    texts = [json.dumps(value, separators=one) for value in values for one in separators]
    found = run_script("/parts.js", "inLines", "return given.map(inLines);", texts)
    assert found == [json.dumps(value, indent=2) for value in values for _ in separators]
    exact, begun, deep = '{"n":12345678901234567890.0}', '{"a": [1, ', "[" * 3000 + "]" * 3000
    found = run_script("/parts.js", "inLines", "return given.map(inLines);", [exact, begun, deep])
    assert found[:2] == ['{\n  "n": 12345678901234567890.0\n}', begun] and len(found[2]) < 300_000


def test_tools_that_are_none_are_refused_with_the_reason(run_script):
    body = "try { return toolsOf(given); } catch (error) { return error.message; }"
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    assert run_script("/parts.js", "toolsOf", body, json.dumps(tools)) == tools
    assert run_script("/parts.js", "toolsOf", body, " ") == []
    assert run_script("/parts.js", "toolsOf", body, "[{").startswith("This is not JSON: ")
    for text in ("{}", "null", "[null]", '[{"type": "function"}]', '[{"function": {"name": "look"}}]'):
        assert run_script("/parts.js", "toolsOf", body, text).startswith("Tools are a list of ")


def test_an_answer_that_is_not_whole_says_why(run_script):
    ends = [
        turn("assistant", "a", end="length", timings={"predicted_n": 256}),
        turn("assistant", "a", end="stopped"),
        turn("assistant", "a", end="failed", error="rank 1 ended"),
        turn("assistant", "", end="failed", error="no key"),
        turn("assistant", "a", end="stop"),
        turn("assistant", "a"),
        turn("assistant", "", end="tool_calls", calls=CALLS),
        turn("assistant", "", end="stopped", calls=CALLS[:1]),
        turn("assistant", "", end="failed", error="rank 1 ended", reasoning="Hm"),
    ]
    found = run_script("/kept.js", "cutOf", "return given.map(cutOf);", ends)
    cut, stopped, broken, none, *whole, stopped_call, broken_reasoning = found
    assert cut == "cut after 256 tokens: maximum length" and stopped == "stopped"
    assert broken.startswith("broken off: rank 1 ended.") and none.startswith("no answer: no key.")
    assert whole == ["", "", ""]
    assert stopped_call == "stopped. Further questions are sent without this one"
    assert broken_reasoning.startswith("broken off: ")


ANSWER = """First line
second line, with `code` and <b>no tag</b>

1. one
2. two
   - inner `x`
   more of inner's neighbour

3. three

```python
def f():

    return "- no item"
```
- a
- b"""


def outline(found):
    """Of blocks: their kinds and texts."""
    return [(one["kind"], one.get("text") or outline(one["content"])) for one in found]


def test_paragraphs_lists_and_code_are_told_apart(run_script):
    found = run_script("/markdown.js", "blocks", 'return blocks(given.split("\\n"));', ANSWER)
    assert outline(found) == [
        ("p", "First line\nsecond line, with `code` and <b>no tag</b>"),
        ("ol", [("p", "one")]),
        ("ol", [("p", "two"), ("ul", [("p", "inner `x`")]), ("p", "more of inner's neighbour")]),
        ("ol", [("p", "three")]),
        ("pre", 'def f():\n\n    return "- no item"'),
        ("ul", [("p", "a")]),
        ("ul", [("p", "b")]),
    ]
    assert run_script("/markdown.js", "blocks", "return blocks(given);", ["4. four"])[0]["number"] == 4
    for one in ("1986.5 is a number", "-5 degrees", "**bold** words", "``` in `a` line"):
        assert outline(run_script("/markdown.js", "blocks", "return blocks(given);", [one])) == [("p", one)]


def test_an_answer_of_nothing_but_signs_of_a_list_is_shown(run_script):
    found = run_script("/markdown.js", "blocks", "return blocks(given);", ["- " * 50_000])
    depth = 0
    while found and found[0]["kind"] == "ul":
        found, depth = found[0]["content"], depth + 1
    assert 1 < depth < 20


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
        expect(window.locator("#status")).to_have_text(re.compile("^saved: a book, "))
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
        expect(page_of.locator(".assistant .text")).to_have_text(answer, use_inner_text=True)
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
        expect(page_of.locator("#status")).to_have_text(re.compile("^saved: tale, "))
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
        kept = page_of.evaluate("Object.values(localStorage).map((one) => JSON.parse(one).turns[1].content)")
        assert [copied] == kept
        expect(page_of.locator(".cut")).to_have_text("stopped")


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
        wanted = {"context", "file", "tools", "new", "turns", "question", "send", "retry", "Copy this answer"}
        assert wanted <= reached, wanted - reached
        unnamed = """() => [...document.querySelectorAll("button, input, select, textarea, progress, svg, nav, main")]
            .filter((one) => !(one.ariaLabel || one.textContent.trim() || one.labels?.length)).map((one) => one.id)"""
        assert page_of.evaluate(unnamed) == []


def chunk(text=None, reason=None, **more):
    return {"choices": [{"index": 0, "delta": {"content": text} if text else {}, "finish_reason": reason}], **more}


@pytest.fixture
def scripted(server, browser, window):
    """Opens a page whose questions get the events that are given, one list a question (a number: that status, with an
    error). The page, and the bodies that it sent."""

    def open_page(*answers):
        left, sent = list(answers), []

        def answer(route):
            sent.append(route.request.post_data_json)
            events = left.pop(0)
            if isinstance(events, int):
                error = {"error": {"message": f"refused with {events}", "type": "server_error", "code": None}}
                route.fulfill(status=events, json=error)
            else:
                body = "".join(f"data: {one if one == '[DONE]' else json.dumps(one)}\n\n" for one in events)
                route.fulfill(status=200, content_type="text/event-stream", body=body)

        page_of = window(server, 390)
        page_of.route("**/v1/chat/completions", answer)
        return page_of, sent

    return open_page


def ask_for_any_end(window, expect, question):
    before = window.locator(".foot").count()
    window.fill("#question", question)
    window.keyboard.press("Enter")
    expect(window.locator(".foot")).to_have_count(before + 1)


@pytest.mark.slow
def test_failed_turns_are_marked_left_out_and_asked_again_by_retry(scripted, browser):
    expect = browser[1]
    error = {"error": {"message": "memory ran out", "type": "server_error", "param": None, "code": "out_of_memory"}}
    page_of, sent = scripted(
        [chunk("Yes."), chunk(None, "stop"), "[DONE]"],
        429,
        [chunk("Half"), error],
        [chunk("Lost")],
        [chunk("Cut"), chunk(None, "length", timings={"predicted_n": 7, "predicted_ms": 1.0}), "[DONE]"],
    )
    for question in ("one", "two", "three", "four"):
        ask_for_any_end(page_of, expect, question)
        expect(page_of.locator(".foot").last).to_be_in_viewport()
    page_of.click("#retry")
    marks = [
        re.compile(r"^no answer: refused with 429\."),
        re.compile(r"^broken off: memory ran out\."),
        "cut after 7 tokens: maximum length",
    ]
    expect(page_of.locator(".cut")).to_have_text(marks)
    asked = [[one["content"] for one in body["messages"]] for body in sent]
    assert asked == [["one"], *(["one", "Yes.", question] for question in ("two", "three", "four", "four"))]
    page_of.reload()
    expect(page_of.locator(".cut")).to_have_text(marks)
    expect(page_of.locator(".assistant .text")).to_have_text(["Yes.", "", "Half", "Cut"])


@pytest.mark.slow
def test_an_answer_reads_well_while_it_grows_and_is_copied_as_it_came(scripted, browser):
    expect = browser[1]
    pieces = [chunk(sign) for sign in ANSWER]
    page_of, _ = scripted([*pieces, chunk(None, "stop"), "[DONE]"])
    page_of.context.grant_permissions(["clipboard-read", "clipboard-write"])
    ask_for_any_end(page_of, expect, "How?")
    shape = """() => [...document.querySelector(".assistant .text").children].map((one) => one.outerHTML)"""
    shown = page_of.evaluate(shape)
    assert shown == [
        "<p>First line\nsecond line, with <code>code</code> and &lt;b&gt;no tag&lt;/b&gt;</p>",
        '<ol start="1"><li><p>one</p></li><li><p>two</p><ul><li><p>inner <code>x</code></p></li></ul>'
        "<p>more of inner's neighbour</p></li><li><p>three</p></li></ol>",
        '<pre><code>def f():\n\n    return "- no item"</code></pre>',
        "<ul><li><p>a</p></li><li><p>b</p></li></ul>",
    ]
    in_steps = """async (answer) => {
        const { MarkdownView } = await import("./markdown.js");
        const place = document.createElement("div");
        const view = new MarkdownView(place);
        const first = [];
        for (let end = 1; end <= answer.length; end += 1) {
            view.show(answer.slice(0, end), true);
            first.push(place.firstChild);
        }
        view.show(answer);
        return [[...place.children].map((one) => one.outerHTML), first.at(-1) === first[answer.indexOf("1. one") + 2]];
    }"""
    assert page_of.evaluate(in_steps, ANSWER) == [shown, True]
    page_of.click("[aria-label='Copy this answer']")
    expect(page_of.locator("#status")).to_have_text("copied")
    assert page_of.evaluate("navigator.clipboard.readText()") == ANSWER


@pytest.mark.slow
def test_the_key_dialog_is_left_with_escape_and_opened_again(serving, browser, tmp_path, monkeypatch):
    expect = browser[1]
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path))
    with serving(api_key="secret", max_new_tokens=4) as server:
        page_of = browser[0].new_page()
        page_of.goto(f"http://127.0.0.1:{server.port}/")
        expect(page_of.locator("#locked")).to_be_visible()
        page_of.keyboard.press("Escape")
        expect(page_of.locator("#locked")).to_be_hidden()
        expect(page_of.locator("#status")).to_have_text(re.compile("^this server needs its key: press “Give the key”"))
        page_of.wait_for_timeout(300)
        assert not page_of.locator("#locked").is_visible()
        page_of.click("#unlock")
        for key, title in (("wrong", "This server needs its key."), ("secret", "This key is wrong.")):
            expect(page_of.locator("#locked-title")).to_have_text(title)
            page_of.fill("#key", key)
            page_of.keyboard.press("Enter")
        expect(page_of.locator("#model")).to_have_text("target")
        expect(page_of.locator("#unlock")).to_be_hidden()
        expect(page_of.locator("#status")).to_have_text("")


@pytest.mark.slow
def test_a_question_without_the_key_fails_once_and_is_answered_by_retry(serving, browser, tmp_path, monkeypatch):
    expect = browser[1]
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path))
    with serving(api_key="secret", max_new_tokens=4) as server:
        page_of = browser[0].new_page()
        page_of.goto(f"http://127.0.0.1:{server.port}/")
        expect(page_of.locator("#locked")).to_be_visible()
        page_of.keyboard.press("Escape")
        page_of.fill("#question", "Why?")
        page_of.keyboard.press("Enter")
        expect(page_of.locator("#locked")).to_be_visible()
        page_of.keyboard.press("Escape")
        expect(page_of.locator(".cut")).to_have_text(re.compile("^no answer: this server needs its key"))
        assert not page_of.locator("#locked").is_visible()
        page_of.click("#retry")
        page_of.fill("#key", "secret")
        page_of.keyboard.press("Enter")
        expect(page_of.locator(".assistant .figures")).to_have_count(1)
        expect(page_of.locator("#model")).to_have_text("target")


@pytest.mark.slow
def test_another_refusal_with_status_401_is_shown_and_asks_for_no_key(scripted, browser):
    page_of, _ = scripted(401)
    ask_for_any_end(page_of, browser[1], "Why?")
    browser[1](page_of.locator("#status")).to_have_text("refused with 401")
    assert not page_of.locator("#locked").is_visible()


@pytest.mark.slow
def test_a_server_that_is_gone_is_said_under_the_answer(serving, browser, window, lasting):
    expect = browser[1]
    with serving(lasting, max_new_tokens=60_000) as server:
        page_of = window(server)
        page_of.fill("#question", "Why?")
        page_of.keyboard.press("Enter")
        expect(page_of.locator("#tbt")).to_have_text(re.compile(r"^TBT [\d.]+ ms"))
        server.signal(signal.SIGKILL)
        expect(page_of.locator(".cut")).to_have_text(re.compile("^broken off: the (connection to the )?server "))
        ask_for_any_end(page_of, expect, "And now?")
        expect(page_of.locator(".cut").last).to_have_text(re.compile("^no answer: the server cannot be reached"))


@pytest.mark.slow
def test_an_empty_page_says_what_to_do_first(serving, browser, window):
    expect = browser[1]
    with serving(max_new_tokens=4) as server:
        page_of = window(server)
        expect(page_of.locator("#hint")).to_have_text(re.compile("^Add a text.*Or ask a question"))
        ask(page_of, expect, "Why?")
        expect(page_of.locator("#hint")).to_be_hidden()
        page_of.click("#new")
        expect(page_of.locator("#hint")).to_be_visible()


@pytest.mark.slow
def test_reasoning_is_opened_and_a_call_gets_its_result_by_keyboard_alone(scripted, browser):
    expect = browser[1]
    (call, _), tools = CALLS, [{"type": "function", "function": {"name": "look"}}]

    def delta(**given):
        return {"choices": [{"index": 0, "delta": given, "finish_reason": None}]}

    begun = {"index": 0, "id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": ""}}
    rest = {"index": 0, "function": {"arguments": '{"at": "<b>sea"}'}}
    page_of, sent = scripted(
        [delta(reasoning_content="Hm, <i>so"), delta(tool_calls=[begun]), delta(tool_calls=[rest]),
         chunk(None, "tool_calls"), "[DONE]"],
        [chunk("Fog."), chunk(None, "stop"), "[DONE]"],
        [chunk("Yes."), chunk(None, "stop"), "[DONE]"],
    )  # fmt: skip
    page_of.focus("#tools")
    page_of.keyboard.press("Enter")
    page_of.fill("#tools-given", "[{")
    page_of.keyboard.press("Tab")
    page_of.keyboard.press("Enter")
    expect(page_of.locator("#tools-dialog")).to_be_visible()
    page_of.fill("#tools-given", json.dumps(tools))
    page_of.keyboard.press("Tab")
    page_of.keyboard.press("Enter")
    expect(page_of.locator("#tools")).to_have_text("Tools (1)")
    ask_for_any_end(page_of, expect, "What is there?")
    expect(page_of.locator(".call .name")).to_have_text("Call: look")
    expect(page_of.locator(".call code")).to_have_text('{\n  "at": "<b>sea"\n}', use_inner_text=True)
    expect(page_of.locator(".thought")).to_be_hidden()
    page_of.focus(".reasoning summary")
    page_of.keyboard.press("Enter")
    expect(page_of.locator(".thought")).to_have_text("Hm, <i>so")
    assert page_of.evaluate("document.documentElement.scrollWidth") <= 390
    page_of.reload()
    page_of.focus(".results textarea")
    page_of.keyboard.type("fog")
    page_of.keyboard.press("Enter")
    expect(page_of.locator(".assistant .text")).to_have_text(["", "Fog."])
    expect(page_of.locator(".tool")).to_have_text("Result of lookfog")
    expect(page_of.locator(".results")).to_have_count(0)
    ask_for_any_end(page_of, expect, "Sure?")
    assert [body["tools"] for body in sent] == [tools] * 3
    roles = [[one["role"] for one in body["messages"]] for body in sent]
    asked = ["user", "assistant", "tool"]
    assert roles == [["user"], asked, [*asked, "assistant", "user"]]
    assert sent[1]["messages"][2] == {"role": "tool", "tool_call_id": call["id"], "content": "fog"}


@pytest.mark.slow
def test_a_question_in_place_of_a_result_is_sent_without_the_call(scripted, browser):
    expect = browser[1]
    begun = {"index": 0, "id": "first0001", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    called = {"choices": [{"index": 0, "delta": {"tool_calls": [begun]}, "finish_reason": None}]}
    page_of, sent = scripted(
        [called, chunk(None, "tool_calls"), "[DONE]"], [chunk("Yes."), chunk(None, "stop"), "[DONE]"]
    )
    ask_for_any_end(page_of, expect, "one")
    expect(page_of.locator(".results textarea")).to_be_focused()
    ask_for_any_end(page_of, expect, "two")
    expect(page_of.locator(".results")).to_have_count(0)
    assert sent[1]["messages"] == [{"role": "user", "content": "two"}]


@pytest.mark.slow
def test_a_model_reasons_calls_a_tool_and_gets_the_result(serving, pair, browser, window, tmp_path):
    """What it writes first is read as reasoning, a call and the end of an answer."""
    expect, tools = browser[1], [{"type": "function", "function": {"name": "look"}}]
    model = with_template(pair[0], tmp_path, CALLING)
    tokenizer, engine = Tokenizer.load(model), Engine.load(model, draft="none", device="cpu", dtype="float32")
    assert tokenizer.render
    prompt = tokenizer.encode(tokenizer.render([{"role": "user", "content": "Why?"}], tools=tools), False)
    *first, end = engine.generate(prompt, Sampling(temperature=0.0), 5).token_ids
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'
    assert len({*first, end}) == 5, "each of them can be told"
    added = dict(zip(first, ("<think>", "Hm, so.", "</think>", call), strict=True))
    model = with_added(model, tmp_path, added).rename(tmp_path / "target")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": end}))
    (model / "generation_config.json").unlink(missing_ok=True)
    with serving((model, "none"), max_new_tokens=8, temperature=0) as server:
        page_of = window(server)
        page_of.click("#tools")
        page_of.fill("#tools-given", json.dumps(tools))
        page_of.get_by_role("button", name="Use these").click()
        ask_for_any_end(page_of, expect, "Why?")
        expect(page_of.locator(".thought")).to_have_text("Hm, so.")
        expect(page_of.locator(".call")).to_have_text('Call: look{ "at": "sea" }')
        page_of.fill(".results textarea", "fog")
        page_of.keyboard.press("Enter")
        expect(page_of.locator(".assistant .foot")).to_have_count(2)
        assert not page_of.locator("#status.wrong").count(), page_of.locator("#status").inner_text()
