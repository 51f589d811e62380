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
  const chunks = [];
  try {
    // What the browser has kept by itself may be damaged.
    const response = await fetch(file.url, { cache: cache ? "reload" : "default" });
    if (!response.ok) throw new Error(response.statusText);
    const reader = response.body.getReader();
    for (let each = await reader.read(); !each.done; each = await reader.read()) {
      chunks.push(each.value);
      count(each.value.length);
    }
  } catch {
    throw new Error(`${file.name} cannot be loaded. Reload the page: what is complete is kept.`);
  }
  const bytes = new Uint8Array(await new Blob(chunks).arrayBuffer());
  if (bytes.length !== file.bytes) throw new Error(`${file.name} is incomplete. Reload the page.`);
  // Without room, the file is loaded at the next visit again.
  await cache?.put(file.url, new Response(bytes)).catch(() => null);
  return bytes;
}

// Makes the page work without a network, forgets the files of an earlier version, and says so.
async function keepPage() {
  const cache = await openCache();
  if (!cache || !navigator.serviceWorker) return;
  await navigator.serviceWorker.register("service_worker.js");
  const address = new URL("./", location).href;
  // The service worker has put aside what it loaded, if it is not the first visit.
  const page = (await cache.match("fresh")) ?? (await fetch(location.pathname, { cache: "force-cache" }));
  const text = await page.text();
  const urls = facts.files.map((file) => file.url);
  const kept = await Promise.all(urls.map((url) => cache.match(url)));
  // Another version may have come in the meantime, or there was no room.
  if (!page.ok || !urls.every((url, i) => kept[i] && text.includes(url))) return;
  await cache.put(address, new Response(text, { headers: { "Content-Type": "text/html; charset=utf-8" } }));
  const needed = new Set([address, ...urls.map((url) => new URL(url, location).href)]);
  for (const request of await cache.keys()) if (!needed.has(request.url)) await cache.delete(request);
  part.offline.hidden = false;
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
  part.translation.lang = part.language.value.replaceAll("_", "-");
  worker?.postMessage({ number, text: part.text.value, language: part.language.value });
}

function show({ text, done, count: sentences }) {
  const isBusy = done < sentences;
  // Only the whole translation is announced.
  part.translation.setAttribute("aria-live", isBusy ? "off" : "polite");
  setBusy(isBusy);
  part.translation.textContent = text;
  part.progress.hidden = !isBusy;
  part.progress.value = done / sentences;
  part.error.textContent = "";
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
    made.onerror = (event) => reject(new Error(`The translator does not start: ${event.message ?? "it says nothing"}. ${NEEDED}.`));
    made.onmessage = async ({ data }) => {
      // It is loaded anew at the next visit.
      if (data.damaged) await cache?.delete(facts.files.find((file) => file.name === data.damaged).url);
      if (data.error) reject(new Error(data.error));
      else resolve();
    };
    made.postMessage({ files: others, facts }, Object.values(others).map((bytes) => bytes.buffer));
  });
  made.onerror = (event) => fail(new Error(`The translator has ended: ${event.message ?? "it says nothing"}. Reload the page.`));
  made.onmessage = ({ data }) => {
    if (data.error) fail(new Error(data.error));
    else if (data.number === number) show(data);
  };
  worker = made;
  part.progress.hidden = true;
  part.note.textContent = "";
  part.state.dataset.ready = "";
  if (part.text.value) translate();
  await keepPage().catch(() => null);
}

// ---- Controls ----------------------------------------------------------------------------------------------------

const names = new Intl.DisplayNames("en", { type: "language" });

function nameOf(code) {
  try {
    return names.of(code.replaceAll("_", "-"));
  } catch {
    return code;
  }
}

if (facts.sources.length === 1) {
  part.from.textContent = nameOf(facts.sources[0]);
  part.text.lang = facts.sources[0].replaceAll("_", "-");
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
  const copied = navigator.clipboard.writeText(part.translation.textContent);
  part.copy.textContent = await copied.then(() => "Copied", () => "Not copied");
  setTimeout(() => (part.copy.textContent = "Copy"), 2000);
});

part.promise.hidden = part.state.hidden = false;
start().catch(fail);
