"use strict";
// What one message looks like, and how an answer grows while it streams.

function showMessage(node) {
  byId("empty").hidden = true;
  byId("log").append(node);
  byId("log").scrollTop = byId("log").scrollHeight;
}

/** Change the log; stay at its end if the reader was there, else leave them where they read. */
function followEnd(change) {
  const log = byId("log");
  const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  change();
  if (follows) log.scrollTop = log.scrollHeight;
}

function messageHead(who, read) {
  return el("header", {}, el("h2", {}, who), copyButton("message", read));
}

function showUser(content) {
  const parts = typeof content === "string" ? [{ type: "text", text: content }] : content;
  const text = parts.filter((part) => part.type === "text").map((part) => part.text).join("\n");
  const pictures = parts.filter((part) => part.type === "image_url")
    .map((part, index) => el("img", { src: part.image_url.url, alt: `image ${index + 1}` }));
  showMessage(el("article", { class: "message user" },
    messageHead("You", () => text), ...pictures, el("p", {}, text)));
}

/** An error, or another remark, below the last message; `action` is [label, function] for a button. */
function showNote(text, kind = "note", action = null) {
  const note = el("p", { class: `remark ${kind}`, role: kind === "error" ? "alert" : null }, text);
  if (action) {
    const button = el("button", { type: "button", class: "act" }, action[0]);
    button.addEventListener("click", () => { button.remove(); action[1](); });
    note.append(" ", button);
  }
  showMessage(note);
}

/** The answer that is streaming: `add` takes the payloads, `message()` is what goes into the history. */
class AnswerView {
  constructor(who) {
    this.content = "";
    this.reasoning = "";
    this.calls = [];
    this.end = null; // the choice that holds finish_reason
    this.timings = null;
    this.usage = null;
    this.scheduled = false;
    this.begun = performance.now();
    this.thoughtSeconds = null;
    this.thoughtDrawn = 0; // characters of it on the screen
    this.summary = el("summary", {}, "Thinking");
    this.thought = el("div", { class: "thought" });
    this.details = el("details", { class: "thinking", hidden: true }, this.summary, this.thought);
    this.body = el("div", { class: "content" });
    this.cards = el("div", { class: "calls" });
    this.meta = el("p", { class: "meta" });
    this.node = el("article", { class: "message answer waiting" },
      messageHead(who, () => this.content), this.details, this.body, this.cards, this.meta);
    showMessage(this.node);
  }

  get empty() {
    return !this.content && !this.reasoning && !this.calls.length;
  }

  add(payload) {
    this.timings = payload.timings ?? this.timings;
    this.usage = payload.usage ?? this.usage;
    const choice = payload.choices[0];
    if (!choice) return;
    this.reasoning += choice.delta.reasoning_content ?? "";
    this.content += choice.delta.content ?? "";
    for (const piece of choice.delta.tool_calls ?? []) this.addCall(piece);
    if (this.thoughtSeconds === null && this.reasoning && (this.content || this.calls.length)) this.endThought();
    if (choice.finish_reason) this.end = choice;
    this.schedule();
  }

  addCall({ index, id, function: { name, arguments: text } }) {
    const call = (this.calls[index] ??= { id, name, arguments: "" });
    call.arguments += text ?? "";
  }

  endThought() {
    this.thoughtSeconds = (performance.now() - this.begun) / 1000;
  }

  /** Many tokens, one drawing for each frame of the screen. */
  schedule() {
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => { this.scheduled = false; this.draw(); });
  }

  draw() {
    followEnd(() => this.drawParts());
  }

  drawParts() {
    if (!this.empty) this.node.classList.remove("waiting");
    this.details.hidden = !this.reasoning;
    // appending keeps what the reader has selected, and costs only what is new
    if (this.reasoning.length > this.thoughtDrawn) {
      this.thought.append(this.reasoning.slice(this.thoughtDrawn));
      this.thoughtDrawn = this.reasoning.length;
    }
    if (this.thoughtSeconds !== null) this.summary.textContent = `Thought for ${this.thoughtSeconds.toFixed(1)} s`;
    renderMarkdown(this.body, this.content);
    this.calls.forEach((call, index) => {
      const card = this.cards.children[index] ?? this.cards.appendChild(callCard(call));
      card.querySelector("code").textContent = call.arguments;
    });
  }

  /** After the last payload, or after a stop or a failure. `sendResults` gets the messages with the tools' results. */
  finish(sendResults) {
    if (this.thoughtSeconds === null && this.reasoning) this.endThought();
    this.draw();
    this.node.classList.remove("waiting");
    followEnd(() => {
      this.meta.textContent = metaLine(this.timings, this.usage);
      if (this.end?.finish_reason === "tool_calls") this.askForResults(sendResults);
    });
  }

  askForResults(sendResults) {
    this.calls.forEach((call, index) => {
      call.arguments = call.arguments || "{}";
      const box = el("textarea", { rows: "2", "aria-label": `Result of ${call.name}`, placeholder: "Its result" });
      this.cards.children[index].append(box);
    });
    const button = el("button", { type: "button", class: "act" }, "Send results");
    button.addEventListener("click", () => {
      const boxes = [...this.cards.querySelectorAll("textarea")];
      sendResults(this.calls.map((call, index) => (
        { role: "tool", tool_call_id: call.id, content: boxes[index].value })));
    });
    this.cards.append(button);
    this.close = () => {
      for (const box of this.cards.querySelectorAll("textarea")) box.readOnly = true;
      button.remove();
    };
  }

  message() {
    const message = { role: "assistant", content: this.content };
    if (this.reasoning) message.reasoning_content = this.reasoning;
    // a call that was cut off is no call
    if (this.end?.finish_reason === "tool_calls") {
      message.tool_calls = this.calls.map((call) => (
        { id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
    }
    return message;
  }

  /** Why the answer ended, where the reader should know. */
  remarks() {
    const { max_tokens: most, max_tokens_from: source, reasoning_ended_by: closer } = this.end?.limits ?? {};
    const remarks = [];
    const why = { budget: "its budget was used up", repetition: "it went round in circles" }[closer];
    if (why) remarks.push(`The server ended the thinking: ${why}.`);
    if (this.end?.finish_reason === "length") {
      const whose = { request: "your limit", default: "the server's limit", context: "the end of the context" }[source];
      remarks.push(whose ? `Cut off at ${whose}, ${most} tokens.` : "Cut off at the token limit.");
    }
    return remarks;
  }
}

function callCard(call) {
  const args = el("code", {});
  return el("section", { class: "call", "aria-label": `Call of ${call.name}` },
    el("div", { class: "code-head" }, el("span", {}, "Calls ", el("strong", {}, call.name)),
      copyButton("arguments", () => args.textContent)),
    el("pre", { tabindex: "0" }, args));
}

function metaLine(timings, usage) {
  const parts = [];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`${usage.prompt_tokens} tokens in${cached ? ` (${cached} cached)` : ""}, ${usage.completion_tokens} out`);
  }
  if (timings) {
    parts.push(`began after ${(timings.queue_seconds + timings.prefill_seconds).toFixed(2)} s`);
    const { decoded_tokens: tokens = usage?.completion_tokens, decode_seconds: seconds } = timings;
    if (tokens && seconds > 0) parts.push(`${(tokens / seconds).toFixed(1)} tokens/s`);
    if (timings.tokens_per_step) parts.push(`${timings.tokens_per_step.toFixed(2)} tokens per step`);
  }
  return parts.join(" · ");
}
