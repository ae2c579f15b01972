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

// The blocks of lines: { kind: "p" | "pre", from, text }, or for an item of a list { kind: "ul" | "ol", from, number,
// content }. `from` is the index of the first line, `content` are blocks.
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
      found.push({ kind: number ? "ol" : "ul", from, number: Number(number ?? 1), content });
    } else {
      index = skip(lines, index + 1, (line) => !line.trim() || FENCE.test(line) || itemIn(line));
      found.push({ kind: "p", from, text: lines.slice(from, index).join("\n") });
    }
  }
  return found;
}

function add(parent, kind, text = "") {
  const found = document.createElement(kind);
  found.textContent = text;
  parent.append(found);
  return found;
}

// Adds a block; the node that was made for it. An item goes into the list that stands last, if one of its kind does.
function addBlock(parent, block) {
  if (block.kind === "pre") {
    const found = add(parent, "pre");
    add(found, "code", block.text);
    return found;
  }
  if (block.kind === "p") {
    const found = add(parent, "p");
    block.text.split(INLINE_CODE).forEach((part, index) => (index % 2 ? add(found, "code", part) : found.append(part)));
    return found;
  }
  let list = parent.lastElementChild;
  if (list?.localName !== block.kind) {
    list = add(parent, block.kind);
    if (block.kind === "ol") list.start = block.number;
  }
  const found = add(list, "li");
  for (const one of block.content) addBlock(found, one);
  return found;
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
    for (const block of found) this.last = addBlock(this.element, block);
    for (const line of lines.slice(0, found.at(-1).from)) this.settled += line.length + 1;
  }
}
