// The Markdown that answers need to read well: paragraphs with their line breaks, lists (- * 1.), code (``` and `).
// Everything else stays as it is written. Nodes are made of text, never of HTML.

const FENCE = /^\s*```[^`]*$/;
const CLOSING_FENCE = /^\s*```\s*$/;
const ITEM = /^(\s*)(?:[-*]|(\d{1,9})[.)])(?:\s+|$)/;
const INLINE_CODE = /`([^`\n]+)`/;
const UNDECIDED = /^\s*(`{1,2}|[-*]|\d{1,9}[.)]?)$/; // what an item or a fence may begin with
const DEEPEST = 8; // lists within lists; deeper ones are text

const indentOf = (line) => line.length - line.trimStart().length;

// The first index from `index` on whose line `ends`; the number of lines where there is none.
function skip(lines, index, ends) {
  while (index < lines.length && !ends(lines[index])) index += 1;
  return index;
}

// The blocks of lines: { kind: "p" | "pre", from, text } or { kind: "ul" | "ol", from, start, items }. `from` is the
// index of the first line, `start` the first number of a numbered list; an item is a list of blocks.
export function blocks(lines, depth = 0) {
  const itemIn = (line) => (depth < DEEPEST ? ITEM.exec(line) : null);
  const found = [];
  let index = 0;
  while (index < lines.length) {
    const from = index;
    const item = itemIn(lines[index]);
    if (!lines[index].trim()) {
      index += 1;
    } else if (FENCE.test(lines[index])) {
      index = skip(lines, index + 1, (line) => CLOSING_FENCE.test(line)) + 1;
      found.push({ kind: "pre", from, text: lines.slice(from + 1, index - 1).join("\n") });
    } else if (item) {
      const [marker, indent, number] = item;
      index = skip(lines, index + 1, (line) => line.trim() && indentOf(line) <= indent.length);
      const rest = lines.slice(from + 1, index).map((line) => line.slice(Math.min(marker.length, indentOf(line))));
      const content = blocks([lines[from].slice(marker.length), ...rest], depth + 1);
      const kind = number ? "ol" : "ul";
      if (found.at(-1)?.kind === kind) found.at(-1).items.push(content);
      else found.push({ kind, from, start: Number(number ?? 1), items: [content] });
    } else {
      index = skip(lines, index + 1, (line) => !line.trim() || FENCE.test(line) || itemIn(line));
      found.push({ kind: "p", from, text: lines.slice(from, index).join("\n") });
    }
  }
  return found;
}

function element(kind, children) {
  const found = document.createElement(kind);
  for (const child of children) found.append(child);
  return found;
}

function nodeOf(block) {
  if (block.kind === "pre") return element("pre", [element("code", [block.text])]);
  if (block.kind === "p") {
    const parts = block.text.split(INLINE_CODE); // every second one is code
    return element("p", parts.map((part, index) => (index % 2 ? element("code", [part]) : part)));
  }
  const list = element(block.kind, block.items.map((item) => element("li", item.map(nodeOf))));
  if (block.kind === "ol") list.start = block.start;
  return list;
}

// Shows a text that grows in an element. Blocks before the last one are complete and stay as they are.
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.settled = 0; // length of the text before the last block
    this.last = null;
  }

  // Takes the whole text so far. While it grows, a last line that may yet become an item or a fence is left out.
  show(text, growing = false) {
    const lines = text.slice(this.settled).split("\n");
    if (growing && UNDECIDED.test(lines.at(-1))) lines.pop();
    const found = blocks(lines);
    if (!found.length) return;
    this.last?.remove();
    for (const block of found) this.element.append((this.last = nodeOf(block)));
    for (const line of lines.slice(0, found.at(-1).from)) this.settled += line.length + 1;
  }
}
