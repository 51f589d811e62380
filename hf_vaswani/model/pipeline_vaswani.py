"""Text in, translation out: the `translation` pipeline, for every sequence-to-sequence model of transformers.

The answers have the shapes that they had in transformers 4.
"""

import copy
import os
import re
import threading
from collections import Counter
from collections.abc import Generator, Iterator, Sequence, Sized
from contextlib import contextmanager
from types import GeneratorType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import BatchEncoding, GenerationConfig, Pipeline, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pipelines.pt_utils import PipelineIterator

from .sentences_vaswani import join_sentences, sentence_spans

# Held by the thread that uses a tokenizer, whose calls change its settings, or that changes the mode of a model. One
# for all pipelines, because pipelines may share both; translating itself needs no lock.
LOCK = threading.Lock()
if hasattr(os, "register_at_fork"):
    # A process that is forked, to read a dataset, gets no tokenizer that another thread is in the middle of.
    os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)

# Of each model that translates: how many threads use it, and which of its modules go back to training after that.
USERS: Counter[torch.nn.Module] = Counter()
IN_TRAINING: dict[torch.nn.Module, list[torch.nn.Module]] = {}


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Dropout is off as long as a thread is in here, and the last one leaves the model as it was."""
    with LOCK:
        USERS[model] += 1
        IN_TRAINING.setdefault(model, []).extend([module for module in model.modules() if module.training])
        model.eval()
    try:
        yield
    finally:
        with LOCK:
            USERS[model] -= 1
            if not USERS[model]:
                del USERS[model]
                for module in IN_TRAINING.pop(model):
                    module.training = True


class VaswaniTranslationPipeline(Pipeline):
    """Translates sentences with any encoder-decoder model that can generate.

    Beam search with 4 beams and at most 256 new tokens, unless the model's generation config or the caller says
    otherwise. The model translates in evaluation mode and is handed back in the mode that it came in. Any number of
    threads may translate with one pipeline at a time; but beside calls with `stop_strings`, for which `generate` uses
    the tokenizer by itself, all should truncate alike.

    Args:
        model (`PreTrainedModel`): An encoder-decoder model.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer; it needs a pad token as soon as `batch_size` is above 1.
        task (`str`, *optional*): `"translation"`, or `"translation_xx_to_yy"`, which names the two languages as well.
        split_sentences (`bool`, *optional*, defaults to `False`): As in [`~VaswaniTranslationPipeline.__call__`], and
            the default of every call.
        kwargs: What [`Pipeline`] takes (`device`, `batch_size`, `num_workers`, ...), and everything that
            [`~VaswaniTranslationPipeline.__call__`] takes, as the default of every call.

    Raises:
        ValueError: If there is no tokenizer, the model is not an encoder-decoder, was not trained for the languages in
            the name of the task, or lacks weights in the folder that it was loaded from by its name.

    Example:

    ```python
    >>> translator = pipeline("translation", model="me/my-model")
    >>> translator("A dog runs.")
    [{'translation_text': 'Ein Hund rennt.'}]
    ```
    """

    # The annotations of transformers leave out what the Auto classes return.
    model: Any
    tokenizer: Any

    # None and not True: what is missing then reaches __init__, which says so in one sentence.
    _load_tokenizer = None
    _load_processor = _load_image_processor = _load_video_processor = False
    _load_feature_extractor = False
    _pipeline_calls_generate = True
    # Fills in only what neither the model's generation config nor the caller sets.
    _default_generation_config = GenerationConfig(num_beams=4, max_new_tokens=256)

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        task: str = "",
        split_sentences: bool = False,
        **kwargs: Any,
    ) -> None:
        if tokenizer is None:
            raise ValueError(
                f"There is no tokenizer for {model.name_or_path or type(model).__name__}: pass `tokenizer=`, or let "
                "AutoTokenizer.from_pretrained say which file or package is missing."
            )
        if getattr(model, "loading_error", None):
            raise ValueError(f"{model.loading_error} To translate all the same, set its loading_error to None.")
        if not getattr(model.config, "is_encoder_decoder", False):
            raise ValueError(f"Translation needs an encoder-decoder model, and {type(model).__name__} is not one.")
        # T5 keeps settings for each pair of languages in its config, the text before every sentence among them.
        task_settings = dict((getattr(model.config, "task_specific_params", None) or {}).get(task, {}))
        prefix = task_settings.pop("prefix", None)
        defaults = copy.deepcopy(self._default_generation_config)
        positions = getattr(model.config, "max_position_embeddings", None)
        offset = getattr(model.generation_config, "max_length_offset", None)
        if "max_length" in task_settings or offset is not None:
            # The model knows better: a limit for this pair of languages, or one for each sentence.
            defaults.max_new_tokens = None
        elif positions is not None:
            # A short model would run out of positions before it has made 256 tokens.
            defaults.max_new_tokens = min(defaults.max_new_tokens, positions - 1)
        defaults.update(**task_settings)
        self._default_generation_config = defaults
        words = task.split("_")
        self._task_languages = (words[1], words[3]) if len(words) == 4 else (None, None)
        self.split_sentences = split_sentences
        # pipeline() has used it by now and hands it on all the same; generate() would refuse it.
        kwargs.pop("local_files_only", None)
        super().__init__(model=model, task=task, **{**kwargs, "tokenizer": tokenizer})
        if prefix is not None:
            self.prefix = prefix
        self._check_direction(*(self._preprocess_params.get(name) for name in ("src_lang", "tgt_lang")))

    def _sanitize_parameters(
        self,
        return_tensors: bool | None = None,
        return_text: bool | None = None,
        clean_up_tokenization_spaces: bool | None = None,
        truncation: bool | str | None = None,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        **generate_kwargs: Any,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Sorts keywords into those of `preprocess`, of `_forward` and of `postprocess`.

        `return_text` is taken and dropped: text is what comes back unless `return_tensors` is true.
        """
        before = {"truncation": truncation, "src_lang": src_lang, "tgt_lang": tgt_lang}
        after = {"return_tensors": return_tensors, "clean_up_tokenization_spaces": clean_up_tokenization_spaces}
        # The base class keeps these two for itself.
        if self.assistant_model is not None:
            generate_kwargs.setdefault("assistant_model", self.assistant_model)
        if self.assistant_tokenizer is not None:
            generate_kwargs.setdefault("assistant_tokenizer", self.assistant_tokenizer)
        # Only what was given: a keyword that a call leaves out keeps the value from the constructor.
        before = {name: value for name, value in before.items() if value is not None}
        after = {name: value for name, value in after.items() if value is not None}
        return before, generate_kwargs, after

    def __call__(
        self,
        inputs: str | Sequence[str] | Sequence[list[Any]] | Generator[str, None, None] | Dataset[str],
        *args: Any,
        split_sentences: bool | None = None,
        num_workers: int | None = None,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Translates one text, or many. A text is one sentence for the model, unless it is split.

        Args:
            inputs (`str`, `list[str]`, `list` of such lists, generator of `str` or `torch.utils.data.Dataset` of
                `str`): The texts; a column of a dataset (`dataset["en"]`) counts as a list. Lists may be nested to any
                depth, as long as one has only texts or only lists in it; transformers 4 translated but the first text
                of each inner list.
            args: Ignored, with a warning, as in every pipeline.
            split_sentences (`bool`, *optional*, defaults to `False`): Translate each sentence of a text on its own
                (see [`sentence_spans`]) and join the translations, the best with the best, the second with the second:
                by the text's own white space where that has a newline, else by one space, or by none in a script that
                has none. A language tag that a text begins with, as `<2de>`, is put in front of all its sentences.
            num_workers (`int`, *optional*, defaults to 0): Processes that tokenize, or, of a dataset whose texts are
                split, that read it.
            batch_size (`int`, *optional*, defaults to 1): Sentences that the model translates at a time. Where texts
                are split, these are of all texts of a list, but of one text of a generator or a dataset.
            return_tensors (`bool`, *optional*): Give token ids back and not text.
            return_text (`bool`, *optional*): Text is the default; `return_tensors=True` wins over this one.
            clean_up_tokenization_spaces (`bool`, *optional*, defaults to `False`): Remove spaces before punctuation.
            truncation (`bool` or `str`, *optional*): Cut sentences that are longer than the tokenizer's
                `model_max_length` or the model's `max_position_embeddings`; without it they reach the model as they
                are.
            src_lang (`str`, *optional*): Source language, for the multilingual tokenizers that need one.
            tgt_lang (`str`, *optional*): Target language, likewise, and for the tokenizers whose vocabulary has a tag
                for each target language, as `<2de>`: it is put in front of the sentence. A model whose config names
                its languages (`language_pairs`) refuses others.
            kwargs: Everything else goes to `model.generate`: `num_beams`, `num_return_sequences`,
                `generation_config`, ...

        Returns:
            `list[dict]` with the key `translation_text` (`str`), or `translation_token_ids` (`torch.LongTensor` of
            shape `(target,)`): for one text, its translations; for a list, one dict a text, or one list of dicts a
            text if there are several translations of each, nested as the lists are. A generator or a dataset gives an
            iterator, which translates as it is read, of one list of dicts a text. A text of white space alone is
            translated as an empty one.

        Raises:
            TypeError: If `inputs` or one of the texts is something else.
            ValueError: If a keyword is known neither here nor to `generate`, if sentences cannot be batched because
                the tokenizer has no pad token, if a text has half of a surrogate pair, if the model was not trained
                for a language, if its vocabulary has tags for target languages and neither the call nor the text says
                which, or if token ids are asked for of texts that are split.
        """
        kwargs |= {"num_workers": num_workers, "batch_size": batch_size}
        translate = super().__call__
        if self.split_sentences if split_sentences is None else split_sentences:
            translate = self._translate_sentences
        if isinstance(inputs, Sequence) and not isinstance(inputs, (str, bytes, tuple)):
            items = list(inputs)
            texts = list(_flat(items))
            translations = translate(texts, *args, **kwargs) if texts else []
            single = all(len(candidates) == 1 for candidates in translations)
            return _nested_as(items, iter([found[0] for found in translations] if single else translations))
        if isinstance(inputs, Dataset) and isinstance(inputs, Sized) and len(inputs) == 0:
            return []
        if not isinstance(inputs, (GeneratorType, Dataset)):
            _require_text(inputs, "the input", ", a list of str, or a generator or torch Dataset of str")
        return translate(inputs, *args, **kwargs)

    def _translate_sentences(self, inputs: Any, *args: Any, num_workers: int | None = None, **kwargs: Any) -> Any:
        """What the base class's `__call__` does, for texts that are split."""
        after = self._sanitize_parameters(**kwargs)[2]
        if {**self._postprocess_params, **after}.get("return_tensors"):
            raise ValueError("The translations of sentences are joined as text: there are no return_tensors of them.")
        if isinstance(inputs, str):
            return self._translate_sentences([inputs], *args, num_workers=num_workers, **kwargs)[0]
        if isinstance(inputs, list):
            texts = [self._without_tag(text) for text in inputs]
            spans_of = [sentence_spans(text) for _, text in texts]
            sentences = [
                tag + text[start:end]
                for (tag, text), spans in zip(texts, spans_of, strict=True)
                for start, end in spans
            ]
            found = iter(super().__call__(sentences, *args, num_workers=num_workers, **kwargs))
            return [
                [
                    {
                        "translation_text": join_sentences(
                            text, spans, [candidate["translation_text"] for candidate in of_rank]
                        )
                    }
                    for of_rank in zip(*(next(found) for _ in spans), strict=True)
                ]
                for (_, text), spans in zip(texts, spans_of, strict=True)
            ]
        if isinstance(inputs, Dataset):
            workers = self._num_workers if num_workers is None else num_workers
            inputs = DataLoader(inputs, batch_size=None, num_workers=workers or 0)

        def translate(text: Any) -> Any:
            _require_text(text, "a sentence")
            return self._translate_sentences(text, *args, num_workers=0, **kwargs)

        return PipelineIterator(inputs, translate, {})

    def _without_tag(self, text: str) -> tuple[str, str]:
        """The language tag that a text begins with, and a space, or nothing; and the rest of it."""
        with LOCK:
            tags = self._language_tags().values()
        tag = next((tag for tag in tags if text.lstrip().startswith(tag)), None)
        return ("", text) if tag is None else (f"{tag} ", text.lstrip().removeprefix(tag))

    # The base class annotates each parameter of these three steps as a dict.
    def preprocess(
        self,
        input_: str,
        truncation: bool | str = False,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
    ) -> BatchEncoding:
        """Turns one sentence into the model's inputs, a batch of 1.

        Args:
            input_ (`str`): The sentence.
            truncation (`bool` or `str`, *optional*, defaults to `False`): As the tokenizer takes it.
            src_lang (`str`, *optional*): Source language; the one in the name of the task if there is none.
            tgt_lang (`str`, *optional*): Target language, likewise.

        Returns:
            `BatchEncoding`: `input_ids` and `attention_mask` of shape `(1, source)`, `is_blank` of shape `(1, 1)`,
            which is 1 for a sentence without a word, and for a multilingual tokenizer the settings of `generate` that
            choose the target language.

        Raises:
            TypeError: If the sentence is not a `str`.
            ValueError: If the model was not trained for the languages, or is not told into which to translate.
        """
        _require_text(input_, "a sentence")
        source_language, target_language = self._check_direction(src_lang, tgt_lang)
        tag, text = self._without_tag(input_)
        is_blank = not text.strip()
        settings: dict[str, Any] = {"return_tensors": "pt", "truncation": truncation}
        positions = getattr(self.model.config, "max_position_embeddings", None)
        if truncation and positions is not None and positions < self.tokenizer.model_max_length:
            settings["max_length"] = positions
        with LOCK:
            front = "" if is_blank else self._language_tag(target_language, tag)
            sentence = (self.prefix or "") + front + input_
            if hasattr(self.tokenizer, "_build_translation_inputs"):
                encoding = self.tokenizer._build_translation_inputs(
                    sentence, src_lang=source_language, tgt_lang=target_language, **settings
                )
            else:
                encoding = self.tokenizer(sentence, **settings)
        # Some tokenizers make it for encoders of their own kind; generate() does not take it.
        encoding.pop("token_type_ids", None)
        encoding["is_blank"] = torch.tensor([[int(is_blank)]])
        return encoding

    def _check_direction(self, src_lang: str | None, tgt_lang: str | None) -> tuple[str | None, str | None]:
        """Source and target language, from the name of the task if not given; refuses what the model cannot do."""
        source, target = src_lang or self._task_languages[0], tgt_lang or self._task_languages[1]
        pairs = getattr(self.model.config, "language_pairs", None)
        if pairs and not any(source in (None, pair[0]) and target in (None, pair[1]) for pair in pairs):
            asked = " ".join(
                f"{word} {language!r}" for word, language in (("from", source), ("to", target)) if language
            )
            known = ", ".join("-".join(pair) for pair in pairs)
            raise ValueError(f"The model does not translate {asked}: its config says that it was trained for {known}.")
        return source, target

    def _language_tag(self, language: str | None, tag: str) -> str:
        """
        The tag of the target language and a space, to go in front of a sentence, where the vocabulary has tags.

        Args:
            language (`str`, *optional*): the target language. Without one it is that of the model, if its config names
                its languages and has but one of them.
            tag (`str`): the tag that the sentence has already and a space, or nothing.
        """
        tags = self._language_tags()
        known = {pair[1] for pair in getattr(self.model.config, "language_pairs", None) or ()} & tags.keys()
        if language is None and not tag and known:
            if len(known) > 1:
                raise ValueError(
                    f"The model translates into {', '.join(sorted(known))}: say into which by tgt_lang, or put one of "
                    f"{', '.join(tags[each] for each in sorted(known))} in front of the text."
                )
            (language,) = known
        if language is None or not tags:
            return ""
        if language not in tags:
            raise ValueError(f"There is no tag for the target language {language!r}, only for {', '.join(tags)}.")
        if tag and tag.strip() != tags[language]:
            raise ValueError(f"The target language is {language!r}, but the text begins with {tag.strip()}.")
        return "" if tag else f"{tags[language]} "

    def _language_tags(self) -> dict[str, str]:
        """The tags that the vocabulary has, by their languages."""
        get_added_vocab = getattr(self.tokenizer, "get_added_vocab", dict)
        return {match[1]: tag for tag in get_added_vocab() if (match := re.fullmatch(r"<2(.+)>", tag))}

    def _forward(self, model_inputs: dict[str, Any], **generate_kwargs: Any) -> dict[str, torch.Tensor]:
        """Translates one batch.

        Returns:
            `dict` with `output_ids` (`torch.LongTensor` of shape `(batch, candidates, target)`): of a sentence without
            a word nothing but padding, because a model would invent something.
        """
        is_blank = model_inputs["is_blank"][:, 0].bool()
        model_inputs = {name: value for name, value in model_inputs.items() if name != "is_blank"}
        tensors = {name: value for name, value in model_inputs.items() if isinstance(value, torch.Tensor)}
        # What the tokenizer adds for the target language; batching made a list of equal items of it.
        language = {
            name: value[0] if isinstance(value, list) else value
            for name, value in model_inputs.items()
            if name not in tensors
        }
        settings = self._prepare_generate_kwargs(self._with_one_length_limit(generate_kwargs), **language)
        # Stop strings and assisted decoding need the tokenizer.
        settings.setdefault("tokenizer", self.tokenizer)

        if is_blank.all():
            # Somebody may be waiting for it.
            if settings.get("streamer") is not None:
                settings["streamer"].end()
            config = settings.get("generation_config") or self.model.generation_config
            candidates = settings.get("num_return_sequences") or config.num_return_sequences or 1
            generated = is_blank.new_zeros(0, candidates, 1, dtype=torch.long)
        else:
            with evaluation_mode(self.model):
                generated = self.model.generate(**{n: t[~is_blank] for n, t in tensors.items()}, **settings)
            generated = getattr(generated, "sequences", generated)  # [sentences * candidates, target]
            generated = generated.reshape(int((~is_blank).sum()), -1, generated.shape[-1])
        padding = next(
            each for each in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0) if each is not None
        )
        output_ids = generated.new_full((len(is_blank), *generated.shape[1:]), padding)
        output_ids[~is_blank] = generated
        return {"output_ids": output_ids}  # [batch, candidates, target]

    def _with_one_length_limit(self, generate_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Lets the caller's length limit replace the model's, be it a `max_length` or a `max_new_tokens`.

        On their own they would meet in `generate`, where `max_new_tokens` wins, whoever set it, with a warning.
        """
        # A generation config given to the call replaces what the constructor was given.
        constructor = {} if "generation_config" in generate_kwargs else self._generate_kwargs
        for keywords in (generate_kwargs, constructor):
            limits = {name: keywords.get(name) for name in ("max_length", "max_new_tokens")}
            if any(limit is not None for limit in limits.values()):
                return {**generate_kwargs, **limits}
        return generate_kwargs

    def postprocess(
        self,
        model_outputs: dict[str, torch.Tensor],
        return_tensors: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> list[dict[str, Any]]:
        """Turns the token ids of one sentence into its answer.

        Args:
            model_outputs (`dict`): `output_ids` of shape `(1, candidates, target)`.
            return_tensors (`bool`, *optional*, defaults to `False`): Keep the ids.
            clean_up_tokenization_spaces (`bool`, *optional*, defaults to `False`): Remove spaces before punctuation.

        Returns:
            `list[dict]`: One dict a candidate, the best first.
        """
        candidates = model_outputs["output_ids"][0]
        if return_tensors:
            return [{"translation_token_ids": ids} for ids in candidates]
        with LOCK:
            texts = self.tokenizer.batch_decode(
                candidates,
                skip_special_tokens=True,
                clean_up_tokenization_spaces=clean_up_tokenization_spaces,
            )
        return [{"translation_text": text} for text in texts]


def _require_text(sentence: object, where: str, alternatives: str = "") -> None:
    """Raises the `TypeError` of this module unless `sentence` is a `str`, and a `ValueError` if it is no text."""
    if not isinstance(sentence, str):
        raise TypeError(f"Translation takes a str{alternatives}, but {where} is a {type(sentence)}.")
    try:
        sentence.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"Translation takes text, but {where} has half of a surrogate pair as character {error.start + 1}."
        ) from error


def _flat(items: list[Any], name: str = "the list") -> Iterator[str]:
    """The texts of a list, or of lists within lists; raises a TypeError where there is something else."""
    nested = _is_nested(items)
    for position, item in enumerate(items):
        where = f"item {position} of {name}"
        if nested:
            yield from _flat(item, where)
        else:
            _require_text(item, where)
            yield item


def _nested_as(items: list[Any], translations: Iterator[Any]) -> list[Any]:
    """The translations of the texts of a list, in lists that are nested like it."""
    if _is_nested(items):
        return [_nested_as(item, translations) for item in items]
    return [next(translations) for _ in items]


def _is_nested(items: list[Any]) -> bool:
    return bool(items) and all(isinstance(item, list) for item in items)
