"""Text in, translation out: the `translation` pipeline, for every sequence-to-sequence model of transformers.

The answers have the shapes that they had in transformers 4.
"""

import copy
import re
from collections.abc import Generator, Sequence, Sized
from types import GeneratorType
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import BatchEncoding, GenerationConfig, Pipeline, PreTrainedModel, PreTrainedTokenizerBase


class VaswaniTranslationPipeline(Pipeline):
    """Translates sentences with any encoder-decoder model that can generate.

    Beam search with 4 beams and at most 256 new tokens, unless the model's generation config or the caller says
    otherwise. The model translates in evaluation mode and is handed back in the mode that it came in.

    Args:
        model (`PreTrainedModel`): An encoder-decoder model.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer; it needs a pad token as soon as `batch_size` is above 1.
        task (`str`, *optional*): `"translation"`, or `"translation_xx_to_yy"`, which names the two languages as well.
        kwargs: What [`Pipeline`] takes (`device`, `batch_size`, `num_workers`, ...), and everything that
            [`~VaswaniTranslationPipeline.__call__`] takes, as the default of every call.

    Raises:
        ValueError: If there is no tokenizer, or the model is not an encoder-decoder.

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
        **kwargs: Any,
    ) -> None:
        if tokenizer is None:
            raise ValueError(
                f"There is no tokenizer for {model.name_or_path or type(model).__name__}: pass `tokenizer=`, or let "
                "AutoTokenizer.from_pretrained say which file or package is missing."
            )
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
        # pipeline() has used it by now and hands it on all the same; generate() would refuse it.
        kwargs.pop("local_files_only", None)
        super().__init__(model=model, task=task, **{**kwargs, "tokenizer": tokenizer})
        if prefix is not None:
            self.prefix = prefix

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
        inputs: str | Sequence[str] | Generator[str, None, None] | Dataset[str],
        *args: Any,
        num_workers: int | None = None,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Translates one sentence, or many.

        Args:
            inputs (`str`, `list[str]`, generator of `str` or `torch.utils.data.Dataset` of `str`): The sentences; a
                column of a dataset (`dataset["en"]`) counts as a list.
            args: Ignored, with a warning, as in every pipeline.
            num_workers (`int`, *optional*, defaults to 0): Processes that tokenize.
            batch_size (`int`, *optional*, defaults to 1): Sentences that the model translates at a time.
            return_tensors (`bool`, *optional*): Give token ids back and not text.
            return_text (`bool`, *optional*): Text is the default; `return_tensors=True` wins over this one.
            clean_up_tokenization_spaces (`bool`, *optional*, defaults to `False`): Remove spaces before punctuation.
            truncation (`bool` or `str`, *optional*): Cut sentences that are longer than the tokenizer's
                `model_max_length`; without it they reach the model as they are.
            src_lang (`str`, *optional*): Source language, for the multilingual tokenizers that need one.
            tgt_lang (`str`, *optional*): Target language, likewise, and for the tokenizers whose vocabulary has a tag
                for each target language, as `<2de>`: it is put in front of the sentence.
            kwargs: Everything else goes to `model.generate`: `num_beams`, `num_return_sequences`,
                `generation_config`, ...

        Returns:
            `list[dict]` with the key `translation_text` (`str`), or `translation_token_ids` (`torch.LongTensor` of
            shape `(target,)`): for one sentence, its translations; for a list, one dict a sentence, or one list of
            dicts a sentence if there are several translations of each. A generator or a dataset gives an iterator,
            which translates as it is read, of one list of dicts a sentence.

        Raises:
            TypeError: If `inputs` or one of the sentences is something else.
            ValueError: If a keyword is known neither here nor to `generate`, if sentences cannot be batched because
                the tokenizer has no pad token, or if its vocabulary has tags, but none for the target language.
        """
        kwargs |= {"num_workers": num_workers, "batch_size": batch_size}
        if isinstance(inputs, Sequence) and not isinstance(inputs, (str, bytes, tuple)):
            sentences = list(inputs)
            for position, sentence in enumerate(sentences):
                _require_text(sentence, f"item {position} of the list")
            translations = super().__call__(sentences, *args, **kwargs) if sentences else []
            single = all(len(candidates) == 1 for candidates in translations)
            return [candidates[0] for candidates in translations] if single else translations
        if isinstance(inputs, Dataset) and isinstance(inputs, Sized) and len(inputs) == 0:
            return []
        if not isinstance(inputs, (GeneratorType, Dataset)):
            _require_text(inputs, "the input", ", a list of str, or a generator or torch Dataset of str")
        return super().__call__(inputs, *args, **kwargs)

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
            `BatchEncoding`: `input_ids` and `attention_mask` of shape `(1, source)`, and for a multilingual tokenizer
            the settings of `generate` that choose the target language.

        Raises:
            TypeError: If the sentence is not a `str`.
        """
        _require_text(input_, "a sentence")
        target_language = tgt_lang or self._task_languages[1]
        sentence = (self.prefix or "") + self._language_tag(target_language) + input_
        if hasattr(self.tokenizer, "_build_translation_inputs"):
            encoding = self.tokenizer._build_translation_inputs(
                sentence,
                return_tensors="pt",
                truncation=truncation,
                src_lang=src_lang or self._task_languages[0],
                tgt_lang=target_language,
            )
        else:
            encoding = self.tokenizer(sentence, return_tensors="pt", truncation=truncation)
        # Some tokenizers make it for encoders of their own kind; generate() does not take it.
        encoding.pop("token_type_ids", None)
        return encoding

    def _language_tag(self, language: str | None) -> str:
        """What goes in front of a sentence: the tag of the target language, where the vocabulary has tags."""
        get_added_vocab = getattr(self.tokenizer, "get_added_vocab", dict)
        tags = {match[1]: tag for tag in get_added_vocab() if (match := re.fullmatch(r"<2(.+)>", tag))}
        if language in tags:
            return f"{tags[language]} "
        if tags and language is not None:
            raise ValueError(f"There is no tag for the target language {language!r}, only for {', '.join(tags)}.")
        return ""

    def _forward(self, model_inputs: dict[str, Any], **generate_kwargs: Any) -> dict[str, torch.Tensor]:
        """Translates one batch.

        Returns:
            `dict` with `output_ids` (`torch.LongTensor` of shape `(batch, candidates, target)`).
        """
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

        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            generated = self.model.generate(**tensors, **settings)
        finally:
            for module in training:
                module.training = True
        output_ids = getattr(generated, "sequences", generated)  # [batch * candidates, target]
        batch = tensors["input_ids"].shape[0]
        return {"output_ids": output_ids.reshape(batch, -1, output_ids.shape[-1])}  # [batch, candidates, target]

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
        texts = self.tokenizer.batch_decode(
            candidates,
            skip_special_tokens=True,
            clean_up_tokenization_spaces=clean_up_tokenization_spaces,
        )
        return [{"translation_text": text} for text in texts]


def _require_text(sentence: object, where: str, alternatives: str = "") -> None:
    """Raises the `TypeError` of this module unless `sentence` is a `str`."""
    if not isinstance(sentence, str):
        raise TypeError(f"Translation takes a str{alternatives}, but {where} is a {type(sentence)}.")
