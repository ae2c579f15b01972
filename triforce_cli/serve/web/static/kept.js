// Conversations that this browser keeps: each has an item of its storage of its own, so that tabs do not overwrite each
// other's. A conversation is { id, context, turns: [{ role, content, timings?, end?, error? }], changed }. An answer's `end`
// is the server's finish_reason, "stopped" (by the user) or "failed", with the `error`.

const PREFIX = "triforce conversation ";

export function newConversation(context) {
  return { id: `${Date.now()}-${Math.random()}`, context, turns: [], changed: Date.now() };
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

// What is sent to have the last question answered: the turns before it, less the answers that failed or are empty and
// their questions.
export function messagesOf({ turns }) {
  const answered = (turn) => turn?.role === "assistant" && turn.content && turn.end !== "failed";
  const sent = turns.filter((turn, index) => {
    if (turn.role === "user") return index === turns.length - 1 || answered(turns[index + 1]);
    return answered(turn);
  });
  return sent.map(({ role, content }) => ({ role, content }));
}

// Why an answer is not whole, in words; empty where it is.
export function cutOf({ content, timings, end, error }) {
  if (end === "length") return `cut${timings ? ` after ${timings.predicted_n} tokens` : ""}: maximum length`;
  if (end === "stopped") return "stopped";
  if (end === "failed") return `${content ? "broken off" : "no answer"}: ${error}. Further questions are sent without this one; Retry asks again`;
  return !end || end === "stop" ? "" : `ended: ${end}`;
}
