"use strict";
// The only ways this page makes and finds nodes. Strings always become text, never markup.

const byId = (id) => document.getElementById(id);

/** el("p", {class: "hint"}, "text", node, ...): attributes that are functions become listeners ("click", "input"). */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** Say something to a screen reader without moving anything on the screen. */
function announce(text) {
  byId("announce").textContent = text;
}

/** A button that copies what `read()` returns and says whether that worked. */
function copyButton(what, read) {
  const button = el("button", { type: "button", class: "copy", "aria-label": `Copy ${what}` }, "Copy");
  button.addEventListener("click", async () => {
    const worked = await copyText(read());
    button.textContent = worked ? "Copied" : "Could not copy";
    announce(worked ? `Copied ${what}` : `Could not copy ${what}`);
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // no clipboard for pages over plain HTTP from another machine: the older way still works there
    const box = el("textarea", { class: "unseen", "aria-hidden": "true" });
    const focused = document.activeElement;
    box.value = text;
    document.body.append(box);
    box.select();
    const worked = document.execCommand("copy");
    box.remove();
    focused?.focus();
    return worked;
  }
}
