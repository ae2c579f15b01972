// Conversations that this browser keeps: each has an item of its storage of its own, so that tabs do not overwrite each
// other's. A conversation is { id, context, tools?, turns: [{ role, content, ... }], changed }, `tools` as OpenAI has them.
// An answer also has { reasoning?, calls?: [{ id, name, arguments }], timings?, end?, error? }: its `end` is the server's
// finish_reason, "stopped" (by the user) or "failed", with the `error`. The result of a call has the role "tool", and the
// call's { id, name }.

const PREFIX = "triforce conversation ";

export function newConversation(context, tools = []) {
  return { id: `${Date.now()}-${Math.random()}`, context, tools, turns: [], changed: Date.now() };
}

// All of them, the one that was changed last first.
export function conversations() {
  const found = [];
  for (let index = 0; index < localStorage.length; index += 1) {
    const name = localStorage.key(index);
    if (!name.startsWith(PREFIX)) continue;
    try {
      const one = JSON.parse(localStorage.getItem(name));
      if (Array.isArray(one.turns) && one.turns.length) found.push(one);
    } catch {
      continue; // not written by this page
    }
  }
  return found.sort((a, b) => b.changed - a.changed);
}

// Whether there was room for it.
export function keep(conversation) {
  conversation.changed = Date.now();
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    return true;
  } catch {
    return false;
  }
}

export function forget(conversation) {
  localStorage.removeItem(PREFIX + conversation.id);
}

export function titleOf(conversation) {
  const first = conversation.turns[0]?.content.replace(/\s+/g, " ") ?? "New conversation";
  return first.length > 48 ? `${first.slice(0, 47)}…` : first;
}

// Questions, each with what came of it.
function exchangesOf(turns) {
  const found = [];
  for (const turn of turns) {
    if (turn.role === "user") found.push([turn]);
    else found.at(-1)?.push(turn);
  }
  return found;
}

// Whether a question has an answer. All calls on the way to it must have results.
function isAnswered(exchange) {
  const results = new Set(exchange.filter((turn) => turn.role === "tool").map((turn) => turn.id));
  const isWhole = ({ role, content, calls, end }) => {
    if (role !== "assistant") return true;
    return calls ? end === "tool_calls" && calls.every((call) => results.has(call.id)) : content && end !== "failed";
  };
  return exchange.at(-1).role === "assistant" && exchange.every(isWhole);
}

// A turn as it is sent. Whether the model sees earlier reasoning is for its chat template to say.
function messageOf({ role, content, reasoning, calls, id }) {
  if (role === "tool") return { role, tool_call_id: id, content };
  const message = { role, content };
  if (reasoning) message.reasoning_content = reasoning;
  if (calls) {
    const called = (call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } });
    message.tool_calls = calls.map(called);
  }
  return message;
}

// What is sent to have the last question answered, or an answer go on behind results: the turns before it, less the
// questions that have no answer, with all that came of them.
export function messagesOf({ turns }) {
  const exchanges = exchangesOf(turns);
  const sent = exchanges.filter((one, index) => index === exchanges.length - 1 || isAnswered(one));
  return sent.flat().map(messageOf);
}

// Why an answer is not whole, in words; empty where it is.
export function cutOf({ content, reasoning, calls, timings, end, error }) {
  const without = "Further questions are sent without this one";
  const left = calls ? `. ${without}` : "";
  if (end === "length") return `cut${timings ? ` after ${timings.predicted_n} tokens` : ""}: maximum length${left}`;
  if (end === "stopped") return `stopped${left}`;
  if (end === "failed") return `${content || reasoning || calls ? "broken off" : "no answer"}: ${error}. ${without}; Retry asks again`;
  return !end || end === "stop" || end === "tool_calls" ? "" : `ended: ${end}`;
}
