"use strict";
// The live panel: reads /health every two seconds, but only while somebody can see the page.

const PANEL_MS = 2000;
const panel = { timer: null, asking: false, before: null, model: null };

// plan lines are called group.detail; these are the groups in words
const GROUPS = {
  weights: "Weights", drafter: "Block drafter", mtp: "MTP head", vision: "Vision", state: "Recurrent state",
  kv: "Keys and values", far: "Far blocks", activations: "Activations", logits: "Logits", sampling: "Sampling",
  runtime: "Runtime", allocator: "Allocator slack", reserve: "Reserve", host: "Host tables",
};
const NUM_COLOURS = 8;

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) [count, unit] = [count / 1024, unit + 1];
  return `${count.toFixed(unit && count < 100 ? 1 : 0)}\u00a0${units[unit]}`; // a line never breaks before the unit
}

function startPanel(learnModel) {
  const look = async () => {
    clearTimeout(panel.timer);
    if (document.hidden || panel.asking) return;
    panel.asking = true;
    try {
      await refreshPanel(learnModel);
    } finally {
      panel.asking = false;
      if (!document.hidden) panel.timer = setTimeout(look, PANEL_MS);
    }
  };
  document.addEventListener("visibilitychange", () => {
    panel.before = null; // a rate over the time away would say nothing
    look();
  });
  look();
}

async function refreshPanel(learnModel) {
  let health = null;
  try {
    // 503 has a body, too: it says why
    health = await (await fetch("/health")).json();
  } catch {
    setState("error", "The server does not answer");
    panel.before = null;
    return;
  }
  const ready = health.status === "ok";
  const words = { ok: health.model, loading: "Loading the model", stopping: "Shutting down" };
  setState(ready ? "ready" : health.status === "loading" ? "busy" : "error",
    words[health.status] ?? `Failed: ${health.reason ?? "see the server's log"}`);
  if (ready && panel.model !== health.model) {
    panel.model = health.model;
    await learnModel();
  }
  if (health.engine && !byId("panel").hidden) drawPanel(health.engine);
}

/** Only a change is written: the state is a live region and would be read out each time. */
function setState(kind, text) {
  byId("state").dataset.kind = kind;
  if (byId("state-text").textContent !== text) byId("state-text").textContent = text;
}

function drawPanel(engine) {
  byId("running").textContent = engine.running ?? "–";
  byId("waiting").textContent = engine.waiting ?? "–";
  byId("queue").textContent = engine.waiting && engine.queue
    ? `The oldest has waited ${engine.queue.oldest_seconds.toFixed(1)} s.` : "";
  drawRate(engine.generated_tokens);
  drawSources(engine.drafts);
  drawPlan(engine.memory);
}

/** Tokens of all streams since the last look. */
function drawRate(tokens) {
  if (typeof tokens !== "number") return;
  const now = performance.now();
  const before = panel.before;
  panel.before = { now, tokens };
  if (before && tokens >= before.tokens) {
    byId("rate").textContent = ((1000 * (tokens - before.tokens)) / (now - before.now)).toFixed(1);
  }
}

function drawSources(drafts) {
  if (!drafts?.verify_steps) return;
  const sources = Object.entries(drafts.sources ?? {}).map(([name, { proposed, accepted }]) => ({
    name, value: accepted / drafts.verify_steps,
    text: `${(accepted / drafts.verify_steps).toFixed(2)}, ${proposed ? Math.round((100 * accepted) / proposed) : 0} % kept`,
  }));
  byId("per-step").textContent = `${drafts.tokens_per_step.toFixed(2)} since the start`;
  const rows = [{ name: "The model itself", value: 1, text: "1.00" }, ...sources];
  drawBar("source-bar", rows, rows.reduce((sum, row) => sum + row.value, 0));
  drawLegend("sources", rows.map((row, index) => ({ ...row, colour: index })));
}

function drawPlan(memory) {
  if (!memory?.lines) return;
  const groups = { device: new Map(), host: new Map() };
  for (const [line, use] of Object.entries(memory.lines)) {
    const group = line.split(".")[0];
    const place = groups[use.place === "device" ? "device" : "host"];
    const sum = place.get(group) ?? { name: GROUPS[group] ?? group, planned: 0, peak: 0 };
    sum.planned += use.planned_bytes;
    sum.peak += use.peak_bytes;
    place.set(group, sum);
  }
  const rows = (place) => [...groups[place].values()].filter((row) => row.planned)
    .sort((a, b) => b.planned - a.planned)
    .map((row, index) => ({
      ...row, value: row.planned, colour: index, share: row.peak / row.planned,
      text: row.peak ? `${bytes(row.peak)} of ${bytes(row.planned)}` : `${bytes(row.planned)} planned`,
    }));
  const device = rows("device");
  const peak = memory.measured_peak_bytes ?? memory.counted_peak_bytes;
  byId("plan-total").textContent =
    `${bytes(memory.planned_bytes)} planned, peak ${bytes(peak)}, cap ${bytes(memory.cap_bytes)}`;
  drawBar("plan-bar", device, Math.max(memory.cap_bytes, memory.planned_bytes));
  drawLegend("plan-device", device);
  const host = rows("host");
  byId("host-title").hidden = !host.length;
  drawLegend("plan-host", host.map((row) => ({ ...row, colour: null })));
}

/** One segment for each row; what is left of `total` stays empty. */
function drawBar(id, rows, total) {
  byId(id).replaceChildren(...rows.map((row, index) => {
    const piece = el("span", { class: `c${index % NUM_COLOURS}`, title: `${row.name}: ${row.text}` });
    piece.style.width = `${(100 * row.value) / total}%`;
    return piece;
  }));
}

/** Rows in words; `share` draws how much of the plan was ever used. Unchanged lists are left alone. */
function drawLegend(id, rows) {
  const list = byId(id);
  const key = JSON.stringify(rows);
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(...rows.map((row) => {
    const item = el("li", {},
      el("span", { class: row.colour === null ? "key" : `key c${row.colour % NUM_COLOURS}`, "aria-hidden": "true" }),
      el("span", { class: "name" }, row.name), el("span", { class: "figure" }, row.text));
    if (row.share !== undefined) {
      const fill = el("span");
      fill.style.width = `${Math.min(100, 100 * row.share)}%`;
      item.append(el("span", { class: "share", "aria-hidden": "true" }, fill));
    }
    return item;
  }));
}
