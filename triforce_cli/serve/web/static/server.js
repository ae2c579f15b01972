// Requests to this server. The key, where one is needed, is asked for once and kept as long as the tab is open.

const at = (id) => document.getElementById(id);

let askedForKey = null; // while the dialog is open, so that requests share it

// Raises an error where the dialog is left without a key.
function keyFromUser(title) {
  askedForKey ??= new Promise((resolve, reject) => {
    at("locked-title").textContent = title;
    at("key").value = "";
    at("locked").returnValue = "";
    at("locked").addEventListener("close", () => {
      askedForKey = null;
      const given = at("locked").returnValue === "given";
      at("unlock").hidden = given;
      if (given) resolve(at("key").value.trim());
      else reject(new Error("this server needs its key: press “Give the key” above, or send a question, and enter the key"));
    }, { once: true });
    at("locked").showModal();
  });
  return askedForKey;
}

// The promise, with words of ours where the network fails; an abort stays one.
function orSay(words, promise) {
  return promise.catch((error) => {
    throw error.name === "AbortError" ? error : new Error(words);
  });
}

// Raises an error with the server's message where it refuses.
export async function call(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem("key");
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const words = "the server cannot be reached, or closed the connection";
    const response = await orSay(words, fetch(path, { ...options, headers }));
    if (response.ok) return response;
    const error = (await response.json().catch(() => null))?.error;
    // Other errors with status 401 are not helped by a key: a server without one answers its own user only.
    if (error?.code !== "invalid_api_key") throw new Error(error?.message ?? `the server answers ${response.status}`);
    sessionStorage.setItem("key", await keyFromUser(key ? "This key is wrong." : "This server needs its key."));
  }
}

// What a stream brings, up to its end.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await orSay("the connection to the server was lost", reader.read());
    if (done) throw new Error("the server ended before the answer did");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (!part.startsWith("data: ")) continue;
      const event = JSON.parse(part.slice(6));
      if (event.error) throw new Error(event.error.message ?? "the server failed");
      yield event;
    }
  }
}
