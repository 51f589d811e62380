"""Recipes and text that hypothesis makes up: read as they stand, or refused in one sentence that names the file."""

import contextlib
import gzip
import json
import math
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from hf_vaswani.data.reading import load_pairs
from hf_vaswani.recipe import Recipe, load_recipe

from . import warm as warm  # reads the recipe's docstrings once
from .judge import FULL, LIMIT, LONGEST_SENTENCE, SEED, Campaign

KEYS = sorted(Recipe().flat())
# What people write, and what they do not.
NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([0, -1, 10**20, 10**400, 2**63, 1e30, 1e-30]))
SCALARS = st.one_of(
    NUMBERS.map(lambda number: str(number).replace("inf", ".inf").replace("nan", ".nan")),
    st.sampled_from(["", "~", "null", "yes", "no", "true", "on", "''", "2020-01-01", "0x1F", "1_000", "1e3", ".inf"]),
    st.sampled_from(
        ["!!int ''", "!!bool maybe", "!!timestamp x", "!!float z", "!!binary '*'", "!!python/name:os.system"]
    ),
    st.sampled_from(
        ["!!set {a}", "!!omap [a: 1]", "!unknown 1", "*nobody", "&a [*a]", "&a {b: *a}", "<<: 1", "? a", "- 1"]
    ),
    st.text(max_size=20).map(json.dumps),
    st.text(max_size=8),
    st.integers(1, 3000).map(lambda depth: "[" * depth + "]" * depth),
    st.integers(1, 3000).map(lambda depth: "{a: " * depth + "1" + "}" * depth),
    st.integers(100, 5000).map(lambda length: "9" * length),
    st.integers(100, 5000).map(lambda length: "x" * length),
)
LINES = st.tuples(st.sampled_from(KEYS), SCALARS)
LETTERS = st.characters(codec="utf-8")
WORDS = st.text(st.one_of(st.sampled_from("ab ,\t\"'\ufeff\u2028\x85\x0b\x00é"), LETTERS), max_size=12)
# Without what ends a line, of which there are two in these files.
FIELDS = WORDS.map(lambda text: text.replace("\n", " ").replace("\r", " "))


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """Ends what hangs."""

    def late(*_: object) -> None:
        raise AssertionError(f"hung for {LIMIT} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class OutOfTime(BaseException):
    """Goes through hypothesis, which takes other errors for findings."""


def shortened(text: str) -> str:
    return text if len(text) < 300 else f"{text[:200]} ... {text[-80:]}"


def attack(
    campaign: Campaign, few: int, seconds: float, check: Callable[[Any], None], strategy: st.SearchStrategy[Any]
) -> None:
    """Lets hypothesis call a check: `few` times in a small campaign, in a full one for so many seconds."""

    @seed(SEED)
    @settings(
        max_examples=20_000 if FULL else few,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def once(example: Any) -> None:
        if campaign.seconds > (seconds if FULL else 4):
            raise OutOfTime
        campaign.attacks += 1
        try:
            with in_time():
                check(example)
        # What a check finds is kept here, and not by hypothesis, which would take minutes to make the example smaller.
        except Exception as error:
            *_, place = traceback.extract_tb(error.__traceback__)
            where = f"{type(error).__name__} at {Path(place.filename).name}:{place.name}"
            # Of one place in the code, one example.
            if not any(each.startswith(where) for each in campaign.broken):
                campaign.broken.append(f"{where}: {shortened(str(error))}, by {shortened(repr(example))}")

    with contextlib.suppress(OutOfTime):
        once()


@contextlib.contextmanager
def right_or_refused(*named: str) -> Iterator[None]:
    """A refusal is one sentence of some length that has one of these words in it."""
    try:
        yield
    except (ValueError, OSError) as error:
        sentence = " ".join(str(error).split())
        assert type(error) in (ValueError, FileNotFoundError) or isinstance(error, OSError), repr(error)
        assert 0 < len(sentence) < LONGEST_SENTENCE, f"a sentence of {len(sentence)} letters: {sentence[:300]}"
        assert any(word in sentence for word in named), f"names nothing: {sentence[:300]}"


def written(lines: list[tuple[str, str]]) -> str:
    """A recipe that has these values, in sections."""
    sections: dict[str, list[str]] = {}
    for key, value in lines:
        section, _, name = key.rpartition(".")
        sections.setdefault(section, []).append(f"{'  ' if section else ''}{name}: {value}")
    top = sections.pop("", [])
    return "\n".join([*top, *(line for name, inner in sections.items() for line in (f"{name}:", *inner))]) + "\n"


def test_recipes_of_any_values_are_right_or_refused(campaign, tmp_path) -> None:
    path = tmp_path / "recipe.yaml"

    def check(lines: list[tuple[str, str]]) -> None:
        path.write_text(written(lines), encoding="utf-8", errors="surrogatepass")
        with right_or_refused("recipe", "must", *KEYS):
            values = load_recipe([str(path)]).flat()
            numbers = [value for value in values.values() if isinstance(value, float)]
            assert all(map(math.isfinite, numbers)), values
            # What is read is written again, and means the same.
            path.write_text(load_recipe([str(path)]).as_yaml(), encoding="utf-8")
            assert load_recipe([str(path)]).flat() == values

    attack(campaign, 60, 50, check, st.lists(LINES, min_size=1, max_size=3, unique_by=lambda line: line[0]))


def test_recipes_of_any_text_are_right_or_refused(campaign, tmp_path) -> None:
    path = tmp_path / "recipe.yaml"
    right = b"training: {max_steps: 10, schedule: constant, peak_learning_rate: 0.1}\nmodel:\n  d_model: 16\n"

    def check(content: bytes) -> None:
        path.write_bytes(content)
        with right_or_refused("recipe", "must", *KEYS):
            load_recipe([str(path)])

    places = st.tuples(st.integers(0, len(right)), st.integers(0, 6), st.binary(max_size=6))
    attack(campaign, 40, 25, check, places.map(lambda cut: right[: cut[0]] + cut[2] + right[cut[0] + cut[1] :]))


# ---- Text --------------------------------------------------------------------------------------------------------


def read(**files: Any) -> list[tuple[str, str]]:
    """The pairs of a training text, as the package reads them, whole and as a stream."""
    whole = load_pairs("en", "de", **files)["train"]
    pairs = list(zip(whole["source"], whole["target"], strict=True))
    stream = load_pairs("en", "de", **files, streaming=True)["train"]
    assert [(row["source"], row["target"]) for row in stream] == pairs, "a stream of other pairs"
    return pairs


def saved(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


PAIRS = st.lists(st.tuples(FIELDS, FIELDS), min_size=1, max_size=6)
FORMS = st.tuples(st.sampled_from(["\n", "\r\n"]), st.booleans(), st.booleans(), st.sampled_from(["", ".gz"]))


def test_aligned_files_are_read_as_they_stand(campaign, tmp_path) -> None:
    def check(example: Any) -> None:
        pairs, (end, mark, last, suffix) = example
        files = {}
        for language, lines in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
            text = end.join(lines) + (end if last or not lines[-1] else "")
            files[language] = str(
                saved(tmp_path / f"text.{language}{suffix}", (b"\xef\xbb\xbf" * mark) + text.encode())
            )
        # A mark at the beginning of a file is none of its text, if it stands there once or twice.
        expected = [tuple(side.lstrip("\ufeff") if not i else side for side in pair) for i, pair in enumerate(pairs)]
        found = read(train_files=files)
        assert found in (expected, pairs)

    attack(campaign, 15, 15, check, st.tuples(PAIRS, FORMS))


def test_aligned_files_of_any_bytes_are_read_or_refused(campaign, tmp_path) -> None:
    def check(sides: tuple[bytes, bytes]) -> None:
        files = {name: str(saved(tmp_path / name, content)) for name, content in zip(("en", "de"), sides, strict=True)}
        texts: list[list[str]] | None
        try:
            texts = [content.decode("utf-8-sig").split("\n") for content in sides]
            texts = [lines[:-1] if not lines[-1] else lines for lines in texts]
        except UnicodeDecodeError:
            texts = None
        found = None
        with right_or_refused(*files.values()):
            found = read(train_files=files)
        if texts is None or len(texts[0]) != len(texts[1]):
            assert found is None, f"{sides} was read as {found}"
        elif found is not None:
            assert found == [(one.rstrip("\r"), two.rstrip("\r")) for one, two in zip(*texts, strict=True)]

    part = st.lists(st.one_of(st.just(b"\n"), st.just(b"a"), st.just(b"\r"), st.binary(max_size=3)), max_size=8)
    attack(campaign, 15, 15, check, st.tuples(part.map(b"".join), part.map(b"".join)))


def tsv(pairs: list[tuple[str, str]], end: str) -> str:
    return "".join("\t".join(field.replace("\t", " ") for field in row) + end for row in [("en", "de"), *pairs])


def quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def csv(pairs: list[tuple[str, str]], end: str) -> str:
    return "".join(",".join(map(quoted, row)) + end for row in [("en", "de"), *pairs])


def jsonl(pairs: list[tuple[str, str]], end: str) -> str:
    return "".join(
        json.dumps(dict(zip(("en", "de"), pair, strict=True)), ensure_ascii=i % 2 == 0) + end
        for i, pair in enumerate(pairs)
    )


@pytest.mark.parametrize("writer", [tsv, csv, jsonl])
def test_tables_are_read_as_they_stand(campaign, tmp_path, writer) -> None:
    def check(example: Any) -> None:
        pairs, (end, mark, _, suffix) = example
        text = writer(pairs, end)
        path = saved(tmp_path / f"text.{writer.__name__}{suffix}", (b"\xef\xbb\xbf" * mark) + text.encode())
        expected = [tuple(side.replace("\t", " ") for side in pair) for pair in pairs] if writer is tsv else pairs
        assert read(train_files=str(path)) == expected

    attack(campaign, 12, 12, check, st.tuples(PAIRS, FORMS))


@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".jsonl", ".json", ".jsonl.gz", ".parquet"])
def test_tables_of_any_bytes_are_read_or_refused(campaign, tmp_path, suffix) -> None:
    def check(parts: list[bytes]) -> None:
        path = tmp_path / f"text{suffix}"
        # Of a compressed file, what is compressed and what is not.
        path.write_bytes(b"".join(parts)) if len(parts) % 2 else saved(path, b"".join(parts))
        with right_or_refused(str(path)):
            assert all(isinstance(side, str) for pair in read(train_files=str(path)) for side in pair)

    deep = st.integers(1, 30_000).map(lambda depth: b'{"en": ' + b"[" * depth + b"]" * depth + b', "de": ""}\n')
    head = {".tsv": b"en\tde\n", ".csv": b"en,de\n"}.get(suffix, b'{"en": "a", "de": "b"}\n')
    small = [
        b'"',
        b"\t",
        b",",
        b"\n",
        b"null",
        b"{}",
        b"[]",
        b'{"en": 1, "de": 2}\n',
        b'{"en": "\\ud800", "de": ""}\n',
    ]
    part = st.one_of(st.sampled_from(small), st.binary(max_size=5), deep, st.just(b"x" * 140_000))
    attack(campaign, 8, 8, check, st.lists(part, max_size=5).map(lambda parts: [head, *parts]))
