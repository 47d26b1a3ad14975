"use strict";
// What the user set: kept in localStorage, the API key only for as long as the tab lives.

const STORE = "agens.settings";
const FIELDS = ["system", "temperature", "max-tokens", "effort", "tools"];

/** Storage may be switched off in the browser; the page then works without remembering. */
function stored(storage, name, value) {
  try {
    if (value === undefined) return window[storage].getItem(name);
    window[storage].setItem(name, value);
  } catch {
    return null;
  }
  return value;
}

const settings = (() => {
  try {
    return { theme: "auto", panel: window.innerWidth > 900, ...JSON.parse(stored("localStorage", STORE) ?? "{}") };
  } catch {
    return { theme: "auto", panel: window.innerWidth > 900 };
  }
})();

function keepSettings() {
  for (const id of FIELDS) settings[id] = byId(id).value;
  stored("localStorage", STORE, JSON.stringify(settings));
}

/** The fields of a chat request; throws an Error in words when one is wrong. */
function requestSettings() {
  const fields = {};
  for (const id of ["temperature", "max-tokens"]) {
    const input = byId(id);
    if (!input.validity.valid) throw new Error(`${input.labels[0].textContent}: ${input.validationMessage}`);
    if (input.value !== "") fields[id.replace("-", "_")] = Number(input.value);
  }
  const effort = byId("effort").value;
  if (effort === "none") fields.enable_thinking = false;
  else if (effort) fields.reasoning_effort = effort;
  const tools = byId("tools").value.trim();
  if (tools) {
    try {
      fields.tools = JSON.parse(tools);
    } catch (error) {
      throw new Error(`Tools: this is not JSON (${error.message})`);
    }
  }
  return fields;
}

/** Headers of every request. Header values are bytes: a key outside ASCII goes out as UTF-8. */
function requestHeaders() {
  const headers = { "Content-Type": "application/json" };
  const key = stored("sessionStorage", "agens.key");
  if (key) headers.Authorization = `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}`;
  return headers;
}

function keyTrouble() {
  return stored("sessionStorage", "agens.key")
    ? "This API key is wrong. Enter the right one above."
    : "This server asks for an API key. Enter it above.";
}

function askForKey() {
  byId("key-form").hidden = false;
  byId("key").focus();
}

function showTheme() {
  if (settings.theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = settings.theme;
  byId("theme").textContent = `Theme: ${settings.theme}`;
}

function showPart(button, part, shown) {
  byId(part).hidden = !shown;
  byId(button).setAttribute("aria-expanded", String(shown));
}

function startSettings() {
  for (const id of FIELDS) {
    byId(id).value = settings[id] ?? "";
    byId(id).addEventListener("input", keepSettings);
  }
  showTheme();
  showPart("open-panel", "panel", settings.panel);
  byId("theme").addEventListener("click", () => {
    settings.theme = { auto: "dark", dark: "light", light: "auto" }[settings.theme] ?? "auto";
    showTheme();
    keepSettings();
  });
  byId("open-settings").addEventListener("click", () => {
    const shown = byId("settings").hidden;
    showPart("open-settings", "settings", shown);
    if (shown) byId("system").focus();
  });
  byId("open-panel").addEventListener("click", () => {
    settings.panel = byId("panel").hidden;
    showPart("open-panel", "panel", settings.panel);
    keepSettings();
  });
  byId("settings").addEventListener("submit", (event) => event.preventDefault());
}
