/**
 * Elements, and lists of them that follow lists of values.
 *
 * Law: what comes from outside becomes text or an attribute's value, never markup. Nothing is written that is there already.
 */

/**
 * @param {string} tag
 * @param {Record<string, string | number | boolean | EventListener>} [attributes] `class`, `role`, …; false leaves one out; functions listen
 * @param {...(Node | string)} children
 * @returns {HTMLElement}
 */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== false) node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children);
  return node;
}

/** @param {string} id @returns {HTMLElement} */
export function byId(id) {
  const node = document.getElementById(id);
  if (!node) throw new Error(`the page has no #${id}`);
  return node;
}

/** @param {Element} node @param {string} text */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** @param {Element} node @param {string} name @param {string | number | boolean | null} value null, false: without it */
export function setAttribute(node, name, value) {
  if (value === null || value === false) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
    return;
  }
  const text = value === true ? "" : String(value);
  if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

/** @param {HTMLElement} node @param {string} name of a custom property @param {string} value */
export function setStyle(node, name, value) {
  if (node.style.getPropertyValue(name) !== value) node.style.setProperty(name, value);
}

/** @type {WeakMap<Element, Map<string, HTMLElement>>} */
const mirrored = new WeakMap();

/**
 * Make the children of `parent` follow `items`: kept by key, made, moved and removed. One pass; nothing moves that is in its place.
 * @template T
 * @param {Element} parent has no other children
 * @param {readonly T[]} items with unique keys
 * @param {(item: T) => string} keyOf
 * @param {(item: T) => HTMLElement} make
 * @param {(node: HTMLElement, item: T) => void} update also called for what was just made
 */
export function mirror(parent, items, keyOf, make, update) {
  const known = mirrored.get(parent) ?? new Map();
  const wanted = new Set(items.map(keyOf));
  const focused = document.activeElement;
  for (const [key, node] of known) {
    if (!wanted.has(key)) {
      node.remove();
      known.delete(key);
    }
  }
  let next = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    const node = known.get(key) ?? make(item);
    known.set(key, node);
    if (next && node === next) next = next.nextElementSibling;
    else parent.insertBefore(node, next);
    update(node, item);
  }
  mirrored.set(parent, known);
  if (focused instanceof HTMLElement && focused !== document.activeElement && focused.isConnected)
    focused.focus({ preventScroll: true });
}
