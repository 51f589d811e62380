// Answers for the page when there is no network. The page itself keeps its files in the cache, and puts the page that
// was loaded in the place of the earlier one when all of them are there.

const PAGE = self.registration.scope;
const ADDRESSES = [PAGE, `${PAGE}index.html`];
const CACHE = `hf_vaswani ${new URL(PAGE).pathname}`;

self.addEventListener("install", () => self.skipWaiting());
self.addEventListener("activate", (event) => event.waitUntil(self.clients.claim()));
self.addEventListener("fetch", (event) => {
  if (ADDRESSES.includes(event.request.url.replace(/[?#].*/u, ""))) event.respondWith(answer(event.request));
});

async function answer(request) {
  const cache = await caches.open(CACHE);
  try {
    const response = await fetch(request);
    if (response.ok) await cache.put("fresh", response.clone());
    return response;
  } catch (error) {
    const kept = await cache.match(PAGE);
    if (kept) return kept;
    throw error;
  }
}
