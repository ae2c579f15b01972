// An answer in the page: its reasoning, which is opened by a click, its text, and its calls of tools.
import { element } from "./elements.js";
import { MarkdownView } from "./markdown.js";
import { inLines } from "./parts.js";

export class AnswerView {
  constructor(parent) {
    this.text = element("div", "text");
    this.markdown = new MarkdownView(this.text);
    this.reasoning = null; // the node of its text, once there is any
    this.calls = []; // of each call, the element of its arguments
    this.parent = parent;
    parent.append(this.text);
  }

  // Takes the whole answer so far.
  show(turn, growing = false) {
    if (turn.reasoning) this.showReasoning(turn.reasoning);
    this.markdown.show(turn.content, growing);
    const calls = turn.calls ?? [];
    calls.forEach((call, index) => this.showCall(index, call, growing && index === calls.length - 1));
  }

  showReasoning(text) {
    if (!this.reasoning) {
      const found = element("details", "reasoning");
      const shown = element("div", "thought");
      this.reasoning = document.createTextNode("");
      shown.append(this.reasoning);
      found.append(element("summary", "", "Reasoning"), shown);
      this.text.before(found);
    }
    this.reasoning.appendData(text.slice(this.reasoning.length));
  }

  showCall(index, call, growing) {
    if (!this.calls[index]) {
      const found = element("div", "call");
      const lines = element("pre", "");
      this.calls[index] = element("code", "");
      lines.append(this.calls[index]);
      found.append(element("div", "name", `Call: ${call.name}`), lines);
      this.parent.append(found);
    }
    const shown = growing ? call.arguments : inLines(call.arguments);
    if (this.calls[index].textContent !== shown) this.calls[index].textContent = shown;
  }
}
