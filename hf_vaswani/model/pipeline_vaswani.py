"""The pipelines from text to text, for every sequence-to-sequence model of transformers.

Their inputs and outputs are those of transformers 4.
"""

import copy
from collections.abc import Callable, Generator, Iterator, Sequence, Sized
from contextlib import nullcontext
from functools import partial
from types import GeneratorType
from typing import Any, ClassVar

import torch
from torch.utils.data import Dataset
from transformers import (
    BatchEncoding,
    GenerationConfig,
    Pipeline,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from .sentences_vaswani import (
    LEAST,
    LOCK,
    MOST_PADDED,
    MOST_POSITIONS,
    TIMES_ON_ACCELERATORS,
    LanguageTags,
    Parts,
    cut,
    evaluation_mode,
    has_words,
    length_groups,
    longest_source,
)


class VaswaniText2TextGenerationPipeline(Pipeline):
    """
    Turns text into text with any encoder-decoder model that can generate. [`VaswaniTranslationPipeline`] and
    [`VaswaniSummarizationPipeline`] do the same, and name their answers differently.

    The search has 4 beams and stops after 256 new tokens, unless the model's generation config or the caller sets
    these. Several threads may use one pipeline; but with `stop_strings`, for which `generate` calls the tokenizer
    itself, they should all pass the same `truncation`.

    Args:
        model ([`PreTrainedModel`]): an encoder-decoder model.
        tokenizer ([`PreTrainedTokenizerBase`]): its tokenizer, which needs a pad token if `batch_size` is above 1.
        task (`str`, *optional*): name of the task, whose settings and prefix are taken from `task_specific_params` of
            the config, if it has them. `"translation_xx_to_yy"` sets the two languages as well.
        split_sentences (`bool`, *optional*, defaults to `False`), markup (`str`, *optional*): defaults of every call,
            see [`~VaswaniText2TextGenerationPipeline.__call__`].
        engine (`str`, *optional*, defaults to `"torch"`): what computes: `"torch"`, `"ctranslate2"`, or `"auto"`:
            CTranslate2 where it searches by exactly the settings of a call, and torch elsewhere. The others need the
            package `hf_vaswani`, a Vaswani model, and the weights that it was loaded with.
        compute_type (`str`, *optional*, defaults to `"float32"`): number format in which CTranslate2 computes: also
            `"int8"`, `"int8_float32"`, `"bfloat16"`, or `"auto"` for the fastest of the machine.
        approximate (`bool`, *optional*, defaults to `False`): let CTranslate2 search by the settings that come closest
            to those of a call.
        autocast (`str`, *optional*): `"bfloat16"` for products in bfloat16 by torch, with everything else in the
            number format of the weights, or `"auto"` for the same where this machine has instructions for it and the
            model is wide enough; by default products are in the format of the weights, too.
        shortlist (`bool`, *optional*, defaults to `False`): search among the likely entries of the vocabulary alone,
            by the shortlist that `hf-vaswani shortlist` has written beside the weights.
        longest_sentence (`int`, *optional*): in tokens. A pipeline for translation cuts a longer sentence into pieces
            of at most half as many, and joins their translations, unless `truncation`, `return_tensors` or a
            `streamer` is set. By default what [`longest_source`] says. A call may have its own.
        kwargs: arguments of [`Pipeline`] (`device`, `batch_size`, `num_workers`, ...), and defaults for the arguments
            of [`~VaswaniText2TextGenerationPipeline.__call__`].

    Raises:
        ValueError: if there is no tokenizer, the model is not an encoder-decoder, was not trained for the languages in
            the name of the task, or was loaded from a folder with missing weights.

    Example:

    ```python
    >>> generator = pipeline("text2text-generation", model="me/my-model")
    >>> generator("question: Who runs? context: A dog runs.")
    [{'generated_text': 'a dog'}]
    ```
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
        split_sentences: bool = False,
        markup: str | None = None,
        engine: str = "torch",
        compute_type: str | None = None,
        approximate: bool = False,
        autocast: str | None = None,
        shortlist: bool = False,
        longest_sentence: int | None = None,
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
        self.split_sentences, self.markup = split_sentences, markup
        self.longest_sentence = longest_sentence
        # pipeline() passes it on after use, and generate() would refuse it.
        kwargs.pop("local_files_only", None)
        super().__init__(model=model, task=task, **{**kwargs, "tokenizer": tokenizer})
        if prefix is not None:
            self.prefix = prefix
        self._longest({})
        self._check_direction(*(self._preprocess_params.get(name) for name in ("src_lang", "tgt_lang")))
        # Arguments of `generate()` that an engine does without.
        self.torch_settings: dict[str, Any] = {}
        if shortlist:
            if self.model.config.model_type != "vaswani":
                raise ValueError(f"shortlist=True needs a Vaswani model, but it is a {type(self.model).__name__}.")
            config = self.model.config
            self.torch_settings["shortlist"] = self._from_home("shortlist", "shortlist=True").load(
                self.model.name_or_path,
                tokenizer,
                config.vocab_size,
                revision=getattr(config, "_commit_hash", None),
            )
        self.engine: Callable[..., torch.Tensor | None] | None = None
        if (engine, compute_type, approximate) != ("torch", None, False):
            make_engine = self._from_home("engine", f"engine={engine!r}")
            self.engine = make_engine(self.model, tokenizer, engine, compute_type, approximate, shortlist)
        if autocast not in (None, "auto", "bfloat16"):
            raise ValueError(f"autocast must be 'auto', 'bfloat16' or None, but it is {autocast!r}.")
        if autocast is not None and engine not in ("torch", "auto"):
            raise ValueError(f"autocast is for torch, but engine is {engine!r}: use compute_type, or leave it out.")
        self.product_dtype = None if autocast is None else torch.bfloat16
        if autocast == "auto":
            self.product_dtype, _ = self._from_home("autocast", "autocast='auto'")(self.model)
        if markup is not None:
            self._from_home("markup", f"markup={markup!r}")(self, markup)

    def _from_home(self, name: str, option: str) -> Any:
        if self.at_home is None:
            raise ValueError(f"{option} needs the package hf_vaswani: install it, and import hf_vaswani.")
        return self.at_home(name)

    def _sanitize_parameters(
        self,
        return_tensors: bool | None = None,
        return_text: bool | None = None,
        clean_up_tokenization_spaces: bool | None = None,
        truncation: bool | str | None = None,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        stop_sequence: str | None = None,
        longest_sentence: int | None = None,
        split: bool | None = None,
        in_parts: bool | None = None,
        **generate_kwargs: Any,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """
        Sorts keywords into those of `preprocess`, of `_forward` and of `postprocess`. `return_text` is ignored,
        because text is returned unless `return_tensors` is true.
        """
        before = {"truncation": truncation, "src_lang": src_lang, "tgt_lang": tgt_lang, "longest": longest_sentence}
        before["split"] = split
        after = {"return_tensors": return_tensors, "clean_up_tokenization_spaces": clean_up_tokenization_spaces}
        after["in_parts"] = in_parts
        if stop_sequence is not None:
            with LOCK:
                ids = self.tokenizer(stop_sequence, add_special_tokens=False).input_ids
            if len(ids) != 1:
                raise ValueError(
                    f"stop_sequence must be one token, but {stop_sequence!r} has {len(ids)}: use stop_strings."
                )
            generate_kwargs["eos_token_id"] = ids[0]
        # The base class does not pass these two on.
        if self.assistant_model is not None:
            generate_kwargs.setdefault("assistant_model", self.assistant_model)
        if self.assistant_tokenizer is not None:
            generate_kwargs.setdefault("assistant_tokenizer", self.assistant_tokenizer)
        # A keyword that a call does not give keeps the constructor's value.
        before = {name: value for name, value in before.items() if value is not None}
        after = {name: value for name, value in after.items() if value is not None}
        return before, generate_kwargs, after

    def __call__(
        self,
        inputs: str | Sequence[str] | Sequence[list[Any]] | Generator[str, None, None] | Dataset[str],
        *args: Any,
        split_sentences: bool | None = None,
        markup: str | None = None,
        num_workers: int | None = None,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """
        Translates one text or many. The model reads each text as one sentence, unless `split_sentences` is set.

        Args:
            inputs (`str`, `list[str]`, generator of `str` or `torch.utils.data.Dataset` of `str`): the texts. A column
                of a dataset (`dataset["en"]`) counts as a list. The lists of a list are translated one by one.
            args: ignored, with a warning, as in every pipeline.
            split_sentences (`bool`, *optional*, defaults to `False`): translate each sentence of a text separately
                (see [`sentence_spans`]) and join the translations of the same rank (see [`Parts`]). A
                language tag at the beginning of a text, as `<2de>`, is put in front of each sentence.
            markup (`str`, *optional*): `"html"` keeps tags, code, placeholders and URLs, each exactly once, and puts
                them where the attention says; `"placeholders"` the last three. Needs a Vaswani model.
            num_workers (`int`, *optional*, defaults to 0): processes that tokenize, or that read the dataset if its
                texts have markup.
            batch_size (`int`, *optional*, defaults to 1): number of texts that the model translates at a time, except
                that it translates few long sentences and many short ones together.
            return_tensors (`bool`, *optional*): return token ids instead of text.
            return_text (`bool`, *optional*): ignored; text is the default, and `return_tensors=True` overrides it.
            clean_up_tokenization_spaces (`bool`, *optional*, defaults to `False`): remove spaces before punctuation.
            truncation (`bool` or `str`, *optional*): truncate sentences that are longer than the tokenizer's
                `model_max_length` or the model's `max_position_embeddings`. By default they are not truncated.
            src_lang (`str`, *optional*): source language, for multilingual tokenizers that need one.
            tgt_lang (`str`, *optional*): target language, for multilingual tokenizers that need one, and for
                vocabularies with a tag for each target language, as `<2de>`, which is put in front of the sentence.
                Models whose config has `language_pairs` accept these languages only.
            stop_sequence (`str`, *optional*): text of one token that ends an answer, in place of `</s>`.
            kwargs: arguments of `model.generate`: `num_beams`, `num_return_sequences`, `generation_config`, ...

        Returns:
            `list[dict]` with the key `generated_text` (`str`), or `generated_token_ids` (`torch.LongTensor` of shape
            `(target,)`). For one text, its translations; for a list, one dict per text, or one list of dicts per
            text if there are several translations of each, nested like the input. For a generator or a dataset, an
            iterator over one list of dicts per text, which translates while it is read. Text without words
            stays as it is, and white space alone becomes an empty text; their ids are padding.

        Raises:
            TypeError: if `inputs` or one of the texts has another type.
            ValueError: if neither the pipeline nor `generate` knows a keyword, the tokenizer has no pad token for a
                batch, a text has half of a surrogate pair, the model was not trained for a language, nothing chooses
                among several, or `return_tensors` is used with `split_sentences` or `markup`.
        """
        kwargs |= {"num_workers": num_workers, "batch_size": batch_size}
        texts = None
        if isinstance(inputs, Sequence) and not isinstance(inputs, (str, bytes, tuple)):
            texts = list(inputs)
        if texts and all(isinstance(each, list) for each in texts):
            kwargs |= {"split_sentences": split_sentences, "markup": markup}
            return [self(each, *args, **kwargs) for each in texts]
        kwargs["longest_sentence"] = self._longest(kwargs)
        split = self.split_sentences if split_sentences is None else split_sentences
        markup = self.markup if markup is None else markup
        if split or markup is not None:
            self._check_text(kwargs, "split_sentences=True" if markup is None else f"markup={markup!r}")
        if markup is None:
            translate: Callable[..., Any] = partial(super().__call__, split=split or None)
        else:
            translate = partial(self._from_home("markup", f"markup={markup!r}")(self, markup), split=split)
        if texts is not None:
            for position, text in enumerate(texts):
                require_text(text, f"item {position} of the list")
            found = translate(texts, *args, **kwargs) if texts else []
            return [each[0] for each in found] if all(len(each) == 1 for each in found) else found
        if isinstance(inputs, Dataset) and isinstance(inputs, Sized) and len(inputs) == 0:
            return []
        if not isinstance(inputs, (GeneratorType, Dataset)):
            require_text(inputs, "the input", ", a list of str, or a generator or torch Dataset of str")
        return translate(inputs, *args, **kwargs)

    def translate_parts(self, texts: list[str], **kwargs: Any) -> list[tuple[Parts, list[list[str]]]]:
        """
        Translates the parts of texts, see [`cut`]; takes the keywords of a call, but `split` for `split_sentences`.

        Returns:
            `list`: each text in parts, and the translations of the parts for each rank, best first.
        """
        kwargs = {"split": False} | kwargs
        found: list[tuple[Parts, list[list[str]]]] = super().__call__(texts, in_parts=True, **kwargs)
        return found

    def _check_text(self, kwargs: dict[str, Any], option: str) -> None:
        if (self._postprocess_params | self._sanitize_parameters(**kwargs)[2]).get("return_tensors"):
            raise ValueError(
                f"return_tensors=True is not supported with {option}, which joins translations as text: "
                "leave one of them out."
            )

    def _longest(self, kwargs: dict[str, Any]) -> int | None:
        """Returns the tokens of the longest sentence that a call with these keywords does not cut."""
        asked = kwargs.pop("longest_sentence", None)
        asked = self.longest_sentence if asked is None else asked
        if asked is not None and asked < LEAST:
            raise ValueError(f"longest_sentence must be at least {LEAST} tokens, but it is {asked}.")
        before, generate_kwargs, after = self._sanitize_parameters(**kwargs)
        before, after = self._preprocess_params | before, self._postprocess_params | after
        # Ids and streams are those of one sentence.
        is_whole = before.get("truncation") or after.get("return_tensors") or generate_kwargs.get("streamer")
        if not self.translates or is_whole:
            return None
        longest = longest_source([self.model], self.tokenizer) if asked is None else asked
        # A model with fewer positions has no room for pieces.
        return longest if longest >= LEAST else None

    def reads(self, text: str) -> bool:
        """Returns whether the model gets a text, which is not kept."""
        return has_words(text) or (not self.translates and bool(text.strip()))

    @property
    def tags(self) -> LanguageTags:
        """The language tags of the tokenizer."""
        if self._tags is None or self._tags.tokenizer is not self.tokenizer:
            self._tags = LanguageTags(self.tokenizer, self.model.config)
        return self._tags

    # Below are the three steps of a pipeline, whose parameters the base class annotates as dicts.
    def preprocess(
        self,
        input_: str,
        truncation: bool | str = False,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        longest: int | None = None,
        split: bool | None = None,
    ) -> BatchEncoding:
        """
        Tokenizes one text.

        Args:
            input_ (`str`): the text.
            truncation (`bool` or `str`, *optional*, defaults to `False`): the tokenizer's argument.
            src_lang (`str`, *optional*): source language; by default that in the name of the task.
            tgt_lang (`str`, *optional*): target language; by default that in the name of the task.
            longest (`int`, *optional*): in tokens; a longer sentence is cut.
            split (`bool`, *optional*): return the text in parts: its sentences if true. By default, only a text that
                is cut is in parts.

        Returns:
            [`BatchEncoding`] with `input_ids` and `attention_mask` of shape `(1, source)`, `kept` (`str`, *optional*),
            which stands for the translation of a sentence without words, `pieces` (*optional*): the [`Parts`] of the
            text and their encodings; and the settings of `generate` by which a multilingual tokenizer chooses the
            target language.

        Raises:
            TypeError: if the sentence is not a `str`.
            ValueError: if the model was not trained for the languages, or needs a target language.
        """
        require_text(input_, "a sentence")
        if split is not None:
            return self._in_parts(
                cut(input_, self.tags, longest, split, self.prefix or ""), truncation, src_lang, tgt_lang
            )
        source_language, target_language = self._check_direction(src_lang, tgt_lang)
        settings: dict[str, Any] = {"truncation": truncation}
        positions = getattr(self.model.config, "max_position_embeddings", None) if truncation else None
        if positions is not None and positions < self.tokenizer.model_max_length:
            settings["max_length"] = positions
        with LOCK:
            tag, _ = self.tags.split(input_)
            kept = self.tags.kept(input_)
            if kept and not self.translates:
                kept = None
            front = "" if kept is not None else self.tags.front(tag, target_language)
            # The model does not read a text without words.
            sentence = tag.strip() if kept is not None else (self.prefix or "") + front + input_
            if hasattr(self.tokenizer, "_build_translation_inputs"):
                encoding = self.tokenizer._build_translation_inputs(
                    sentence, return_tensors="pt", src_lang=source_language, tgt_lang=target_language, **settings
                )
            else:
                # The tokenizer takes twice the time, and that counts where the model is small.
                encoding = self._encoded(sentence, truncation, longest) or self.tokenizer(
                    sentence, return_tensors="pt", verbose=longest is None, **settings
                )
        # Some tokenizers add it for encoder-only models; generate() refuses it.
        encoding.pop("token_type_ids", None)
        encoding["kept"], encoding["pieces"] = kept, None
        if longest is None or kept is not None or encoding["input_ids"].shape[-1] <= longest:
            return encoding
        parts = cut(input_, self.tags, longest, prefix=self.prefix or "")
        return self._in_parts(parts, truncation, src_lang, tgt_lang) if len(parts.spans) > 1 else encoding

    def _in_parts(self, parts: Parts, *settings: Any) -> BatchEncoding:
        pieces = [self.preprocess(each, *settings) for each in parts.sources]
        # The ids of the whole are not read, and would make those of others longer.
        encoding = copy.copy(pieces[0])
        encoding["pieces"] = parts, pieces
        return encoding

    def _encoded(self, sentence: str, truncation: bool | str, longest: int | None) -> BatchEncoding | None:
        """Returns what a plain tokenizer makes of a sentence, or `None` if it has to be asked itself."""
        tokenizer = self.tokenizer
        if truncation or type(tokenizer) is not PreTrainedTokenizerFast:
            return None
        backend = tokenizer.backend_tokenizer
        if backend.truncation or backend.padding or "attention_mask" not in tokenizer.model_input_names:
            return None
        ids = backend.encode(sentence).ids
        # It warns of a longer sentence that is not cut.
        if longest is None and len(ids) > self.tokenizer.model_max_length:
            return None
        input_ids = torch.tensor([ids], dtype=torch.long)
        return BatchEncoding({"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)})

    def _check_direction(self, src_lang: str | None, tgt_lang: str | None) -> tuple[str | None, str | None]:
        """Returns source and target language, by default the task's, after checking the model's `language_pairs`."""
        source, target = src_lang or self._task_languages[0], tgt_lang or self._task_languages[1]
        pairs = getattr(self.model.config, "language_pairs", None)
        if pairs and not any(source in (None, pair[0]) and target in (None, pair[1]) for pair in pairs):
            asked = " ".join(
                f"{word} {language!r}" for word, language in (("from", source), ("to", target)) if language
            )
            known = ", ".join("-".join(pair) for pair in pairs)
            raise ValueError(f"The model does not translate {asked}: by its config it was trained for {known}.")
        return source, target

    def front(self, tag: str, **kwargs: Any) -> str:
        """Returns what a call with these keywords puts in front of a sentence with this tag or none."""
        before = self._preprocess_params | self._sanitize_parameters(**kwargs)[0]
        language = self._check_direction(before.get("src_lang"), before.get("tgt_lang"))[1]
        return (self.prefix or "") + self.tags.front(tag, language)

    def _forward(self, model_inputs: dict[str, Any], **generate_kwargs: Any) -> dict[str, Any]:
        """
        Translates one batch.

        Returns:
            `dict` with `output_ids` (`torch.LongTensor` of shape `(batch, candidates, target)`), which are padding for
            a text without words or in parts; with `kept`, from [`preprocess`]; and with `pieces`: the [`Parts`] of a
            text, what is kept of them, and the output ids of the others.
        """
        # One text alone is no list.
        is_batch = isinstance(model_inputs["kept"], list)
        kept, pieces = (model_inputs[name] if is_batch else [model_inputs[name]] for name in ("kept", "pieces"))
        has_text = [each is None and parts is None for each, parts in zip(kept, pieces, strict=True)]
        model_inputs = {name: value for name, value in model_inputs.items() if name not in ("kept", "pieces")}
        tensors = {name: value for name, value in model_inputs.items() if isinstance(value, torch.Tensor)}
        # The tokenizer's settings for the target language. Batching turned them into lists of equal items.
        language = {
            name: value[0] if isinstance(value, list) else value
            for name, value in model_inputs.items()
            if name not in tensors
        }
        settings = self._prepare_generate_kwargs(self._with_one_length_limit(generate_kwargs), **language)
        # Stop strings and assisted decoding need the tokenizer.
        settings.setdefault("tokenizer", self.tokenizer)

        # Another thread may be waiting for the end of the stream.
        if settings.get("streamer") is not None and not any(has_text) and not any(pieces):
            settings["streamer"].end()
        of_pieces = self._generate_pieces([each for each in pieces if each is not None], settings)
        found = [None if each is None else next(of_pieces) for each in pieces]
        answer = {"kept": kept if is_batch else kept[0], "pieces": found if is_batch else found[0]}
        if all(has_text):
            return {"output_ids": self._generate(tensors, settings), **answer}  # [batch, candidates, target]
        generated = self._generate({name: tensor[has_text] for name, tensor in tensors.items()}, settings)
        output_ids = generated.new_full((len(has_text), *generated.shape[1:]), self._padding())
        output_ids[has_text] = generated
        return {"output_ids": output_ids, **answer}  # [batch, candidates, target]

    def _generate_pieces(
        self, texts: Sequence[tuple[Parts, Sequence[dict[str, Any]]]], settings: dict[str, Any]
    ) -> Iterator[tuple[Parts, list[str | None], torch.Tensor]]:
        """Yields the parts of each text, what is kept of them, and the ids of the others; all are translated first."""
        read = [piece["input_ids"][0] for _, pieces in texts for piece in pieces if piece["kept"] is None]
        tensors = {"input_ids": torch.zeros(0, 1, dtype=torch.long)}
        if read:
            with LOCK:
                tensors = dict(self.tokenizer.pad({"input_ids": read}, padding=len(read) > 1, return_tensors="pt"))
        tensors = {name: tensor.to(self.model.device) for name, tensor in tensors.items() if name != "token_type_ids"}
        generated, place = self._generate(tensors, settings), 0  # [pieces, candidates, target]
        for parts, pieces in texts:
            kept = [piece["kept"] for piece in pieces]
            yield parts, kept, generated[place : place + kept.count(None)]
            place += kept.count(None)

    def _generate(self, tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> torch.Tensor:
        """
        Returns the ids of the candidates of each sentence, of shape `(batch, candidates, target)`. Sentences of very
        different length are translated one group after the other, because memory follows the padded length.
        """
        rows = len(tensors["input_ids"])
        mask = tensors.get("attention_mask")
        config = settings.get("generation_config") or self.model.generation_config
        if not rows:
            candidates = settings.get("num_return_sequences") or config.num_return_sequences or 1
            return tensors["input_ids"].new_zeros(0, candidates, 1)
        limits = self._most_positions(settings.get("num_beams") or config.num_beams or 1)
        groups = [list(range(rows))] if mask is None else length_groups(mask.sum(dim=1).tolist(), *limits)
        if settings.get("streamer") is not None:
            groups = [[row] for row in range(rows)]
        found = []
        for group in map(sorted, groups):
            part = tensors
            if mask is not None and (len(group) < rows or not mask.any(dim=0).all()):
                columns = mask[group].any(dim=0)
                part = {
                    name: tensor[group][:, columns] if tensor.shape == mask.shape else tensor[group]
                    for name, tensor in tensors.items()
                }
            generated = None if self.engine is None else self.engine(**part, **settings)
            if generated is None:
                is_rounded = self.product_dtype == torch.bfloat16
                autocast = torch.autocast(self.model.device.type, torch.bfloat16) if is_rounded else nullcontext()
                with evaluation_mode(self.model), autocast:
                    generated = self.model.generate(**part, **(self.torch_settings | settings))
            generated = getattr(generated, "sequences", generated)  # [sentences * candidates, target]
            found.append(generated.reshape(len(group), -1, generated.shape[-1]))
        if len(found) == 1:
            return found[0]
        longest = max(each.shape[-1] for each in found)
        output_ids = found[0].new_full((rows, found[0].shape[1], longest), self._padding())
        for group, generated in zip(map(sorted, groups), found, strict=True):
            output_ids[group, :, : generated.shape[-1]] = generated.to(output_ids.device)
        return output_ids

    def _most_positions(self, num_beams: int) -> tuple[int, int]:
        """
        Returns the limits of a group, as [`length_groups`] takes them: smaller by as much as there are more beams than
        by default, and larger on an accelerator, which small groups leave idle.
        """
        least = self._default_generation_config.num_beams
        times = 1 if self.model.device.type == "cpu" else TIMES_ON_ACCELERATORS
        most, padded = (limit * times * least // max(least, num_beams) for limit in (MOST_POSITIONS, MOST_PADDED))
        return most, padded

    def _padding(self) -> int:
        ids = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        return next(each for each in ids if each is not None)

    def _with_one_length_limit(self, generate_kwargs: dict[str, Any]) -> dict[str, Any]:
        """
        Lets the caller's length limit override the model's, whether it is `max_length` or `max_new_tokens`. In
        `generate` itself `max_new_tokens` overrides the other one, whoever set it, with a warning.
        """
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
        Decodes the translations of one text.

        Args:
            model_outputs (`dict`): `output_ids` of shape `(1, candidates, target)`; `kept`, the text that stands for
                the translations of a text without words; and `pieces`, the parts of a text and their ids.
            return_tensors (`bool`, *optional*, defaults to `False`): return the ids instead of text.
            clean_up_tokenization_spaces (`bool`, *optional*, defaults to `False`): remove spaces before punctuation.

            in_parts (`bool`, *optional*, defaults to `False`): return the parts of the text and their translations.

        Returns:
            `list[dict]`: one dict per candidate, the best first; or `tuple` of what [`translate_parts`] returns.
        """
        candidates = model_outputs["output_ids"][0]
        if return_tensors:
            return [{f"{self.return_name}_token_ids": ids} for ids in candidates]

        def decoded(ids: torch.Tensor) -> list[str]:
            with LOCK:
                texts: list[str] = self.tokenizer.batch_decode(
                    ids.tolist(),
                    skip_special_tokens=True,
                    clean_up_tokenization_spaces=clean_up_tokenization_spaces,
                )
            return texts

        if model_outputs["pieces"] is not None:
            parts, kept, ids = model_outputs["pieces"]
            left = [iter(decoded(rank)) for rank in ids.unbind(dim=1)]
            ranks = [[next(texts) if each is None else each for each in kept] for texts in left]
            if in_parts:
                return parts, ranks
            found = list(map(parts.join, ranks))
        elif model_outputs["kept"] is not None:
            found = [model_outputs["kept"]] * len(candidates)
        else:
            found = decoded(candidates)
        return [{f"{self.return_name}_text": text} for text in found]


class VaswaniTranslationPipeline(VaswaniText2TextGenerationPipeline):
    """
    Translates text with any encoder-decoder model that can generate: a [`VaswaniText2TextGenerationPipeline`] whose
    answers have the keys `translation_text` and `translation_token_ids`.

    Example:

    ```python
    >>> translator = pipeline("translation", model="me/my-model")
    >>> translator("A dog runs.")
    [{'translation_text': 'Ein Hund rennt.'}]
    ```
    """

    return_name = "translation"
    translates = True


class VaswaniSummarizationPipeline(VaswaniText2TextGenerationPipeline):
    """
    Summarizes text with any encoder-decoder model that can generate: a [`VaswaniText2TextGenerationPipeline`] whose
    answers have the keys `summary_text` and `summary_token_ids`.
    """

    return_name = "summary"


@torch.no_grad()
def find_non_finite(model: Any) -> str | None:
    """Returns the name of the first parameter or buffer of a model with NaN or infinity, or `None`."""
    # One of both is the smallest or the largest number then: each tensor is read once. Torch compares numbers of 8
    # bits in other formats only, and those of 4 bits are all finite.
    ends = {
        name: torch.stack((each.to(torch.bfloat16) if each.dtype.itemsize == 1 else each).aminmax()).float()
        for name, each in (*model.named_parameters(), *model.named_buffers())
        if type(each) in (torch.Tensor, torch.nn.Parameter)
        and each.is_floating_point()
        and each.dtype != torch.float4_e2m1fn_x2
        and each.numel()
        and not each.is_meta
    }
    # They are read together: a GPU waits for each reading.
    found = [*ends.values()]
    are_finite = torch.stack([each.to(found[0].device) for each in found]).isfinite().tolist() if found else []
    return next((name for name, finite in zip(ends, are_finite, strict=True) if not all(finite)), None)


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
