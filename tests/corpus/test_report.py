"""A report counts what it is given, and says the same to people and to machines."""

import json

import numpy as np

from hf_vaswani.corpus.checking import REASONS, Checker, Limits, Norm
from hf_vaswani.corpus.report import EDGES, Report, total


class Identifier:
    """Is certain of everything but questions."""

    labels = ["en", "de"]

    def classify(self, sentence: str) -> tuple[str, float]:
        return ("en" if sentence.startswith("The") else "de", 0.4 if sentence.endswith("?") else 0.9)


def report(name: str = "en-de") -> Report:
    return Report(name, [f"{name}.tsv"], Limits(), Norm(1.0, (frozenset(), frozenset())), "defaults")


def filled() -> Report:
    found = report()
    checker = Checker(("en", "de"), Identifier())
    for sources, targets, bad in (
        (["The dogs are running fast.", "A cat."], ["Die Hunde laufen sehr schnell.", ""], [False, True]),
        (["The dogs are sleeping now?", "word " * 250], ["Schlafen die Hunde jetzt?", "Wort " * 30], [False, True]),
    ):
        flags = {"empty": np.array(bad) & (np.array(targets) == ""), "length": np.array(bad)}
        found.add(checker.measure(sources, targets), flags)
    found.held_out = {"test": {"pairs": 1000, "found": 12}}
    found.same_source = 7
    return found


def test_the_counts_as_json() -> None:
    content = json.loads(json.dumps(filled().as_json()))
    assert (content["pairs"], content["kept"], content["rejected"]) == (4, 2, 2)
    assert content["reasons"] == dict.fromkeys(REASONS, 0) | {"empty": 1, "length": 2}
    assert content["words"] == {"source": 262, "target": 39}
    assert content["lengths"]["from"] == list(EDGES)
    histogram = dict(zip(EDGES, content["lengths"]["source"], strict=True))
    assert {edge: count for edge, count in histogram.items() if count} == {1: 3, 201: 1}
    assert sum(content["lengths"]["target"]) == 4 and content["lengths"]["target"][0] == 1
    # A short sentence is not identified, an uncertain one is not counted as any language.
    assert content["languages"] == {"source": {"en": 1, "?": 1, "de": 1}, "target": {"de": 2, "?": 1}}
    assert content["scripts"]["source"] == {"latin": 1046}
    assert content["held_out"] == {"test": {"pairs": 1000, "found": 12}}
    assert content["limits"]["max_length"] == 200 and content["limits_from"] == "defaults"


def test_the_counts_as_text() -> None:
    text = filled().as_text()
    assert "en-de: 4 pairs of en-de.tsv" in text
    assert "12 of 1,000 test pairs have their source or target in the training text too." in text
    assert "7 different pairs have a source that was there before" in text
    assert "max_length=200 " in text and "Nothing is wrong with 2 of 4 pairs (50.00 %)." in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert rows["length"][1:4] == ["2", "50.00", "%"]
    assert rows["201+"][1:] == ["1", "0", "########"]
    # What was not looked for is not said to be absent.
    assert "duplicate" not in rows and "numbers" not in rows


def test_an_empty_report_has_a_page() -> None:
    assert "Nothing is wrong with 0 of 0 pairs" in report().as_text()


def test_quantiles() -> None:
    found = report()
    found.pairs = 1000
    found.lengths[0, 10], found.lengths[0, 20], found.lengths[0, 300] = 600, 399, 1
    assert [found.quantile(0, share) for share in (0.5, 0.999, 1.0)] == [10, 20, 300]


def test_the_total_is_the_sum() -> None:
    reports = [filled(), filled()]
    assert total(reports)["pairs"] == 8 and total(reports)["rejected"] == 4
    assert total(reports)["words"] == {"source": 524, "target": 78}
    assert total(reports)["reasons"]["length"] == 4
