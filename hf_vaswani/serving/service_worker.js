// Answers for the page when there is no network. The page itself keeps its files in the cache, and puts the page that
// was loaded in the place of the earlier one when all of them are there.

const PAGE = self.registration.scope;
const ADDRESSES = [PAGE, `${PAGE}index.html`];
const CACHE = `hf_vaswani ${new URL(PAGE).pathname}`;

self.addEventListener("install", () => self.skipWaiting());
self.addEventListener("activate", (event) => event.waitUntil(self.clients.claim()));
self.addEventListener("fetch", (event) => {
  const { request } = event;
  if (request.mode === "navigate" && ADDRESSES.includes(request.url.replace(/[?#].*/u, ""))) {
    event.respondWith(answer(event));
  }
});

async function answer(event) {
  try {
    // Servers that say nothing of caches would have browsers show an old page for a while.
    const response = await fetch(event.request, { cache: "no-cache" });
    const copy = response.clone();
    // Where there is no room, the answer is the same.
    if (response.ok) event.waitUntil(caches.open(CACHE).then((cache) => cache.put("fresh", copy)).catch(() => null));
    return response;
  } catch (error) {
    const kept = await caches.match(PAGE, { cacheName: CACHE });
    if (kept) return kept;
    throw error;
  }
}
