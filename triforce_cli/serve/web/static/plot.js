// A small plot of the answer that is being written: the time between tokens, and the share of accepted draft tokens.

const WIDTH = 240;
const HEIGHT = 40;
const MOST_POINTS = 120;

function line(svg, kind) {
  const found = document.createElementNS(svg.namespaceURI, "polyline");
  found.setAttribute("class", kind);
  return found;
}

function draw(polyline, values, most) {
  const step = WIDTH / Math.max(1, values.length - 1);
  const points = values.map((value, index) => `${(index * step).toFixed(1)},${(HEIGHT - 1 - (value / most) * (HEIGHT - 2)).toFixed(1)}`);
  polyline.setAttribute("points", points.join(" "));
}

export class Plot {
  constructor(svg, tbtText, acceptedText) {
    this.svg = svg;
    this.texts = [tbtText, acceptedText];
    this.lines = [line(svg, "tbt"), line(svg, "accepted")];
    svg.append(...this.lines);
    this.clear();
  }

  clear() {
    this.last = null;
    this.tbt = [];
    this.accepted = [];
    for (const one of this.lines) one.setAttribute("points", "");
    for (const text of this.texts) text.textContent = "";
  }

  // Takes the timings of the answer so far.
  add(timings) {
    const last = this.last;
    this.last = timings;
    if (!last || timings.predicted_n <= last.predicted_n) return;
    this.tbt.push((timings.predicted_ms - last.predicted_ms) / (timings.predicted_n - last.predicted_n));
    const drafted = timings.draft_n - last.draft_n;
    if (drafted > 0) this.accepted.push((timings.draft_n_accepted - last.draft_n_accepted) / drafted);
    this.tbt.splice(0, this.tbt.length - MOST_POINTS);
    this.accepted.splice(0, this.accepted.length - MOST_POINTS);
    const most = Math.max(...this.tbt);
    draw(this.lines[0], this.tbt, most || 1);
    draw(this.lines[1], this.accepted, 1);
    this.texts[0].textContent = `TBT ${this.tbt.at(-1).toFixed(1)} ms (at most ${most.toFixed(1)})`;
    this.texts[1].textContent = this.accepted.length ? `${(100 * this.accepted.at(-1)).toFixed(0)} % of drafts accepted` : "";
    this.svg.setAttribute("aria-label", this.texts.map((text) => text.textContent).filter(Boolean).join(", "));
  }
}
