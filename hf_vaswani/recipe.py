"""One YAML file is one experiment: reads it, lays the command line over it, and checks every key and value.

train.py RECIPE.yaml [--section.key value ...]
"""

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

try:
    import yaml
    from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings
except ImportError as error:
    raise ImportError(f"Training needs {error.name}: pip install 'hf_vaswani[train]'") from error

set_parsing_settings(docstring_parse_attribute_docstrings=True)

Files = dict[str, str] | str | None
# Stands for "not 0", or 1 less it for "not 1", in a range.
TINY = 1e-15
SECTIONS = ("data", "tokenizer", "model", "training", "evaluation", "hub")


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
    source_column: int | str | None = None
    """Column of the source side (default: the language code). A number counts the columns of a TSV/CSV file without
    a header line, from 0."""
    target_column: int | str | None = None
    """Column of the target side, likewise."""
    weight: float = 1.0
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
    stream_window: int = 100_000
    """Pairs of a stream (data.streaming) that are read, shuffled and put into batches together."""
    target_tag: bool = False
    """Put the target language in front of each source sentence, as <2de>: an entry of the vocabulary, by which one
    model can translate into several languages."""
    num_proc: int | None = None
    """Processes that turn the training text into ids, unless it is a stream (see training.data_workers); null means
    this one, with the tokenizer's threads."""


@dataclass
class TokenizerRecipe:
    """The vocabulary (Section 5.1)."""

    kind: Literal["bpe", "unigram", "wordpiece", "words", "characters", "bytes"] = "bpe"
    """What its entries are: byte-pair encoding over bytes, pieces of a unigram language model (as SentencePiece's),
    word-pieces (the paper's for English-French), whole words, characters, or the bytes of UTF-8."""
    vocab_size: int = 37000
    """Entries, at most, of the joint vocabulary to train on both sides of the training text; bytes have always 260."""
    path: str | None = None
    """Folder or Hub id of a tokenizer to use instead of training one; then the two keys above say nothing."""
    decoder_start: Literal["bos", "eos", "pad"] = "bos"
    """First symbol of the decoder's input (Section 3.1): the tokenizer's <s>; its </s>, as in fairseq; or its <pad>,
    whose embedding is zero, as in tensor2tensor and Marian. Without a <s> it is <pad>."""


@dataclass
class ModelRecipe:
    """The network: fields and defaults of VaswaniConfig, less those that the tokenizer decides."""

    d_model: int = 512
    """Width of the embeddings and of every sub-layer's output (Section 3.1)."""
    d_ff: int = 2048
    """Width of the hidden layer of the feed-forward networks (Section 3.3)."""
    num_heads: int = 8
    """Attention heads h (Section 3.2.2)."""
    d_k: int | None = None
    """Width of a head's queries and keys; null means d_model / num_heads."""
    d_v: int | None = None
    """Width of a head's values; null means d_model / num_heads."""
    encoder_layers: int = 6
    """Layers N of the encoder."""
    decoder_layers: int = 6
    """Layers N of the decoder."""
    dropout: float = 0.1
    """P_drop: on embedding + position, and on each sub-layer's output (Section 5.4)."""
    attention_dropout: float = 0.0
    """Dropout on the attention weights; the paper has none."""
    activation_dropout: float = 0.0
    """Dropout after the feed-forward networks' activation; the paper has none."""
    activation_function: str = "relu"
    """Activation of the feed-forward networks, by transformers' name."""
    norm_position: Literal["post", "pre"] = "post"
    """LayerNorm after the residual sum, as in the paper, or before the sub-layer."""
    position_encoding: Literal["sinusoidal", "learned"] = "sinusoidal"
    """Sinusoids (Section 3.5), or a table of max_position_embeddings rows that is learned (Table 3 row E)."""
    sinusoid_layout: Literal["interleaved", "concatenated", "tensor2tensor"] = "interleaved"
    """Sines and cosines in turn, as in the paper; or first the sines; or tensor2tensor's wavelengths as well."""
    max_position_embeddings: int = 1024
    """Rows of a learned table of positions; no limit for sinusoids."""
    layer_norm_eps: float = 1e-6
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

    max_steps: int = 100_000
    """Updates of the parameters in all (Section 5.2)."""
    tokens_per_batch: int = 25_000
    """Budget of a batch: rows times its longest side, padding counted (Section 5.1)."""
    accumulation_steps: int = 1
    """Batches that every process adds up for one update."""
    schedule: Literal["noam", "inverse_sqrt", "constant", "cosine"] = "noam"
    """The learning rate after the warm-up: equation 3; peak * sqrt(warmup_steps / step), as fairseq's; the peak; or
    half a cosine from the peak to 0, just after max_steps."""
    warmup_steps: int = 4000
    """Updates during which the learning rate rises in a straight line from 0 (Section 5.3)."""
    learning_rate_factor: float = 1.0
    """Multiplies the schedule of equation 3; for noam only."""
    peak_learning_rate: float | None = None
    """Learning rate at the end of the warm-up: for every schedule but noam, whose peak equation 3 gives."""
    optimizer: Literal["adam", "muon"] = "adam"
    """What makes the updates: the paper's Adam; or Muon for the layers' matrices, and Adam for embeddings, biases and
    LayerNorms."""
    adam_beta1: float = 0.9
    """Adam's decay of the gradient's mean (Section 5.3)."""
    adam_beta2: float = 0.98
    """Adam's decay of the gradient's square (Section 5.3)."""
    adam_epsilon: float = 1e-9
    """Adam's epsilon (Section 5.3)."""
    weight_decay: float = 0.0
    """AdamW's: every update also multiplies each matrix, embeddings included, by 1 - learning rate * weight_decay;
    biases and LayerNorms are spared. 0 is the paper's Adam."""
    label_smoothing: float = 0.1
    """Epsilon_ls (Section 5.4)."""
    label_smoothing_over: Literal["others", "all"] = "others"
    """Who shares epsilon_ls: all tokens but the true one, as in the paper's code; or all V, the true one as well."""
    clip_norm: float | None = None
    """Longest gradient, as a Euclidean norm; null does not clip, as the paper."""
    mixed_precision: Literal["no", "bf16", "fp16"] | None = None
    """Number format of the forward pass; null means what `accelerate launch` was told."""
    gradient_checkpointing: bool = False
    """Whether the layers are computed a second time in the backward pass, instead of kept: less memory, more time."""
    compile: bool = False
    """Whether `torch.compile` makes the network faster: one dynamic graph, so that no new length is compiled anew.
    The first update then takes minutes, and needs a C++ compiler on a CPU."""
    ema_decay: float | None = None
    """Decay of an exponential moving average of the weights, which is then what is validated, averaged and published;
    null keeps none, as the paper."""
    max_nonfinite_updates: int = 10
    """Updates in a row whose loss or gradient is not a finite number, and which are left out, before the run stops."""
    log_every: int = 100
    """Updates between two lines of training.jsonl, which are also what trackers draw: loss, gradient's norm, rate."""
    validate_every: int = 1000
    """Updates between two validations (loss and BLEU)."""
    save_every: int = 1000
    """Updates between two checkpoints."""
    keep_last: int = 5
    """Checkpoints that stay on disk."""
    keep_best: int = 0
    """Checkpoints of the best validations that stay on disk as well; save_every is then a multiple of
    validate_every."""
    best_by: Literal["bleu", "loss"] = "bleu"
    """What makes a validation the best: the highest BLEU or the lowest loss."""
    patience: int | None = None
    """Validations in a row without a new best after which the run ends before max_steps; null never."""
    average_last: int = 5
    """Checkpoints whose mean is the final model (Section 6.1), at most keep_last; 1 takes the last as it is."""
    average_best: int | None = None
    """Average this many checkpoints of the best validations instead; they stay on disk beside the last."""
    data_workers: int = 0
    """Processes that make batches ahead of the training; 0 makes each when it is asked for."""
    cpu_threads: int | None = None
    """Threads of each process when it trains on CPU; null shares the machine's cores among the processes."""
    trackers: list[str] = field(default_factory=list)
    """Experiment trackers by Accelerate's names: tensorboard, wandb, trackio, ..."""


@dataclass
class EvaluationRecipe:
    """How validation and test are translated (Section 6.1) and scored."""

    num_beams: int = 4
    """Beam size for the test set, and the model's default from then on."""
    length_penalty: float = 0.6
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
    validation_num_beams: int = 1
    """Beam size for validation during training; 1 is greedy."""
    tokens_per_batch: int = 4096
    """Budget of a batch of sentences to translate: rows times the longest source."""
    max_length_offset: int | None = 50
    """Longest output of a sentence: the tokens of its source and this many more; the model's default from then on."""
    max_length: int | None = None
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
    min_bleu: float = 0.0
    """Least BLEU: of the test set for the model, of the validation for a checkpoint. What has less, or none, is not
    published."""
    private: bool | None = None
    """Whether only its owners see it: of a repository that is made, null is what its owner has as a default. true is
    also a promise: nothing goes to one that is public."""
    revision: str = "main"
    """Branch to publish on; it is made if there is none."""
    every_n_checkpoints: int | None = None
    """Publish each n-th checkpoint while the training goes on, with the BLEU of its validation; null only publishes
    the model at the end."""
    license: str | None = None
    """Licence of the model, as apache-2.0, for its card."""


@dataclass
class Recipe:
    """One experiment."""

    run_dir: str = ""
    """Folder of the run; default: runs/NAME, where NAME is the recipe's file name."""
    seed: int = 1
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
            raise ValueError(f"{where} has the key {key!r}, which no recipe has; the nearest one is {nearest!r}.")


def _check_nodes(node: yaml.Node | None, path: Path) -> None:
    """YAML's reader would take the last of two equal keys, and a bare `no`, Norwegian or a precision, for false."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_nodes(item, path)
    if (
        isinstance(node, yaml.ScalarNode)
        and node.tag.endswith(":bool")
        and node.value.lower() not in ("true", "false")
    ):
        raise ValueError(
            f"The recipe {str(path)!r} has a bare {node.value} in line {node.start_mark.line + 1}, which is a truth "
            f"value to YAML: write '{node.value}' in quotes, or else true or false."
        )
    if not isinstance(node, yaml.MappingNode):
        return
    seen = set()
    for key, value in node.value:
        if key.value in seen:
            line = key.start_mark.line + 1
            raise ValueError(f"The recipe {str(path)!r} has the key {key.value!r} a second time in line {line}.")
        seen.add(key.value)
        _check_nodes(key, path)
        _check_nodes(value, path)


def _check_file(path: Path) -> None:
    """Refuses a file that is no mapping of known keys, before its values are looked at."""
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
        _check_nodes(yaml.compose(text), path)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"The recipe {str(path)!r} is not readable YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"The recipe {str(path)!r} must be `key: value` lines, but it is {content!r}.")
    for name in SECTIONS:
        if not isinstance(content.get(name, {}), dict):
            raise ValueError(
                f"The recipe {str(path)!r} must have `key: value` lines below {name!r}, but it has {content[name]!r}."
            )
    sources = content.get("more_data", [])
    if not isinstance(sources, list) or not all(source and isinstance(source, dict) for source in sources):
        raise ValueError(
            f"The recipe {str(path)!r} must have a list of sources below 'more_data', each of `key: value` lines, "
            f"but it has {sources!r}."
        )
    keys = [*_flat(content), *(f"more_data.{key}" for source in sources for key in source)]
    _check_keys(map(str, keys), f"The recipe {str(path)!r}")


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
    path = Path(arguments[0]) if arguments and not arguments[0].startswith("-") else None
    if path is not None:
        if not path.is_file():
            raise FileNotFoundError(f"There is no recipe file {str(path)!r}.")
        _check_file(path)
        arguments[:1] = ["--recipe", str(path)]
    options = [argument[2:].split("=")[0].rstrip("+") for argument in arguments if argument.startswith("--")]
    _check_keys([key for key in options if key not in ("help", "recipe", "print_config")], "The command line")
    try:
        namespace = parser.parse_args(arguments)
    except ArgumentError as error:
        raise ValueError(re.sub(r"<class '(\w+)'>", r"\1", " ".join(str(error).split()))) from error
    values = parser.instantiate(namespace).as_dict()
    recipe = Recipe(**{name: value for name, value in values.items() if name != "recipe"})
    _check_ranges(recipe)
    if not recipe.run_dir:
        if path is None:
            raise ValueError("Name a recipe file first, or at least the folder of the run with --run_dir.")
        recipe.run_dir = str(Path("runs") / path.stem)
    return recipe


# The least value of each number, and for some the greatest.
RANGES: dict[str, tuple[float, float]] = {
    "seed": (0, 2**32 - 1),
    "data.weight": (TINY, 1000),
    "data.stream_window": (1, math.inf),
    "data.num_proc": (1, math.inf),
    "tokenizer.vocab_size": (1, 1_000_000),
    "training.max_steps": (1, math.inf),
    "training.tokens_per_batch": (1, math.inf),
    "training.accumulation_steps": (1, math.inf),
    "training.warmup_steps": (1, math.inf),
    "training.learning_rate_factor": (TINY, math.inf),
    "training.peak_learning_rate": (TINY, math.inf),
    "training.adam_beta1": (0, 1 - TINY),
    "training.adam_beta2": (0, 1 - TINY),
    "training.adam_epsilon": (TINY, math.inf),
    "training.weight_decay": (0, math.inf),
    "training.label_smoothing": (0, 1 - TINY),
    "training.clip_norm": (TINY, math.inf),
    "training.log_every": (1, math.inf),
    "training.validate_every": (1, math.inf),
    "training.save_every": (1, math.inf),
    "training.keep_last": (1, math.inf),
    "training.average_last": (1, math.inf),
    "training.average_best": (1, math.inf),
    "training.keep_best": (0, math.inf),
    "training.patience": (1, math.inf),
    "training.ema_decay": (0, 1 - TINY),
    "training.max_nonfinite_updates": (1, math.inf),
    "training.data_workers": (0, math.inf),
    "training.cpu_threads": (1, math.inf),
    "evaluation.num_beams": (1, math.inf),
    "evaluation.validation_num_beams": (1, math.inf),
    "evaluation.tokens_per_batch": (1, math.inf),
    "evaluation.max_length_offset": (0, math.inf),
    # The first symbol counts, and one more is needed to say anything.
    "evaluation.max_length": (2, math.inf),
    "hub.min_bleu": (0, 100),
    "hub.every_n_checkpoints": (1, math.inf),
}


def _check_ranges(recipe: Recipe) -> None:
    defaults = Recipe().flat()
    optional = {"data.validation_split", "data.test_split", "evaluation.max_length_offset"}
    values = [(key, key, value) for key, value in recipe.flat().items()]
    # What holds for a key of `data` holds for the same key of any other source.
    for i, source in enumerate(recipe.more_data):
        values += [(f"more_data[{i}].{key}", f"data.{key}", value) for key, value in asdict(source).items()]
    for name, key, value in values:
        if value is None and defaults[key] is not None and key not in optional:
            raise ValueError(f"{name} must have a value, for example its default {defaults[key]!r}, but it is null.")
        least, greatest = RANGES.get(key, (-math.inf, math.inf))
        if key in RANGES and value is not None and not least <= value <= greatest:
            bounds = {TINY: "above 0", 1 - TINY: "below 1"}
            low = bounds.get(least, f"at least {least:,.0f}")
            high = "" if greatest == math.inf else f" and {bounds.get(greatest, f'at most {greatest:,.0f}')}"
            raise ValueError(f"{name} must be {low}{high}, but it is {value}.")
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
