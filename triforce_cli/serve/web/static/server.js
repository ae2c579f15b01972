// Requests to this server. The key, where one is needed, is asked for once and kept as long as the tab is open.

const at = (id) => document.getElementById(id);

function keyFromUser() {
  return new Promise((resolve) => {
    at("key").value = "";
    at("locked").addEventListener("close", () => resolve(at("key").value), { once: true });
    at("locked").showModal();
  });
}

export async function call(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem("key");
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const response = await fetch(path, { ...options, headers });
    if (response.ok) return response;
    const found = await response.json().catch(() => null);
    if (found?.error?.code === "invalid_api_key") {
      sessionStorage.setItem("key", await keyFromUser());
    } else {
      throw new Error(found?.error?.message ?? `the server answers ${response.status}`);
    }
  }
}

// What a stream brings, up to its end.
export async function* events(response) {
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
