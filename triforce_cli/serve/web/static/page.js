// Conversations with the model of this server. All that comes from it, or from a file, is put into the page as text.
import { AnswerView } from "./answer.js";
import { button, element } from "./elements.js";
import { conversations, cutOf, forget, keep, messagesOf, newConversation, titleOf } from "./kept.js";
import { addDelta, openCalls, toolsOf } from "./parts.js";
import { Plot } from "./plot.js";
import { call, events } from "./server.js";

const at = (id) => document.getElementById(id);
const plot = new Plot(at("plot"), at("tbt"), at("accepted"));
let current = newConversation("");
let running = null; // stops what is being written, or read

function say(text, wrong = false) {
  at("status").textContent = text;
  at("status").classList.toggle("wrong", wrong);
}

function sure(question) {
  return new Promise((resolve) => {
    at("sure-title").textContent = question;
    at("sure").returnValue = "no";
    at("sure").addEventListener("close", () => resolve(at("sure").returnValue === "yes"), { once: true });
    at("sure").showModal();
  });
}

// The turns of the conversation.

// Makes a change to the last turn; whoever has its end in sight keeps it in sight.
function follow(turn, change) {
  const turns = at("turns");
  const near = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 120;
  change();
  if (near) turn.scrollIntoView({ block: "end" });
}

function figuresOf(timings) {
  const shares = [`${timings.predicted_n} tokens`];
  if (timings.predicted_n > 1) shares.push(`TBT ${(timings.predicted_ms / (timings.predicted_n - 1)).toFixed(1)} ms`);
  if (timings.draft_n) shares.push(`${((100 * timings.draft_n_accepted) / timings.draft_n).toFixed(0)} % of drafts accepted`);
  if (timings.cache_n) shares.push(`${timings.cache_n.toLocaleString("en")} tokens needed no prefill`);
  return shares.join(" · ");
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without TLS browsers give pages of other machines no clipboard, but they copy what is selected.
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  say("copied");
}

function showTurn(turn) {
  const found = element("div", `turn ${turn.role}`);
  if (turn.role === "assistant") {
    new AnswerView(found).show(turn);
    finishTurn(found, turn);
  } else {
    if (turn.role === "tool") found.append(element("div", "name", `Result of ${turn.name}`));
    found.append(element("div", "text", turn.content));
  }
  at("turns").append(found);
  found.scrollIntoView({ block: "end" });
  return found;
}

function finishTurn(shown, turn) {
  const foot = element("div", "foot");
  const cut = cutOf(turn);
  if (cut) foot.append(element("span", "cut", cut));
  if (turn.timings) foot.append(element("span", "figures", figuresOf(turn.timings)));
  if (turn.content) foot.append(button("Copy", "Copy this answer", () => copy(turn.content)));
  shown.append(foot);
}

function addTurn(turn) {
  current.turns.push(turn);
  showTurn(turn);
}

// Fields for the results that the last answer waits for; the first one, if there are any.
function showResultFields() {
  const calls = openCalls(current.turns);
  if (!calls.length) return null;
  const form = element("form", "results");
  const fields = calls.map((call) => {
    const label = element("label", "", `Result of ${call.name}`);
    const field = element("textarea", "");
    field.rows = 2;
    field.required = true;
    field.addEventListener("keydown", sendOnEnter);
    label.append(field);
    form.append(label);
    return field;
  });
  form.append(element("button", "", calls.length > 1 ? "Send the results" : "Send the result"));
  form.append(element("span", "figures", "If you ask a question instead, it is sent without this call and the turns that led to it"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return;
    form.remove();
    calls.forEach(({ id, name }, index) => addTurn({ role: "tool", id, name, content: fields[index].value }));
    keepCurrent();
    answer();
  });
  at("turns").lastElementChild.append(form);
  form.scrollIntoView({ block: "end" });
  return fields[0];
}

function dropResultFields() {
  at("turns").querySelector(".results")?.remove();
}

// The list of conversations.

function showList() {
  const items = conversations().map((one) => {
    const item = document.createElement("li");
    const open = element("button", "open", titleOf(one));
    open.type = "button";
    open.setAttribute("aria-current", String(one.id === current.id));
    open.addEventListener("click", () => choose(one));
    const title = titleOf(one);
    item.append(open, button("×", `Delete the conversation: ${title}`, () => remove(one)));
    return item;
  });
  at("conversations").replaceChildren(...items);
  disableWhileRunning();
}

function showHint() {
  at("hint").hidden = Boolean(current.turns.length || current.context);
}

function choose(conversation) {
  if (running) return;
  current = conversation;
  sessionStorage.setItem("conversation", current.id);
  at("turns").replaceChildren();
  current.turns.forEach(showTurn);
  showResultFields();
  showHint();
  showChosenContext();
  showTools();
  at("speed").hidden = true;
  say("");
  showList();
  at("question").focus();
}

async function remove(conversation) {
  if (running || !(await sure(`Delete this conversation? ${titleOf(conversation)}`))) return;
  forget(conversation);
  if (conversation.id === current.id) choose(newConversation(current.context, current.tools));
  else showList();
}

function keepCurrent() {
  if (current.turns.length && !keep(current)) say("this browser has no room to keep the conversation", true);
}

function disableWhileRunning() {
  const busy = Boolean(running);
  for (const id of ["new", "context", "file", "tools"]) at(id).disabled = busy;
  for (const one of at("conversations").querySelectorAll("button")) one.disabled = busy;
  at("remove").disabled = busy || !at("context").value;
  at("retry").disabled = busy || !current.turns.length;
}

function setRunning(controller) {
  running = controller;
  at("turns").setAttribute("aria-busy", String(Boolean(controller))); // read out once it is whole
  at("send").hidden = Boolean(controller);
  at("stop").hidden = !controller;
  disableWhileRunning();
}

// Answers.

function showReading(progress) {
  at("reading").hidden = !progress || progress.processed >= progress.total;
  if (!progress) return;
  at("reading").value = progress.processed / progress.total;
  say(`prefill: ${progress.processed.toLocaleString("en")} of ${progress.total.toLocaleString("en")} tokens`);
}

async function answer() {
  const messages = messagesOf(current);
  const turn = { role: "assistant", content: "", end: "failed", error: "the page was closed" }; // as kept if it is
  const shown = element("div", "turn assistant");
  const view = new AnswerView(shown);
  let frame = 0; // in which the text is drawn, however many pieces come before it
  let reason = null;
  let failure = null;
  at("turns").append(shown);
  current.turns.push(turn);
  const controller = new AbortController();
  setRunning(controller);
  plot.clear();
  say("waiting");
  const draw = () => {
    frame = 0;
    follow(shown, () => view.show(turn, true));
  };
  try {
    const body = { messages, stream: true, return_progress: true, timings_per_token: true };
    if (current.context) body.context = current.context;
    if (current.tools?.length) body.tools = current.tools;
    const options = { method: "POST", body: JSON.stringify(body), signal: controller.signal };
    for await (const event of events(await call("v1/chat/completions", options))) {
      if (event.timings) {
        turn.timings = event.timings;
        plot.add(event.timings);
        at("speed").hidden = false;
      }
      if (event.prompt_progress) showReading(event.prompt_progress);
      const choice = event.choices?.[0];
      reason = choice?.finish_reason ?? reason;
      const grows = addDelta(turn, choice?.delta ?? {});
      if (!grows) continue;
      frame ||= requestAnimationFrame(draw);
      say(grows);
    }
    reason ??= "stop";
  } catch (error) {
    failure = error;
  }
  // An answer that has its finish_reason is whole, whatever comes after that.
  const stopped = controller.signal.aborted;
  turn.end = reason ?? (stopped ? "stopped" : "failed");
  turn.error = turn.end === "failed" ? failure.message : undefined;
  say(turn.error ?? (turn.end === "stopped" ? "stopped" : ""), turn.end === "failed");
  cancelAnimationFrame(frame);
  showReading(null);
  follow(shown, () => {
    view.show(turn);
    finishTurn(shown, turn);
  });
  keepCurrent();
  setRunning(null);
  showList();
  (showResultFields() ?? at("question")).focus();
  if (turn.end !== "failed" && !at("model").textContent) connect();
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = at("question").value.trim();
  if (!question || running) return;
  at("question").value = "";
  dropResultFields();
  addTurn({ role: "user", content: question });
  showHint();
  sessionStorage.setItem("conversation", current.id);
  keepCurrent();
  answer();
});

function sendOnEnter(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  event.currentTarget.form.requestSubmit();
}

at("question").addEventListener("keydown", sendOnEnter);

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) running?.abort();
});

at("stop").addEventListener("click", () => running?.abort());

at("retry").addEventListener("click", () => {
  if (running || !current.turns.length) return;
  if (current.turns.at(-1).role === "assistant") {
    current.turns.pop();
    at("turns").lastElementChild.remove();
  }
  answer();
});

at("new").addEventListener("click", () => choose(newConversation(current.context, current.tools)));

addEventListener("pagehide", keepCurrent);

// Tools that the model may call.

function showTools() {
  const number = current.tools?.length;
  at("tools").textContent = number ? `Tools (${number})` : "Tools";
}

function checkTools() {
  let wrong = "";
  try {
    toolsOf(at("tools-given").value);
  } catch (error) {
    wrong = error.message;
  }
  at("tools-given").setCustomValidity(wrong); // the form then cannot be sent, and says why
}

at("tools").addEventListener("click", () => {
  at("tools-given").value = current.tools?.length ? JSON.stringify(current.tools, null, 2) : "";
  checkTools();
  at("tools-dialog").returnValue = "";
  at("tools-dialog").showModal();
});

at("tools-given").addEventListener("input", checkTools);

at("tools-dialog").addEventListener("close", () => {
  if (at("tools-dialog").returnValue !== "given") return;
  current.tools = toolsOf(at("tools-given").value);
  keepCurrent();
  showTools();
});

// Texts: saved contexts of the server.

function showChosenContext() {
  const known = [...at("context").options].some((one) => one.value === current.context);
  if (!known) at("context").append(new Option(`${current.context} (not there any more)`, current.context));
  at("context").value = current.context;
}

async function showContexts() {
  const { data } = await (await call("v1/contexts")).json();
  const options = data.filter((one) => one.complete).map((one) => new Option(`${one.name} (${one.tokens.toLocaleString("en")} tokens)`, one.name));
  at("context").replaceChildren(new Option("none", ""), ...options);
  showChosenContext();
  disableWhileRunning();
}

at("context").addEventListener("change", () => choose(newConversation(at("context").value)));

at("remove").addEventListener("click", async () => {
  const name = at("context").value;
  if (running || !name || !(await sure(`Delete the text ${name} from the server, for everybody?`))) return;
  try {
    await call(`v1/contexts/${encodeURIComponent(name)}`, { method: "DELETE" });
    choose(newConversation(""));
    await showContexts();
    say(`deleted: ${name}`);
  } catch (error) {
    say(error.message, true);
  }
});

async function addText(file) {
  if (!file || running) return;
  const controller = new AbortController();
  setRunning(controller);
  try {
    const form = new FormData();
    const stem = file.name.replace(/\.[^.]*$/, "").replace(/[^\p{L}\p{N} .+@=_-]/gu, "-").replace(/^[ .+@=-]+/, "");
    form.append("name", stem.slice(0, 100).trim() || "text");
    form.append("file", file);
    form.append("return_progress", "true");
    say(`sending ${file.name}`);
    let saved = null;
    const options = { method: "POST", body: form, signal: controller.signal };
    for await (const event of events(await call("v1/contexts", options))) {
      if (event.prompt_progress) showReading(event.prompt_progress);
      else saved = event;
    }
    setRunning(null);
    choose(newConversation(saved.name));
    await showContexts();
    say(`saved: ${saved.name}, ${saved.tokens.toLocaleString("en")} tokens`);
  } catch (error) {
    setRunning(null);
    say(controller.signal.aborted ? "stopped" : error.message, !controller.signal.aborted);
  }
  showReading(null);
  at("file").value = "";
}

at("file").addEventListener("change", () => addText(at("file").files[0]));
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
  addText(event.dataTransfer.files[0]);
});

async function connect() {
  try {
    const { data } = await (await call("v1/models")).json();
    at("model").textContent = data[0].id;
    await showContexts();
  } catch (error) {
    say(error.message, true);
  }
}

at("unlock").addEventListener("click", () => {
  say("");
  connect();
});

const chosen = sessionStorage.getItem("conversation");
choose(conversations().find((one) => one.id === chosen) ?? conversations()[0] ?? current);
connect();
