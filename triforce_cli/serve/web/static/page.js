// A conversation with the model of this server. All that comes from it, or from a file, is put into the page as text.
"use strict";

const at = (id) => document.getElementById(id);
let messages = [];
let running = null; // stops the answer that is being written

function say(text, wrong = false) {
  at("status").textContent = text;
  at("status").classList.toggle("wrong", wrong);
}

function keyFromUser() {
  return new Promise((resolve) => {
    at("key").value = "";
    at("locked").addEventListener("close", () => resolve(at("key").value), { once: true });
    at("locked").showModal();
  });
}

async function call(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem("key");
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const response = await fetch(path, { ...options, headers });
    if (response.status === 401) {
      sessionStorage.setItem("key", await keyFromUser());
    } else if (response.ok) {
      return response;
    } else {
      const found = await response.json().catch(() => null);
      throw new Error(found?.error?.message ?? `the server answers ${response.status}`);
    }
  }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the server ended before the answer did");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (!part.startsWith("data: ")) continue;
      const event = JSON.parse(part.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

function follow(turn) {
  const turns = at("turns");
  if (turns.scrollHeight - turns.scrollTop - turns.clientHeight < 120) turn.scrollIntoView({ block: "end" });
}

function addTurn(role, text) {
  const turn = document.createElement("div");
  turn.className = `turn ${role}`;
  turn.textContent = text;
  at("turns").append(turn);
  turn.scrollIntoView({ block: "end" });
  return turn;
}

function figuresOf(timings) {
  const shares = [`${timings.predicted_n} tokens`];
  if (timings.predicted_n > 1) shares.push(`TBT ${(timings.predicted_ms / (timings.predicted_n - 1)).toFixed(1)} ms`);
  if (timings.draft_n) shares.push(`${((100 * timings.draft_n_accepted) / timings.draft_n).toFixed(0)} % of drafts accepted`);
  if (timings.cache_n) shares.push(`${timings.cache_n.toLocaleString("en")} tokens not read again`);
  return shares.join(" · ");
}

function addFigures(turn, timings) {
  const figures = document.createElement("span");
  figures.className = "figures";
  figures.textContent = figuresOf(timings);
  turn.append(figures);
}

function showReading(progress) {
  at("reading").hidden = !progress || progress.processed >= progress.total;
  if (!progress) return;
  at("reading").value = progress.processed / progress.total;
  say(`reading: ${progress.processed.toLocaleString("en")} of ${progress.total.toLocaleString("en")} tokens`);
}

function setRunning(controller) {
  running = controller;
  at("turns").setAttribute("aria-busy", String(Boolean(controller))); // read out once it is whole
  at("send").hidden = Boolean(controller);
  at("stop").hidden = !controller;
  for (const id of ["new", "context", "file"]) at(id).disabled = Boolean(controller);
  at("retry").disabled = Boolean(controller) || messages.length < 2;
}

async function answer() {
  const turn = addTurn("assistant", "");
  const controller = new AbortController();
  setRunning(controller);
  say("waiting");
  let text = "";
  let timings = null;
  try {
    const body = { messages, stream: true, return_progress: true, timings_per_token: true };
    if (at("context").value) body.context = at("context").value;
    const options = { method: "POST", body: JSON.stringify(body), signal: controller.signal };
    for await (const event of events(await call("v1/chat/completions", options))) {
      timings = event.timings ?? timings;
      if (event.prompt_progress) showReading(event.prompt_progress);
      const piece = event.choices?.[0]?.delta?.content;
      if (!piece) continue;
      text += piece;
      turn.textContent = text;
      follow(turn);
      say("writing");
      at("progress-figures").textContent = timings ? figuresOf(timings) : "";
    }
    say("");
  } catch (error) {
    say(controller.signal.aborted ? "stopped" : error.message, !controller.signal.aborted);
  }
  showReading(null);
  at("progress-figures").textContent = "";
  messages.push({ role: "assistant", content: text });
  if (timings) addFigures(turn, timings);
  follow(turn);
  setRunning(null);
  at("question").focus();
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = at("question").value.trim();
  if (!question || running) return;
  at("question").value = "";
  messages.push({ role: "user", content: question });
  addTurn("user", question);
  answer();
});

at("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("ask").requestSubmit();
});

at("stop").addEventListener("click", () => running?.abort());

at("retry").addEventListener("click", () => {
  if (running || messages.length < 2) return;
  messages.pop();
  at("turns").lastElementChild.remove();
  answer();
});

function restart() {
  messages = [];
  at("turns").replaceChildren();
  setRunning(null);
  say("");
}

at("new").addEventListener("click", restart);
at("context").addEventListener("change", restart);

async function showContexts(chosen = at("context").value) {
  const { data } = await (await call("v1/contexts")).json();
  const options = data.filter((one) => one.complete).map((one) => new Option(`${one.name} (${one.tokens.toLocaleString("en")} tokens)`, one.name));
  at("context").replaceChildren(new Option("none", ""), ...options);
  at("context").value = options.some((one) => one.value === chosen) ? chosen : "";
}

at("file").addEventListener("change", async () => {
  const file = at("file").files[0];
  if (!file) return;
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
    await showContexts(saved.name);
    restart();
    say(`read: ${saved.name}, ${saved.tokens.toLocaleString("en")} tokens`);
  } catch (error) {
    setRunning(null);
    say(controller.signal.aborted ? "stopped" : error.message, !controller.signal.aborted);
  }
  showReading(null);
  at("file").value = "";
});

async function begin() {
  try {
    const { data } = await (await call("v1/models")).json();
    at("model").textContent = data[0].id;
    await showContexts();
  } catch (error) {
    say(error.message, true);
  }
}

begin();
