"""Texts of many requests, translated together: a bounded queue, and one thread that takes batches from it."""

import asyncio
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from transformers import StoppingCriteria

from ..translation.alignment import ended_by

# Limits of a batch on a CPU. Its texts are not tokenized yet: no token has less than a byte. A longer text is a batch.
MAX_TEXTS, MAX_BYTES = 64, 10_000
# In seconds: while nothing is translated, the first text waits this long for others.
MAX_WAIT = 0.003
# In seconds, between which the client is asked to come back.
RETRY = (1, 60)
# In seconds: a search ends between two of its steps, and so it may end this long after its deadline.
LATENESS = 1.0
# Shows whether anything can be translated, when a text could not.
PROBE = "a"

# Translates texts of one kind, and returns the translations of each, best first.
TranslateBatch = Callable[[Any, list[str]], list[list[str]]]


class QueueFullError(Exception):
    """
    There are too many texts in the queue.

    Attributes:
        retry_after (`int`): seconds after which the queue is probably empty.
    """

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"The server is busy: try again in {retry_after} s.")
        self.retry_after = retry_after


class OverdueError(Exception):
    """A translation was not ready at its deadline, or nobody waits for it any more."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The translation was not ready within {seconds:g} s.")


class EndCriteria(StoppingCriteria):
    """
    Ends a search from outside, between two of its steps, with the hypotheses that it has: a deadline has passed, or
    nobody waits for the translation any more.

    Args:
        is_over (`Callable[[], object]`): called after each step, in the thread that searches.
    """

    # So the model's own search takes it.
    reads_tokens = False

    def __init__(self, is_over: Callable[[], object]) -> None:
        self.is_over = is_over

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Returns whether each row of `input_ids`, of shape `(rows, length)`, is done, of shape `(rows,)`."""
        return torch.full((len(input_ids),), bool(self.is_over()), device=input_ids.device)


@dataclass(eq=False)
class _Job:
    """
    The texts of a request, of which the first `taken` are in a batch or translated. Its deadline is `until`, by the
    clock of `time.monotonic`.
    """

    kind: Hashable
    texts: Sequence[str]
    until: float
    result: "asyncio.Future[list[list[str]]]"
    found: list[list[str] | None] = field(default_factory=list)
    taken: int = 0

    @property
    def is_over(self) -> bool:
        """True if nobody waits for it: it has its answer, its client is gone, or its deadline has passed."""
        return self.result.done() or time.monotonic() > self.until


class Batcher:
    """
    Collects texts of concurrent requests into batches. Requests take turns, text by text, so that a long list does
    not keep a single sentence waiting.

    A batch goes on as long as somebody waits for one of its texts. The process does not wait for its thread at the
    end.

    Args:
        translate (`Callable`): gets a kind and texts of that kind, and returns the translations of each. It is called
            in one thread, and asks [`~hf_vaswani.translation.alignment.end_if_over`] while it works.
        max_waiting (`int`): texts that may wait at a time.
        observe (`Callable`, *optional*): called with the number of texts of each batch.
        observe_waiting (`Callable`, *optional*): called with the number of texts that wait, when it changes.
        deadline (`float`, *optional*): in seconds, for a request from its arrival to its answer.
        times (`int`): how many times as much text as a CPU the device translates at a time.

    Attributes:
        waiting (`int`): number of texts that wait.
        is_broken (`bool`): true if the last text that was tried could not be translated, and no other could, either.
    """

    def __init__(
        self,
        translate: TranslateBatch,
        max_waiting: int,
        observe: Callable[[int], object] | None = None,
        observe_waiting: Callable[[int], object] | None = None,
        deadline: float | None = None,
        times: int = 1,
    ) -> None:
        self.translate, self.max_waiting = translate, max_waiting
        self.max_texts, self.max_bytes = times * MAX_TEXTS, times * MAX_BYTES
        self.observe, self.observe_waiting = observe, observe_waiting
        self.deadline = math.inf if deadline is None else deadline
        self.waiting = 0
        self.is_broken = False
        self._jobs: deque[_Job] = deque()
        self._worker: asyncio.Task[None] | None = None
        # The jobs of the batch that is translated, set by the thread; empty while it has nothing to do.
        self._running: Sequence[_Job] = ()
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        # Python waits for the threads of its executors when it ends, however long they work.
        threading.Thread(target=_call, args=[self._calls], name="translate", daemon=True).start()
        weakref.finalize(self, self._calls.put, None)
        # Texts per second of the last batches.
        self._rate = 0.0

    async def submit(self, kind: Hashable, texts: Sequence[str]) -> list[list[str]]:
        """
        Translates the texts of a request. If the caller is cancelled, those that still wait are dropped, and a batch
        for which nobody waits any more is ended.

        Args:
            kind (`Hashable`): what distinguishes this translation from others; only equal kinds share a batch.
            texts (`Sequence[str]`): the texts.

        Returns:
            `list[list[str]]`: the translations of each text.

        Raises:
            QueueFullError: there is no room for these texts.
            OverdueError: they were not translated by the deadline.
            Exception: what `translate` raised for one of them.
        """
        if not texts:
            return []
        # A request that is larger than the queue can pass when nothing else waits.
        if self.waiting and self.waiting + len(texts) > self.max_waiting:
            raise QueueFullError(self._retry_after())
        until = time.monotonic() + self.deadline
        job = _Job(kind, texts, until, asyncio.get_running_loop().create_future(), [None] * len(texts))
        self._jobs.append(job)
        self._count(len(texts))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        try:
            async with asyncio.timeout(None if math.isinf(self.deadline) else self.deadline) as limit:
                return await job.result
        except TimeoutError as error:
            if limit.expired():
                raise OverdueError(self.deadline) from error
            raise
        finally:
            self._drop(job)
            # An error that nobody has read would be logged with its message, which may have the text in it.
            if not job.result.cancel() and not job.result.cancelled():
                job.result.exception()

    def end_if_over(self) -> None:
        """Raises an [`OverdueError`] if nobody waits any more for the batch that is translated."""
        if self._running and all(job.is_over for job in self._running):
            raise OverdueError(self.deadline)

    @property
    def is_overdue(self) -> bool:
        """True while the thread translates a batch though the deadlines of all its texts have passed."""
        running = self._running
        return bool(running) and time.monotonic() > max(job.until for job in running) + LATENESS

    def is_free(self, within: float) -> bool:
        """Returns whether the thread has nothing to do, after waiting for that for so many seconds at most."""
        until = time.monotonic() + within
        while self._running and time.monotonic() < until:
            time.sleep(0.01)
        return not self._running

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
        size = 0
        while turns and len(parts) < self.max_texts:
            job = turns.popleft()
            size += len(job.texts[job.taken].encode("utf-8", "surrogatepass"))
            if parts and size > self.max_bytes:
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
        """Translates a batch, and in halves if that fails: only bad texts fail, and what a GPU cannot hold fits."""
        parts = [part for part in parts if not part[0].is_over]
        if not parts:
            return
        start = time.perf_counter()
        texts, jobs = [job.texts[number] for job, number in parts], [job for job, _ in parts]
        try:
            found = await self._run(kind, texts, jobs)
        except OverdueError as error:
            for job in jobs:
                self._fail(job, error)
            return
        except Exception as error:
            if middle := len(parts) // 2:
                await self._translate(kind, parts[:middle])
                await self._translate(kind, parts[middle:])
                return
            # The fault may be that of the text, or that of the device.
            if not isinstance(error, ValueError) and not self.is_broken:
                self.is_broken = not await self._is_translated(kind, jobs)
            self._fail(jobs[0], error)
            return
        self.is_broken = False
        rate = len(texts) / (time.perf_counter() - start)
        self._rate = 0.8 * self._rate + 0.2 * rate if self._rate else rate
        if self.observe is not None:
            self.observe(len(texts))
        for (job, number), translations in zip(parts, found, strict=True):
            job.found[number] = translations
            if all(each is not None for each in job.found) and not job.result.done():
                job.result.set_result([each for each in job.found if each is not None])

    def _fail(self, job: _Job, error: Exception) -> None:
        if not job.result.done():
            job.result.set_exception(error)
        self._drop(job)

    async def _is_translated(self, kind: Hashable, jobs: Sequence[_Job]) -> bool:
        """Returns whether the shortest text is translated in the time of these jobs."""
        try:
            await self._run(kind, [PROBE], jobs)
        except (ValueError, OverdueError):
            pass
        except Exception:
            return False
        return True

    async def _run(self, kind: Hashable, texts: list[str], jobs: Sequence[_Job]) -> list[list[str]]:
        """Translates texts of these jobs in the thread."""
        done: Future[list[list[str]]] = Future()
        self._calls.put((done, partial(self._translate_in_thread, kind, texts, jobs)))
        return await asyncio.wrap_future(done)

    def _translate_in_thread(self, kind: Hashable, texts: list[str], jobs: Sequence[_Job]) -> list[list[str]]:
        self._running = jobs
        try:
            self.end_if_over()
            with ended_by(self.end_if_over):
                return self.translate(kind, texts)
        finally:
            self._running = ()


def _call(calls: "SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]") -> None:
    """Calls one function after the other, and hands over what each returns or raises, up to a `None`."""
    while (call := calls.get()) is not None:
        done, function = call
        if not done.set_running_or_notify_cancel():
            continue
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)
        # The thread keeps nothing alive while it waits.
        del call, done, function
