"use strict";
// The conversation: what was said, sending, stopping. Starts the page; the last script to load.

const chat = {
  history: [], // what the next request repeats
  model: "Agens",
  controller: null, // of the answer that streams
  last: null, // the newest AnswerView
  retry: null, // after a failure: sends the same again
};

function setBusy(busy) {
  byId("send").disabled = busy;
  byId("stop").hidden = !busy;
  byId("log").setAttribute("aria-busy", String(busy)); // screen readers wait for the whole answer
  if (!busy && (document.activeElement === byId("stop") || document.activeElement === document.body)) {
    byId("prompt").focus();
  }
}

/** Add messages to the conversation and stream the answer to it. */
async function answer(added) {
  if (chat.controller) return;
  let fields;
  try {
    fields = requestSettings();
  } catch (error) {
    showNote(error.message, "error", ["Try again", () => answer(added)]);
    return;
  }
  chat.last?.close?.();
  chat.retry = null;
  chat.history.push(...added);
  const history = chat.history;
  const system = byId("system").value.trim();
  const messages = system ? [{ role: "system", content: system }, ...history] : [...history];
  const controller = (chat.controller = new AbortController());
  const view = (chat.last = new AnswerView(chat.model));
  setBusy(true);
  announce("The answer begins");
  let failure = null;
  try {
    const body = { messages, stream: true, stream_options: { include_usage: true }, ...fields };
    for await (const payload of streamChat(body, controller.signal)) view.add(payload);
  } catch (error) {
    failure = error;
  }
  if (chat.controller === controller) chat.controller = null;
  if (history !== chat.history) return; // a new chat began meanwhile
  view.finish(answer);
  setBusy(false);
  conclude(view, failure, added);
}

function conclude(view, failure, added) {
  if (view.empty && failure) {
    // nothing was said: take the question back, so that a bad one does not spoil those after it
    view.node.remove();
    chat.history.splice(-added.length);
  } else {
    chat.history.push(view.message());
  }
  if (failure === null) {
    for (const remark of view.remarks()) showNote(remark);
    announce("The answer is complete");
  } else if (failure.name === "AbortError") {
    showNote("Stopped.");
    announce("Stopped");
  } else {
    const again = () => answer(added);
    showNote(failure.status === 401 ? keyTrouble() : failure.message, "error", view.empty ? ["Try again", again] : null);
    if (failure.status === 401) {
      if (view.empty) chat.retry = again;
      askForKey();
    }
  }
}

function send() {
  const text = byId("prompt").value.trim();
  if (chat.controller || (!text && !images.urls.length)) return;
  const content = takeContent(text);
  byId("prompt").value = "";
  fitPrompt();
  for (const button of document.querySelectorAll(".remark button")) button.remove();
  showUser(content);
  answer([{ role: "user", content }]);
}

function stop() {
  chat.controller?.abort();
}

function newChat() {
  stop();
  chat.controller = null;
  Object.assign(chat, { history: [], last: null, retry: null });
  byId("log").replaceChildren(byId("empty"));
  byId("empty").hidden = false;
  setBusy(false);
  announce("New chat");
  byId("prompt").focus();
}

/** The box grows with its text; the style sheet sets the limit. */
function fitPrompt() {
  const box = byId("prompt");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

/** Ask who serves here. Asks for the key when the server wants one. */
async function learnModel() {
  try {
    const model = (await getJson("/v1/models")).data[0];
    chat.model = model.id;
    setModalities(model.input_modalities);
    return true;
  } catch (error) {
    if (error.status === 401) askForKey();
    return false; // loading, or away: the panel says so and asks again
  }
}

function onKey(event) {
  if (event.key === "Escape" && chat.controller) stop();
  // while an input method composes a character, Enter belongs to it
  const sends = event.target === byId("prompt") && event.key === "Enter" && !event.shiftKey && !event.isComposing;
  if (sends) {
    event.preventDefault();
    send();
  }
}

function start() {
  startSettings();
  startImages();
  byId("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  byId("prompt").addEventListener("input", fitPrompt);
  byId("stop").addEventListener("click", stop);
  byId("new-chat").addEventListener("click", newChat);
  document.addEventListener("keydown", onKey);
  byId("key-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    stored("sessionStorage", "agens.key", byId("key").value.trim());
    byId("key-form").hidden = true;
    byId("prompt").focus();
    const { retry } = chat;
    for (const button of retry ? document.querySelectorAll(".remark button") : []) button.remove();
    if (await learnModel()) retry?.();
  });
  startPanel(learnModel);
}

start();
