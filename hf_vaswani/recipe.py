"""One YAML file is one experiment: reads it, lays the command line over it, and checks every key and value.

train.py RECIPE.yaml [--section.key value ...]
"""

import difflib
import operator
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

try:
    import yaml
    from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings
except ImportError as error:
    raise ImportError(f"Training needs {error.name}: pip install 'hf_vaswani[train]'") from error

set_parsing_settings(docstring_parse_attribute_docstrings=True)

Files = dict[str, str] | str | None
SECTIONS = ("data", "tokenizer", "model", "training", "evaluation", "hub")

COMPARISONS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}

# Bounds that no recipe comes near: bytes of its file, levels and entries of its YAML, digits of a number.
MOST_BYTES = 1_000_000
MOST_LEVELS = 20
MOST_ENTRIES = 10_000
LONG_NUMBER = re.compile(r"[-+]?([0-9._:]{30,}|0[bx][0-9a-f_]{30,})", re.IGNORECASE)


def number(default: Any, **bounds: float) -> Any:
    """
    A number of a recipe, with its range.

    Args:
        default (`int`, `float` or `None`): its default.
        bounds (`float`): by the keys of `COMPARISONS`, as in `number(0.1, at_least=0, below=1)`.

    Returns:
        `dataclasses.Field`: for a dataclass, with the range as `metadata`.
    """
    return field(default=default, metadata=bounds)


def shown(value: object) -> str:
    """A value as a message has it: shortened, if it is long."""
    return _shortened(repr(value), 80)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 25]} ... {text[-20:]}"


@dataclass
class SourceRecipe:
    """Where sentence pairs come from. A split's files, where given, take the place of the dataset's split."""

    source_language: str = "en"
    """Language code of the source side."""
    target_language: str = "de"
    """Language code of the target side."""
    dataset: str | None = None
    """Hub dataset id, or local dataset folder; "pocket" is the built-in English-German corpus."""
    dataset_config: str | None = None
    """Configuration name of the Hub dataset, where it has several."""
    train_split: str = "train"
    """Name of the dataset's training split."""
    validation_split: str | None = "validation"
    """Name of the dataset's validation split; null where it has none."""
    test_split: str | None = "test"
    """Name of the dataset's test split; null where it has none."""
    train_files: Files = None
    """Training text: two line-aligned files as {en: FILE, de: FILE}, or one .tsv, .csv, .jsonl or .parquet file.
    All but the last may be .gz."""
    validation_files: Files = None
    """Validation text, likewise."""
    test_files: Files = None
    """Test text, likewise."""
    source_column: int | str | None = number(None, at_least=0, at_most=10_000)
    """Column of the source side (default: the language code). A number counts the columns of a TSV/CSV file without
    a header line, from 0."""
    target_column: int | str | None = number(None, at_least=0, at_most=10_000)
    """Column of the target side, likewise."""
    weight: float = number(1.0, above=0, at_most=1000)
    """How often an epoch takes each pair: 2 takes it twice, 0.5 takes a random half, another one in each epoch. With
    data.streaming, where nobody knows how many pairs there are: the proportion in which the sources are mixed."""
    license: str | None = None
    """Licence of the text, as cc-by-4.0, for the model card."""


@dataclass
class DataRecipe(SourceRecipe):
    """The sentence pairs. streaming and the keys after it are set here alone, and hold for more_data as well."""

    streaming: bool = False
    """Read the training text as it is needed, for text that does not fit on the disk: it is neither copied nor
    counted, and a vocabulary is trained on its first million pairs."""
    stream_window: int = number(100_000, at_least=1, at_most=10**8)
    """Pairs of a stream (data.streaming) that are read, shuffled and put into batches together."""
    target_tag: bool = False
    """Put the target language in front of each source sentence, as <2de>: an entry of the vocabulary, by which one
    model can translate into several languages."""
    num_proc: int | None = number(None, at_least=1, at_most=1024)
    """Processes that turn the training text into ids, unless it is a stream (see training.data_workers); null means
    this one, with the tokenizer's threads."""


@dataclass
class TokenizerRecipe:
    """The vocabulary (Section 5.1)."""

    kind: Literal["bpe", "unigram", "wordpiece", "words", "characters", "bytes"] = "bpe"
    """What its entries are: byte-pair encoding over bytes, pieces of a unigram language model (as SentencePiece's),
    word-pieces (the paper's for English-French), whole words, characters, or the bytes of UTF-8."""
    vocab_size: int = number(37000, at_least=1, at_most=1_000_000)
    """Entries, at most, of the joint vocabulary to train on both sides of the training text; bytes have always 260."""
    path: str | None = None
    """Folder or Hub id of a tokenizer to use instead of training one; then the two keys above say nothing."""
    decoder_start: Literal["bos", "eos", "pad"] = "bos"
    """First symbol of the decoder's input (Section 3.1): the tokenizer's <s>; its </s>, as in fairseq; or its <pad>,
    whose embedding is zero, as in tensor2tensor and Marian. Without a <s> it is <pad>."""


@dataclass
class ModelRecipe:
    """The network: fields and defaults of VaswaniConfig, less those that the tokenizer decides."""

    d_model: int = number(512, at_least=1, at_most=100_000)
    """Width of the embeddings and of every sub-layer's output (Section 3.1)."""
    d_ff: int = number(2048, at_least=1, at_most=1_000_000)
    """Width of the hidden layer of the feed-forward networks (Section 3.3)."""
    num_heads: int = number(8, at_least=1, at_most=10_000)
    """Attention heads h (Section 3.2.2)."""
    d_k: int | None = number(None, at_least=1, at_most=100_000)
    """Width of a head's queries and keys; null means d_model / num_heads."""
    d_v: int | None = number(None, at_least=1, at_most=100_000)
    """Width of a head's values; null means d_model / num_heads."""
    encoder_layers: int = number(6, at_least=1, at_most=1000)
    """Layers N of the encoder."""
    decoder_layers: int = number(6, at_least=1, at_most=1000)
    """Layers N of the decoder."""
    dropout: float = number(0.1, at_least=0, below=1)
    """P_drop: on embedding + position, and on each sub-layer's output (Section 5.4)."""
    attention_dropout: float = number(0.0, at_least=0, below=1)
    """Dropout on the attention weights; the paper has none."""
    activation_dropout: float = number(0.0, at_least=0, below=1)
    """Dropout after the feed-forward networks' activation; the paper has none."""
    activation_function: str = "relu"
    """Activation of the feed-forward networks, by transformers' name."""
    norm_position: Literal["post", "pre"] = "post"
    """LayerNorm after the residual sum, as in the paper, or before the sub-layer."""
    position_encoding: Literal["sinusoidal", "learned"] = "sinusoidal"
    """Sinusoids (Section 3.5), or a table of max_position_embeddings rows that is learned (Table 3 row E)."""
    sinusoid_layout: Literal["interleaved", "concatenated", "tensor2tensor"] = "interleaved"
    """Sines and cosines in turn, as in the paper; or first the sines; or tensor2tensor's wavelengths as well."""
    max_position_embeddings: int = number(1024, at_least=1, at_most=1_000_000)
    """Rows of a learned table of positions; no limit for sinusoids."""
    layer_norm_eps: float = number(1e-6, above=0, at_most=1)
    """Added to the variance in LayerNorm."""
    attention_bias: bool = False
    """Whether the projections of an attention have biases."""
    lm_head_bias: bool = False
    """Whether the pre-softmax linear transformation has a bias."""
    scale_embedding: bool = True
    """Whether embeddings are multiplied by sqrt(d_model) (Section 3.4)."""
    share_embeddings: bool = True
    """Whether source and target use one embedding matrix (Section 3.4)."""
    tie_word_embeddings: bool = True
    """Whether the target embedding is also the pre-softmax linear transformation (Section 3.4)."""


@dataclass
class TrainingRecipe:
    """Batches, optimizer and schedule (Sections 5.1 to 5.4), and what is kept."""

    max_steps: int = number(100_000, at_least=1, at_most=10**9)
    """Updates of the parameters in all (Section 5.2)."""
    tokens_per_batch: int = number(25_000, at_least=1, at_most=2_000_000)
    """Budget of a batch: rows times its longest side, padding counted (Section 5.1)."""
    accumulation_steps: int = number(1, at_least=1, at_most=100_000)
    """Batches that every process adds up for one update."""
    schedule: Literal["noam", "inverse_sqrt", "constant", "cosine"] = "noam"
    """The learning rate after the warm-up: equation 3; peak * sqrt(warmup_steps / step), as fairseq's; the peak; or
    half a cosine from the peak to 0, just after max_steps."""
    warmup_steps: int = number(4000, at_least=1, at_most=10**9)
    """Updates during which the learning rate rises in a straight line from 0 (Section 5.3)."""
    learning_rate_factor: float = number(1.0, above=0, at_most=1000)
    """Multiplies the schedule of equation 3; for noam only."""
    peak_learning_rate: float | None = number(None, above=0, at_most=10)
    """Learning rate at the end of the warm-up: for every schedule but noam, whose peak equation 3 gives."""
    optimizer: Literal["adam", "muon"] = "adam"
    """What makes the updates: the paper's Adam; or Muon for the layers' matrices, and Adam for embeddings, biases and
    LayerNorms."""
    adam_beta1: float = number(0.9, at_least=0, below=1)
    """Adam's decay of the gradient's mean (Section 5.3)."""
    adam_beta2: float = number(0.98, at_least=0, below=1)
    """Adam's decay of the gradient's square (Section 5.3)."""
    adam_epsilon: float = number(1e-9, above=0, at_most=1)
    """Adam's epsilon (Section 5.3)."""
    weight_decay: float = number(0.0, at_least=0, at_most=100)
    """AdamW's: every update also multiplies each matrix, embeddings included, by 1 - learning rate * weight_decay;
    biases and LayerNorms are spared. 0 is the paper's Adam."""
    label_smoothing: float = number(0.1, at_least=0, below=1)
    """Epsilon_ls (Section 5.4)."""
    label_smoothing_over: Literal["others", "all"] = "others"
    """Who shares epsilon_ls: all tokens but the true one, as in the paper's code; or all V, the true one as well."""
    clip_norm: float | None = number(None, above=0, at_most=10**6)
    """Longest gradient, as a Euclidean norm; null does not clip, as the paper."""
    mixed_precision: Literal["no", "bf16", "fp16"] | None = None
    """Number format of the forward pass; null means what `accelerate launch` was told."""
    gradient_checkpointing: bool = False
    """Whether the layers are computed a second time in the backward pass, instead of kept: less memory, more time."""
    compile: bool = False
    """Whether `torch.compile` makes the network faster: one dynamic graph, so that no new length is compiled anew.
    The first update then takes minutes, and needs a C++ compiler on a CPU."""
    ema_decay: float | None = number(None, at_least=0, below=1)
    """Decay of an exponential moving average of the weights, which is then what is validated, averaged and published;
    null keeps none, as the paper."""
    max_nonfinite_updates: int = number(10, at_least=1, at_most=10**9)
    """Updates in a row whose loss or gradient is not a finite number, and which are left out, before the run stops."""
    log_every: int = number(100, at_least=1, at_most=10**9)
    """Updates between two lines of training.jsonl, which are also what trackers draw: loss, gradient's norm, rate."""
    validate_every: int = number(1000, at_least=1, at_most=10**9)
    """Updates between two validations (loss and BLEU)."""
    save_every: int = number(1000, at_least=1, at_most=10**9)
    """Updates between two checkpoints."""
    keep_last: int = number(5, at_least=1, at_most=10**6)
    """Checkpoints that stay on disk."""
    keep_best: int = number(0, at_least=0, at_most=10**6)
    """Checkpoints of the best validations that stay on disk as well; save_every is then a multiple of
    validate_every."""
    best_by: Literal["bleu", "loss"] = "bleu"
    """What makes a validation the best: the highest BLEU or the lowest loss."""
    patience: int | None = number(None, at_least=1, at_most=10**6)
    """Validations in a row without a new best after which the run ends before max_steps; null never."""
    average_last: int = number(5, at_least=1, at_most=10**6)
    """Checkpoints whose mean is the final model (Section 6.1), at most keep_last; 1 takes the last as it is."""
    average_best: int | None = number(None, at_least=1, at_most=10**6)
    """Average this many checkpoints of the best validations instead; they stay on disk beside the last."""
    data_workers: int = number(0, at_least=0, at_most=1024)
    """Processes that make batches ahead of the training; 0 makes each when it is asked for."""
    cpu_threads: int | None = number(None, at_least=1, at_most=1024)
    """Threads of each process when it trains on CPU; null shares the machine's cores among the processes."""
    trackers: list[str] = field(default_factory=list)
    """Experiment trackers by Accelerate's names: tensorboard, wandb, trackio, ..."""


@dataclass
class EvaluationRecipe:
    """How validation and test are translated (Section 6.1) and scored."""

    num_beams: int = number(4, at_least=1, at_most=1000)
    """Beam size for the test set, and the model's default from then on."""
    length_penalty: float = number(0.6, at_least=-10, at_most=10)
    """Alpha of the length penalty; the model's default from then on."""
    length_penalty_type: Literal["gnmt", "power"] = "gnmt"
    """A hypothesis of L tokens scores log-probability / ((5 + L) / 6) ** alpha, as in the paper, or / L ** alpha; the
    model's default from then on."""
    finish_candidates: Literal["all", "top"] = "all"
    """Which of the 2 x num_beams candidates of a step may finish: all, as in tensor2tensor, or the first num_beams, as
    in transformers; the model's default from then on."""
    early_stopping: bool | Literal["never"] | None = None
    """When a sentence is done, as transformers' key of this name; null is never for gnmt, which is tensor2tensor's
    rule, and false for power."""
    validation_num_beams: int = number(1, at_least=1, at_most=1000)
    """Beam size for validation during training; 1 is greedy."""
    tokens_per_batch: int = number(4096, at_least=1, at_most=2_000_000)
    """Budget of a batch of sentences to translate: rows times the longest source."""
    max_length_offset: int | None = number(50, at_least=0, at_most=1_000_000)
    """Longest output of a sentence: the tokens of its source and this many more; the model's default from then on."""
    # The first symbol counts, and one more is needed to say anything.
    max_length: int | None = number(None, at_least=2, at_most=1_000_000)
    """Longest output in tokens, one for all sentences, in the place of max_length_offset."""
    tokenize: str = "13a"
    """sacreBLEU's tokenizer: 13a for plain text, none for text that is tokenised already."""
    lowercase: bool = False
    """Whether BLEU ignores case."""


@dataclass
class HubRecipe:
    """Where the model is published, if anywhere. The token is not of a recipe: huggingface_hub finds it."""

    repo_id: str | None = None
    """Repository on the Hub, as user/name; it is made if there is none. null publishes nothing."""
    min_bleu: float = number(0.0, at_least=0, at_most=100)
    """Least BLEU: of the test set for the model, of the validation for a checkpoint. What has less, or none, is not
    published."""
    private: bool | None = None
    """Whether only its owners see it: of a repository that is made, null is what its owner has as a default. true is
    also a promise: nothing goes to one that is public."""
    revision: str = "main"
    """Branch to publish on; it is made if there is none."""
    every_n_checkpoints: int | None = number(None, at_least=1, at_most=10**6)
    """Publish each n-th checkpoint while the training goes on, with the BLEU of its validation; null only publishes
    the model at the end."""
    license: str | None = None
    """Licence of the model, as apache-2.0, for its card."""


@dataclass
class Recipe:
    """One experiment."""

    run_dir: str = ""
    """Folder of the run; default: runs/NAME, where NAME is the recipe's file name."""
    seed: int = number(1, at_least=0, at_most=2**32 - 1)
    """Of the initial weights, the dropout, the order of the data and the built-in corpus."""
    data: DataRecipe = field(default_factory=DataRecipe)
    more_data: list[SourceRecipe] = field(default_factory=list)
    """Further sources of text, each with data's keys from source_language to weight; on the command line
    --more_data.KEY is that of the last one."""
    tokenizer: TokenizerRecipe = field(default_factory=TokenizerRecipe)
    model: ModelRecipe = field(default_factory=ModelRecipe)
    training: TrainingRecipe = field(default_factory=TrainingRecipe)
    evaluation: EvaluationRecipe = field(default_factory=EvaluationRecipe)
    hub: HubRecipe = field(default_factory=HubRecipe)

    @property
    def language_pairs(self) -> list[list[str]]:
        """Source and target language of each direction, in the order of the sources, each direction once."""
        pairs = ((part.source_language, part.target_language) for part in (self.data, *self.more_data))
        return [list(pair) for pair in dict.fromkeys(pairs)]

    def flat(self) -> dict[str, Any]:
        """Every key with its value, as the command line spells it: `{"training.max_steps": 100, ...}`."""
        return _flat(asdict(self))

    def as_yaml(self) -> str:
        """The recipe with all its defaults as YAML, which `load_recipe` reads back to an equal one."""
        return str(yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True))


def _flat(sections: dict[str, Any]) -> dict[str, Any]:
    """`{"training": {"max_steps": 1}, "seed": 1}` -> `{"training.max_steps": 1, "seed": 1}`."""
    keys: dict[str, Any] = {}
    for name, value in sections.items():
        if name in SECTIONS and isinstance(value, dict):
            keys.update({f"{name}.{key}": inner for key, inner in value.items()})
        else:
            keys[name] = value
    return keys


def _check_keys(keys: Iterable[str], where: str) -> None:
    known = [*Recipe().flat(), *SECTIONS, *(f"more_data.{source.name}" for source in fields(SourceRecipe))]
    for key in keys:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0)[0]
            raise ValueError(f"{where} has the key {shown(key)}, which no recipe has; the nearest one is {nearest!r}.")


class _Loader(yaml.SafeLoader):
    """As jsonargparse reads values: what looks like a date is text."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _check_yaml(text: str, where: str) -> None:
    """
    Refuses YAML that readers stumble over, before one of them sees it: nested deeper than a recipe is, aliases that
    multiply or refer to themselves, numbers of hundreds of digits, halves of characters, and types by name, as
    !!timestamp.
    """
    # For each collection that is open: whether it has an anchor, so that an alias could stand for it.
    opened: list[bool] = []
    for count, event in enumerate(yaml.parse(text, _Loader)):
        line = "" if event.start_mark is None else f"in line {event.start_mark.line + 1}"
        if isinstance(event, (yaml.CollectionStartEvent, yaml.ScalarEvent)) and event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            raise ValueError(f"{where} names the type {shown(tag)} {line}: write the value without it.")
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append(event.anchor is not None)
        elif isinstance(event, yaml.CollectionEndEvent):
            opened.pop()
        elif isinstance(event, yaml.AliasEvent) and any(opened):
            raise ValueError(f"{where} has the alias *{event.anchor} {line} inside a value that has an anchor itself.")
        elif isinstance(event, yaml.ScalarEvent) and LONG_NUMBER.fullmatch(event.value):
            raise ValueError(f"{where} has a number of {len(event.value)} digits {line}: {shown(event.value)}.")
        elif isinstance(event, yaml.ScalarEvent) and re.search("[\ud800-\udfff]", event.value):
            raise ValueError(f"{where} has half a character of UTF-16 {line}: {shown(event.value)}.")
        if len(opened) > MOST_LEVELS or count > MOST_ENTRIES:
            raise ValueError(
                f"{where} has more than {MOST_LEVELS} levels or {MOST_ENTRIES:,} entries {line}, which is no recipe."
            )


def _check_nodes(node: yaml.Node | None, where: str) -> None:
    """YAML's reader would take the last of two equal keys, and a bare `no`, Norwegian or a precision, for false."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_nodes(item, where)
    if (
        isinstance(node, yaml.ScalarNode)
        and node.tag.endswith(":bool")
        and node.value.lower() not in ("true", "false")
    ):
        raise ValueError(
            f"{where} has a bare {node.value} in line {node.start_mark.line + 1}, which is a truth "
            f"value to YAML: write '{node.value}' in quotes, or else true or false."
        )
    if not isinstance(node, yaml.MappingNode):
        return
    seen = set()
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                line = key.start_mark.line + 1
                raise ValueError(f"{where} has the key {shown(key.value)} a second time in line {line}.")
            seen.add(key.value)
        _check_nodes(key, where)
        _check_nodes(value, where)


def _check_file(path: Path) -> None:
    """Refuses a file that is no mapping of known keys, before its values are looked at."""
    where = f"The recipe {str(path)!r}"
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{where} has {path.stat().st_size:,} bytes, which is no recipe.")
    try:
        text = path.read_text(encoding="utf-8")
        _check_yaml(text, where)
        content = yaml.load(text, _Loader)
        _check_nodes(yaml.compose(text, _Loader), where)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8: {error.reason} at byte {error.start + 1}.") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is not readable YAML: {_shortened(' '.join(str(error).split()), 400)}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{where} must be `key: value` lines, but it is {shown(content)}.")
    for name in SECTIONS:
        if not isinstance(content.get(name, {}), dict):
            raise ValueError(
                f"{where} must have `key: value` lines below {name!r}, but it has {shown(content[name])}."
            )
    sources = content.get("more_data", [])
    if not isinstance(sources, list) or not all(source and isinstance(source, dict) for source in sources):
        raise ValueError(
            f"{where} must have a list of sources below 'more_data', each of `key: value` lines, "
            f"but it has {shown(sources)}."
        )
    keys = [*_flat(content), *(f"more_data.{key}" for source in sources for key in source)]
    _check_keys(map(str, keys), where)


def _told(message: str) -> str:
    """The sentence about a value that jsonargparse refuses; in the recipe's words, if it is that of a single key."""
    found = re.search(r'Parser key "(\w+\.)?(\w+)":.*value:(.*)$', message, re.DOTALL)
    section = getattr(Recipe(), found[1][:-1], None) if found and found[1] else Recipe()
    hints = get_type_hints(type(section))
    if found and found[2] in hints and found[2] != "more_data":
        kinds = list(dict.fromkeys(_kinds(hints[found[2]])))
        expected = " or ".join([", ".join(kinds[:-1]), kinds[-1]]) if kinds[1:] else kinds[0]
        return f"{found[1] or ''}{found[2]} must be {expected}, but it is {shown(found[3].strip())}."
    message = re.sub(r"<class '(\w+)'>", r"\1", " ".join(message.split()))
    return _shortened(re.sub(r"\S{81,}", lambda word: _shortened(word[0], 80), message), 400)


def _kinds(hint: Any) -> list[str]:
    """The values that a type hint allows, in words."""
    if get_origin(hint) is Literal:
        return [repr(value) for value in get_args(hint)]
    if get_origin(hint) in (Union, UnionType):
        return [kind for part in get_args(hint) for kind in _kinds(part)]
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
    return [names[hint] if hint in names else "a list" if get_origin(hint) is list else "{language: file}"]


def _recipe_file(name: str) -> Path:
    path = Path(name)
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"There is no recipe file {str(path)!r}.") from error
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise ValueError(f"The recipe {str(path)!r} is {kind}: name a YAML file.")
    return path


def _check_arguments(arguments: Sequence[str]) -> None:
    """Refuses keys and values of the command line that jsonargparse would stumble over."""
    keys = []
    for i, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if option.startswith("--"):
            key = option[2:].rstrip("+")
            keys.append(key)
            value = value if equals else " ".join(arguments[i + 1 : i + 2])
            if key in SECTIONS and not value.lstrip().startswith("{"):
                raise ValueError(
                    f"The command line gives {option} the value {shown(value)}: override its keys singly."
                )
            if key == "recipe":
                _check_file(_recipe_file(value))
                continue
        text = value if option.startswith("--") else argument
        try:
            _check_yaml(text, f"The command line's {shown(text)}")
        except yaml.YAMLError:
            # A text, which need not be YAML, or a value that is refused with its key.
            continue
    _check_keys([key for key in keys if key not in ("help", "recipe", "print_config")], "The command line")


def load_recipe(argv: Sequence[str], program: str = "accelerate launch train.py") -> Recipe:
    """
    Reads a recipe file and the overrides that follow it.

    Args:
        argv (`Sequence[str]`): the command line without the program's name: `RECIPE.yaml`, then
            `--section.key value` as often as wanted. `--help` prints every key with type, default and meaning.
        program (`str`): how the usage says that a training is started.

    Returns:
        [`Recipe`]: complete and checked, with `run_dir` filled in.

    Raises:
        ValueError: an unknown key (with the nearest right one), a value of the wrong type or out of range, or YAML
            that cannot be read.
        FileNotFoundError: there is no such recipe file.
    """
    parser = ArgumentParser(
        prog=program,
        usage=f"{program} RECIPE.yaml [--section.key value ...]",
        description="Trains a translation model. Every key below may stand in the recipe, or override it here.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--recipe", action="config", help="the recipe: a YAML file; usually stands first, by itself")
    parser.add_class_arguments(Recipe)
    arguments = list(argv)
    path = _recipe_file(arguments[0]) if arguments and not arguments[0].startswith("-") else None
    if path is not None:
        arguments[:1] = ["--recipe", str(path)]
    _check_arguments(arguments)
    try:
        namespace = parser.parse_args(arguments)
    except ArgumentError as error:
        raise ValueError(_told(str(error))) from error
    values = parser.instantiate(namespace).as_dict()
    recipe = Recipe(**{name: value for name, value in values.items() if name != "recipe"})
    check_ranges(recipe)
    if not recipe.run_dir:
        if path is None:
            raise ValueError("Name a recipe file first, or at least the folder of the run with --run_dir.")
        recipe.run_dir = str(Path("runs") / path.stem)
    return recipe


def check_ranges(recipe: Recipe) -> None:
    """
    Raises:
        ValueError: a number that is not finite or out of its range, a text with control characters, null where a
            value is needed, or keys that do not go together; the message names the key.
    """
    optional = {"validation_split", "test_split", "max_length_offset"}
    sections: list[tuple[str, Any]] = [("", recipe)]
    sections += [(f"{name}.", getattr(recipe, name)) for name in SECTIONS]
    sections += [(f"more_data[{i}].", source) for i, source in enumerate(recipe.more_data)]
    for prefix, section in sections:
        defaults = type(section)()
        for part in fields(section):
            name, value, default = prefix + part.name, getattr(section, part.name), getattr(defaults, part.name)
            if value is None and default is not None and part.name not in optional:
                raise ValueError(f"{name} must have a value, for example its default {default!r}, but it is null.")
            # A NaN compares false with everything.
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if is_number and not all(COMPARISONS[word](value, bound) for word, bound in part.metadata.items()):
                bounds = " and ".join(f"{word.replace('_', ' ')} {bound:,}" for word, bound in part.metadata.items())
                raise ValueError(f"{name} must be {bounds}, but it is {shown(value)}.")
            texts = [*value, *value.values()] if isinstance(value, dict) else [value] if isinstance(value, str) else []
            if any(re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", text) for text in texts):
                raise ValueError(f"{name} must be text without control characters, but it is {shown(value)}.")
    _check_agreement(recipe.training)
    _check_hub(recipe.hub, recipe.training)
    if recipe.evaluation.max_length_offset is None and recipe.evaluation.max_length is None:
        raise ValueError("evaluation.max_length_offset and evaluation.max_length must not both be null.")


def _check_agreement(training: TrainingRecipe) -> None:
    """Keys that are right by themselves, and not together."""
    if training.schedule == "noam" and training.peak_learning_rate is not None:
        raise ValueError(
            f"training.peak_learning_rate ({training.peak_learning_rate}) says nothing to training.schedule 'noam', "
            "whose peak is equation 3's; change it by training.learning_rate_factor, or choose another schedule."
        )
    if training.schedule != "noam" and training.peak_learning_rate is None:
        raise ValueError(f"training.schedule {training.schedule!r} needs a training.peak_learning_rate.")
    if training.schedule != "noam" and training.learning_rate_factor != 1:
        raise ValueError(
            f"training.learning_rate_factor ({training.learning_rate_factor}) says nothing to training.schedule "
            f"{training.schedule!r}, whose height is training.peak_learning_rate."
        )
    if training.average_best is None and training.average_last > training.keep_last:
        raise ValueError(
            f"training.average_last ({training.average_last}) must not be above training.keep_last "
            f"({training.keep_last}): a deleted checkpoint cannot be averaged."
        )
    ranking = "average_best" if training.average_best is not None else "keep_best" if training.keep_best else None
    if ranking is not None and training.save_every % training.validate_every:
        raise ValueError(
            f"training.{ranking} ranks checkpoints by their validation, so training.save_every "
            f"({training.save_every}) must be a multiple of training.validate_every ({training.validate_every})."
        )


def _check_hub(hub: HubRecipe, training: TrainingRecipe) -> None:
    if hub.repo_id is None and hub.every_n_checkpoints is not None:
        raise ValueError("hub.every_n_checkpoints needs a hub.repo_id to publish to.")
    if hub.repo_id is not None:
        check_repo_id(hub.repo_id, "hub.repo_id")
    check_branch(hub.revision, "hub.revision")
    if hub.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", hub.license):
        raise ValueError(
            f"hub.license must be one of the Hub's names, as apache-2.0 or cc-by-4.0, but it is {hub.license!r}."
        )
    if hub.every_n_checkpoints is not None and training.save_every % training.validate_every:
        raise ValueError(
            "hub.every_n_checkpoints publishes a checkpoint with the BLEU of its validation, so training.save_every "
            f"({training.save_every}) must be a multiple of training.validate_every ({training.validate_every})."
        )


def check_repo_id(repo_id: str, where: str) -> None:
    """
    Raises:
        ValueError: the Hub would not take it for the id of a repository; `where` is what the message calls it.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo_id)
        if repo_id.count("/") != 1:
            raise HFValidationError("it has no slash.")
    except HFValidationError as error:
        raise ValueError(f"{where} must be of the form user/name, but it is {repo_id!r}: {error}") from error


def check_branch(name: str, where: str) -> None:
    """
    Raises:
        ValueError: git would not take it for the name of a branch; `where` is what the message calls it.
    """
    if not re.fullmatch(r"[\w][\w./-]*", name) or ".." in name or "//" in name or name.endswith(("/", ".", ".lock")):
        raise ValueError(f"{where} must be the name of a branch, as main or v2, but it is {name!r}.")
