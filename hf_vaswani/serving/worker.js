// Translates in a thread of its own: sentence by sentence, by transformers.js.

// The number of the last text, and translations of sentences: of a text that is typed, few change.
let latest = 0, pipeline = null, facts = null;
const known = new Map();
const MAX_KNOWN = 10_000;
// In milliseconds: how often the page sees what is there, and another text may come in between.
const PAUSE = 50;

async function decompress(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Returns the address of a script. In a page that was opened as a file, some browsers take no blob.
async function addressOf(bytes) {
  const blob = URL.createObjectURL(new Blob([bytes], { type: "text/javascript" }));
  if (self.origin !== "null") return blob;
  return new Promise((resolve) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.readAsDataURL(new Blob([bytes], { type: "text/javascript" }));
  });
}

async function start(compressed) {
  const files = {};
  for (const [name, bytes] of Object.entries(compressed)) {
    files[name] = await decompress(bytes).catch(() => {
      throw Object.assign(new Error(`${name} is damaged. Reload the page.`), { damaged: name });
    });
  }
  const library = await import(await addressOf(files["transformers.min.js"]));
  const { env } = library;
  const { wasm } = env.backends.onnx;
  wasm.wasmPaths = { mjs: await addressOf(files["ort-wasm-simd-threaded.mjs"]) };
  wasm.wasmBinary = files["ort-wasm-simd-threaded.wasm"];
  wasm.numThreads = 1;
  Object.assign(env, { allowRemoteModels: false, allowLocalModels: true, localModelPath: "/models/" });
  Object.assign(env, { useBrowserCache: false, useWasmCache: false, useCustomCache: true });
  env.customCache = {
    async match(address) {
      const name = Object.keys(files).find((each) => String(address).endsWith(`/${each}`));
      return name && new Response(files[name]);
    },
    async put() {},
  };
  pipeline = await library.pipeline("translation", "translator", { dtype: "q8", device: "wasm" });
  // The engine has copies of its own.
  env.customCache = env.useCustomCache = wasm.wasmBinary = undefined;
}

// Returns the number of tokens that the model reads for a text.
function countTokens(text) {
  return pipeline.tokenizer(text, { return_tensor: false }).input_ids.length;
}

async function translateSentence(source) {
  if (!known.has(source)) {
    // The graph ends a translation at its limit.
    const [{ translation_text: found }] = await pipeline(source, { max_new_tokens: facts.maxNewTokens });
    if (known.size >= MAX_KNOWN) known.delete(known.keys().next().value);
    known.set(source, withoutRepetition(source, found));
  }
  return known.get(source);
}

async function translate({ number, text, language }) {
  const tags = facts.languages.map((each) => each.tag).filter(Boolean);
  const [front, rest] = splitTag(text, tags);
  const chosen = facts.languages.find((each) => each.code === language)?.tag;
  const parts = cut(front || (chosen ? `${chosen} ` : ""), rest, countTokens, facts.longest, true);
  const { sources, kept: unread } = parts;
  const translations = sources.map(() => "");
  let paused = -Infinity;
  for (const [i, source] of sources.entries()) {
    if (performance.now() - paused > PAUSE) {
      await new Promise((resolve) => setTimeout(resolve));
      if (number !== latest) return;
      postMessage({ number, text: parts.join(translations).trimEnd(), done: i, count: translations.length });
      paused = performance.now();
    }
    translations[i] = unread[i] ?? (await translateSentence(source));
  }
  postMessage({ number, text: parts.join(translations), done: translations.length, count: translations.length });
}

let before = Promise.resolve();
onmessage = ({ data }) => {
  if (data.files) {
    facts = data.facts;
    start(data.files).then(() => postMessage({}), ({ message, damaged }) => postMessage({ error: message, damaged }));
    return;
  }
  latest = data.number;
  // One after the other: the engine computes one thing at a time.
  before = before.then(() => translate(data)).catch((error) => postMessage({ error: error.message }));
};
