"""The queue of the server: batches, turns, room, and texts that fail."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from hf_vaswani.serving.batcher import MOST_CHARACTERS, MOST_TEXTS, Batcher, QueueFullError


class Recorder:
    """Turns texts to upper case, and keeps the batches. The first waits until it is released."""

    def __init__(self, wait: bool = False) -> None:
        self.batches: list[tuple[Any, list[str]]] = []
        self.released, self.started = threading.Event(), threading.Event()
        if not wait:
            self.released.set()

    def __call__(self, kind: Any, texts: list[str]) -> list[list[str]]:
        self.started.set()
        assert self.released.wait(20)
        self.batches.append((kind, texts))
        if any("bad" in text for text in texts):
            raise ValueError("bad")
        return [[text.upper(), kind] for text in texts]


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


async def started(recorder: Recorder) -> None:
    while not recorder.started.is_set():
        await asyncio.sleep(0.001)


def test_requests_share_a_batch_and_get_their_own_translations() -> None:
    async def test() -> None:
        recorder = Recorder()
        batcher = Batcher(recorder, 100)
        asked = [["a", "bbb"], ["cc"], [], ["dddd"]]
        found = await asyncio.gather(*(batcher.submit("k", texts) for texts in asked))
        assert found == [[[text.upper(), "k"] for text in texts] for texts in asked]
        # Those of similar length are beside each other.
        assert recorder.batches == [("k", ["dddd", "bbb", "cc", "a"])]
        assert batcher.waiting == 0

    run(test)


def test_kinds_do_not_share_a_batch() -> None:
    async def test() -> None:
        recorder = Recorder()
        batcher = Batcher(recorder, 100)
        found = await asyncio.gather(*(batcher.submit(kind, [kind]) for kind in "abab"))
        assert [texts for ((texts,),) in zip(found, strict=True)] == [["A", "a"], ["B", "b"], ["A", "a"], ["B", "b"]]
        assert recorder.batches == [("a", ["a", "a"]), ("b", ["b", "b"])]

    run(test)


def test_a_long_list_does_not_keep_a_sentence_waiting() -> None:
    async def test() -> None:
        recorder = Recorder(wait=True)
        batcher = Batcher(recorder, 10_000)
        first = asyncio.create_task(batcher.submit("k", ["first"]))
        await started(recorder)
        many = asyncio.create_task(batcher.submit("k", [f"{number:04}" for number in range(10 * MOST_TEXTS)]))
        other = asyncio.create_task(batcher.submit("other kind", ["x"]))
        await asyncio.sleep(0)
        single = asyncio.create_task(batcher.submit("k", ["single"]))
        await asyncio.sleep(0)
        recorder.released.set()
        assert await single == [["SINGLE", "k"]]
        assert len(recorder.batches) <= 3 and not many.done()
        await other
        # The other kind came before the rest of the list.
        assert [kind for kind, _ in recorder.batches[:3]] == ["k", "k", "other kind"]
        assert [text for text, _ in await many] == [f"{number:04}" for number in range(10 * MOST_TEXTS)]
        assert await first == [["FIRST", "k"]]
        assert all(len(texts) <= MOST_TEXTS for _, texts in recorder.batches)

    run(test)


def test_batches_of_long_texts_are_small() -> None:
    async def test() -> None:
        recorder = Recorder()
        batcher = Batcher(recorder, 100)
        text = "x" * (MOST_CHARACTERS // 2)
        await asyncio.gather(*(batcher.submit("k", [text]) for _ in range(5)), batcher.submit("k", [5 * text]))
        assert [len(texts) for _, texts in recorder.batches] == [2, 2, 1, 1]

    run(test)


def test_there_is_room_for_so_many_texts() -> None:
    async def test() -> None:
        recorder = Recorder(wait=True)
        batcher = Batcher(recorder, 3)
        first = asyncio.create_task(batcher.submit("k", ["first"]))
        await started(recorder)
        waiting = [asyncio.create_task(batcher.submit("k", ["a"])) for _ in range(3)]
        await asyncio.sleep(0)
        assert batcher.waiting == 3
        with pytest.raises(QueueFullError) as error:
            await batcher.submit("k", ["b"])
        assert error.value.retry_after >= 1
        assert f"{error.value.retry_after} s" in str(error.value)
        recorder.released.set()
        assert await asyncio.gather(first, *waiting)
        # A list that is longer than the queue is translated if nothing else waits.
        assert len(await batcher.submit("k", ["a"] * 5)) == 5

    run(test)


def test_a_text_that_fails_does_not_fail_the_others() -> None:
    async def test() -> None:
        recorder = Recorder()
        batcher = Batcher(recorder, 100)
        found = await asyncio.gather(
            batcher.submit("k", ["a"]),
            batcher.submit("k", ["b", "bad", "c"]),
            batcher.submit("k", ["d"]),
            return_exceptions=True,
        )
        assert found[0] == [["A", "k"]] and found[2] == [["D", "k"]]
        assert isinstance(found[1], ValueError)
        assert batcher.waiting == 0
        assert await batcher.submit("k", ["e"]) == [["E", "k"]]

    run(test)


def test_texts_of_a_client_that_is_gone_are_not_translated() -> None:
    async def test() -> None:
        recorder = Recorder(wait=True)
        batcher = Batcher(recorder, 100)
        first = asyncio.create_task(batcher.submit("k", ["first"]))
        await started(recorder)
        gone = asyncio.create_task(batcher.submit("k", ["gone"] * 3))
        await asyncio.sleep(0)
        assert batcher.waiting == 3
        gone.cancel()
        last = asyncio.create_task(batcher.submit("k", ["last"]))
        await asyncio.sleep(0)
        recorder.released.set()
        assert await first and await last
        assert [texts for _, texts in recorder.batches] == [["first"], ["last"]]
        assert batcher.waiting == 0

    run(test)
