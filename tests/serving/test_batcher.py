"""The queue of the server: batches, turns, room, and texts that fail."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest

from hf_vaswani.serving.batcher import MAX_BYTES, MAX_TEXTS, Batcher, OverdueError, QueueFullError
from hf_vaswani.translation.alignment import end_if_over


class Recorder:
    """
    Turns texts to upper case, and keeps the batches. `slow` is not ready before it is released or ended; `bad` has a
    fault of its own, and `fault` fails as everything does when the device is broken.
    """

    def __init__(self) -> None:
        self.batches: list[tuple[Any, list[str]]] = []
        self.batcher: Any = None
        self.is_deaf = self.is_broken = False
        self.started, self.released = threading.Event(), threading.Event()

    def __call__(self, kind: Any, texts: list[str]) -> list[list[str]]:
        self.batches.append((kind, texts))
        self.started.set()
        if "bad" in texts:
            raise ValueError("bad")
        if self.is_broken or "fault" in texts:
            raise RuntimeError("CUDA error: device-side assert triggered")
        until = time.monotonic() + 20
        while "slow" in texts and not self.released.is_set():
            assert time.monotonic() < until
            if not self.is_deaf:
                end_if_over()
            time.sleep(0.001)
        return [[text.upper(), kind] for text in texts]


def recorded(max_waiting: int = 100, deadline: float | None = None, times: int = 1) -> tuple[Recorder, Batcher]:
    recorder = Recorder()
    recorder.batcher = batcher = Batcher(recorder, max_waiting, deadline=deadline, times=times)
    return recorder, batcher


async def submit_slow(recorder: Recorder) -> asyncio.Task[Any]:
    """Submits a text, and waits until it is being translated."""
    task = asyncio.create_task(recorder.batcher.submit("k", ["slow"]))
    while not recorder.started.is_set():
        await asyncio.sleep(0.001)
    return task


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test in an event loop."""

    @wraps(test)
    def run(*arguments: Any, **settings: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **settings), 30))

    return run


@in_a_loop
async def test_requests_share_a_batch_and_get_their_own_translations() -> None:
    recorder, batcher = recorded()
    asked = [["a", "bbb"], ["cc"], [], ["dddd"]]
    found = await asyncio.gather(*(batcher.submit("k", texts) for texts in asked))
    assert found == [[[text.upper(), "k"] for text in texts] for texts in asked]
    assert recorder.batches == [("k", ["a", "cc", "dddd", "bbb"])]
    assert batcher.waiting == 0


@in_a_loop
async def test_kinds_do_not_share_a_batch() -> None:
    recorder, batcher = recorded()
    found = await asyncio.gather(*(batcher.submit(kind, [kind]) for kind in "abab"))
    assert [texts for ((texts,),) in zip(found, strict=True)] == [["A", "a"], ["B", "b"], ["A", "a"], ["B", "b"]]
    assert recorder.batches == [("a", ["a", "a"]), ("b", ["b", "b"])]


@in_a_loop
async def test_a_long_list_does_not_keep_a_sentence_waiting() -> None:
    recorder, batcher = recorded(10_000)
    first = await submit_slow(recorder)
    many = asyncio.create_task(batcher.submit("k", [f"{number:04}" for number in range(10 * MAX_TEXTS)]))
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
    assert [text for text, _ in await many] == [f"{number:04}" for number in range(10 * MAX_TEXTS)]
    assert await first == [["SLOW", "k"]]
    assert all(len(texts) <= MAX_TEXTS for _, texts in recorder.batches)


@in_a_loop
async def test_batches_of_long_texts_are_small() -> None:
    recorder, batcher = recorded()
    # A letter may be as many tokens as it has bytes.
    for letter in "xส😀":
        recorder.batches.clear()
        text = letter * (MAX_BYTES // len(letter.encode()) // 2)
        await asyncio.gather(*(batcher.submit("k", [text]) for _ in range(5)), batcher.submit("k", [5 * text]))
        assert [len(texts) for _, texts in recorder.batches] == [2, 2, 1, 1]


@in_a_loop
async def test_batches_are_larger_on_a_device_that_they_would_not_fill() -> None:
    recorder, batcher = recorded(10_000, times=3)
    await batcher.submit("k", ["a"] * 6 * MAX_TEXTS)
    long = "x" * (MAX_BYTES // 2)
    await batcher.submit("k", [long] * 12)
    assert [len(texts) for _, texts in recorder.batches] == [3 * MAX_TEXTS] * 2 + [6] * 2


@in_a_loop
async def test_there_is_room_for_so_many_texts() -> None:
    recorder, batcher = recorded(3)
    first = await submit_slow(recorder)
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


@in_a_loop
async def test_a_text_that_fails_does_not_fail_the_others() -> None:
    _, batcher = recorded()
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


@in_a_loop
async def test_a_text_that_fails_does_not_make_the_others_slow() -> None:
    recorder, batcher = recorded(10_000, times=8)
    asked = [asyncio.create_task(batcher.submit("k", ["bad" if number == 77 else "a"])) for number in range(512)]
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert [number for number, each in enumerate(found) if isinstance(each, ValueError)] == [77]
    # In halves: two batches for each of the nine powers of two.
    assert len(recorder.batches) <= 1 + 2 * 9


@in_a_loop
async def test_texts_of_a_client_that_is_gone_are_not_translated() -> None:
    recorder, batcher = recorded()
    first = await submit_slow(recorder)
    gone = asyncio.create_task(batcher.submit("k", ["gone"] * 3))
    await asyncio.sleep(0)
    assert batcher.waiting == 3
    gone.cancel()
    last = asyncio.create_task(batcher.submit("k", ["last"]))
    await asyncio.sleep(0)
    recorder.released.set()
    assert await first and await last
    assert [texts for _, texts in recorder.batches] == [["slow"], ["last"]]
    assert batcher.waiting == 0


# ---- The end of a batch ------------------------------------------------------------------------------------------


async def until_free(batcher: Batcher) -> None:
    while not batcher.is_free(within=0):
        await asyncio.sleep(0.001)


@in_a_loop
async def test_a_batch_ends_at_the_deadline_and_the_next_one_begins() -> None:
    _, batcher = recorded(deadline=0.1)
    for _ in range(2):
        with pytest.raises(OverdueError, match=r"The translation was not ready within 0\.1 s\."):
            await batcher.submit("k", ["slow", "b"])
        await until_free(batcher)
        assert not batcher.is_overdue and not batcher.is_broken
    assert await batcher.submit("k", ["quick"]) == [["QUICK", "k"]]
    assert batcher.waiting == 0


@in_a_loop
async def test_what_waits_too_long_is_not_begun() -> None:
    recorder, batcher = recorded(deadline=0.1)
    recorder.is_deaf = True
    first = await submit_slow(recorder)
    with pytest.raises(OverdueError):
        await batcher.submit("k", ["late"])
    with pytest.raises(OverdueError):
        await first
    recorder.released.set()
    await until_free(batcher)
    assert await batcher.submit("k", ["next"]) == [["NEXT", "k"]]
    assert [texts for _, texts in recorder.batches] == [["slow"], ["next"]]


@in_a_loop
async def test_a_batch_ends_when_nobody_waits_for_it_any_more() -> None:
    recorder, batcher = recorded()
    second = asyncio.create_task(batcher.submit("k", ["b"]))
    first = await submit_slow(recorder)
    first.cancel()
    await asyncio.sleep(0.05)
    # The other one still waits.
    assert not batcher.is_free(within=0) and recorder.batches == [("k", ["b", "slow"])]
    second.cancel()
    await asyncio.wait_for(until_free(batcher), 5)
    assert await batcher.submit("k", ["next"]) == [["NEXT", "k"]]


@in_a_loop
async def test_a_batch_that_does_not_end_is_overdue(monkeypatch) -> None:
    monkeypatch.setattr("hf_vaswani.serving.batcher.LATENESS", 0.05)
    recorder, batcher = recorded(deadline=0.1)
    recorder.is_deaf = True
    with pytest.raises(OverdueError):
        await batcher.submit("k", ["slow"])
    await asyncio.sleep(0.1)
    assert batcher.is_overdue and not batcher.is_free(within=0)
    recorder.released.set()
    await until_free(batcher)
    assert not batcher.is_overdue


@in_a_loop
async def test_a_text_that_fails_is_told_from_a_device_that_does() -> None:
    recorder, batcher = recorded()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="device-side assert"):
            await batcher.submit("k", ["fault"])
        assert not batcher.is_broken
    recorder.is_broken = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="device-side assert"):
            await batcher.submit("k", ["one"])
        assert batcher.is_broken
    recorder.is_broken = False
    assert await batcher.submit("k", ["one"]) == [["ONE", "k"]]
    assert not batcher.is_broken


@pytest.mark.process
def test_the_process_does_not_wait_for_a_translation() -> None:
    program = (
        "import asyncio, time; from hf_vaswani.serving.batcher import Batcher\n"
        "async def main():\n"
        "    batcher = Batcher(lambda kind, texts: time.sleep(30), 10)\n"
        "    work = asyncio.ensure_future(batcher.submit('kind', ['text']))\n"
        "    while batcher.is_free(within=0): await asyncio.sleep(0.01)\n"
        "    work.cancel()\n"
        "asyncio.run(main()); print(time.time())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert time.time() - float(done.stdout) < 10
