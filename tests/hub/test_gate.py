"""The gate: what is significantly worse on any test set is refused, with scores and p-value; verdicts repeat."""

import random
from types import SimpleNamespace

import pytest
from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest

from hf_vaswani.hub.gate import check_not_worse, compare_sets, is_worse
from hf_vaswani.recipe import Recipe
from hf_vaswani.records import Comparison, Verdict

WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa".split()


def sentences(count: int) -> list[str]:
    draw = random.Random(1)
    return [" ".join(draw.choices(WORDS, k=9)) for _ in range(count)]


def with_errors(texts: list[str], every: int) -> list[str]:
    """Replaces two words in one of `every` sentences."""
    return [text if i % every else "x y " + text.split(" ", 2)[2] for i, text in enumerate(texts)]


def compared(before: float, after: float, p: float) -> Comparison:
    return Comparison({"bleu": before}, {"bleu": after}, p, "signature")


def test_a_comparison_is_sacrebleus_paired_bootstrap() -> None:
    target = sentences(60)
    sets = [SimpleNamespace(name="general", target=target), SimpleNamespace(name="domain", target=target[:30])]
    before, after = with_errors(target, 5), with_errors(target, 2)
    texts = [{"general": side, "domain": side[:30]} for side in (before, after)]
    found = compare_sets(sets, *texts, Recipe())
    assert list(found) == ["general", "domain"]
    test = PairedTest([("a", before), ("b", after)], {"bleu": BLEU()}, [target], "bs", 1000)()[1]["BLEU"]
    assert found["general"].before["bleu"] == test[0].score and found["general"].after["bleu"] == test[1].score
    assert found["general"].p == test[1].p_value and is_worse(found["general"])
    assert {"bleu", "chrf", "ter"} == found["general"].before.keys()
    assert "bs:1000" in found["general"].signature and "seed:12345" in found["general"].signature
    assert found == compare_sets(sets, *texts, Recipe()), "the verdict repeats"
    # Better is not worse, however sure that is.
    (better, _) = compare_sets(sets, *reversed(texts), Recipe()).values()
    assert better.p < 0.05 and not is_worse(better)


def test_equal_translations_do_not_differ() -> None:
    target = sentences(20)
    sets = [SimpleNamespace(name="a", target=target)]
    found = compare_sets(sets, {"a": with_errors(target, 3)}, {"a": with_errors(target, 3)}, Recipe())
    assert found["a"].p == 1 and not is_worse(found["a"])


def test_another_number_of_translations_is_refused() -> None:
    sets = [SimpleNamespace(name="a", target=sentences(3))]
    with pytest.raises(ValueError, match="There are 2 translations, but 3 references"):
        compare_sets(sets, {"a": ["x"] * 3}, {"a": ["x"] * 2}, Recipe())


def test_one_worse_set_is_enough(tmp_path) -> None:
    worse, better, slightly = compared(30.0, 25.0, 0.001), compared(20.0, 40.0, 0.001), compared(30.0, 29.9, 0.6)
    check_not_worse(tmp_path, "start", Verdict("start", {"a": better, "b": slightly}))
    with pytest.raises(ValueError) as error:
        check_not_worse(tmp_path, "start", Verdict("start", {"a": better, "b": worse, "c": slightly}))
    assert str(error.value) == (
        f"{tmp_path} is not published, because it is significantly worse than hub.not_worse_than: "
        "on b, its BLEU is 25.00, and that of start is 30.00 (p = 0.001)."
    )


def test_nothing_is_published_without_the_comparison_that_was_asked_for(tmp_path) -> None:
    check_not_worse(tmp_path, None, None)
    # Nothing was published before.
    check_not_worse(tmp_path, "last_push", Verdict("last_push", {}))
    for verdict in (None, Verdict("start", {})):
        with pytest.raises(ValueError, match="it was not compared with last_push"):
            check_not_worse(tmp_path, "last_push", verdict)
