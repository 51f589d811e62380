"""Texts of many requests, translated together: a bounded queue, and one thread that takes batches from it."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

# Limits of a batch. Texts are not tokenized yet: 10,000 characters are about 3,000 tokens.
MOST_TEXTS, MOST_CHARACTERS = 64, 10_000
# In seconds: while nothing is translated, the first text waits this long for others.
MAX_WAIT = 0.003
# In seconds, between which the client is asked to come back.
RETRY = (1, 60)

# Translates texts of one kind, and returns the translations of each, best first.
Translate = Callable[[Any, list[str]], list[list[str]]]


class QueueFullError(Exception):
    """
    There are too many texts in the queue.

    Attributes:
        retry_after (`int`): seconds after which the queue is probably empty.
    """

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"The server is busy: try again in {retry_after} s.")
        self.retry_after = retry_after


@dataclass(eq=False)
class _Job:
    """The texts of a request, of which the first `taken` are in a batch or translated."""

    kind: Hashable
    texts: Sequence[str]
    result: "asyncio.Future[list[list[str]]]"
    found: list[list[str] | None] = field(default_factory=list)
    taken: int = 0


class Batcher:
    """
    Collects texts of concurrent requests into batches. Requests take turns, text by text, so that a long list does
    not keep a single sentence waiting.

    Args:
        translate (`Callable`): gets a kind and texts of that kind, and returns the translations of each. It is called
            in one thread.
        most_waiting (`int`): texts that may wait at a time.
        observe (`Callable`, *optional*): called with the number of texts of each batch.
        observe_waiting (`Callable`, *optional*): called with the number of texts that wait, when it changes.

    Attributes:
        waiting (`int`): number of texts that wait.
    """

    def __init__(
        self,
        translate: Translate,
        most_waiting: int,
        observe: Callable[[int], object] | None = None,
        observe_waiting: Callable[[int], object] | None = None,
    ) -> None:
        self.translate, self.most_waiting = translate, most_waiting
        self.observe, self.observe_waiting = observe, observe_waiting
        self.waiting = 0
        self._jobs: deque[_Job] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="translate")
        self._worker: asyncio.Task[None] | None = None
        # Texts per second of the last batches.
        self._rate = 0.0

    async def submit(self, kind: Hashable, texts: Sequence[str]) -> list[list[str]]:
        """
        Translates the texts of a request. If the caller is cancelled, those that still wait are dropped.

        Args:
            kind (`Hashable`): what distinguishes this translation from others; only equal kinds share a batch.
            texts (`Sequence[str]`): the texts.

        Returns:
            `list[list[str]]`: the translations of each text.

        Raises:
            QueueFullError: there is no room for these texts.
            Exception: what `translate` raised for one of them.
        """
        if not texts:
            return []
        # A request that is larger than the queue can pass when nothing else waits.
        if self.waiting and self.waiting + len(texts) > self.most_waiting:
            raise QueueFullError(self._retry_after())
        job = _Job(kind, texts, asyncio.get_running_loop().create_future(), [None] * len(texts))
        self._jobs.append(job)
        self._count(len(texts))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        try:
            return await job.result
        finally:
            self._drop(job)

    def _count(self, more: int) -> None:
        self.waiting += more
        if self.observe_waiting is not None:
            self.observe_waiting(self.waiting)

    def _drop(self, job: _Job) -> None:
        """Drops what waits of a job."""
        if job in self._jobs:
            self._jobs.remove(job)
            self._count(job.taken - len(job.texts))

    def _retry_after(self) -> int:
        least, most = RETRY
        return min(most, max(least, math.ceil(self.waiting / self._rate))) if self._rate else least

    async def _work(self) -> None:
        """Translates batches until nothing waits."""
        await asyncio.sleep(MAX_WAIT)
        while self._jobs:
            kind, parts = self._next_batch()
            await self._translate(kind, parts)

    def _next_batch(self) -> tuple[Hashable, list[tuple[_Job, int]]]:
        """Takes texts of one kind, each with its job and number, from one job after the other."""
        kind = self._jobs[0].kind
        turns = deque(job for job in self._jobs if job.kind == kind)
        parts: list[tuple[_Job, int]] = []
        characters = 0
        while turns and len(parts) < MOST_TEXTS:
            job = turns.popleft()
            characters += len(job.texts[job.taken])
            if parts and characters > MOST_CHARACTERS:
                break
            parts.append((job, job.taken))
            job.taken += 1
            if job.taken < len(job.texts):
                turns.append(job)
        self._count(-len(parts))
        # Jobs with texts left go to the end of the queue, behind jobs of other kinds.
        taken_from = {id(job) for job, _ in parts}
        left = [job for job in self._jobs if id(job) in taken_from and job.taken < len(job.texts)]
        self._jobs = deque([job for job in self._jobs if id(job) not in taken_from] + left)
        return kind, parts

    async def _translate(self, kind: Hashable, parts: list[tuple[_Job, int]]) -> None:
        """Translates a batch. If that fails, each text is translated alone, and only the bad ones fail."""
        start = time.perf_counter()
        texts = [job.texts[number] for job, number in parts]
        try:
            found = await self._run(kind, texts)
        except Exception as error:
            if len(parts) > 1:
                for part in parts:
                    if not part[0].result.done():
                        await self._translate(kind, [part])
                return
            job, _ = parts[0]
            if not job.result.done():
                job.result.set_exception(error)
            self._drop(job)
            return
        rate = len(texts) / (time.perf_counter() - start)
        self._rate = 0.8 * self._rate + 0.2 * rate if self._rate else rate
        if self.observe is not None:
            self.observe(len(texts))
        for (job, number), translations in zip(parts, found, strict=True):
            job.found[number] = translations
            if all(each is not None for each in job.found) and not job.result.done():
                job.result.set_result([each for each in job.found if each is not None])

    async def _run(self, kind: Hashable, texts: list[str]) -> list[list[str]]:
        """Translates texts in the thread, those of similar length beside each other."""
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]), reverse=True)
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._thread, self.translate, kind, [texts[number] for number in order])
        return [translations for _, translations in sorted(zip(order, found, strict=True))]
