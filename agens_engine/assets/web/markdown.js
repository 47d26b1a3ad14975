"use strict";
// Model text to nodes: paragraphs, headings, fenced code, `code` and **bold**. Everything else stays as it was written.

/** "...": [{kind: "text" | "code", text, info}]; a fence that is still open counts as code. */
function splitBlocks(text) {
  const blocks = [];
  let fence = null; // the ticks that opened the code block
  let lines = [];
  let info = "";
  const close = (kind) => {
    if (lines.length) blocks.push({ kind, text: lines.join("\n"), info });
    lines = [];
  };
  for (const line of text.split("\n")) {
    const mark = /^ {0,3}(`{3,}|~{3,})([^`]*)$/.exec(line);
    if (fence !== null) {
      const closes = mark && mark[1][0] === fence[0] && mark[1].length >= fence.length && !mark[2].trim();
      if (!closes) lines.push(line);
      else {
        if (!lines.length) lines.push("");
        close("code");
        fence = null;
      }
    } else if (mark) {
      close("text");
      [fence, info] = [mark[1], mark[2].trim()];
    } else if (!line.trim() || /^#{1,6} /.test(line)) {
      close("text");
      if (line.trim()) blocks.push({ kind: "text", text: line });
    } else lines.push(line);
  }
  if (fence !== null && !lines.length) lines.push("");
  close(fence === null ? "text" : "code");
  return blocks;
}

/** Bring `container` up to date with `text`. Blocks that did not change keep their nodes, so streaming stays cheap. */
function renderMarkdown(container, text) {
  const blocks = splitBlocks(text);
  const drawn = (container.drawn ??= []);
  blocks.forEach((block, index) => {
    const old = drawn[index];
    if (old && old.kind === block.kind && old.text === block.text && old.info === block.info) return;
    if (old && old.kind === "code" && block.kind === "code" && old.info === block.info) {
      container.children[index].querySelector("code").textContent = block.text;
    } else {
      const node = block.kind === "code" ? codeBlock(block) : textBlock(block.text);
      if (old) container.children[index].replaceWith(node);
      else container.append(node);
    }
    drawn[index] = block;
  });
  while (drawn.length > blocks.length) {
    drawn.pop();
    container.lastChild.remove();
  }
}

function codeBlock({ text, info }) {
  const code = el("code", {}, text);
  const head = el("div", { class: "code-head" }, el("span", {}, info || "code"), copyButton("code", () => code.textContent));
  // scrollable, so the keyboard must be able to reach it
  return el("div", { class: "code" }, head, el("pre", { tabindex: "0" }, code));
}

function textBlock(text) {
  const heading = /^(#{1,6}) (.*)$/s.exec(text);
  const node = heading ? el("p", { class: "heading" }) : el("p");
  const pieces = (heading ? heading[2] : text).split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/);
  pieces.forEach((piece, index) => {
    if (index % 2 === 0) node.append(piece);
    else if (piece.startsWith("`")) node.append(el("code", {}, piece.slice(1, -1)));
    else node.append(el("strong", {}, piece.slice(2, -2)));
  });
  return node;
}
