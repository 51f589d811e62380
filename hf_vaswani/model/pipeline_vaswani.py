"""The pipelines from text to text, for every sequence-to-sequence model, with transformers 4's inputs and outputs."""

import copy
from collections.abc import Callable, Generator, Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from types import GeneratorType
from typing import Any, ClassVar

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import GenerationConfig, Pipeline, PreTrainedModel, PreTrainedTokenizerBase

from .sentences_vaswani import (
    LOCK,
    MIN_LONGEST,
    LanguageTags,
    Parts,
    batch_limits,
    cut,
    evaluation_mode,
    kept,
    length_groups,
    longest_source,
    without_repetition,
)


@dataclass
class Passage:
    """A text on its way through a pipeline."""

    parts: Parts  # what is translated at a time
    kept: list[str | None]  # for each part the text that stands for its translation, or None if the model reads it
    # The tokens of each part that is read; then those of the translations of all, of shape `(candidates, target)`.
    ids: list[Any] = field(default_factory=list)
    # Settings of `generate` by which a multilingual tokenizer chooses the target language.
    language: dict[str, Any] = field(default_factory=dict)


class VaswaniText2TextGenerationPipeline(Pipeline):
    """
    Turns text into text with any encoder-decoder model that can generate. [`VaswaniTranslationPipeline`] and
    [`VaswaniSummarizationPipeline`] do the same, and name their answers differently.

    The search has 4 beams and stops after 256 new tokens, unless the model's generation config or the caller sets
    these. Several threads may use one pipeline; but with `stop_strings`, for which `generate` calls the tokenizer
    itself, they should all pass the same `truncation`. An engine, a shortlist, markup and `autocast="auto"` need the
    package `hf_vaswani`.

    Args:
        model ([`PreTrainedModel`]): an encoder-decoder model.
        tokenizer ([`PreTrainedTokenizerBase`]): its tokenizer, which needs a pad token if `batch_size` is above 1.
        task (`str`, *optional*): name of the task, whose settings and prefix are taken from `task_specific_params` of
            the config, if it has them. `"translation_xx_to_yy"` sets the two languages as well.
        engine (`str`, *optional*, defaults to `"torch"`): what computes: also `"ctranslate2"`, or `"auto"` for it if
            it can search as a call says. Both need a Vaswani model with the weights that it was loaded with.
        compute_type (`str`, *optional*, defaults to `"float32"`): number format in which CTranslate2 computes: also
            `"int8"`, `"int8_float32"`, `"bfloat16"`, or `"auto"` for the fastest of the machine.
        approximate (`bool`, *optional*): let CTranslate2 search by the settings that come closest to those of a call.
        autocast (`str`, *optional*): `"bfloat16"` for products in bfloat16 by torch, or `"auto"` where that is faster.
        shortlist (`bool`, *optional*): search among the likely entries of the vocabulary alone, by the shortlist that
            `hf-vaswani shortlist` has written beside the weights.
        markup (`str`, *optional*): default of every call.
        kwargs: arguments of [`Pipeline`] (`device`, `batch_size`, `num_workers`, ...), and defaults for the arguments
            of [`~VaswaniText2TextGenerationPipeline.__call__`].

    Raises:
        ValueError: if there is no tokenizer, the model is not an encoder-decoder, was not trained for the languages in
            the name of the task, or was loaded from a folder with missing weights.
    """

    # Prefix of the keys of an answer, as in `generated_text`.
    return_name: ClassVar[str] = "generated"
    # True for a translator: the translations of its pieces make that of a text, and numbers stay as they are.
    translates: ClassVar[bool] = False
    # transformers' annotations do not cover the classes that the Auto classes return.
    model: Any
    tokenizer: Any
    _tags: LanguageTags | None = None
    # Returns what does not travel with a model, by its name. The package sets it; a copy on the Hub is without.
    at_home: ClassVar[Callable[..., Any] | None] = None
    # Returns the limits of a batch, from the model, its beams and the usual ones. The package sets it, too.
    limits: Callable[..., tuple[Any, ...]] = staticmethod(batch_limits)

    # None, not True: a missing tokenizer then reaches __init__, which reports it in one sentence.
    _load_tokenizer = None
    _load_processor = _load_image_processor = _load_video_processor = False
    _load_feature_extractor = False
    _pipeline_calls_generate = True
    # Applies where neither the model's generation config nor the caller sets a value.
    _default_generation_config = GenerationConfig(num_beams=4, max_new_tokens=256)

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        task: str = "",
        engine: str = "torch",
        compute_type: str | None = None,
        approximate: bool = False,
        autocast: str | None = None,
        shortlist: bool = False,
        markup: str | None = None,
        **kwargs: Any,
    ) -> None:
        if tokenizer is None:
            raise ValueError(
                f"There is no tokenizer for {model.name_or_path or type(model).__name__}: pass `tokenizer=`, or call "
                "AutoTokenizer.from_pretrained to see which file or package is missing."
            )
        if getattr(model, "loading_error", None):
            raise ValueError(f"{model.loading_error} To translate anyway, set the model's loading_error to None.")
        if name := find_non_finite(model):
            raise ValueError(f"The weights of {model.name_or_path} have non-finite values in {name}.")
        if not getattr(model.config, "is_encoder_decoder", False):
            raise ValueError(f"The pipeline needs an encoder-decoder model, and {type(model).__name__} is not one.")
        # T5's config has settings for each pair of languages, among them a prefix for the sentences.
        task_settings = dict((getattr(model.config, "task_specific_params", None) or {}).get(task, {}))
        prefix = task_settings.pop("prefix", None)
        defaults = copy.deepcopy(self._default_generation_config)
        positions = getattr(model.config, "max_position_embeddings", None)
        offset = getattr(model.generation_config, "max_length_offset", None)
        if "max_length" in task_settings or offset is not None:
            # The model has its own limit, for this pair of languages or for each sentence.
            defaults.max_new_tokens = None
        elif positions is not None:
            # A model with few positions would run out of them before 256 tokens.
            defaults.max_new_tokens = min(defaults.max_new_tokens, positions - 1)
        defaults.update(**task_settings)
        self._default_generation_config = defaults
        words = task.split("_")
        self._task_languages = (words[1], words[3]) if len(words) == 4 else (None, None)
        # pipeline() passes it on after use, and generate() would refuse it.
        kwargs.pop("local_files_only", None)
        super().__init__(model=model, tokenizer=tokenizer, task=task, **kwargs)
        if prefix is not None:
            self.prefix = prefix
        self._check_direction(*(self._preprocess_params.get(name) for name in ("src_lang", "tgt_lang")))
        self.markup = markup
        # Generates in place of torch, or returns None if it cannot; and arguments of `generate()` for torch alone.
        self.engine: Callable[..., torch.Tensor | None] | None = None
        self.torch_settings: dict[str, Any] = {}
        self.product_dtype = torch.bfloat16 if autocast == "bfloat16" else None
        options = {"shortlist": shortlist, "engine": engine, "compute_type": compute_type, "approximate": approximate}
        options |= {"autocast": autocast, "markup": markup}
        of_torch = ("engine", "torch"), ("autocast", "bfloat16")
        asked = [item for item in options.items() if item[1] not in (None, False) and item not in of_torch]
        if asked:
            self._from_home("options", *asked[0])(self, **options)

    def _from_home(self, name: str, option: str, value: object) -> Callable[..., Any]:
        """Returns what the package has for an option, by its name."""
        if self.at_home is None:
            raise ValueError(f"{option}={value!r} needs the package hf_vaswani: install it, and import hf_vaswani.")
        return self.at_home(name)

    def _sanitize_parameters(
        self, stop_sequence: str | None = None, return_text: bool | None = None, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Sorts keywords by the step that takes them; where one is `None`, the constructor's value holds."""
        before, after = (
            {name: value for name in names if (value := kwargs.pop(name, None)) is not None}
            for names in (
                ("truncation", "src_lang", "tgt_lang", "longest_sentence", "split_sentences"),
                ("return_tensors", "clean_up_tokenization_spaces", "in_parts"),
            )
        )
        if (longest := before.get("longest_sentence", MIN_LONGEST)) < MIN_LONGEST:
            raise ValueError(f"longest_sentence must be at least {MIN_LONGEST} tokens, but it is {longest}.")
        # Ids and streams are those of one sentence.
        is_streamed = kwargs.get("streamer") is not None
        if is_streamed or "return_tensors" in after:
            before["is_whole"] = is_streamed or after["return_tensors"]
        if stop_sequence is not None:
            with LOCK:
                ids = self.tokenizer(stop_sequence, add_special_tokens=False).input_ids
            if len(ids) != 1:
                raise ValueError(
                    f"stop_sequence must be one token, but {stop_sequence!r} has {len(ids)}: use stop_strings."
                )
            kwargs["eos_token_id"] = ids[0]
        # The base class does not pass these two on.
        for name in ("assistant_model", "assistant_tokenizer"):
            if getattr(self, name) is not None:
                kwargs.setdefault(name, getattr(self, name))
        return before, kwargs, after

    def __call__(
        self,
        inputs: str | Sequence[str] | Sequence[list[Any]] | Generator[str, None, None] | Dataset[str],
        *args: Any,
        markup: str | None = None,
        num_workers: int | None = None,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """
        Translates one text or many, each as one sentence unless `split_sentences` is set.

        Args:
            inputs (`str`, list, generator or `torch.utils.data.Dataset` of `str`): the texts. A column of a dataset
                (`dataset["en"]`) counts as a list, and the lists of a list are translated one by one.
            markup (`str`, *optional*): `"html"` keeps tags, code, placeholders and URLs, and puts them where the
                attention says; `"html+attributes"` also `alt`; `"placeholders"`, as in split text, has no tags.
            num_workers (`int`, *optional*, defaults to 0): processes that tokenize; with markup they read a dataset.
            batch_size (`int`, *optional*, defaults to 1): texts at a time: fewer long sentences, and more short ones.
            split_sentences (`bool`, *optional*, defaults to `False`): translate each sentence of a text separately,
                with the language tag that the text begins with, and join the translations of the same rank.
            longest_sentence (`int`, *optional*): in tokens, by default [`longest_source`]. A longer one is translated
                in pieces of at most half as many, unless `truncation`, `return_tensors` or a `streamer` is set.
            return_tensors (`bool`, *optional*): return token ids instead of text, whatever `return_text` says.
            clean_up_tokenization_spaces (`bool`, *optional*, defaults to `False`): remove spaces before punctuation.
            truncation (`bool` or `str`, *optional*): truncate sentences that are longer than the tokenizer's
                `model_max_length` or the model's `max_position_embeddings`.
            src_lang, tgt_lang (`str`, *optional*): languages, of the `language_pairs` in the config if it has any, for
                multilingual tokenizers, or a target language for a vocabulary with a tag for each, as `<2de>`.
            stop_sequence (`str`, *optional*): text of one token that ends an answer, in place of `</s>`.
            kwargs: arguments of `model.generate`: `num_beams`, `num_return_sequences`, `generation_config`, ...

        Returns:
            `list[dict]` with the key `generated_text` (`str`), or `generated_token_ids` (`torch.LongTensor`,
            `(target,)`): of one text, its translations; of a list, one dict or list of several per text, nested like
            the input; of a generator or a dataset, an iterator over a list per text. Text without words stays.

        Raises:
            TypeError, ValueError: if a text is no valid `str`, nobody knows a keyword, the model was not trained for a
                language, or ids are to be returned of joined translations.
        """
        texts = list(inputs) if isinstance(inputs, Sequence) and not isinstance(inputs, (str, bytes, tuple)) else None
        loading = {"num_workers": num_workers, "batch_size": batch_size}
        if texts and all(isinstance(each, list) for each in texts):
            return [self(each, *args, markup=markup, **loading, **kwargs) for each in texts]
        markup = self.markup if markup is None else markup
        self._check_ids_are_whole(markup, **kwargs)
        translate = super().__call__
        if markup is not None or self.at_home is not None:
            translate = self._from_home("markup", "markup", markup)(self, markup, translate)
        if texts is not None:
            for position, text in enumerate(texts):
                require_text(text, f"item {position} of the list")
            found = translate(texts, *args, **loading, **kwargs) if texts else []
            return [each[0] for each in found] if all(len(each) == 1 for each in found) else found
        if isinstance(inputs, Dataset) and isinstance(inputs, Sized) and len(inputs) == 0:
            return []
        if not isinstance(inputs, (GeneratorType, Dataset)):
            require_text(inputs, "the input", ", a list of str, or a generator or torch Dataset of str")
        return translate(inputs, *args, **loading, **kwargs)

    def _check_ids_are_whole(self, markup: str | None, **kwargs: Any) -> None:
        """Raises a `ValueError` if a call asks for the ids of translations that are joined as text."""
        before, _, after = self._sanitize_parameters(**kwargs)
        before, after = self._preprocess_params | before, self._postprocess_params | after
        if after.get("return_tensors") and (markup is not None or before.get("split_sentences")):
            option = "split_sentences=True" if markup is None else f"markup={markup!r}"
            raise ValueError(f"return_tensors=True is not supported with {option}, which joins translations as text.")

    def kept(self, text: str) -> str | None:
        """Returns what stands for the answer to a text that the model does not read (see [`kept`]), or `None`."""
        return kept(text) if self.translates else None if text.strip() else ""

    @property
    def tags(self) -> LanguageTags:
        """The language tags of the tokenizer."""
        if self._tags is None or self._tags.tokenizer is not self.tokenizer:
            self._tags = LanguageTags(self.tokenizer, self.model.config)
        return self._tags

    def preprocess(
        self,
        input_: str,
        truncation: bool | str = False,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        longest_sentence: int | None = None,
        split_sentences: bool = False,
        is_whole: bool = False,
    ) -> dict[str, Any]:
        """Returns a text as a [`Passage`], cut and tokenized as a call says; `is_whole` leaves sentences uncut."""
        require_text(input_, "a sentence")
        source, target = self._check_direction(src_lang, tgt_lang)
        front, text = self.tags.split(input_)
        if self.kept(text) is None:
            front = (self.prefix or "") + self.tags.front(front, target) + front
        longest = None
        if self.translates and not truncation and not is_whole:
            longest = longest_sentence or longest_source([self.model], self.tokenizer)
            # A model with fewer positions has no room for pieces.
            longest = longest if longest >= MIN_LONGEST else None
        settings: dict[str, Any] = {"truncation": truncation, "verbose": longest is None}
        positions = getattr(self.model.config, "max_position_embeddings", None)
        if truncation and positions is not None and positions < self.tokenizer.model_max_length:
            settings["max_length"] = positions
        tokenize = getattr(self.tokenizer, "_build_translation_inputs", None)
        if tokenize is not None:
            settings |= {"src_lang": source, "tgt_lang": target, "return_tensors": None}

        # A sentence that fits is the one that was tokenized last.
        @lru_cache(maxsize=1)
        def encode(sentence: str) -> Any:
            with LOCK:
                return (tokenize or self.tokenizer)(sentence, **settings)

        parts = cut(front, text, encode, longest, split_sentences)
        if not self.translates and not split_sentences:
            parts = Parts(front, text, [(0, len(text))])
        passage = Passage(parts, [self.kept(text[start:end]) for start, end in parts.spans])
        for sentence, answer in zip(parts.sources, passage.kept, strict=True):
            if answer is None:
                encoding = encode(sentence)
                names = encoding.keys() - {"token_type_ids", *self.tokenizer.model_input_names}
                passage.language |= {name: encoding[name] for name in names}
                passage.ids.append(encoding["input_ids"])
        return {"passage": passage}

    def _check_direction(self, src_lang: str | None, tgt_lang: str | None) -> tuple[str | None, str | None]:
        """Returns source and target language, by default the task's, after checking the model's `language_pairs`."""
        source, target = src_lang or self._task_languages[0], tgt_lang or self._task_languages[1]
        pairs = getattr(self.model.config, "language_pairs", None)
        if pairs and not any(source in (None, pair[0]) and target in (None, pair[1]) for pair in pairs):
            asked = " ".join(f"{word} {each!r}" for word, each in (("from", source), ("to", target)) if each)
            known = ", ".join("-".join(pair) for pair in pairs)
            raise ValueError(f"The model does not translate {asked}: by its config it was trained for {known}.")
        return source, target

    def _forward(self, model_inputs: dict[str, Any], **generate_kwargs: Any) -> dict[str, Any]:
        """
        Translates the parts of all texts of a batch, and puts the ids of each into its [`Passage`]. Parts of very
        different length are translated one group after the other, because memory follows the padded length.
        """
        # One text alone is no list.
        is_batch = isinstance(model_inputs["passage"], list)
        passages: list[Passage] = model_inputs["passage"] if is_batch else [model_inputs["passage"]]
        sources = [ids for each in passages for ids in each.ids]
        language = {name: value for each in passages for name, value in each.language.items()}
        settings = self._prepare_generate_kwargs(self._with_one_length_limit(generate_kwargs), **language)
        # Stop strings and assisted decoding need the tokenizer.
        settings.setdefault("tokenizer", self.tokenizer)
        config = settings.get("generation_config") or self.model.generation_config
        beams, usual = settings.get("num_beams") or config.num_beams or 1, self._default_generation_config.num_beams
        groups = length_groups([len(ids) for ids in sources], *self.limits(self.model, beams, usual))
        if settings.get("streamer") is not None:
            groups = [[row] for row in range(len(sources))]
            if not sources:
                # Another thread may be waiting for the end of the stream.
                settings["streamer"].end()
        padding = next(id_ for id_ in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0) if id_ is not None)
        generated: dict[int, torch.Tensor] = {}
        for group in map(sorted, groups):
            generated |= zip(group, self._generate([sources[row] for row in group], padding, settings), strict=True)
        candidates = settings.get("num_return_sequences") or config.num_return_sequences or 1
        unread = torch.full((candidates, 1), padding, device="cpu")
        found = (generated[row] for row in range(len(sources)))
        done = [
            replace(each, ids=[next(found) if text is None else unread for text in each.kept]) for each in passages
        ]
        return {"passage": done if is_batch else done[0]}

    def _generate(self, sources: Sequence[list[int]], padding: int, settings: dict[str, Any]) -> torch.Tensor:
        """Returns the ids of the translations of a group, of shape `(batch, candidates, target)`."""
        rows = [torch.tensor(ids, dtype=torch.long, device="cpu") for ids in sources]
        side = self.tokenizer.padding_side
        ids = pad_sequence(rows, True, padding, side).to(self.device)  # [batch, source]
        mask = pad_sequence([torch.ones_like(row) for row in rows], True, 0, side).to(self.device)
        inputs = {"input_ids": ids, "attention_mask": mask}
        generated = None if self.engine is None else self.engine(**inputs, **settings)
        if generated is None:
            dtype = self.product_dtype
            autocast = torch.autocast(self.model.device.type, dtype) if dtype is not None else nullcontext()
            with evaluation_mode(self.model), autocast:
                generated = self.model.generate(**inputs, **(self.torch_settings | settings))
        generated = getattr(generated, "sequences", generated).cpu()  # [batch * candidates, target]
        return generated.reshape(len(sources), -1, generated.shape[-1])

    def _with_one_length_limit(self, generate_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Lets the caller's length limit override the model's: in `generate`, `max_new_tokens` overrides the other."""
        # A generation config of the call replaces the constructor's settings.
        constructor = {} if "generation_config" in generate_kwargs else self._generate_kwargs
        for keywords in (generate_kwargs, constructor):
            limits = {name: keywords.get(name) for name in ("max_length", "max_new_tokens")}
            if any(limit is not None for limit in limits.values()):
                return {**generate_kwargs, **limits}
        return generate_kwargs

    def postprocess(
        self,
        model_outputs: dict[str, Any],
        return_tensors: bool = False,
        clean_up_tokenization_spaces: bool = False,
        in_parts: bool = False,
    ) -> Any:
        """
        Decodes the translations of one text. With `in_parts` returns its [`Parts`] and a `list[list[str]]`: for each
        rank, best first, the translations of the parts.
        """
        passage: Passage = model_outputs["passage"]
        if return_tensors:
            return [{f"{self.return_name}_token_ids": ids} for ids in passage.ids[0]]
        rows = [row for candidates in passage.ids for row in candidates.tolist()]
        with LOCK:
            decoded = self.tokenizer.batch_decode(
                rows, skip_special_tokens=True, clean_up_tokenization_spaces=clean_up_tokenization_spaces
            )
        texts = iter(decoded)
        of_parts = [
            [text if answer is None else answer for text in islice(texts, len(candidates))]
            for answer, candidates in zip(passage.kept, passage.ids, strict=True)
        ]
        if self.translates:
            of_parts = list(map(without_repetition, passage.parts.sources, of_parts))
        ranks = [list(rank) for rank in zip(*of_parts, strict=True)]
        if in_parts:
            return passage.parts, ranks
        return [{f"{self.return_name}_text": passage.parts.join(rank)} for rank in ranks]


class VaswaniTranslationPipeline(VaswaniText2TextGenerationPipeline):
    """Translates as [`VaswaniText2TextGenerationPipeline`], into `translation_text` or `translation_token_ids`."""

    return_name = "translation"
    translates = True


@torch.no_grad()
def find_non_finite(model: Any) -> str | None:
    """Returns the name of the first parameter or buffer of a model with NaN or infinity, or `None`."""
    # One of both is the smallest or the largest number then: each tensor is read once. Torch compares numbers of 8
    # bits in other formats only, and those of 4 bits are all finite.
    ends = {
        name: torch.stack((each.bfloat16() if each.itemsize == 1 else each).aminmax()).float()
        for name, each in (*model.named_parameters(), *model.named_buffers())
        if type(each) in (torch.Tensor, torch.nn.Parameter) and each.numel() and not each.is_meta
        if each.is_floating_point() and each.dtype != torch.float4_e2m1fn_x2
    }
    # They are read together: a GPU waits for each reading.
    found = [each.to(next(iter(ends.values())).device) for each in ends.values()]
    are_finite = torch.stack(found).isfinite().all(dim=1).tolist() if found else []
    return next((name for name, is_finite in zip(ends, are_finite, strict=True) if not is_finite), None)


def require_text(sentence: object, where: str, alternatives: str = "") -> None:
    """Raises a `TypeError` unless `sentence` is a `str`, and a `ValueError` if it cannot be encoded."""
    if not isinstance(sentence, str):
        raise TypeError(f"The pipeline takes a str{alternatives}, but {where} is a {type(sentence)}.")
    try:
        sentence.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"The pipeline takes text, but {where} has half of a surrogate pair as character {error.start + 1}."
        ) from error
