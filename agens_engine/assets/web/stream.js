"use strict";
// One chat request as a stream of parsed events, and every failure as an error in words.

class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** The JSON of a GET, or a ServerError. */
async function getJson(path) {
  let response;
  try {
    response = await fetch(path, { headers: requestHeaders() });
  } catch {
    throw new ServerError("The server does not answer. Is it still running?", 0);
  }
  if (!response.ok) throw await errorOf(response);
  return response.json();
}

/** Yields each payload of the stream; ends after [DONE]. An aborted `signal` raises AbortError as fetch does. */
async function* streamChat(body, signal) {
  let response;
  try {
    response = await fetch("/v1/chat/completions", {
      method: "POST", headers: requestHeaders(), body: JSON.stringify(body), signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer. Is it still running?", 0);
  }
  if (!response.ok) throw await errorOf(response);
  for await (const data of sseData(response.body)) {
    if (data === "[DONE]") return;
    const payload = JSON.parse(data);
    if (payload.error) throw new ServerError(payload.error.message, 500);
    yield payload;
  }
  throw new ServerError("The connection ended before the answer was complete.", 0);
}

/** The data of each server-sent event; comments (keep-alive) are skipped. */
async function* sseData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      let piece;
      try {
        piece = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        return; // the connection broke; the caller says so
      }
      if (piece.done) return;
      const lines = (rest + piece.value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trimStart();
    }
  } finally {
    reader.cancel().catch(() => {}); // leaving early also closes the connection; it may be closed already
  }
}

async function errorOf(response) {
  let message = "";
  try {
    message = (await response.json()).error.message;
  } catch {
    message = `The server answered ${response.status} ${response.statusText}.`;
  }
  return new ServerError(message[0].toUpperCase() + message.slice(1), response.status);
}
