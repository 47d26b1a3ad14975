"use strict";
// The drop zone for images: off, with the reason, until the model says that it takes them.

const images = { on: false, urls: [] };

function setModalities(modalities) {
  images.on = (modalities ?? []).includes("image");
  byId("images").setAttribute("aria-disabled", String(!images.on));
  byId("image-files").disabled = !images.on;
  byId("image-help").textContent = images.on
    ? "Drop or paste images here, or choose files."
    : "Images are off: this model takes text only.";
}

async function addImages(files) {
  for (const file of files) {
    if (!file.type.startsWith("image/")) continue;
    images.urls.push(await new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(reader.error);
      reader.readAsDataURL(file);
    }));
  }
  showImages();
}

function showImages() {
  byId("thumbnails").hidden = !images.urls.length;
  byId("thumbnails").replaceChildren(...images.urls.map((url, index) => {
    const drop = () => {
      images.urls.splice(index, 1);
      showImages();
    };
    const name = `image ${index + 1}`;
    const button = el("button", { type: "button", "aria-label": `Remove ${name}`, click: drop }, "Remove");
    return el("li", {}, el("img", { src: url, alt: name }), button);
  }));
}

/** The content of a user message: plain text, or parts when there are images. Empties the zone. */
function takeContent(text) {
  if (!images.urls.length) return text;
  const parts = images.urls.map((url) => ({ type: "image_url", image_url: { url } }));
  images.urls = [];
  showImages();
  return [...parts, { type: "text", text }];
}

function startImages() {
  byId("image-files").addEventListener("change", (event) => {
    addImages([...event.target.files]);
    event.target.value = "";
  });
  // a file that misses the zone must not replace the page
  for (const kind of ["dragover", "drop"]) {
    document.addEventListener(kind, (event) => {
      if (event.dataTransfer.types.includes("Files")) event.preventDefault();
    });
  }
  byId("composer").addEventListener("drop", (event) => {
    if (images.on) addImages([...event.dataTransfer.files]);
    else announce(byId("image-help").textContent);
  });
  byId("prompt").addEventListener("paste", (event) => {
    if (images.on && event.clipboardData.files.length) addImages([...event.clipboardData.files]);
  });
}
