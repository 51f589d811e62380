"""
The network of a run that starts from a model, before its first update: layers that are dropped, parts that are drawn
anew, a vocabulary that is extended or exchanged, and low-rank adapters (LoRA, Hu et al., 2021) on PEFT.
"""

import copy
import json
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase

from ..adapters import ADAPTER_WEIGHTS
from ..averaging import load_stored
from ..data.reading import Source
from ..data.task_data import TaskData, prefix_tags
from ..data.tokenizer import backend, byte_letters, has_tag, is_tag
from ..extras import extra
from ..model.modeling_vaswani import VaswaniForConditionalGeneration, VaswaniPreTrainedModel
from ..model.sentences_vaswani import LANGUAGE_TAG, LanguageTags, language_tag
from ..recipe import MEASURED_TASKS, AdapterRecipe, Recipe

ROLES = ("pad", "bos", "eos", "unk")
SOURCE_MATRIX = "model.encoder.embed_tokens.weight"
# All uses of the vocabulary, tied or not.
MATRICES = (
    SOURCE_MATRIX,
    "model.decoder.embed_tokens.weight",
    "lm_head.weight",
    "lm_head.bias",
)
# Settings of a generation config that have ids.
ID_SETTINGS = (
    *("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"),
    *("forced_bos_token_id", "forced_eos_token_id", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens"),
)
# Matrices of a sub-layer, by the words of `training.adapter.target`.
SUBLAYERS = {"attention": ["q_proj", "k_proj", "v_proj", "out_proj"], "feed_forward": ["fc1", "fc2"]}


def keep_layers(recipe: Recipe, model: VaswaniPreTrainedModel) -> VaswaniPreTrainedModel:
    """
    Drops layers of a translation model if the recipe asks for fewer than it has (shrink and fine-tune: Shleifer and
    Rush, 2020). Those that stay are spread evenly from the first to the last; a single one is the first.

    Args:
        recipe ([`Recipe`]): the recipe as it was given.
        model ([`VaswaniPreTrainedModel`]): from [`load_start`].

    Returns:
        [`VaswaniPreTrainedModel`]: a smaller model with weights of `model`, or `model` itself.

    Raises:
        ValueError: layers are dropped, and another key needs the whole model.
    """
    kept = {}
    for stack in ("encoder", "decoder"):
        key, there = f"{stack}_layers", getattr(model.config, f"{stack}_layers")
        count = getattr(recipe.model, key) if f"model.{key}" in recipe.given else there
        if count < there:
            kept[stack] = [round(i * (there - 1) / max(count - 1, 1)) for i in range(count)]
    if not kept or not isinstance(model, VaswaniForConditionalGeneration):
        return model
    for key, given in (
        ("hub.not_worse_than 'start'", recipe.hub.not_worse_than == "start"),
        ("training.adapter", recipe.training.adapter is not None),
    ):
        if given:
            raise ValueError(
                f"model.{min(kept)}_layers drops layers of {recipe.initialize.from_}, but {key} needs the whole model."
            )
    changes = {f"{stack}_layers": len(numbers) for stack, numbers in kept.items()}
    config = type(model.config)(**model.config.to_dict() | changes | {"alignment_layer": None})
    with seeded(recipe.seed):
        smaller = VaswaniForConditionalGeneration(config)
    weights, there = {}, model.state_dict()
    for name in smaller.state_dict():
        match = re.fullmatch(r"(model\.(encoder|decoder)\.layers\.)(\d+)(\..+)", name)
        if match and match[2] in kept:
            weights[name] = there[f"{match[1]}{kept[match[2]][int(match[3])]}{match[4]}"]
        else:
            weights[name] = there[name]
    smaller.load_state_dict(weights)
    smaller.generation_config = model.generation_config
    return smaller.eval()


def prepare_network(
    recipe: Recipe,
    data: TaskData,
    sources: list[Source],
    model: VaswaniPreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[VaswaniPreTrainedModel, PreTrainedTokenizerBase]:
    """
    Makes the network before the first update: with the vocabulary that the recipe asks for, and with random weights in
    the parts that it does not take.

    Args:
        recipe ([`Recipe`]): complete, from [`fill_from_model`].
        data ([`TaskData`]), sources (`list[Source]`): its text.
        model ([`VaswaniPreTrainedModel`]), tokenizer ([`PreTrainedTokenizerBase`]): from [`load_start`].

    Returns:
        Model and tokenizer of the run.

    Raises:
        ValueError: the vocabulary lacks a language tag or a prefix, or has an entry of `initialize.add_tokens`
            already.
    """
    start = recipe.initialize
    if recipe.task not in MEASURED_TASKS:
        translator = cast(VaswaniForConditionalGeneration, model)
        with seeded(recipe.seed):
            if start.vocabulary == "transfer":
                new = data.make_tokenizer(sources)
                model, tokenizer = transfer_vocabulary(translator, tokenizer, new), new
            elif start.add_tokens:
                parts = (recipe.data, *recipe.more_data, *recipe.named_sets.values())
                prefixes = [part.prefix for part in parts if part.prefix is not None and is_tag(part.prefix)]
                model = add_entries(translator, tokenizer, start.add_tokens, prefixes)
            _check_tags(recipe, sources, tokenizer)
    if start.parts is not None:
        model = _with_random_parts(model, start.parts, recipe.seed)
    return model, tokenizer


def _check_tags(recipe: Recipe, sources: list[Source], tokenizer: PreTrainedTokenizerBase) -> None:
    targets = dict.fromkeys(str(source.target_language) for source in sources if source.tag is not None)
    known = LanguageTags(tokenizer).by_language
    tags = [language_tag(language) for language in targets if language not in known]
    prefixes = [prefix for prefix in prefix_tags(sources) if not has_tag(tokenizer, prefix)]
    reasons = ["data.target_tag is true"] if tags else []
    for prefix in prefixes:
        i = [source.prefix for source in sources].index(prefix)
        reasons.append(f"{f'more_data[{i - 1}]' if i else 'data'}.prefix is {prefix!r}")
    if missing := [*tags, *prefixes]:
        tokens = json.dumps([*recipe.initialize.add_tokens, *missing], ensure_ascii=False)
        raise ValueError(
            f"{' and '.join(reasons)}, but the vocabulary of {recipe.initialize.from_} lacks {', '.join(missing)}: "
            f"set initialize.add_tokens: {tokens}"
        )


def _with_random_parts(model: VaswaniPreTrainedModel, parts: Collection[str], seed: int) -> VaswaniPreTrainedModel:
    if foreign := set(parts) - {"embeddings", *model.config.stacks}:
        raise ValueError(f"initialize.parts has {min(foreign)!r}, which this task's model does not have: remove it.")
    with seeded(seed):
        network = type(model)(model.config)
    taken = {*parts, *(["head"] if set(model.config.stacks) <= set(parts) else [])}
    weights = {name: weight for name, weight in model.state_dict().items() if part_of(name) in taken}
    load_stored(network, weights, is_new=lambda name: part_of(name) not in taken)
    network.generation_config = model.generation_config
    return network.eval()


def part_of(name: str) -> str:
    """
    Returns the part of the network that a weight belongs to, in the words of `initialize.parts` and `training.freeze`.

    Args:
        name (`str`): name of the parameter in a model of this package.

    Returns:
        `str`: `"encoder"` or `"decoder"`, their layers and the norm on top of them; `"embeddings"`: tokens, learned
        positions and the output; or `"head"`, what stands on top of a stack alone.
    """
    match = re.fullmatch(r"model\.(encoder|decoder)\.(layers|norm)\..+", name)
    if match:
        return match[1]
    return "embeddings" if name.startswith(("model.", "lm_head.")) else "head"


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draws from the recipe's seed, and leaves the generator of the run as it was: only one process is here."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


# ---- Vocabularies ------------------------------------------------------------------------------------------------


def add_entries(
    model: VaswaniForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    tokens: Sequence[str],
    prefixes: Collection[str] = (),
) -> VaswaniForConditionalGeneration:
    """
    Adds entries to the vocabulary of a model. Each begins as the mean of the pieces that spelled it.

    Args:
        model ([`VaswaniForConditionalGeneration`]): the model; its old logits stay what they were.
        tokenizer ([`PreTrainedTokenizerBase`]): its tokenizer, changed in place.
        tokens (`Sequence[str]`): new entries: language tags and prefixes, which absorb the spaces around them, or
            whole words.
        prefixes (`Collection[str]`): those of the text, of which an entry may be one.

    Returns:
        [`VaswaniForConditionalGeneration`]: a model with a row for each entry.

    Raises:
        ValueError: an entry is in the vocabulary already, or text with it would not be decoded as it was.
    """
    known = tokenizer.get_vocab()
    for token in tokens:
        if token in known:
            raise ValueError(
                f"initialize.add_tokens has {token!r}, which is in the vocabulary of the model already: leave it out."
            )
    sides = [_Side(tokenizer, is_target) for is_target in (False, True)]
    spellings = [[side.pieces(token) for token in tokens] for side in sides]
    are_tags = [token in prefixes or LANGUAGE_TAG.fullmatch(token) is not None for token in tokens]
    words = [token for token, is_tag in zip(tokens, are_tags, strict=True) if not is_tag]
    decoded = {word: _decoded_between_words(tokenizer, word) for word in words}
    tokenizer.add_tokens(
        [
            AddedToken(token, lstrip=is_tag, rstrip=is_tag, single_word=not is_tag, normalized=False, special=False)
            for token, is_tag in zip(tokens, are_tags, strict=True)
        ]
    )
    for word in words:
        for before, after in zip(decoded[word], _decoded_between_words(tokenizer, word), strict=True):
            if after not in (before, f"a {word} b"):
                raise ValueError(
                    f"initialize.add_tokens has {word!r}, but with it, the tokenizer of the model would read "
                    f"{before!r} as {after!r}: leave it out. Language tags such as <2de> can be added to every "
                    "vocabulary."
                )
    rows = []
    for spelling in spellings:
        found = [[id_] for id_ in range(model.config.vocab_size)]
        for token, pieces in zip(tokens, spelling, strict=True):
            id_ = tokenizer.convert_tokens_to_ids(token)
            # A matrix may have more rows than its tokenizer has entries.
            found += [[] for _ in range(id_ + 1 - len(found))]
            found[id_] = pieces
        rows.append(found)
    return exchange_rows(model, *_filled(rows, sides[0].everything))


def transfer_vocabulary(
    model: VaswaniForConditionalGeneration, old: PreTrainedTokenizerBase, new: PreTrainedTokenizerBase
) -> VaswaniForConditionalGeneration:
    """
    Exchanges the vocabulary of a model. Entries that spell the same text keep their rows, and special tokens those of
    their role; the others begin as the mean of the old entries that spell them.

    Args:
        model ([`VaswaniForConditionalGeneration`]): the model.
        old ([`PreTrainedTokenizerBase`]), new ([`PreTrainedTokenizerBase`]): its tokenizer, and the one in its place.

    Returns:
        [`VaswaniForConditionalGeneration`]: a model for the new tokenizer.
    """
    roles = {
        getattr(new, f"{role}_token_id"): getattr(old, f"{role}_token_id")
        for role in ROLES
        if getattr(new, f"{role}_token_id") is not None and getattr(old, f"{role}_token_id") is not None
    }
    sides, spelled = [_Side(old, is_target) for is_target in (False, True)], speller(backend(new, False))
    rows: list[list[list[int]]] = [[[] for _ in range(len(new))] for _ in sides]
    for token, id_ in new.get_vocab().items():
        text = spelled(token)
        for side, found in zip(sides, rows, strict=True):
            found[id_] = [roles[id_]] if id_ in roles else side.spell(text)
    # A decoder that starts with </s> still does.
    ids = {before: after for after, before in roles.items()}
    return exchange_rows(model, *_filled(rows, sides[0].everything), ids)


def _decoded_between_words(tokenizer: PreTrainedTokenizerBase, word: str) -> list[str]:
    """Returns what remains of a word between two others when source and target text are encoded and decoded."""
    sides = [backend(tokenizer, is_target) for is_target in (False, True)]
    return [side.decode(side.encode(f"a {word} b").ids) for side in sides]


class _Side:
    """The entries of a vocabulary that text of one side is split into, by their text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, is_target: bool) -> None:
        self.tokenizer = backend(tokenizer, is_target)
        self.unknown = tokenizer.unk_token_id
        special = {getattr(tokenizer, f"{role}_token_id") for role in ROLES}
        spelled, entries = speller(self.tokenizer), self.tokenizer.get_vocab().items()
        self.by_text: dict[bytes, int] = {}
        for token, id_ in sorted(entries, key=lambda entry: entry[1]):
            if id_ not in special:
                self.by_text.setdefault(spelled(token), id_)
        # The row of padding is zero.
        self.everything = sorted(id_ for _, id_ in entries if id_ != tokenizer.pad_token_id)

    def spell(self, text: bytes) -> list[int]:
        """Returns the entry that is a text, or those that spell it."""
        return [self.by_text[text]] if text in self.by_text else self.pieces(text.decode(errors="ignore"))

    def pieces(self, text: str) -> list[int]:
        """Returns the entries that spell a text, without the unknown one."""
        found = self.tokenizer.encode(text, add_special_tokens=False).ids if text.strip() else []
        return [id_ for id_ in found if id_ != self.unknown]


def _filled(rows: Sequence[list[list[int]]], everything: list[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Gives the rows of entries that a side cannot spell those of the other, or the mean of all."""
    source, target = rows
    return (
        [one or other or everything for one, other in zip(source, target, strict=True)],
        [other or one or everything for one, other in zip(source, target, strict=True)],
    )


def exchange_rows(
    model: VaswaniForConditionalGeneration,
    source_rows: Sequence[Sequence[int]],
    target_rows: Sequence[Sequence[int]],
    ids: Mapping[int, int] | None = None,
) -> VaswaniForConditionalGeneration:
    """
    Makes a model whose vocabulary has other rows: those of source and target embedding, and of the output and its
    bias, tied or not.

    Args:
        model ([`VaswaniForConditionalGeneration`]): the model, which stays as it is.
        source_rows (`Sequence[Sequence[int]]`), target_rows (`Sequence[Sequence[int]]`): for each new row, the old
            ones whose mean it is, in the source embedding and in the matrices of the target. If they share one matrix,
            the shorter list of both counts.
        ids (`Mapping[int, int]`, *optional*): new ids of the special tokens, by their old ones; by default they keep
            their ids.

    Returns:
        [`VaswaniForConditionalGeneration`] in evaluation mode.
    """
    config, generation = copy.deepcopy(model.config), copy.deepcopy(model.generation_config)
    config.vocab_size = len(source_rows)
    if ids is not None:
        for settings in (config, generation):
            for name in ID_SETTINGS:
                if getattr(settings, name, None) is not None:
                    setattr(settings, name, _renumbered(getattr(settings, name), ids))
    if config.share_embeddings:
        source_rows = target_rows = [min(pair, key=len) for pair in zip(source_rows, target_rows, strict=True)]
    changed = VaswaniForConditionalGeneration(config)
    changed.generation_config = generation
    weights = model.state_dict()
    for name in MATRICES:
        if name in weights:
            rows = source_rows if name == SOURCE_MATRIX else target_rows
            weights[name] = torch.stack([weights[name][list(row)].mean(dim=0) for row in rows])
    changed.load_state_dict(weights)
    return changed.eval()


def speller(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """
    Returns a function from an entry to its text, in which vocabularies of different kinds can be compared: the space
    before a word is `Ġ` in byte-level BPE, `▁` in SentencePiece, and a space in the other kinds of this package.

    Args:
        tokenizer (`tokenizers.Tokenizer`): tokenizer of one side.

    Returns:
        `Callable[[str], bytes]`: returns UTF-8, of which an entry may be a part.
    """
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    settings = json.loads(tokenizer.to_str())
    types = set(re.findall(r"'type': '(\w+)'", str([settings["pre_tokenizer"], settings["decoder"]])))

    def spelled(token: str) -> bytes:
        if token in added:
            return token.encode()
        if "ByteLevel" in types:
            return bytes(_BYTES[letter] for letter in token) if all(letter in _BYTES for letter in token) else b""
        if "ByteFallback" in types and (match := re.fullmatch(r"<0x([0-9A-F]{2})>", token)):
            return bytes.fromhex(match[1])
        return token.replace("▁", " ").encode()

    return spelled


_BYTES = byte_letters()


def _renumbered(value: int | list, ids: Mapping[int, int]) -> int | list | None:  # type: ignore[type-arg]
    """Returns an id, or lists of them, by their new numbers; without those that have none."""
    if not isinstance(value, list):
        return ids.get(value)
    if all(isinstance(each, int) for each in value):
        return [ids[each] for each in value if each in ids] or None
    return [[ids[id_] for id_ in each] for each in value if all(id_ in ids for id_ in each)] or None


# ---- Adapters ----------------------------------------------------------------------------------------------------


def check_peft() -> None:
    """Raises an `ImportError` with the command that installs PEFT, if it is missing."""
    with extra("adapt", "training.adapter"):
        import peft  # noqa: F401


def target_modules(model: VaswaniForConditionalGeneration, words: list[str]) -> list[str]:
    """
    Returns the names of modules that `training.adapter.target` asks for, as PEFT matches them.

    Args:
        model ([`VaswaniForConditionalGeneration`]): the model, without adapters.
        words (`list[str]`): `attention`, `feed_forward`, or names of linear layers, whole or their last parts.

    Raises:
        ValueError: a word matches no linear layer of encoder or decoder, or there is no word.
    """
    linear = [
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and ".layers." in name
    ]
    existing = [*SUBLAYERS, *dict.fromkeys(name.rsplit(".", 1)[-1] for name in linear)]
    found: dict[str, None] = {}
    for word in words:
        names = SUBLAYERS.get(word, [word])
        if not any(f".{name}".endswith(f".{last}") for name in linear for last in names):
            raise ValueError(f"training.adapter.target has {word!r}, but the model has only {', '.join(existing)}.")
        found |= dict.fromkeys(names)
    if not found:
        raise ValueError(f"training.adapter.target is empty: name some of {', '.join(existing)}.")
    return list(found)


def attach_adapters(model: VaswaniForConditionalGeneration, adapter: AdapterRecipe, start: Path) -> Any:
    """
    Puts adapters into a model, in place, and freezes its own weights.

    Args:
        model ([`VaswaniForConditionalGeneration`]): the model, with the weights of `start`.
        adapter ([`AdapterRecipe`]): rank, scale, dropout and place of the adapters.
        start (`Path`): folder of the model, to which the saved adapters will refer.

    Returns:
        `peft.PeftModel` around the same model.
    """
    check_peft()
    import peft

    settings = peft.LoraConfig(
        task_type="SEQ_2_SEQ_LM",
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=target_modules(model, adapter.target),
    )
    with warnings.catch_warnings():
        # PEFT asks for an attribute that transformers is about to rename.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        adapters = peft.get_peft_model(model, settings)
    # PEFT would take the name from the config of the model, which has none in a training.
    settings.base_model_name_or_path = str(start)
    return adapters


def save_adapters(adapters: Any, folder: Path) -> None:
    """Writes adapters as PEFT does, so that `PeftModel.from_pretrained` loads them, but without a model card."""
    import peft

    weights = {name: weight.contiguous() for name, weight in peft.get_peft_model_state_dict(adapters).items()}
    save_file(weights, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    adapters.peft_config["default"].save_pretrained(folder)


def load_adapters(adapters: Any, folder: Path) -> None:
    """Loads what [`save_adapters`] has written."""
    import peft

    peft.set_peft_model_state_dict(adapters, load_file(folder / ADAPTER_WEIGHTS))
