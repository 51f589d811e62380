"use strict";
const facts = JSON.parse(document.getElementById("facts").textContent);
const part = Object.fromEntries([...document.querySelectorAll("[id]")].map((each) => [each.id, each]));
// A WebAssembly module with an instruction for vectors, without which the engine does not start.
const WITH_VECTORS = [0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 10, 1, 8, 0, 65, 0, 253, 15,
  253, 98, 11];
const NEEDED = "This page needs Chrome or Edge 92, Firefox 114, Safari 16.4, or a newer browser";
// In milliseconds: how long the keys rest before the text is translated.
const REST = 200;
// The cache is shared by all pages of a server.
const CACHE = `hf_vaswani ${new URL("./", location).pathname}`;

// ---- Files -------------------------------------------------------------------------------------------------------

const total = facts.files.reduce((sum, file) => sum + file.bytes, 0);
let loaded = 0;

function count(bytes) {
  loaded += bytes;
  part.progress.value = loaded / total;
  part.note.textContent = `Loading ${(loaded / 1e6).toFixed(1)} of ${(total / 1e6).toFixed(1)} MB`;
}

// Returns the cache of this page, or null where a browser has none: for a file, without https, or if it refuses one.
async function openCache() {
  return facts.isSingle || !self.caches ? null : caches.open(CACHE).catch(() => null);
}

// Returns the compressed bytes of a file: from within this page, from the cache, or from beside this page.
async function read(file, cache) {
  const element = document.querySelector(`script[data-file="${file.name}"]`);
  if (element) {
    const bytes = Uint8Array.from(atob(element.textContent), (letter) => letter.charCodeAt(0));
    element.remove();
    count(bytes.length);
    return bytes;
  }
  const kept = await cache?.match(file.url);
  if (kept) {
    count(file.bytes);
    return new Uint8Array(await kept.arrayBuffer());
  }
  const response = await fetch(file.url).catch(() => null);
  if (!response?.ok) throw new Error(`${file.name} cannot be loaded. Reload the page: what is complete is kept.`);
  const chunks = [];
  const reader = response.body.getReader();
  for (let each = await reader.read(); !each.done; each = await reader.read()) {
    chunks.push(each.value);
    count(each.value.length);
  }
  const bytes = new Uint8Array(await new Blob(chunks).arrayBuffer());
  if (bytes.length !== file.bytes) throw new Error(`${file.name} is incomplete. Reload the page.`);
  // Without room, the file is loaded at the next visit again.
  await cache?.put(file.url, new Response(bytes)).catch(() => null);
  return bytes;
}

// Makes the page work without a network, and forgets the files of an earlier version.
async function keepPage(cache) {
  if (!cache || !navigator.serviceWorker) return;
  await navigator.serviceWorker.register("service_worker.js");
  const page = new URL("./", location).href;
  // The service worker has put aside what it loaded, if it is not the first visit.
  const fresh = (await cache.match("fresh")) ?? (await fetch(page, { cache: "force-cache" }));
  await cache.put(page, fresh);
  const needed = new Set([page, ...facts.files.map((file) => new URL(file.url, location).href)]);
  for (const request of await cache.keys()) if (!needed.has(request.url)) await cache.delete(request);
  part.promise.textContent += " It works without a network, too.";
}

// ---- The translator ----------------------------------------------------------------------------------------------

let worker = null, number = 0, timer = 0;

function setBusy(isBusy) {
  part.translation.setAttribute("aria-busy", isBusy);
}

function fail(error) {
  setBusy(false);
  part.progress.hidden = true;
  part.note.textContent = "";
  part.error.textContent = error.message ?? String(error);
}

function translate() {
  clearTimeout(timer);
  number += 1;
  setBusy(true);
  part.translation.lang = part.language.value.replace("_", "-");
  worker?.postMessage({ number, text: part.text.value, language: part.language.value });
}

function show({ text, done, count: sentences }) {
  part.translation.textContent = text;
  setBusy(done < sentences);
  part.error.textContent = "";
  part.note.textContent = done < sentences ? `Sentence ${done + 1} of ${sentences}` : "";
  part.copy.hidden = !navigator.clipboard || !text;
}

async function start() {
  if (!self.DecompressionStream || !self.WebAssembly?.validate(new Uint8Array(WITH_VECTORS))) {
    throw new Error(`${NEEDED}, on a processor with vector instructions.`);
  }
  const cache = await openCache();
  const files = await Promise.all(facts.files.map(async (file) => [file.name, await read(file, cache)]));
  part.note.textContent = "Starting";
  part.progress.removeAttribute("value");
  const { "worker.js": script, ...others } = Object.fromEntries(files);
  const source = await new Response(new Blob([script]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  const made = new Worker(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
  await new Promise((resolve, reject) => {
    made.onerror = (event) => reject(new Error(`The translator does not start: ${event.message ?? "unknown error"}. ${NEEDED}.`));
    made.onmessage = ({ data }) => (data.error ? reject(new Error(data.error)) : resolve());
    made.postMessage({ files: others, facts }, Object.values(others).map((bytes) => bytes.buffer));
  }).catch(async (error) => {
    // A file may be damaged.
    if (cache) await caches.delete(CACHE);
    throw error;
  });
  made.onerror = (event) => fail(new Error(`The translator has ended: ${event.message ?? "unknown error"}. Reload the page.`));
  made.onmessage = ({ data }) => {
    if (data.error) fail(new Error(data.error));
    else if (data.number === number) show(data);
  };
  worker = made;
  part.progress.hidden = true;
  part.note.textContent = "";
  part.state.dataset.ready = "";
  if (part.text.value) translate();
  await keepPage(cache).catch(() => null);
}

// ---- Controls ----------------------------------------------------------------------------------------------------

const names = new Intl.DisplayNames("en", { type: "language" });

function nameOf(code) {
  try {
    return names.of(code.replace("_", "-"));
  } catch {
    return code;
  }
}

if (facts.sources.length === 1) {
  part.from.textContent = nameOf(facts.sources[0]);
  part.text.lang = facts.sources[0].replace("_", "-");
}
part.language.append(...facts.languages.map(({ code }) => new Option(nameOf(code), code)));
part.language.value = facts.language ?? part.language.options[0]?.value ?? "";
part.language.hidden = facts.languages.length < 2;
if (facts.languages.length === 1) part.to.textContent = nameOf(facts.languages[0].code);

part.text.addEventListener("input", () => {
  clearTimeout(timer);
  // What comes now is the translation of an earlier text.
  number += 1;
  setBusy(true);
  timer = setTimeout(translate, REST);
});
part.language.addEventListener("change", translate);
part.copy.addEventListener("click", async () => {
  await navigator.clipboard.writeText(part.translation.textContent);
  part.note.textContent = "Copied";
});

start().catch(fail);
