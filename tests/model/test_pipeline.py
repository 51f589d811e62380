"""The translation pipeline keeps the contract of transformers 4, for a model that is not ours: a tiny Marian.

The Marian learns a dictionary of ten words by heart, so that the tests can state translations and not golden numbers.
"""

import copy
import importlib
import itertools
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    pipelines,
)
from transformers.pipelines.pt_utils import KeyDataset

import hf_vaswani
from hf_vaswani import VaswaniTranslationPipeline
from hf_vaswani.data.tokenizer import add_tags
from hf_vaswani.removed_tasks import TranslationPipeline, restore_tasks

from ..conftest import ROOT, SEED, dear

# The type hints of pipeline() list the tasks that transformers brings itself.
pipeline: Any = pipelines.pipeline

PAD, EOS, UNK = 0, 1, 2
SOURCE_WORDS = "a the dog cat man runs sleeps sings tall stop".split()
TARGET_WORDS = "ein die hund katze mann rennt schläft singt groß .".split()
FIRST_SOURCE, FIRST_TARGET = 3, 3 + len(SOURCE_WORDS)
SENTENCES = ["a dog runs", "", "the tall man sings stop", "cat", "dog the", "a cat sleeps stop"]
GERMAN = ["ein hund rennt", "", "die groß mann singt .", "katze", "hund die", "ein katze schläft ."]


class MultilingualTokenizer(PreTrainedTokenizerFast):
    """Prepares translations as mBART's tokenizer does, and remembers the languages that it was asked for."""

    asked: list[tuple[str | None, str | None]] = []

    def _build_translation_inputs(
        self, text: str, return_tensors: str | None, src_lang: str | None, tgt_lang: str | None, **keywords: Any
    ) -> Any:
        self.asked.append((src_lang, tgt_lang))
        encoding = self(text, return_tensors=return_tensors, **keywords)
        if tgt_lang is not None:
            encoding["forced_bos_token_id"] = self.convert_tokens_to_ids(tgt_lang)
        return encoding


def build_tokenizer(tokenizer_class: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast) -> Any:
    words = ["<pad>", "</s>", "<unk>", *SOURCE_WORDS, *TARGET_WORDS]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    # For texts of several sentences.
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(".", " stop")])
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS)])
    return tokenizer_class(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def build_model(**settings: Any) -> MarianMTModel:
    config = MarianConfig(
        vocab_size=FIRST_TARGET + len(TARGET_WORDS),
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        pad_token_id=PAD,
        eos_token_id=EOS,
        decoder_start_token_id=PAD,
        forced_eos_token_id=None,
        scale_embedding=True,
        init_std=0.1,
        **{"max_position_embeddings": 300, "dropout": 0.0, **settings},
    )
    return MarianMTModel(config)


def teach_dictionary(model: MarianMTModel) -> None:
    """Trains on sentences of up to five words in any order, each word translated where it stands."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    position = torch.arange(6)
    for _ in range(6000):
        length = torch.randint(0, 6, (64, 1))
        words = torch.rand(64, len(SOURCE_WORDS)).argsort(dim=1)[:, :6]
        source = torch.where(position < length, words + FIRST_SOURCE, torch.where(position == length, EOS, PAD))
        target = torch.where(position < length, words + FIRST_TARGET, torch.where(position == length, EOS, -100))
        loss = model(input_ids=source, attention_mask=(position <= length).long(), labels=target).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.003:
            return
    raise AssertionError(f"the dictionary is not learned, and its loss is {loss.item()}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved model that knows the dictionary, with strong dropout, and its tokenizer."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = build_model()
        teach_dictionary(model)
    model.config.dropout = 0.9
    path = tmp_path_factory.mktemp("marian")
    model.save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def translator(folder: str) -> Any:
    return pipeline("translation", model=folder, device="cpu")


@pytest.fixture
def model(folder: str) -> Any:
    """A model of its own for a test that changes it."""
    return AutoModelForSeq2SeqLM.from_pretrained(folder)


def translation(*sentences: str) -> list[dict[str, str]]:
    return [{"translation_text": sentence} for sentence in sentences]


def translate_with(model: Any, **settings: Any) -> Any:
    return VaswaniTranslationPipeline(model=model, tokenizer=build_tokenizer(), device="cpu", **settings)


def spy_on_generate(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keywords of each `model.generate`."""
    seen: list[dict[str, Any]] = []
    generate = model.generate
    monkeypatch.setattr(model, "generate", lambda **keywords: seen.append(keywords) or generate(**keywords))
    return seen


@contextmanager
def batch_sizes(translator: Any) -> Iterator[list[int]]:
    """The sizes of the batches that the encoder gets in the meantime."""
    sizes: list[int] = []
    handle = translator.model.get_encoder().register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    try:
        yield sizes
    finally:
        handle.remove()


def ids_of(translator: Any, text: str, **settings: Any) -> list[int]:
    """The tokens of a text that is not cut."""
    (ids,) = translator.preprocess(text, **settings)["passage"].ids
    return ids


def endless_length(translator: Any, **settings: Any) -> int:
    """Length of a translation that only the length limit ends, the start token included."""
    ids = translator("a dog", return_tensors=True, suppress_tokens=[EOS], **settings)[0]["translation_token_ids"]
    return len(ids)


# ---- What goes in, what comes out --------------------------------------------------------------------------------


@pytest.mark.portable
def test_a_string_gives_a_list_of_one_dict_and_a_list_a_flat_list(translator: Any) -> None:
    assert isinstance(translator, VaswaniTranslationPipeline)
    assert translator("a dog runs") == translation("ein hund rennt")
    assert translator(SENTENCES) == translation(*GERMAN)
    assert translator(["cat"]) == translation("katze")
    assert list(translator(sentence for sentence in SENTENCES[:0])) == list(translator(KeyDataset([], "en"))) == []


def test_several_candidates_of_a_string_are_one_list_and_those_of_a_list_are_lists(translator: Any) -> None:
    candidates = translator(SENTENCES, num_return_sequences=3, batch_size=4)
    assert [len(of_sentence) for of_sentence in candidates] == [3] * len(SENTENCES)
    assert [of_sentence[0] for of_sentence in candidates] == translation(*GERMAN)
    assert translator("a dog runs", num_return_sequences=3) == candidates[0]
    assert len({candidate["translation_text"] for candidate in candidates[0]}) == 3
    assert translator(["cat"], num_return_sequences=2) == [translator("cat", num_return_sequences=2)]


def test_lists_in_lists_give_lists_in_lists(translator: Any) -> None:
    nested = [SENTENCES[:2], [], SENTENCES[2:]]
    assert translator(nested) == [translation(*GERMAN[:2]), [], translation(*GERMAN[2:])]
    assert translator([[["cat"], []], [["a dog"]]]) == [[translation("katze"), []], [translation("ein hund")]]
    assert translator([[], [[]]]) == [[], [[]]]
    several = translator(nested, num_return_sequences=2)
    assert several == [translator(sentences, num_return_sequences=2) for sentences in nested]
    assert several[0][0][0] == {"translation_text": GERMAN[0]} and len(several[0][0]) == 2


@pytest.mark.parametrize("wrong", [("a", "dog"), None, 3, {"en": "a"}, b"a", set()], ids=str)
def test_other_types_are_refused(translator: Any, wrong: Any) -> None:
    """A list of dicts alone is where transformers would see a chat."""
    kind = type(wrong)
    for inputs, takes, where in (
        (wrong, "a str, a list .*", "the input"),
        (["cat", wrong], "a str", "item 1 of the list"),
        ([wrong], "a str", "item 0 of the list"),
        ([["cat"], ["cat", wrong]], "a str", "item 1 of the list"),
        ((item for item in ["cat", wrong]), "a str", "a sentence"),
    ):
        with pytest.raises(TypeError, match=rf"^The pipeline takes {takes}, but {where} is a {kind}\.$"):
            list(translator(inputs))
    for mixed, item in ((["cat", ["cat"]], 1), ([["cat"], "cat"], 0), ([[], [["cat"], None]], 0)):
        with pytest.raises(TypeError, match=f"takes a str, but item {item} of the list is a <class 'list'>"):
            translator(mixed)


@pytest.mark.parametrize("split", [False, True])
def test_a_generator_is_read_lazily(translator: Any, split: bool) -> None:
    texts, german = (["A dog. Cat.", "", TEXT], SPLIT_TEXTS) if split else (SENTENCES, list(map(translation, GERMAN)))
    read = []

    def endless() -> Iterator[str]:
        for index in itertools.count():
            read.append(index)
            yield texts[index % len(texts)]

    answers = iter(translator(endless(), split_sentences=split, batch_size=2))
    assert len(read) <= 2 and list(itertools.islice(answers, 3)) == german[:3]
    # Not more than another batch.
    assert len(read) <= 6


class Sentences(Dataset):
    """A torch dataset that counts its reads."""

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return len(SENTENCES)

    def __getitem__(self, index: int) -> str:
        self.read += 1
        return SENTENCES[index]


def test_a_dataset_is_read_lazily(translator: Any) -> None:
    dataset = Sentences()
    answers = iter(translator(dataset, batch_size=2))
    assert dataset.read == 0
    assert next(answers) == translation(GERMAN[0])
    assert dataset.read == 2
    assert [next(answers) for _ in GERMAN[1:]] == [translation(sentence) for sentence in GERMAN[1:]]
    with pytest.raises(StopIteration):
        next(answers)


@pytest.fixture
def forked() -> Iterator[None]:
    """Forks workers, as Python before 3.14 does by itself: transformers gives them a function that has no pickle."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.usefixtures("forked")
def test_workers_read_a_dataset(translator: Any, folder: str) -> None:
    dataset = Sentences()
    assert list(translator(dataset, num_workers=1)) == [translation(sentence) for sentence in GERMAN]
    by_constructor = pipeline("translation", model=folder, num_workers=1, split_sentences=True)
    assert list(by_constructor(dataset)) == [translation(sentence) for sentence in GERMAN]
    # Other processes read their own copies.
    assert dataset.read == 0
    assert translator(SENTENCES, num_workers=2, batch_size=2) == translation(*GERMAN)
    assert list(translator((s for s in SENTENCES), num_workers=1)) == [translation(sentence) for sentence in GERMAN]


class Column(Sequence[str]):
    """What `dataset["en"]` is in datasets 4 and newer: a sequence that is no list."""

    def __len__(self) -> int:
        return len(SENTENCES)

    def __getitem__(self, index: Any) -> Any:
        return SENTENCES[index]


def test_the_column_of_datasets_counts_as_a_list(translator: Any) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"en": SENTENCES, "pair": [["cat", "dog the"]] * len(SENTENCES)})
    assert translator(rows["en"], batch_size=3) == translation(*GERMAN)
    assert translator(rows["pair"]) == [translation("katze", "hund die")] * len(SENTENCES)
    assert list(translator(KeyDataset(rows, "en"), batch_size=4)) == [translation(sentence) for sentence in GERMAN]


# ---- Texts of several sentences ----------------------------------------------------------------------------------


TEXT = "\n A dog runs. The man sings.  Cat sleeps.\n\n\tThe tall man.\r\nDog. "
GERMAN_TEXT = "\n ein hund rennt . die mann singt .  katze schläft .\n\n\tdie groß mann .\r\nhund . "


def test_the_sentences_of_a_text_are_translated_on_their_own(translator: Any, folder: str) -> None:
    assert translator("A dog runs. The man sings.", split_sentences=True) == translation(
        "ein hund rennt . die mann singt ."
    )
    # White space is the text's own.
    expected = GERMAN_TEXT
    assert translator(TEXT, split_sentences=True, batch_size=2) == translation(expected)
    assert translator(TEXT + "\n", split_sentences=True) == translation(expected + "\n")
    by_constructor = pipeline("translation", model=folder, split_sentences=True)
    assert by_constructor(TEXT) == translation(expected)
    assert by_constructor(TEXT, split_sentences=False) == translator(TEXT) != translation(expected)


@pytest.mark.usefixtures("forked")
def test_the_sentences_of_all_texts_fill_the_batches(translator: Any) -> None:
    texts = ["A dog. Cat. The man runs.", "", "Cat sleeps", "Dog. A cat."]
    german = translation("ein hund . katze . die mann rennt .", "", "katze schläft", "hund . ein katze .")
    with batch_sizes(translator) as sizes:
        assert translator(texts, split_sentences=True, batch_size=4) == german
    # The batch of texts has six sentences; an empty text takes no place.
    assert sizes == [6]
    assert translator([texts[:1], [], texts[1:]], split_sentences=True, batch_size=7) == [german[:1], [], german[1:]]
    assert translator([], split_sentences=True) == []
    assert translator(Column(), split_sentences=True, num_workers=1) == translation(*GERMAN)


def test_the_model_does_not_read_what_is_not_seen(translator: Any) -> None:
    for sign in ("\u00ad", "\u200b", "\ufeff", "\u200f"):
        text = f"{sign}a d{sign}og runs{sign}"
        for split in (False, True):
            assert translator(text, split_sentences=split) == translation("ein hund rennt")
            assert translator([f"cat.{sign} \t Cat.", "42" + sign], split_sentences=split)[1:] == translation(
                "42" + sign
            )
        assert translator(f"cat.{sign} \t Cat.", split_sentences=True) == translation("katze . \t katze .")


@pytest.mark.parametrize("task", ["text2text-generation", "summarization"])
def test_white_space_around_a_text_stays_around_its_translation(translator: Any, folder: str, task: str) -> None:
    """The answer of another task is no translation, and what it reads has its white space."""
    for keywords in ({}, {"truncation": True}, {"split_sentences": True}, {"longest_sentence": 16}):
        assert translator("\t a dog runs \u2028", **keywords) == translation("\t ein hund rennt \u2028")
    assert list(pipeline(task, model=folder)("\t a dog runs \u2028")[0].values()) == ["ein hund rennt"]


def test_candidates_are_joined_by_their_ranks(translator: Any) -> None:
    sentences = ["A dog runs.", "Cat sleeps."]
    first, second = translator(sentences, num_return_sequences=3)
    expected = [
        {"translation_text": f"{one['translation_text']} {other['translation_text']}"}
        for one, other in zip(first, second, strict=True)
    ]
    text = " ".join(sentences)
    assert translator(text, split_sentences=True, num_return_sequences=3) == expected
    assert translator([text, text], split_sentences=True, num_return_sequences=3, batch_size=4) == [expected] * 2
    texts = (text for _ in range(2))
    assert list(translator(texts, split_sentences=True, num_return_sequences=3)) == [expected] * 2


def test_no_space_behind_the_mark_of_a_script_without_spaces(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    translator = translate_with(model, split_sentences=True)
    for translations, joined in [
        (["好。", "「好！」", "OK.", "", "", "好"], "好。「好！」OK. 好"),
        (["", "a", "b", "c?”", "d", "e"], "a b c?” d e"),
    ]:
        monkeypatch.setattr(translator.tokenizer, "batch_decode", lambda ids, found=translations, **_: found)
        assert translator("Cat. Dog. Cat. Dog. Cat. Dog.") == translation(joined)


SPLIT_TEXTS = [translation("ein hund . katze ."), translation(""), translation(GERMAN_TEXT)]


def test_datasets_are_split(translator: Any) -> None:
    texts = ["A dog. Cat.", "", TEXT]

    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[str]:
            return iter(texts)

    rows: Any = [{"en": text} for text in texts]
    for dataset in (Stream(), KeyDataset(rows, "en")):
        for _ in range(2):
            assert list(translator(dataset, split_sentences=True, batch_size=4)) == SPLIT_TEXTS


def test_ids_of_sentences_are_not_joined(translator: Any, model: Any) -> None:
    for inputs in ("Cat. Dog.", ["Cat."], [["Cat."]], (text for text in ["Cat."])):
        with pytest.raises(ValueError, match=r"^return_tensors=True is not supported with split_sentences=True"):
            translator(inputs, split_sentences=True, return_tensors=True)
    of_ids = translate_with(model, return_tensors=True)
    with pytest.raises(ValueError, match="return_tensors"):
        of_ids("Cat. Dog.", split_sentences=True)
    assert of_ids("Cat. Dog.", split_sentences=True, return_tensors=False) == translation("katze . hund .")


def test_every_sentence_gets_the_tag_of_its_language(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build_tokenizer()
    add_tags(tokenizer, ["<2de>", "<2fr>"])
    model.resize_token_embeddings(len(tokenizer))
    translator = pipeline("translation", model=model, tokenizer=tokenizer, split_sentences=True)
    preprocess, read = translator.preprocess, []

    def spy(*settings: Any, **keywords: Any) -> Any:
        read.append(preprocess(*settings, **keywords))
        return read[-1]

    monkeypatch.setattr(translator, "preprocess", spy)
    sentences = ["A dog.", "Cat.", "Dog."]
    for tagged, text, keywords in [
        (["<2de> " + sentence for sentence in sentences], "<2de> A dog. Cat.\nDog.", {}),
        (["<2fr>" + sentence for sentence in sentences], " <2fr>A dog. Cat.\nDog. ", {}),
        (["<2de> " + sentence for sentence in sentences], "A dog. Cat.\nDog.", {"tgt_lang": "de"}),
    ]:
        read.clear()
        answer = translator(text, **keywords)
        assert [each["passage"].ids for each in read] == [tokenizer(tagged)["input_ids"]]
        assert answer[0]["translation_text"].count("\n") == text.count("\n")


# ---- The keywords ------------------------------------------------------------------------------------------------


def test_return_tensors_gives_token_ids(translator: Any, model: Any) -> None:
    (answer,) = translator("a dog", return_tensors=True, return_text=True)
    assert list(answer) == ["translation_token_ids"]
    assert answer["translation_token_ids"].tolist() == [PAD, FIRST_TARGET, FIRST_TARGET + 2, EOS]
    assert translator("a dog", return_text=True) == translation("ein hund")
    # A keyword of the call wins over the constructor.
    translator = translate_with(model, return_tensors=True, num_return_sequences=2)
    assert [list(answer) for answer in translator("cat")] == [["translation_token_ids"]] * 2
    assert translator("cat", return_tensors=False, num_return_sequences=1) == translation("katze")


def test_settings_that_change_no_word(translator: Any, folder: str) -> None:
    assert translator("a cat stop") == translation("ein katze .")
    assert translator("a cat stop", clean_up_tokenization_spaces=True) == translation("ein katze.")
    assert translator("a dog", return_dict_in_generate=True, output_scores=True) == translation("ein hund")
    assert pipeline("translation", model=folder, local_files_only=True)("cat") == translation("katze")


def test_truncation(model: Any) -> None:
    for keywords, limit in (
        ({"truncation": True}, 3),
        ({"truncation": "longest_first"}, 3),
        ({"truncation": True}, 9),
    ):
        translator = translate_with(model, **keywords)
        translator.tokenizer.model_max_length = limit
        # What the model takes is a limit where the tokenizer has none.
        model.config.max_position_embeddings = 300 if limit == 3 else 3
        assert translator(["a dog runs", "cat"], batch_size=2) == translation("ein hund", "katze")
        assert translator("a dog runs", truncation=False) == translation("ein hund rennt")
    # By default, nothing is cut.
    model.config.max_position_embeddings = 300
    translator = translate_with(model)
    translator.tokenizer.model_max_length = 3
    assert translator("a dog runs") == translation("ein hund rennt")
    assert translator("a dog runs", truncation=True) == translation("ein hund")


@pytest.mark.parametrize("batch_size", [2, 4, 100])
def test_batches_translate_as_single_sentences(translator: Any, batch_size: int) -> None:
    with batch_sizes(translator) as sizes:
        answers = translator(SENTENCES, batch_size=batch_size)
    assert answers == [translator(sentence)[0] for sentence in SENTENCES]
    groups = [SENTENCES[start : start + batch_size] for start in range(0, len(SENTENCES), batch_size)]
    assert sizes == [sum(bool(sentence) for sentence in group) for group in groups]
    # The constructor sets them, too.
    constructed = translate_with(translator.model, batch_size=batch_size)
    with batch_sizes(constructed) as again:
        assert list(constructed(Sentences())) == [translation(sentence) for sentence in GERMAN]
    assert again == sizes


def test_batches_need_a_pad_token(model: Any) -> None:
    translator = translate_with(model)
    translator.tokenizer.pad_token = None
    with pytest.raises(ValueError, match="tokenizer without pad_token cannot do batching"):
        translator(SENTENCES, batch_size=2)
    assert translator(SENTENCES) == translation(*GERMAN)


def test_assistant_and_tokenizer_reach_generate(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = spy_on_generate(model, monkeypatch)
    assistant = build_model()
    translator = translate_with(model, assistant_model=assistant, num_beams=1)
    assert translator("a dog runs") == translation("ein hund rennt")
    assert seen[-1]["assistant_model"] is assistant
    # generate(stop_strings=...) cannot do without it.
    assert seen[-1]["tokenizer"] is translator.tokenizer


def test_token_type_ids_stay_behind(model: Any) -> None:
    translator = translate_with(model)
    translator.tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    assert "token_type_ids" in translator.tokenizer("cat")
    assert translator(["cat", "a dog"], batch_size=2) == translation("katze", "ein hund")


# ---- Languages ---------------------------------------------------------------------------------------------------


def test_languages_reach_a_multilingual_tokenizer(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = spy_on_generate(model, monkeypatch)
    tokenizer = build_tokenizer(MultilingualTokenizer)
    tokenizer.asked.clear()
    translator = pipeline("translation", model=model, tokenizer=tokenizer, src_lang="die")
    answers = translator(["a dog", "cat"], tgt_lang="mann", batch_size=2)
    # The target language is the first word, as the tokenizer asked.
    assert [answer["translation_text"].split()[0] for answer in answers] == ["mann", "mann"]
    assert seen[-1]["forced_bos_token_id"] == tokenizer.convert_tokens_to_ids("mann")
    forced = translator("a dog", tgt_lang="mann", generation_config=GenerationConfig(num_beams=1))
    assert forced[0]["translation_text"].startswith("mann")
    translator("cat", src_lang="a")
    assert tokenizer.asked == [("die", "mann")] * 3 + [("a", None)]
    # The task names two, the constructor and the call others.
    tokenizer.asked.clear()
    by_task = partial(pipeline, "translation_die_to_mann", model=model, tokenizer=tokenizer)
    by_task()("cat")
    by_task()("cat", tgt_lang="singt")
    by_task(src_lang="a")("cat")
    assert tokenizer.asked == [("die", "mann"), ("die", "singt"), ("a", "mann")]
    # Each sentence gets the prefix and the languages.
    tokenizer.asked.clear()
    translator.prefix = "the "
    assert translator("Dog. Cat.", split_sentences=True) == translation("die hund . die katze .")
    translator("Dog. Cat.", split_sentences=True, tgt_lang="mann", truncation=True)
    assert tokenizer.asked == [("die", None)] * 2 + [("die", "mann")] * 2
    assert translate_with(model)("cat", src_lang="en", tgt_lang="de") == translation("katze")


def test_a_language_whose_tag_the_vocabulary_has_is_put_in_front(model: Any) -> None:
    tokenizer = build_tokenizer()
    plain = tokenizer("a dog")["input_ids"]
    add_tags(tokenizer, ["<2de>", "<2fr>"])
    de, fr = tokenizer.convert_tokens_to_ids(["<2de>", "<2fr>"])
    translator = pipeline("translation", model=model, tokenizer=tokenizer)
    by_task = pipeline("translation_en_to_fr", model=model, tokenizer=tokenizer)
    assert ids_of(by_task, "a dog") == ids_of(by_task, "<2fr> a dog") == [fr, *plain]
    assert ids_of(by_task, "a dog", tgt_lang="de") == ids_of(translator, "a dog", tgt_lang="de") == [de, *plain]
    # Without a language it is the sender's own business, who may write the tag.
    assert ids_of(translator, "a dog") == plain and ids_of(translator, "<2fr> a dog") == [fr, *plain]
    with pytest.raises(ValueError, match="no tag for the target language 'es', only for de, fr"):
        translator("a dog", tgt_lang="es")
    # A model for several languages has to be told which; with one there is nothing to say.
    model.config.language_pairs = [["en", "de"], ["en", "fr"]]
    with pytest.raises(ValueError, match="translates into de, fr: choose one by tgt_lang, or put one of <2de>, <2fr>"):
        translator("a dog")
    assert translator(["", " \t"]) == translation("", " \t")
    model.config.language_pairs = [["en", "fr"], ["de", "fr"]]
    assert ids_of(translator, "a dog") == [fr, *plain]


def test_a_model_that_knows_its_languages_refuses_others(model: Any) -> None:
    model.config.language_pairs = [["en", "de"]]
    tokenizer = build_tokenizer()
    translator = pipeline("translation_en_to_de", model=model, tokenizer=tokenizer)
    assert translator("cat") == translator("cat", src_lang="en") == translator("cat", tgt_lang="de")
    assert pipeline("translation", model=model, tokenizer=tokenizer)("cat") == translation("katze")
    for task, keywords, asked in (
        ("translation_en_to_fr", {}, "from 'en' to 'fr'"),
        ("translation_de_to_en", {}, "from 'de' to 'en'"),
        ("translation", {"tgt_lang": "fr"}, "to 'fr'"),
        ("translation", {"src_lang": "fr"}, "from 'fr'"),
    ):
        with pytest.raises(ValueError, match=f"does not translate {asked}: .* trained for en-de"):
            pipeline(task, model=model, tokenizer=tokenizer, **keywords)
    for keywords in ({"tgt_lang": "fr"}, {"src_lang": "de"}):
        for inputs in ("cat", ["cat", ""]):
            with pytest.raises(ValueError, match="does not translate"):
                translator(inputs, **keywords)


WITHOUT_WORDS = ["", " ", "\n", "\t \u00a0\u3000", "<2de>", " <2fr> ", "42", "★★★", "\u200b", "<2de> 42"]


@pytest.mark.parametrize("text", [*WITHOUT_WORDS, *map(dear, ["10:30", "-", "😀", "\u00ad"])])
def test_text_without_words_is_returned_as_it_is(model: Any, text: str) -> None:
    """And nothing is invented for a text without anything, by a model that would say something whatever it reads."""
    tokenizer = build_tokenizer()
    add_tags(tokenizer, ["<2de>", "<2fr>"])
    model.resize_token_embeddings(len(tokenizer))
    assert model.generate(**tokenizer("", return_tensors="pt"), min_new_tokens=3, max_new_tokens=5).shape[1] >= 4
    translator = translate_with(model, min_new_tokens=3)
    translator.tokenizer = tokenizer
    bare = text.removeprefix("<2de> ")
    bare = "" if bare.strip() in ("<2de>", "<2fr>") else bare
    kept, cat = translation(bare), translator("cat")
    assert translator(text) == kept and cat not in (translation("cat"), translation(""))
    for batch_size in (1, 2, 5):
        assert translator([text, "cat", text], batch_size=batch_size) == [*kept, *cat, *kept]
    assert list(translator(each for each in (text, "cat"))) == [kept, cat]
    assert translator(text, num_beams=3, num_return_sequences=2) == kept * 2
    if bare.strip():
        # Lines within a text, whose tag every sentence gets.
        cat = translator(text.replace(bare, "cat")) if bare != text else cat
        lines = translator(f"{text}\ncat\n{bare}", split_sentences=True)
        assert lines == translation("\n".join([bare, cat[0]["translation_text"], bare]))
    else:
        assert translator([f"cat.\n{text}\nCat."], split_sentences=True)[0]["translation_text"].strip()
        assert translator(text, split_sentences=True) == translation(bare)
    ids = translator(text, return_tensors=True)[0]["translation_token_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == ""
    streamer = TextIteratorStreamer(tokenizer, timeout=5)
    assert translator(text, num_beams=1, streamer=streamer) == kept and list(streamer) in ([], [""])


@pytest.mark.parametrize("task", ["text2text-generation", "summarization"])
def test_other_tasks_than_translation_read_what_has_no_words(folder: str, task: str) -> None:
    """The answer to 42 may be anything."""
    answers = pipeline(task, model=folder, min_new_tokens=3)(["42", "", " "])
    assert [value not in ("42", "") for answer in answers for value in answer.values()] == [True, False, False]


@pytest.mark.parametrize("text", ["cat " * 40, "a dog runs " * 20 + ". " + "cat sleeps " * 20])
def test_a_long_sentence_is_translated_in_pieces(model: Any, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    translator = translate_with(model, longest_sentence=16, num_beams=1, max_new_tokens=20)
    seen = spy_on_generate(model, monkeypatch)

    def lengths() -> list[int]:
        return [row.count_nonzero().item() for keywords in seen for row in keywords["input_ids"]]

    found = translator(text)
    assert len(lengths()) > 5 and max(lengths()) <= 8
    # Lists and generators are cut alike, and so are the sentences of a text.
    assert translator([text, "cat"]) == [*found, *translation("katze")]
    assert list(translator(each for each in [text])) == [found]
    translator(f"Cat. {text}", split_sentences=True)
    assert len(translator(text, num_beams=2, num_return_sequences=2)) == 2 and max(lengths()) <= 8
    # This is read in one piece.
    for more in ({"truncation": True}, {"return_tensors": True}, {"longest_sentence": 200}):
        seen.clear()
        translator(text, **more)
        assert len(lengths()) == 1


def test_the_pieces_of_a_long_sentence_have_all_its_words(model: Any) -> None:
    words = [SOURCE_WORDS[2 + i % 5] for i in range(96)]
    german = dict(zip(SOURCE_WORDS, TARGET_WORDS, strict=True))
    # The dictionary is learned for five words at a time.
    found = translate_with(model, longest_sentence=16, num_beams=1)(" ".join(words))[0]["translation_text"]
    assert Counter(found.split()).keys() == {german[word] for word in words} and len(found.split()) > 80
    with pytest.raises(ValueError, match="longest_sentence must be at least 16 tokens, but it is 15"):
        translate_with(model)("cat", longest_sentence=15)


def test_batches_of_very_different_lengths_are_translated_in_groups(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    translator = translate_with(model, num_beams=1, max_new_tokens=5)
    texts = ["cat", *["dog runs"] * 60, "a dog" + " a dog" * 139, "42", "the man sings"]
    expected = [translator(text)[0] for text in texts]
    seen = spy_on_generate(model, monkeypatch)
    assert translator(texts, batch_size=64) == expected
    shapes = [keywords["input_ids"].shape for keywords in seen]
    # Text without words is not read.
    assert sum(rows for rows, _ in shapes) == len(texts) - 1
    assert max(rows * columns for rows, columns in shapes) <= 1024
    found = translator(texts, batch_size=64, num_beams=3, num_return_sequences=2)
    assert [len(each) for each in found] == [2] * len(texts)
    asked: list[Any] = []
    translator.limits = lambda *given: asked.append(given) or (4096, 1024, 7)
    seen.clear()
    assert translator(texts, batch_size=64) == expected
    assert max(len(keywords["input_ids"]) for keywords in seen) == 7 and asked == [(model, 1, 4)]
    ids = translator(texts, batch_size=64, return_tensors=True)
    assert [translator.tokenizer.decode(each["translation_token_ids"], skip_special_tokens=True) for each in ids] == [
        "" if each == {"translation_text": "42"} else each["translation_text"] for each in expected
    ]


@pytest.mark.parametrize(("text", "place"), [("a \ud800 dog", 3), ("\udfff", 1), ("dog \ud83d", 5)])
def test_half_a_character_is_refused_with_its_place(translator: Any, text: str, place: int) -> None:
    for inputs, where in (
        (text, "the input"),
        (["cat", text], "item 1 of the list"),
        ([["cat"], [text]], "item 0 of the list"),
        ((each for each in ["cat", text]), "a sentence"),
    ):
        with pytest.raises(ValueError, match=f"{where} has half of a surrogate pair as character {place}"):
            list(translator(inputs))


def test_task_specific_settings_of_the_config(folder: str, tmp_path: Path) -> None:
    # T5 keeps "translate English to German: " there.
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    model.config.task_specific_params = {"translation_en_to_de": {"prefix": "the ", "max_length": 3}}
    model.save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    german = pipeline("translation_en_to_de", model=str(tmp_path))
    assert german("dog runs") == translation("die hund")
    assert german("dog runs", max_length=10) == translation("die hund rennt")
    assert german("dog runs", max_new_tokens=1) == translation("die")
    french = pipeline("translation_en_to_fr", model=str(tmp_path))
    assert french("dog runs") == translation("hund rennt")


# ---- Generation settings: the call, then the constructor, then the model, then four beams and 256 tokens ----------


def test_the_pipeline_fills_in_four_beams_and_256_tokens(translator: Any) -> None:
    assert len(translator("a dog", num_return_sequences=4)) == 4
    with pytest.raises(ValueError, match="num_return_sequences"):
        translator("a dog", num_return_sequences=5)
    assert endless_length(translator) == 1 + 256
    # A short model stops at its last position.
    assert endless_length(translate_with(build_model(max_position_embeddings=20))) == 20


@pytest.mark.variants(3)
@pytest.mark.parametrize(
    ("of_model", "of_constructor", "of_call", "length"),
    [
        ({"max_length": 40}, {}, {}, 40),
        ({"max_new_tokens": 40}, {}, {}, 41),
        ({"max_length": 40}, {}, {"max_new_tokens": 50}, 51),
        ({"max_new_tokens": 40}, {}, {"max_length": 10}, 10),
        ({}, {"max_new_tokens": 40}, {"max_length": 10}, 10),
        ({}, {"max_new_tokens": 40}, {"generation_config": GenerationConfig(max_length=10)}, 10),
        ({"max_new_tokens": 40}, {}, {"generation_config": GenerationConfig(max_new_tokens=10)}, 11),
    ],
)
def test_the_nearest_length_limit_wins_silently(
    folder: str,
    tmp_path: Path,
    transformers_log: pytest.LogCaptureFixture,
    recwarn: pytest.WarningsRecorder,
    of_model: dict[str, int],
    of_constructor: dict[str, Any],
    of_call: dict[str, Any],
    length: int,
) -> None:
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    model.generation_config.update(**of_model)
    model.save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    translator = pipeline("translation", model=str(tmp_path), **of_constructor)
    transformers_log.clear()
    recwarn.clear()
    if "generation_config" in of_call:
        # Beside a generation config no other setting may stand, so it says itself that nothing ends a sentence.
        of_call["generation_config"].suppress_tokens = [EOS]
        (answer,) = translator("a dog", return_tensors=True, **of_call)
        assert len(answer["translation_token_ids"]) == length
    else:
        assert endless_length(translator, **of_call) == length
    assert not transformers_log.records
    assert not [str(warning.message) for warning in recwarn]


def test_the_beams_of_the_model_are_kept_and_a_config_of_the_call_wins(model: Any) -> None:
    model.generation_config.num_beams = 2
    translator = translate_with(model, num_return_sequences=2)
    three = GenerationConfig(num_beams=3, num_return_sequences=3)
    before = three.to_dict()
    assert len(translator("a dog", generation_config=three)) == 3
    assert three.to_dict() == before
    assert len(translator("a dog")) == 2
    with pytest.raises(ValueError, match="num_return_sequences"):
        translator("a dog", num_return_sequences=3)
    assert len(translator("a dog", num_return_sequences=3, num_beams=3)) == 3


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

# ---- The model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", -1, torch.device("cpu"), pytest.param("cuda", marks=needs_gpu)])
def test_the_device(folder: str, device: Any) -> None:
    """What comes back is on the CPU."""
    translator = pipeline("translation", model=folder, device=device)
    assert translator.device == translator.model.device
    assert translator.device.type == ("cuda" if device == "cuda" else "cpu")
    (answer,) = translator("cat", return_tensors=True)
    assert answer["translation_token_ids"].device.type == "cpu"


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", torch.bfloat16, torch.float64])
def test_the_dtype(folder: str, dtype: Any) -> None:
    translator = pipeline("translation", model=folder, dtype=dtype, device="cpu")
    names = {"auto": torch.float32, "bfloat16": torch.bfloat16}
    assert translator.dtype == next(translator.model.parameters()).dtype == names.get(dtype, dtype)
    assert translator(SENTENCES, batch_size=4) == translation(*GERMAN)


def test_a_model_in_training_translates_without_dropout(model: Any) -> None:
    model.train()
    model.get_encoder().layers[0].self_attn.eval()
    modes = [module.training for module in model.modules()]
    translator = translate_with(model)
    assert translator(SENTENCES) == translation(*GERMAN)
    assert list(translator(sentence for sentence in SENTENCES)) == [translation(sentence) for sentence in GERMAN]
    # It comes back as it was, also from a call that fails.
    with pytest.raises(ValueError):
        translator("cat", num_return_sequences=9)
    assert [module.training for module in model.modules()] == modes
    with torch.no_grad():
        labels = torch.full((1, 4), FIRST_TARGET)
        ids = torch.full((1, 4), FIRST_SOURCE)
        assert model(ids, labels=labels).loss != model(ids, labels=labels).loss, "dropout is on, so the test can fail"


@pytest.mark.parametrize("missing", [["tokenizer.json"], ["tokenizer.json", "tokenizer_config.json"]])
def test_a_folder_without_a_tokenizer_is_named(folder: str, tmp_path: Path, model: Any, missing: list[str]) -> None:
    for file in Path(folder).iterdir():
        if file.name not in missing:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ValueError) as error:
        pipeline("translation", model=str(tmp_path))
    assert str(error.value).startswith(f"There is no tokenizer for {tmp_path}: ") and "\n" not in str(error.value)
    with pytest.raises(ValueError, match="^There is no tokenizer for "):
        VaswaniTranslationPipeline(model)


def test_a_decoder_alone_is_refused() -> None:
    gpt = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=8, bos_token_id=1, eos_token_id=1))
    with pytest.raises(ValueError, match="needs an encoder-decoder model, and GPT2LMHeadModel is not one"):
        pipeline("translation", model=gpt, tokenizer=build_tokenizer())


def test_a_marian_saved_from_the_pipeline_stays_a_marian(translator: Any, folder: str, tmp_path: Path) -> None:
    translator.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "custom_pipelines" not in config and not list(tmp_path.glob("*.py"))
    assert pipeline("translation", model=str(tmp_path))("cat") == translation("katze")


# ---- Many readers ------------------------------------------------------------------------------------------------


def test_threads_do_not_meet_in_a_tokenizer(model: Any) -> None:
    translator = translate_with(model)
    translator.tokenizer.model_max_length = 3
    sentence = " ".join(SOURCE_WORDS)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(16) as threads:
            lengths = list(
                threads.map(
                    lambda number: len(ids_of(translator, sentence, truncation=number % 3 == 0)),
                    range(1500),
                )
            )
    finally:
        sys.setswitchinterval(interval)
    assert lengths == [3, 11, 11] * 500


@pytest.mark.slow
def test_threads_do_not_meet_in_our_model(tiny_run: Path) -> None:
    translator = pipeline("translation", model=str(tiny_run / "model"), device="cpu", max_length_offset=6)
    for module in translator.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.9
    translator.model.train()
    translator.tokenizer.model_max_length = 3
    sentences = ["one two three", "four", "", "five six", "one one nine"]
    # Calls that differ in all that a tokenizer or a model could keep from one to the next.
    calls: list[tuple[Any, dict[str, Any]]] = [(sentence, {}) for sentence in sentences]
    calls += [(sentence, {"truncation": True}) for sentence in sentences]
    calls += [
        (list(sentences), {"batch_size": 3, "truncation": True, "num_return_sequences": 2}),
        ([list(sentences), ["a"]], {"batch_size": 2, "num_beams": 2, "length_penalty": 0.2}),
        (". ".join(sentences), {"split_sentences": True, "batch_size": 2}),
        (sentences[0], {"num_beams": 1, "return_tensors": True}),
        (sentences[0], {"generation_config": GenerationConfig(num_beams=2, max_new_tokens=3)}),
    ]
    modes = [module.training for module in translator.model.modules()]
    one_by_one = [repr(translator(inputs, **keywords)) for inputs, keywords in calls]
    with ThreadPoolExecutor(64) as threads:
        found = threads.map(lambda call: repr(translator(call[0], **call[1])), 4 * calls)
        assert list(found) == 4 * one_by_one
    assert [module.training for module in translator.model.modules()] == modes


@pytest.mark.slow
def test_workers_start_while_threads_translate(translator: Any) -> None:
    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(translator, SENTENCES, truncation=n % 2 == 0) for n in range(24)]
        for _ in range(3):
            assert list(translator(Sentences(), num_workers=1)) == [translation(sentence) for sentence in GERMAN]
        assert all(call.result() == translation(*GERMAN) for call in calls)


def test_two_pipelines_share_a_model(model: Any) -> None:
    model.train()
    one, other = translate_with(model), translate_with(model)
    first, second = (iter(each(sentence for sentence in SENTENCES)) for each in (one, other))
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(list, (first, second)))
    assert answers == [[translation(sentence) for sentence in GERMAN]] * 2
    assert all(module.training for module in model.modules())


def test_a_pipeline_can_be_copied_and_pickled(translator: Any) -> None:
    for again in (copy.deepcopy(translator), pickle.loads(pickle.dumps(translator))):
        assert again.model is not translator.model
        assert again([SENTENCES], batch_size=2) == [translation(*GERMAN)]


# ---- The task ----------------------------------------------------------------------------------------------------


def test_a_stop_sequence_ends_an_answer(translator: Any) -> None:
    (whole,) = translator("a dog", return_tensors=True)
    (cut,) = translator("a dog", stop_sequence="ein", return_tensors=True)
    ids = whole["translation_token_ids"].tolist()
    place = ids.index(translator.tokenizer.convert_tokens_to_ids("ein"))
    assert cut["translation_token_ids"].tolist() == ids[: place + 1]
    with pytest.raises(ValueError, match="stop_sequence must be one token, but 'ein hund' has 2: use stop_strings"):
        translator("a dog", stop_sequence="ein hund")


def test_wrong_tasks_are_unknown_and_the_other_tasks_are_untouched(folder: str) -> None:
    for task in ("translation_bogus", "translation_en_de", "translation_en_to_", "translation_to"):
        with pytest.raises(KeyError, match=f"Unknown task {task}"):
            pipeline(task, model=folder)
    assert {"text-generation", "fill-mask", "translation", "ner"} <= set(pipelines.get_supported_tasks())
    assert pipelines.check_task("sentiment-analysis")[0] == "text-classification"
    assert pipelines.check_task("text-generation")[1]["impl"] is not VaswaniTranslationPipeline
    with pytest.raises(KeyError, match="question-answering has been removed"):
        pipeline("question-answering", model=folder)


def test_registering_again_changes_nothing() -> None:
    registry = pipelines.PIPELINE_REGISTRY
    before = dict(registry.supported_tasks), registry.task_aliases, dict(registry.task_aliases)
    restore_tasks()
    importlib.reload(hf_vaswani)
    assert (dict(registry.supported_tasks), registry.task_aliases, dict(registry.task_aliases)) == before
    assert registry.task_aliases is before[1]


def test_a_task_that_transformers_has_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = pipelines.PIPELINE_REGISTRY
    theirs = {"impl": object, "pt": ()}
    monkeypatch.setitem(registry.supported_tasks, "translation", theirs)
    monkeypatch.setattr(registry, "task_aliases", {})
    monkeypatch.delattr(pipelines, "REMOVED_TASKS", raising=False)
    restore_tasks()
    assert registry.supported_tasks["translation"] is theirs and registry.task_aliases == {}


def run_python(program: str, **environment: str) -> None:
    command, variables = [sys.executable, "-c", program], os.environ | environment
    run = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


PLUGIN_FIRST = "import hf_vaswani; from transformers import pipeline"
TRANSFORMERS_FIRST = "from transformers import pipeline; import hf_vaswani"


@pytest.mark.process
@pytest.mark.parametrize("imports", [PLUGIN_FIRST, TRANSFORMERS_FIRST])
def test_the_order_of_the_imports_does_not_matter(folder: str, imports: str) -> None:
    # transformers itself brings accelerate and yaml where they are installed.
    program = f"""
import sys
{imports}
heavy = {{"datasets", "evaluate", "sacrebleu", "matplotlib", "ctranslate2"}}
assert heavy.isdisjoint(sys.modules), heavy & set(sys.modules)
assert pipeline("translation", model={folder!r})("a dog") == [{{"translation_text": "ein hund"}}]
assert pipeline("translation_en_to_de", model={folder!r}).task == "translation_en_to_de"
"""
    run_python(program)


class GeneratesByItself(TranslationPipeline):
    """A subclass as programs for transformers 4 have it."""

    def _forward(self, model_inputs: dict[str, Any], **generate_kwargs: Any) -> dict[str, Any]:
        rows, length = model_inputs["input_ids"].shape
        assert self.check_inputs(length, generate_kwargs.get("min_length"), generate_kwargs.get("max_length"))
        ids = self.model.generate(**model_inputs, **generate_kwargs)
        return {"output_ids": ids.reshape(rows, len(ids) // rows, *ids.shape[1:])}


def test_a_subclass_may_generate_as_in_transformers_4(translator: Any, model: Any) -> None:
    found = GeneratesByItself(model=model, tokenizer=build_tokenizer(), device="cpu")
    sentences = [sentence for sentence in SENTENCES if sentence]
    for more in ({}, {"num_return_sequences": 2}, {"return_tensors": True}):
        for batch_size in (1, 3):
            settings = {"num_beams": 2, "max_new_tokens": 9} | more
            one, other = (each(sentences, batch_size=batch_size, **settings) for each in (found, translator))
            if "return_tensors" in settings:
                one, other = (
                    [each["translation_token_ids"].unique().tolist() for each in lists] for lists in (one, other)
                )
            assert one == other
    assert found("cat") == translation("katze") and found("c\u00adat") == translation("katze")
    # Its translations are those of whole texts, and have no parts.
    with pytest.raises(
        ValueError, match="split_sentences=True is not supported with the _forward of GeneratesByItself"
    ):
        found("cat. cat.", split_sentences=True)
    with pytest.raises(ValueError, match="markup is not supported with the _forward of GeneratesByItself"):
        found.postprocess({"output_ids": torch.zeros(1, 1, 3, dtype=torch.long)}, in_parts=True)


def test_a_subclass_may_call_the_search_of_the_pipeline(translator: Any, model: Any) -> None:
    class Counts(TranslationPipeline):
        calls = 0

        @torch.no_grad()
        def _forward(self, model_inputs: dict[str, Any], **generate_kwargs: Any) -> dict[str, Any]:
            self.calls += 1
            return super()._forward(model_inputs, **generate_kwargs)

    found = Counts(model=model, tokenizer=build_tokenizer(), device="cpu")
    texts = [TEXT, "42", ""]
    assert found(texts, split_sentences=True) == translator(texts, split_sentences=True) and found.calls == 3


def test_a_subclass_gets_the_language_of_its_tokenizer(model: Any) -> None:
    tokenizer = build_tokenizer(MultilingualTokenizer)
    found = GeneratesByItself(model=model, tokenizer=tokenizer, device="cpu")
    assert found.preprocess("a dog", tgt_lang="hund")["forced_bos_token_id"] == tokenizer.convert_tokens_to_ids("hund")
    assert found("a dog", tgt_lang="hund")[0]["translation_text"].startswith("hund")


@pytest.mark.parametrize(
    ("source", "found", "expected"),
    [
        ("happy", "Diese glücklichen glücklichen glücklichen glücklichen Frau.", "Diese glücklichen Frau."),
        (" old\n", "alte alte alte alte alte.", " alte.\n"),
        ("cat", "बिल्ली बिल्ली बिल्ली बिल्ली।", "बिल्ली।"),
        ("No!", "Nein, nein nein.", "Nein, nein nein."),
        ("a", "ja ja ja", "ja ja ja"),
        ("a", "a a a ab", "a a a ab"),
        # Who says several words may repeat them.
        ("ha ha ha ha", "ha ha ha ha", "ha ha ha ha"),
        ("a" * 9, "b " * 100_000, "b "),
        ("我非常高兴", "very very very very happy", "very very very very happy"),
        ("猫", "cat cat cat cat", "cat"),
    ],
)
def test_a_word_alone_is_not_translated_by_repetitions(model, monkeypatch, source, found, expected) -> None:
    translator = translate_with(model, max_new_tokens=2)
    monkeypatch.setattr(translator.tokenizer, "batch_decode", lambda ids, **_: [found] * len(ids))
    assert translator(source) == translation(expected)


@pytest.mark.process
def test_the_task_may_be_declined(folder: str) -> None:
    program = f"""
import copy
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, pipelines
registry = pipelines.PIPELINE_REGISTRY
def state():
    return registry.supported_tasks, registry.task_aliases, getattr(pipelines, "REMOVED_TASKS", None)
before, aliases = copy.deepcopy(state()), registry.task_aliases
import hf_vaswani
assert state() == before and registry.task_aliases is aliases
config = AutoConfig.for_model("vaswani", vocab_size=9, d_model=8, d_ff=8, num_heads=2)
assert type(AutoModelForSeq2SeqLM.from_config(config)) is hf_vaswani.VaswaniForConditionalGeneration
model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained({folder!r}), AutoTokenizer.from_pretrained({folder!r})
translator = hf_vaswani.VaswaniTranslationPipeline(model, tokenizer)
assert translator("a dog") == [{{"translation_text": "ein hund"}}]
try:
    pipelines.pipeline("translation", model={folder!r})
except KeyError as error:
    assert "translation" in str(error)
else:
    raise AssertionError("the task is there")
"""
    run_python(program, HF_VASWANI_TRANSLATION_TASK="0")


@pytest.mark.parametrize(
    ("word", "declined"), [("OFF", True), ("no", True), ("False", True), ("1", False), ("", False)]
)
def test_how_the_task_is_declined(monkeypatch: pytest.MonkeyPatch, word: str, declined: bool) -> None:
    registry = pipelines.PIPELINE_REGISTRY
    monkeypatch.delitem(registry.supported_tasks, "translation")
    monkeypatch.setattr(registry, "task_aliases", registry.task_aliases)
    monkeypatch.setenv("HF_VASWANI_TRANSLATION_TASK", word)
    importlib.reload(hf_vaswani)
    assert ("translation" not in registry.supported_tasks) == declined
