"""The translation pipeline keeps the contract of transformers 4, for a model that is not ours: a tiny Marian.

The Marian learns a dictionary of ten words by heart, so that the tests can state translations and not golden numbers.
"""

import importlib
import itertools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.utils.data import Dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
    pipelines,
)
from transformers.pipelines.pt_utils import KeyDataset

import hf_vaswani
from hf_vaswani import VaswaniTranslationPipeline
from hf_vaswani.tokenizer import add_language_tags

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

    def _build_translation_inputs(self, text: str, src_lang: str | None, tgt_lang: str | None, **keywords: Any) -> Any:
        self.asked.append((src_lang, tgt_lang))
        encoding = self(text, **keywords)
        if tgt_lang is not None:
            encoding["forced_bos_token_id"] = self.convert_tokens_to_ids(tgt_lang)
        return encoding


def build_tokenizer(tokenizer_class: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast) -> Any:
    words = ["<pad>", "</s>", "<unk>", *SOURCE_WORDS, *TARGET_WORDS]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
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
    for _ in range(600):
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved model that knows the dictionary, with strong dropout, and its tokenizer."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
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


@pytest.fixture
def transformers_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    return caplog


def translation(*sentences: str) -> list[dict[str, str]]:
    return [{"translation_text": sentence} for sentence in sentences]


def translate_with(model: Any, **settings: Any) -> Any:
    return VaswaniTranslationPipeline(model=model, tokenizer=build_tokenizer(), device="cpu", **settings)


def spy_on_generate(model: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The keywords of the last `model.generate`."""
    seen: dict[str, Any] = {}
    generate = model.generate

    def spy(**keywords: Any) -> Any:
        seen.clear()
        seen.update(keywords)
        return generate(**keywords)

    monkeypatch.setattr(model, "generate", spy)
    return seen


def endless_length(translator: Any, **settings: Any) -> int:
    """Length of a translation that only the length limit ends, the start token included."""
    ids = translator("a dog", return_tensors=True, suppress_tokens=[EOS], **settings)[0]["translation_token_ids"]
    return len(ids)


# ---- What goes in, what comes out --------------------------------------------------------------------------------


def test_a_string_gives_a_list_of_one_dict(translator: Any) -> None:
    assert isinstance(translator, VaswaniTranslationPipeline)
    assert translator("a dog runs") == translation("ein hund rennt")


def test_the_empty_string_is_a_sentence(translator: Any) -> None:
    assert translator("") == translation("")


def test_a_list_gives_a_flat_list(translator: Any) -> None:
    assert translator(SENTENCES) == translation(*GERMAN)
    assert translator(["cat"]) == translation("katze")


def test_an_empty_list_gives_an_empty_list(translator: Any) -> None:
    assert translator([]) == []


def test_several_candidates_of_a_string_are_one_list(translator: Any) -> None:
    candidates = translator("a dog runs", num_return_sequences=3)
    assert candidates[0] == {"translation_text": "ein hund rennt"}
    assert len({candidate["translation_text"] for candidate in candidates}) == 3


def test_several_candidates_of_a_list_are_lists(translator: Any) -> None:
    candidates = translator(SENTENCES, num_return_sequences=2, batch_size=4)
    assert [len(of_sentence) for of_sentence in candidates] == [2] * len(SENTENCES)
    assert [of_sentence[0] for of_sentence in candidates] == translation(*GERMAN)
    assert translator(["cat"], num_return_sequences=2) == [translator("cat", num_return_sequences=2)]


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_generator_is_read_lazily(translator: Any, batch_size: int) -> None:
    read = []

    def endless() -> Iterator[str]:
        for index in itertools.count():
            read.append(index)
            yield SENTENCES[index % len(SENTENCES)]

    answers = translator(endless(), batch_size=batch_size)
    assert len(read) <= 1
    assert list(itertools.islice(answers, 3)) == [translation(sentence) for sentence in GERMAN[:3]]
    assert len(read) <= 3 + 2 * batch_size


def test_an_empty_generator_gives_nothing(translator: Any) -> None:
    assert list(translator(sentence for sentence in SENTENCES[:0])) == []


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


def test_workers_read_a_dataset(translator: Any) -> None:
    dataset = Sentences()
    assert list(translator(dataset, num_workers=1)) == [translation(sentence) for sentence in GERMAN]
    # Another process read its own copy.
    assert dataset.read == 0


def test_a_key_dataset_is_a_dataset(translator: Any) -> None:
    rows: Any = [{"en": sentence, "id": index} for index, sentence in enumerate(SENTENCES)]
    assert list(translator(KeyDataset(rows, "en"))) == [translation(sentence) for sentence in GERMAN]
    assert list(translator(KeyDataset(rows[:0], "en"))) == []


class Column(Sequence[str]):
    """What `dataset["en"]` is in datasets 4 and newer: a sequence that is no list."""

    def __len__(self) -> int:
        return len(SENTENCES)

    def __getitem__(self, index: Any) -> Any:
        return SENTENCES[index]


def test_a_column_counts_as_a_list(translator: Any) -> None:
    assert translator(Column()) == translation(*GERMAN)


def test_the_column_of_datasets_counts_as_a_list(translator: Any) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"en": SENTENCES})
    assert translator(rows["en"], batch_size=3) == translation(*GERMAN)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [(("a", "dog"), "tuple"), (None, "NoneType"), (3, "int"), ({"en": "a"}, "dict"), (b"a", "bytes"), (set(), "set")],
)
def test_other_types_are_refused(translator: Any, wrong: Any, name: str) -> None:
    with pytest.raises(
        TypeError, match=rf"^Translation takes a str, a list .* but the input is a <class '{name}'>\.$"
    ):
        translator(wrong)


@pytest.mark.parametrize("wrong", [["cat"], ("cat",), None, 3, {"role": "user", "content": "cat"}])
def test_other_types_in_a_list_are_refused(translator: Any, wrong: Any) -> None:
    message = rf"^Translation takes a str, but item 1 of the list is a <class '{type(wrong).__name__}'>\.$"
    with pytest.raises(TypeError, match=message):
        translator(["a dog", wrong])
    # A list of such items alone is where transformers would see a chat.
    with pytest.raises(TypeError, match="item 0 of the list"):
        translator([wrong])


def test_other_types_in_a_generator_are_refused(translator: Any) -> None:
    with pytest.raises(TypeError, match=r"^Translation takes a str, but a sentence is a <class 'int'>\.$"):
        list(translator(item for item in ["cat", 3]))


# ---- The keywords ------------------------------------------------------------------------------------------------


def test_return_tensors_gives_token_ids(translator: Any, folder: str) -> None:
    (answer,) = translator("a dog", return_tensors=True)
    assert list(answer) == ["translation_token_ids"]
    assert answer["translation_token_ids"].tolist() == [PAD, FIRST_TARGET, FIRST_TARGET + 2, EOS]
    (answer,) = translator("a dog", return_tensors=True, return_text=True)
    assert list(answer) == ["translation_token_ids"]
    assert translator("a dog", return_text=True) == translation("ein hund")


def test_a_keyword_of_the_call_wins_over_the_constructor(model: Any) -> None:
    translator = translate_with(model, return_tensors=True, num_return_sequences=2)
    assert [list(answer) for answer in translator("cat")] == [["translation_token_ids"]] * 2
    assert translator("cat", return_tensors=False, num_return_sequences=1) == translation("katze")


def test_clean_up_tokenization_spaces(translator: Any) -> None:
    assert translator("a cat stop") == translation("ein katze .")
    assert translator("a cat stop", clean_up_tokenization_spaces=True) == translation("ein katze.")


def test_truncation(model: Any) -> None:
    translator = translate_with(model)
    translator.tokenizer.model_max_length = 3
    assert translator("a dog runs") == translation("ein hund rennt")
    assert translator("a dog runs", truncation=True) == translation("ein hund")


@pytest.mark.parametrize("batch_size", [2, 4, 100])
def test_batches_translate_as_single_sentences(translator: Any, batch_size: int) -> None:
    sizes = []
    handle = translator.model.get_encoder().register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    try:
        answers = translator(SENTENCES, batch_size=batch_size)
    finally:
        handle.remove()
    assert answers == [translator(sentence)[0] for sentence in SENTENCES]
    assert sizes[0] == min(batch_size, len(SENTENCES)) and sum(sizes) == len(SENTENCES)


def test_batches_need_a_pad_token(model: Any) -> None:
    translator = translate_with(model)
    translator.tokenizer.pad_token = None
    with pytest.raises(ValueError, match="tokenizer without pad_token cannot do batching"):
        translator(SENTENCES, batch_size=2)
    assert translator(SENTENCES) == translation(*GERMAN)


def test_an_unknown_keyword_is_refused_by_generate(translator: Any) -> None:
    with pytest.raises(ValueError, match=r"not used by the model: \['num_beems'\]"):
        translator("a dog", num_beems=2)


def test_a_score_dictionary_of_generate_is_unwrapped(translator: Any) -> None:
    assert translator("a dog", return_dict_in_generate=True, output_scores=True) == translation("ein hund")


def test_assistant_and_tokenizer_reach_generate(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = spy_on_generate(model, monkeypatch)
    assistant = build_model()
    translator = translate_with(model, assistant_model=assistant, num_beams=1)
    assert translator("a dog runs") == translation("ein hund rennt")
    assert seen["assistant_model"] is assistant
    # generate(stop_strings=...) cannot do without it.
    assert seen["tokenizer"] is translator.tokenizer


def test_token_type_ids_stay_behind(model: Any) -> None:
    translator = translate_with(model)
    translator.tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    assert "token_type_ids" in translator.tokenizer("cat")
    assert translator(["cat", "a dog"], batch_size=2) == translation("katze", "ein hund")


def test_local_files_only_is_not_a_generation_setting(folder: str) -> None:
    assert pipeline("translation", model=folder, local_files_only=True)("cat") == translation("katze")


# ---- Languages ---------------------------------------------------------------------------------------------------


def test_languages_reach_a_multilingual_tokenizer(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = spy_on_generate(model, monkeypatch)
    tokenizer = build_tokenizer(MultilingualTokenizer)
    tokenizer.asked.clear()
    translator = pipeline("translation", model=model, tokenizer=tokenizer, src_lang="die")
    answers = translator(["a dog", "cat"], tgt_lang="mann", batch_size=2)
    # The target language is the first word, as the tokenizer asked.
    assert [answer["translation_text"].split()[0] for answer in answers] == ["mann", "mann"]
    assert seen["forced_bos_token_id"] == tokenizer.convert_tokens_to_ids("mann")
    assert translator("a dog", tgt_lang="mann")[0] == answers[0]
    forced = translator("a dog", tgt_lang="mann", generation_config=GenerationConfig(num_beams=1))
    assert forced[0]["translation_text"].startswith("mann")
    translator("cat", src_lang="a")
    assert tokenizer.asked == [("die", "mann")] * 4 + [("a", None)]


def test_languages_come_from_the_task(model: Any) -> None:
    tokenizer = build_tokenizer(MultilingualTokenizer)
    tokenizer.asked.clear()
    translator = pipeline("translation_die_to_mann", model=model, tokenizer=tokenizer)
    translator("cat")
    translator("cat", tgt_lang="singt")
    fixed = pipeline("translation_die_to_mann", model=model, tokenizer=tokenizer, src_lang="a")
    fixed("cat")
    assert tokenizer.asked == [("die", "mann"), ("die", "singt"), ("a", "mann")]


def test_languages_mean_nothing_to_other_tokenizers(translator: Any) -> None:
    assert translator("cat", src_lang="en", tgt_lang="de") == translation("katze")


def test_a_language_whose_tag_the_vocabulary_has_is_put_in_front(model: Any) -> None:
    tokenizer = build_tokenizer()
    plain = tokenizer("a dog")["input_ids"]
    add_language_tags(tokenizer, ["de", "fr"])
    de, fr = tokenizer.convert_tokens_to_ids(["<2de>", "<2fr>"])
    translator = pipeline("translation", model=model, tokenizer=tokenizer)
    assert translator.preprocess("a dog", tgt_lang="de")["input_ids"].tolist() == [[de, *plain]]
    # Without a language it is the sender's own business, who may write the tag.
    assert translator.preprocess("a dog")["input_ids"].tolist() == [plain]
    assert translator.preprocess("<2fr> a dog")["input_ids"].tolist() == [[fr, *plain]]
    by_task = pipeline("translation_en_to_fr", model=model, tokenizer=tokenizer)
    assert by_task.preprocess("a dog")["input_ids"].tolist() == [[fr, *plain]]
    assert by_task.preprocess("a dog", tgt_lang="de")["input_ids"].tolist() == [[de, *plain]]
    with pytest.raises(ValueError, match="no tag for the target language 'es', only for de, fr"):
        translator("a dog", tgt_lang="es")


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


def test_a_short_model_stops_at_its_last_position() -> None:
    assert endless_length(translate_with(build_model(max_position_embeddings=20))) == 20


@pytest.mark.parametrize(
    ("of_model", "of_constructor", "of_call", "length"),
    [
        ({"max_length": 40}, {}, {}, 40),
        ({"max_length": 20}, {}, {}, 20),
        ({"max_new_tokens": 40}, {}, {}, 41),
        ({"max_length": 40}, {}, {"max_new_tokens": 50}, 51),
        ({"max_length": 40}, {"max_new_tokens": 50}, {}, 51),
        ({"max_new_tokens": 40}, {}, {"max_length": 10}, 10),
        ({"max_new_tokens": 40}, {"max_length": 10}, {}, 10),
        ({}, {"max_new_tokens": 40}, {"max_length": 10}, 10),
        ({}, {"max_length": 40}, {"max_new_tokens": 10}, 11),
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


def test_the_beams_of_the_model_are_kept(model: Any) -> None:
    model.generation_config.num_beams = 2
    translator = translate_with(model)
    assert len(translator("a dog", num_return_sequences=2)) == 2
    with pytest.raises(ValueError, match="num_return_sequences"):
        translator("a dog", num_return_sequences=3)
    assert len(translator("a dog", num_return_sequences=3, num_beams=3)) == 3


def test_a_generation_config_of_the_call_wins(model: Any) -> None:
    model.generation_config.num_beams = 2
    translator = translate_with(model, num_return_sequences=2)
    three = GenerationConfig(num_beams=3, num_return_sequences=3)
    before = three.to_dict()
    assert len(translator("a dog", generation_config=three)) == 3
    assert three.to_dict() == before
    assert len(translator("a dog")) == 2


# ---- The model ---------------------------------------------------------------------------------------------------


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
def test_a_folder_without_a_tokenizer_is_named(folder: str, tmp_path: Path, missing: list[str]) -> None:
    for file in Path(folder).iterdir():
        if file.name not in missing:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ValueError) as error:
        pipeline("translation", model=str(tmp_path))
    assert str(error.value).startswith(f"There is no tokenizer for {tmp_path}: ") and "\n" not in str(error.value)


def test_a_model_object_without_a_tokenizer_is_named(model: Any) -> None:
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


# ---- The task ----------------------------------------------------------------------------------------------------


def test_the_task_with_languages(folder: str) -> None:
    translator = pipeline("translation_en_to_de", model=folder)
    assert isinstance(translator, VaswaniTranslationPipeline)
    assert translator.task == "translation_en_to_de"
    assert translator("a dog") == translation("ein hund")


@pytest.mark.parametrize("task", ["translation_bogus", "translation_en_de", "translation_en_to_", "translation_to"])
def test_wrong_tasks_are_unknown(folder: str, task: str) -> None:
    with pytest.raises(KeyError, match=f"Unknown task {task}"):
        pipeline(task, model=folder)


def test_the_other_tasks_are_untouched(folder: str) -> None:
    assert {"text-generation", "fill-mask", "translation", "ner"} <= set(pipelines.get_supported_tasks())
    assert pipelines.check_task("sentiment-analysis")[0] == "text-classification"
    assert pipelines.check_task("text-generation")[1]["impl"] is not VaswaniTranslationPipeline
    with pytest.raises(KeyError, match="summarization has been removed"):
        pipeline("summarization", model=folder)


def test_registering_again_changes_nothing() -> None:
    registry = pipelines.PIPELINE_REGISTRY
    before = dict(registry.supported_tasks), registry.task_aliases, dict(registry.task_aliases)
    hf_vaswani._register_translation_task()
    importlib.reload(hf_vaswani)
    assert (dict(registry.supported_tasks), registry.task_aliases, dict(registry.task_aliases)) == before
    assert registry.task_aliases is before[1]


def test_a_task_that_transformers_has_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = pipelines.PIPELINE_REGISTRY
    theirs = {"impl": object, "pt": ()}
    monkeypatch.setitem(registry.supported_tasks, "translation", theirs)
    monkeypatch.setattr(registry, "task_aliases", {})
    monkeypatch.delattr(pipelines, "REMOVED_TASKS", raising=False)
    hf_vaswani._register_translation_task()
    assert registry.supported_tasks["translation"] is theirs and registry.task_aliases == {}


PLUGIN_FIRST = "import hf_vaswani; from transformers import pipeline"
TRANSFORMERS_FIRST = "from transformers import pipeline; import hf_vaswani"


@pytest.mark.parametrize("imports", [PLUGIN_FIRST, TRANSFORMERS_FIRST])
def test_the_order_of_the_imports_does_not_matter(folder: str, imports: str) -> None:
    # transformers itself brings accelerate and yaml where they are installed.
    program = f"""
import sys
{imports}
heavy = {{"datasets", "evaluate", "sacrebleu", "matplotlib", "jsonargparse", "ctranslate2"}}
assert heavy.isdisjoint(sys.modules), heavy & set(sys.modules)
assert pipeline("translation", model={folder!r})("a dog") == [{{"translation_text": "ein hund"}}]
assert pipeline("translation_en_to_de", model={folder!r}).task == "translation_en_to_de"
"""
    root = str(Path(hf_vaswani.__file__).parents[1])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": root}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_the_saved_folder_is_plain(folder: str) -> None:
    # The tests above stand on this: the model and tokenizer come back through the Auto classes alone.
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("a dog").input_ids == [FIRST_SOURCE, FIRST_SOURCE + 2, EOS]
    assert isinstance(AutoModelForSeq2SeqLM.from_pretrained(folder), MarianMTModel)
