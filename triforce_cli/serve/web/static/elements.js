// Elements of the page, made of text.

export function element(kind, className, text = "") {
  const found = document.createElement(kind);
  if (className) found.className = className;
  found.textContent = text;
  return found;
}

export function button(text, label, act) {
  const found = element("button", "small", text);
  found.type = "button";
  found.setAttribute("aria-label", label);
  found.addEventListener("click", act);
  return found;
}
