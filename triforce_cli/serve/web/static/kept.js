// Conversations that this browser keeps: each has an item of its storage of its own, so that tabs do not overwrite each
// other's. A conversation is { id, context, turns: [{ role, content, timings? }], changed }.

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
