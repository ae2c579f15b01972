// What answers have beside their text: reasoning, and calls of tools. An answer is a turn of kept.js. Needs no browser.

const DEEPEST = 20; // levels of JSON that are indented; deeper ones stay at that margin
const SIGNS = /("[^"\\]*(?:\\.[^"\\]*)*")|\s+|\{\s*\}|\[\s*\]|[{}[\],:]/gs;

// Adds what a stream has brought to an answer. What grows, in a word for the status line; empty where nothing does.
export function addDelta(turn, { content, reasoning_content, tool_calls }) {
  if (reasoning_content) turn.reasoning = (turn.reasoning ?? "") + reasoning_content;
  if (content) turn.content += content;
  for (const { index, id, function: called } of tool_calls ?? []) {
    turn.calls ??= [];
    turn.calls[index] ??= { id, name: called.name, arguments: "" };
    turn.calls[index].arguments += called.arguments ?? "";
  }
  if (tool_calls?.length) return "calling a tool";
  if (content) return "writing";
  return reasoning_content ? "reasoning" : "";
}

// The calls whose results the model waits for.
export function openCalls(turns) {
  const last = turns.at(-1);
  return last?.role === "assistant" && last.end === "tool_calls" ? last.calls : [];
}

// JSON in lines, with texts and numbers as they are written. What is no JSON stays as it is.
export function inLines(text) {
  try {
    JSON.parse(text);
  } catch {
    return text;
  }
  let depth = 0;
  const lineEnd = () => `\n${"  ".repeat(Math.min(depth, DEEPEST))}`;
  return text.replace(SIGNS, (found, quoted) => {
    if (quoted) return found;
    const sign = found.replace(/\s+/g, "");
    if (sign === ":") return ": ";
    if (sign === ",") return sign + lineEnd();
    if (sign.length !== 1) return sign; // white space, or an empty object or list
    const opens = "{[".includes(sign);
    depth += opens ? 1 : -1;
    return opens ? sign + lineEnd() : lineEnd() + sign;
  });
}

// The list of tools that a text has as JSON. Raises an error where it has something else.
export function toolsOf(text) {
  if (!text.trim()) return [];
  let tools = null;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`This is not JSON: ${error.message}`);
  }
  const isTool = (one) => one?.type === "function" && typeof one.function?.name === "string";
  if (Array.isArray(tools) && tools.every(isTool)) return tools;
  throw new Error('Tools are a list of {"type": "function", "function": {"name": "…", "parameters": {…}}}.');
}
