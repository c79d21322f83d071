// Elements: made from plain text only, and lists that are brought up to date without losing the focus.

/** An element; a child that is a string becomes text, never markup. `null` leaves an attribute or a child out. */
export function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const byId = (id) => document.getElementById(id);

/** Set the text of a node, and touch it only when it is another: a live region speaks at each change. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Where a style has to be a number: through the object model, which the content policy allows. */
export function setShare(node, share) {
  node.style.setProperty("--share", String(Math.max(0, Math.min(1, share))));
}

/**
 * Make the children of `parent` those of `items`, in their order: `build(item)` makes a node, once for each key, and
 * `update(node, item)` brings it up to date.
 */
export function syncChildren(parent, items, keyOf, build, update) {
  const known = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let node = known.get(key);
    known.delete(key);
    if (!node) {
      node = build(item);
      node.dataset.key = key;
    }
    update(node, item);
    if (node === place) place = place.nextElementSibling;
    else parent.insertBefore(node, place);
  }
  for (const node of known.values()) node.remove();
}

/** A table with a caption for those who do not see the chart beside it; cells of numbers are aligned. */
export function table(caption, columns, className = null) {
  const head = element("tr", {}, ...columns.map(({ title, kind }) => element("th", { scope: "col", class: kind }, title)));
  return element(
    "table", { class: className }, element("caption", { class: "unseen" }, caption), element("thead", {}, head), element("tbody"),
  );
}
