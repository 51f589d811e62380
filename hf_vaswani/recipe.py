"""
The recipe: one experiment, as dataclasses whose fields are the keys of its YAML file.

The docstrings below the fields are the manual: `--help` prints them, and docs/recipe.md is generated from them.
"""

import ast
import inspect
import math
import re
from dataclasses import Field, asdict, dataclass, field, fields, is_dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin, get_type_hints

from .extras import extra

with extra("train"):
    import yaml

# Section 5.1.
TOKENS_PER_BATCH = 25_000
Files = dict[str, str] | str | None
Schedule = Literal["noam", "inverse_sqrt", "constant", "cosine"]
Part = Literal["encoder", "decoder", "embeddings"]
Alteration = Literal["upper", "title", "typos", "no_final_mark"]
Noise = Literal["infilling", "permutation", "fragment"]
PairTask = Literal["translation", "text_to_text"]
TextTask = Literal["masked_lm", "causal_lm", "span_corruption", "denoise"]
LabelTask = Literal["classification", "tagging"]
Task = Literal[PairTask, TextTask, LabelTask]
# Tasks on pairs of texts, whose models are scored by their translations; on running text; and on text with labels.
PAIR_TASKS, TEXT_TASKS, LABEL_TASKS = map(get_args, (PairTask, TextTask, LabelTask))
FAMILIES = {PAIR_TASKS: "pairs of texts", TEXT_TASKS: "running text", LABEL_TASKS: "labelled text"}
# Tasks whose models are measured by their predictions, and not by translations.
MEASURED_TASKS = (*TEXT_TASKS, *LABEL_TASKS)
# Tasks whose models have a head beside the three parts that can be frozen.
HEAD_TASKS = ("masked_lm", *LABEL_TASKS)
Optimizer = Literal["adam", "muon"]
# Optimizers of whole matrices: neither of their shards nor of adapters.
MATRIX_OPTIMIZERS: tuple[Optimizer, ...] = ("muon",)
ResumeMark = Literal["fixed", "free", "place", "unread"]
BestBy = Literal["bleu", "loss", "accuracy", "f1", "exact_match"]
# Measures that can rank the validations of a task, its default first.
RANKED_BY: dict[str, tuple[BestBy, ...]] = {
    "translation": ("bleu", "loss"),
    "text_to_text": ("bleu", "exact_match", "loss"),
    "masked_lm": ("loss", "accuracy"),
    "causal_lm": ("loss",),
    "span_corruption": ("loss",),
    "denoise": ("loss",),
    "classification": ("accuracy", "f1", "loss"),
    "tagging": ("f1", "accuracy", "loss"),
}


def key(
    resume: ResumeMark, default: Any, tasks: tuple[str, ...] | None = None, needs: str | None = None, **bounds: float
) -> Any:
    """
    Declares a key of a recipe. Each is declared as `fixed`, `free`, `place` or `unread`.

    Args:
        resume (`str`): what a resumed run may do with the key: `"fixed"` keeps its value, `"free"` may change it,
            `"place"` may change it as long as the text there is the same; training reads no `"unread"` key.
        default: the default, or a function that makes it.
        tasks (`tuple[str, ...]`, *optional*): the tasks that have the key; by default all.
        needs (`str`, *optional*): the key without which this one has no effect, as `"initialize.from"`.
        bounds (`float`): the range of a number, by `at_least`, `above`, `at_most` and `below`, as in
            `fixed(0.1, at_least=0, below=1)`.

    Returns:
        `dataclasses.Field`: with all this as its `metadata`.
    """
    metadata = {"resume": resume, "tasks": tasks, "needs": needs, "bounds": bounds}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


class _Dumper(yaml.SafeDumper):
    """Writes the YAML of recipes: a string that would be read as a number, such as `1e3`, is quoted."""


# YAML 1.1 takes a number without a point, or without a sign in its exponent, for a string: 1e-4 and 1.0e5.
FLOAT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, "-+0123456789")

fixed, free, place, unread = (partial(key, mark) for mark in get_args(ResumeMark))


def shown(value: object) -> str:
    """Returns a value as messages show it: its `repr`, shortened to 80 characters."""
    return shortened(repr(value), 80)


def shortened(text: str, most: int) -> str:
    """Returns a text of at most `most` characters: a longer one without its middle."""
    return text if len(text) <= most else f"{text[: most - 25]} ... {text[-20:]}"


def spelled(key: str) -> str:
    """Returns a field's name as recipes spell it: `initialize.from_` is `initialize.from`."""
    return key.removesuffix("_")


@dataclass
class SourceRecipe:
    """One source of sentence pairs: a dataset, files, or both. Files of a split replace that split of the dataset."""

    source_language: str = fixed("en")
    """Language code of the source text, for example `en`."""
    target_language: str = fixed("de")
    """Language code of the target text, for example `de`."""
    dataset: str | None = place(None)
    """Id of a dataset on the Hub, or a local dataset folder. `pocket` is the built-in English-German corpus."""
    dataset_config: str | None = fixed(None)
    """Configuration of the Hub dataset, if it has several."""
    train_split: str = fixed("train")
    """Name of the dataset's training split."""
    validation_split: str | None = fixed("validation")
    """Name of the dataset's validation split; `null` for none."""
    test_split: str | None = fixed("test")
    """Name of the dataset's test split; `null` for none."""
    train_files: Files = place(None)
    """Training text: two line-aligned files as `{en: FILE, de: FILE}`, or one file with a column per language (`.tsv`,
    `.csv`, `.jsonl`, `.json` or `.parquet`). All but `.parquet` files may be compressed as `.gz`. A file may be a URL
    of fsspec, such as `s3://bucket/train.tsv.gz`: each machine copies it to its cache, unless it is streamed."""
    validation_files: Files = place(None)
    """Validation text, in the formats of `train_files`."""
    test_files: Files = place(None)
    """Test text, in the formats of `train_files`."""
    source_column: int | str | None = fixed(None, at_least=0, at_most=10_000)
    """Column of the source text: its name or, in a TSV or CSV file without a header line, its number, counted from 0.
    `null` means the language code."""
    target_column: int | str | None = fixed(None, tasks=PAIR_TASKS, at_least=0, at_most=10_000)
    """Column of the target text, given like `source_column`."""
    document_column: int | str | None = fixed(None, tasks=TEXT_TASKS, at_least=0, at_most=10_000)
    """Column that names the document of each row, for running text in a table (`task`); `null` takes each row for a
    document. A text file without columns has blank lines between its documents."""
    pair_column: int | str | None = fixed(None, tasks=LABEL_TASKS[:1], at_least=0, at_most=10_000)
    """Column of the second text, for `task: classification` of pairs of texts."""
    label_column: int | str | None = fixed(None, tasks=LABEL_TASKS, at_least=0, at_most=10_000)
    """Column of the label, for `task: classification`, or of the tags of the words, for `task: tagging`; `null` means
    `label`."""
    prefix: str | None = fixed(None, tasks=PAIR_TASKS)
    """Text in front of each source sentence, in training and in the validation and test sets of this source, with a
    space between, as in `translate English to German:`. A word in angle brackets, such as `<bt>`, is one entry of the
    vocabulary. With `data.target_tag`, the language tag comes first. `null` puts nothing there."""
    weight: float = fixed(1.0, above=0, at_most=1000)
    """Repetitions of each pair in an epoch: 2 takes each pair twice, 0.5 draws a new random half for each epoch.
    With `data.streaming`, the ratio in which the sources are mixed."""
    license: str | None = free(None)
    """Licence of the text, for the model card, for example `cc-by-4.0`."""


@dataclass
class EvaluationSetRecipe:
    """A validation or test set, or both, besides those of the sources; most keys are as in `data`."""

    source_language: str | None = fixed(None)
    """Language code of the source text; `null` is that of `data`."""
    target_language: str | None = fixed(None)
    """Language code of the target text; `null` is that of `data`."""
    dataset: str | None = place(None)
    dataset_config: str | None = fixed(None)
    validation_split: str | None = fixed("validation")
    test_split: str | None = fixed("test")
    validation_files: Files = place(None)
    test_files: Files = place(None)
    source_column: int | str | None = fixed(None, at_least=0, at_most=10_000)
    target_column: int | str | None = fixed(None, tasks=PAIR_TASKS, at_least=0, at_most=10_000)
    pair_column: int | str | None = fixed(None, tasks=LABEL_TASKS[:1], at_least=0, at_most=10_000)
    label_column: int | str | None = fixed(None, tasks=LABEL_TASKS, at_least=0, at_most=10_000)
    prefix: str | None = fixed(None, tasks=PAIR_TASKS)
    """Text in front of each source sentence, as in `data`, whose prefix these sets do not get by themselves."""
    license: str | None = free(None)


@dataclass
class AugmentRecipe:
    """Probabilities of the alterations of a training pair, which are drawn anew in each epoch."""

    upper: float = fixed(0.0, at_least=0, at_most=1)
    """Probability of a pair to be written in capital letters, on both sides."""
    title: float = fixed(0.0, at_least=0, at_most=1)
    """Probability of a pair to be written with a capital letter at the beginning of each word, on both sides."""
    typos: float = fixed(0.0, at_least=0, at_most=1)
    """Probability of a source sentence to get typing errors: letters swapped, left out, doubled or replaced by a
    neighbour on the keyboard."""
    no_final_mark: float = fixed(0.0, at_least=0, at_most=1)
    """Probability of a pair to lose its final punctuation mark, on both sides."""


@dataclass
class DataRecipe(SourceRecipe):
    """The sentence pairs. The keys from `streaming` on exist only here, and apply to `more_data` as well."""

    streaming: bool = fixed(False, tasks=(*PAIR_TASKS, *TEXT_TASKS))
    """Read the training text on the fly, for text larger than the disk: it is neither copied nor counted. A vocabulary
    is then trained on the first million pairs of each source."""
    stream_window: int = fixed(100_000, at_least=1, at_most=10**8)
    """Pairs of a stream (`data.streaming`) that are read, shuffled and batched together; with `data.augment` or
    `tokenizer.bpe_dropout`, the pairs of an epoch that are encoded and batched together. For running text (`task`),
    the lines of a stream, or the blocks of an epoch."""
    target_tag: bool = fixed(False, tasks=(*PAIR_TASKS, *TEXT_TASKS))
    """Put a tag of the target language, for example `<2de>`, in front of each source sentence. The tag is one entry of
    the vocabulary, and lets one model translate into several languages."""
    augment: AugmentRecipe | None = fixed(None, tasks=PAIR_TASKS)
    """Alterations of the training pairs, for a model that meets capitals, missing full stops and typing errors later:
    `{upper: 0.07, title: 0.05, typos: 0.05, no_final_mark: 0.2}` are probabilities, each 0 by default. `null` alters
    nothing."""
    num_proc: int | None = free(None, at_least=1, at_most=1024)
    """Processes that tokenize the training text; `null` tokenizes in the main process, with the tokenizer's threads.
    Streams are tokenized where their batches are prepared, see `training.data_workers`."""


@dataclass
class TokenizerRecipe:
    """The vocabulary (Section 5.1)."""

    kind: Literal["bpe", "unigram", "wordpiece", "words", "characters", "bytes"] = fixed("bpe")
    """Kind of entries: `bpe` is byte-pair encoding over bytes (the paper's for English-German), `unigram` the pieces
    of a unigram language model, as in SentencePiece, `wordpiece` word pieces (the paper's for English-French), `words`
    whole words, `characters` Unicode code points, and `bytes` the bytes of UTF-8."""
    vocab_size: int = fixed(37000, at_least=1, at_most=1_000_000)
    """Maximum number of entries of the vocabulary, which source and target share. The 4 special tokens, the tags of
    `data.target_tag` and prefixes such as `<bt>` count. `bytes` always has 260 entries, plus the tags and prefixes."""
    split_digits: bool = fixed(False)
    """Make each digit an entry of its own, so that numbers are spelled digit by digit. `bytes` and `characters` do so
    anyway."""
    path: str | None = place(None)
    """Folder or Hub id of a tokenizer to use instead of training one. `kind`, `vocab_size` and `split_digits` then
    have no effect."""
    bpe_dropout: float = fixed(0.0, tasks=PAIR_TASKS, at_least=0, below=1)
    """BPE-dropout (Provilkov et al., 2020): probability of each merge to be skipped when training text is encoded,
    anew in each epoch; 0.1 is usual. Needs a vocabulary of kind `bpe`. Text to translate is encoded without it."""
    decoder_start: Literal["bos", "eos", "pad"] = fixed("bos")
    """First symbol of the decoder's input (Section 3.1): `bos` is `<s>`; `eos` is `</s>`, as in fairseq; `pad` is
    `<pad>`, whose embedding is zero, as in tensor2tensor and Marian. A tokenizer without the symbol starts with
    `<pad>`."""


@dataclass
class InitializeRecipe:
    """
    The model that training starts from, in place of random weights. Its architecture, vocabulary and search settings
    become those of the run; dropout rates and everything in `training` stay free. A translation model can be made
    shallower: a smaller `model.encoder_layers` or `decoder_layers` keeps so many of its layers, spread evenly.
    """

    # Spelled `from` in a recipe, which Python does not allow as a name.
    from_: str | None = fixed(None)
    """Model to start from: an id on the Hub, or the folder of a model, checkpoint or run; a MarianMT model such as
    OPUS-MT's, a Marian `.npz` file or a fairseq model is converted. `null` starts from random weights."""
    revision: str | None = fixed(None, needs="initialize.from")
    """Branch, tag or commit of a model on the Hub; `null` is its main branch."""
    parts: list[Part] | None = fixed(None, needs="initialize.from")
    """Parts to take from the model, of `encoder`, `decoder` (the layers of each) and `embeddings` (all embedding and
    output matrices); the others start from random weights. A head is taken with its stack. `null` takes all."""
    vocabulary: Literal["keep", "transfer"] = fixed("keep", tasks=PAIR_TASKS, needs="initialize.from")
    """`keep` keeps the vocabulary of the model; `transfer` exchanges it for that of the recipe's `tokenizer` section:
    entries that both have keep their embeddings, the others begin as the mean of the old entries that spell them."""
    add_tokens: list[str] = fixed(list, tasks=PAIR_TASKS, needs="initialize.from")
    """Entries to add to the vocabulary of the model, for example `["<2fr>"]`, the language tag of a further direction,
    or `["<bt>"]`, the prefix of a source. Each begins as the mean of the embeddings of the pieces that spelled it."""


@dataclass
class ModelRecipe:
    """The network: the settings of `VaswaniConfig`, except those that follow from the data and the tokenizer."""

    d_model: int = fixed(512, at_least=1, at_most=100_000)
    """Width of the embeddings and of every sub-layer's output (Section 3.1). Must be even for sinusoidal positions."""
    d_ff: int = fixed(2048, at_least=1, at_most=1_000_000)
    """Width of the hidden layer of the feed-forward networks (Section 3.3)."""
    num_heads: int = fixed(8, at_least=1, at_most=10_000)
    """Number of attention heads, h (Section 3.2.2)."""
    d_k: int | None = fixed(None, at_least=1, at_most=100_000)
    """Width of the queries and keys of each head (Section 3.2.2); `null` means `d_model / num_heads`."""
    d_v: int | None = fixed(None, at_least=1, at_most=100_000)
    """Width of the values of each head (Section 3.2.2); `null` means `d_model / num_heads`."""
    encoder_layers: int = fixed(6, at_least=1, at_most=1000)
    """Number of encoder layers, N (Section 3.1)."""
    decoder_layers: int = fixed(6, at_least=1, at_most=1000)
    """Number of decoder layers, N (Section 3.1)."""
    dropout: float = fixed(0.1, at_least=0, below=1)
    """Dropout rate P_drop, on the sum of embedding and position and on each sub-layer's output (Section 5.4)."""
    attention_dropout: float = fixed(0.0, at_least=0, below=1)
    """Dropout rate on the attention weights; the paper uses none."""
    activation_dropout: float = fixed(0.0, at_least=0, below=1)
    """Dropout rate after the activation of the feed-forward networks; the paper uses none."""
    activation_function: str = fixed("relu")
    """Activation of the feed-forward networks (Section 3.3), by its name in transformers."""
    norm_position: Literal["post", "pre"] = fixed("post")
    """Place of LayerNorm: `post` is after each residual sum, as in the paper; `pre` is before each sub-layer, and at
    the end of each stack."""
    position_encoding: Literal["sinusoidal", "learned"] = fixed("sinusoidal")
    """`sinusoidal` computes positions for any length (Section 3.5); `learned` trains a table of
    `max_position_embeddings` rows (Table 3, row E)."""
    sinusoid_layout: Literal["interleaved", "concatenated", "tensor2tensor"] = fixed("interleaved")
    """`interleaved` alternates sines and cosines, as in the paper; `concatenated` puts all sines first, as in Marian;
    `tensor2tensor` does so with the wavelengths of tensor2tensor."""
    max_position_embeddings: int = fixed(1024, at_least=1, at_most=1_000_000)
    """Longest sentence in tokens, for `learned` positions: pairs with a longer side are skipped. Sinusoidal positions
    have no limit: there, sentences longer than those of the training are cut when they are translated."""
    layer_norm_eps: float = fixed(1e-6, above=0, at_most=1)
    """Constant added to the variance in LayerNorm."""
    attention_bias: bool = fixed(False)
    """Add biases to the projections of the attention; the paper's have none."""
    lm_head_bias: bool = fixed(False)
    """Add a bias to the pre-softmax linear transformation; the paper's has none."""
    embedding_norm: bool = fixed(False)
    """Add a LayerNorm behind the sum of embedding and position, as in BERT; the paper has none."""
    lm_head_transform: bool = fixed(False, tasks=(*PAIR_TASKS, "masked_lm"))
    """Add a linear layer, the activation and a LayerNorm in front of the pre-softmax linear transformation, as in
    BERT; for the task `masked_lm` only."""
    initializer_range: float | None = fixed(None, above=0, at_most=1)
    """Standard deviation of the initial weights, as in BERT and GPT, whose embeddings are not scaled; `null` is
    tensor2tensor's rule, by the widths of each matrix."""
    scale_embedding: bool = fixed(True)
    """Multiply the embeddings by `sqrt(d_model)` (Section 3.4)."""
    share_embeddings: bool = fixed(True)
    """Use one embedding matrix for source and target (Section 3.4). Requires `tie_word_embeddings`: without it, no
    matrix is shared."""
    tie_word_embeddings: bool = fixed(True)
    """Use the target embedding matrix as the pre-softmax linear transformation (Section 3.4)."""


@dataclass
class ObjectiveRecipe:
    """Objective of a task on running or labelled text. A key applies to the tasks that it names, or to all of them."""

    unit: Literal["blocks", "lines"] = fixed("blocks", tasks=MEASURED_TASKS)
    """What a model reads at once: `blocks` are as many lines of a document as fit `block_length`, `lines` single lines
    of the text."""
    block_length: int = fixed(512, tasks=MEASURED_TASKS, at_least=8, at_most=1_000_000)
    """Most tokens of a block, special tokens included; a longer line makes several blocks. At most
    `training.tokens_per_batch`. `classification` and `tagging`: most tokens of a text, which is cut there."""
    noise_rate: float | None = fixed(None, tasks=("masked_lm", "span_corruption", "denoise"), above=0, below=1)
    """Share of the tokens that are masked or corrupted; `null` is that of the task's paper: 0.15 for `masked_lm` and
    `span_corruption`, and for `denoise` 0.3 with `infilling` and 0.5 with `fragment`."""
    whole_words: bool = fixed(False, tasks=("masked_lm",))
    """`masked_lm`: mask all tokens of a word, or none."""
    next_sentence: bool = fixed(False, tasks=("masked_lm",))
    """`masked_lm`: also predict whether the second half of a block continues the first (Devlin et al., 2018). In half
    of the blocks it does, in the others it is taken from another document."""
    span_length: float = fixed(3.0, tasks=("span_corruption", "denoise"), at_least=1, at_most=1000)
    """`span_corruption`, and `denoise` with `infilling`: mean length of the spans, in tokens."""
    noise: list[Noise] = fixed(lambda: ["infilling"], tasks=("denoise",))
    """`denoise`: `infilling` replaces each span by one mask and `permutation` reorders the lines of a block (BART,
    Lewis et al., 2019); `fragment` masks the tokens of one fragment (MASS, Song et al., 2019)."""
    stack: Literal["encoder", "decoder"] | None = fixed(None, tasks=("classification",))
    """`classification`: the stack that reads the text, an `encoder` from its first token (BERT) or a `decoder` from
    its last one (GPT); `null` is that of the model of `initialize.from`, or else an encoder."""


@dataclass
class AdapterRecipe:
    """Low-rank adapters (LoRA, Hu et al., 2021), computed by PEFT."""

    rank: int = fixed(16, at_least=1, at_most=100_000)
    """Rank of the two matrices whose product is added to a weight."""
    alpha: float = fixed(32.0, above=0, at_most=100_000)
    """The product is scaled by `alpha / rank`."""
    dropout: float = fixed(0.0, at_least=0, below=1)
    """Dropout rate on the input of the adapters."""
    target: list[str] = fixed(lambda: ["attention", "feed_forward"])
    """Weights that get an adapter: `attention` and `feed_forward` are all matrices of these sub-layers; other words
    are the names of single modules, as in `q_proj`."""


@dataclass
class SimCutRecipe:
    """SimCut (Gao et al., 2022)."""

    alpha: float = fixed(3.0, above=0, at_most=1000)
    """Weight of the divergence between the predictions for a pair and for the same pair with embeddings cut off."""
    p: float = fixed(0.05, above=0, below=1)
    """Probability of each source and target embedding to be cut off, that is, set to zero."""


@dataclass
class RDropRecipe:
    """R-Drop (Wu et al., 2021)."""

    alpha: float = fixed(5.0, above=0, at_most=1000)
    """Weight of the divergence between the predictions for a pair under two draws of the dropout."""


@dataclass
class TrainingRecipe:
    """Batches, optimizer and schedule (Sections 5.1 to 5.4), checkpoints and logs."""

    max_steps: int = free(100_000, at_least=1, at_most=10**9)
    """Number of updates of the parameters (Section 5.2)."""
    tokens_per_batch: int | Literal["auto"] = fixed(TOKENS_PER_BATCH, at_least=1, at_most=2_000_000)
    """Token budget of a batch, per side and process: pairs times their longest sentence, padding included (Section
    5.1). A pair with a longer sentence is skipped. Padding to few shapes on a GPU is not counted. `auto`
    measures what fits the memory of a GPU, at most an update, whose size stays that of `tokens_per_update`, or of
    25,000 tokens times `accumulation_steps` in each process; on a CPU it is 25,000. A resumed run keeps the number."""
    accumulation_steps: int = fixed(1, at_least=1, at_most=100_000)
    """Batches per update in each process, over which the gradient is accumulated."""
    tokens_per_update: int | None = fixed(None, at_least=1, at_most=10**9)
    """Token budget of an update, per side, of all processes together. Each process accumulates the gradient over as
    many equal batches of at most `tokens_per_batch` as its share needs; their size is rounded down to whole tokens.
    `null` is `tokens_per_batch * accumulation_steps` in each process."""
    schedule: Schedule = fixed("noam")
    """Learning rate after the warm-up: `noam` is equation 3 (Section 5.3); `inverse_sqrt` is `peak_learning_rate *
    sqrt(warmup_steps / step)`, as in fairseq; `constant` is `peak_learning_rate`; `cosine` falls from
    `peak_learning_rate` along half a cosine, which reaches 0 one update after `max_steps`."""
    warmup_steps: int = fixed(4000, at_least=1, at_most=10**9)
    """Updates during which the learning rate rises linearly from 0 (Section 5.3)."""
    learning_rate_factor: float = fixed(1.0, above=0, at_most=1000)
    """Factor on the learning rate of `noam`; 1 in the paper. Other schedules use `peak_learning_rate` instead."""
    peak_learning_rate: float | None = fixed(None, above=0, at_most=10)
    """Learning rate at the end of the warm-up. Required for every schedule but `noam`, whose peak follows from
    `d_model` and `warmup_steps`."""
    optimizer: Optimizer = fixed("adam")
    """`adam` is the paper's Adam; `muon` uses Muon for the matrices of the layers, and Adam for embeddings, biases and
    LayerNorms."""
    adam_beta1: float = fixed(0.9, at_least=0, below=1)
    """Decay rate of Adam's running mean of the gradient (Section 5.3)."""
    adam_beta2: float = fixed(0.98, at_least=0, below=1)
    """Decay rate of Adam's running mean of the squared gradient (Section 5.3)."""
    adam_epsilon: float = fixed(1e-9, above=0, at_most=1)
    """Constant that Adam adds to the denominator of its update (Section 5.3)."""
    weight_decay: float = fixed(0.0, at_least=0, at_most=100)
    """Decoupled weight decay, as in AdamW: each update also multiplies every matrix, embeddings included, by `1 -
    learning_rate * weight_decay`. Biases and LayerNorms are exempt. 0 is the paper's Adam."""
    label_smoothing: float = fixed(0.1, at_least=0, below=1)
    """Label smoothing epsilon_ls (Section 5.4): probability spread over the tokens of `label_smoothing_over`."""
    label_smoothing_over: Literal["others", "all"] = fixed("others")
    """Tokens that share epsilon_ls: `others` are all tokens but the true one, as in the paper's code; `all` is the
    whole vocabulary, the true token included."""
    simcut: SimCutRecipe | None = fixed(None, tasks=PAIR_TASKS)
    """SimCut (Gao et al., 2022), which makes more of little text, at about twice the time per update: a second pass
    sees the pair with some embeddings set to zero, and the divergence of its predictions from those of the first pass
    is added to the loss. `{alpha: 3.0, p: 0.05}` are the published weight and probability; `null` disables it."""
    r_drop: RDropRecipe | None = fixed(None, tasks=PAIR_TASKS)
    """R-Drop (Wu et al., 2021), at about twice the time per update: two passes differ by their dropout, and the
    divergence between their predictions is added to the loss. `{alpha: 5.0}` is the published weight; `null` disables
    it. Excludes `simcut`."""
    freeze: list[Part] = fixed(list)
    """Parts that are not trained, of `encoder`, `decoder` (the layers of each) and `embeddings` (all embedding and
    output matrices)."""
    adapter: AdapterRecipe | None = fixed(None, tasks=PAIR_TASKS)
    """Train low-rank adapters in place of the weights, as in `{rank: 16, alpha: 32, dropout: 0.1}`: checkpoints are
    small, and the published model has the adapters merged into its weights. Needs `initialize.from` and the package
    `peft`; `null` trains the weights themselves."""
    clip_norm: float | None = fixed(None, above=0, at_most=10**6)
    """Maximum Euclidean norm of the gradient, to which longer ones are clipped; `null` disables clipping, as in the
    paper."""
    mixed_precision: Literal["no", "bf16", "fp16", "auto"] | None = fixed(None)
    """Number format of the forward pass: `no` is float32; `auto` is bf16 where the
    processor or GPU has instructions for it and, on a processor, `d_model` is at least 128, and otherwise
    float32; `null` uses the setting of `accelerate launch`. A resumed run keeps its format."""
    matmul_precision: Literal["highest", "high"] = free("highest")
    """Products in float32 on NVIDIA GPUs: `highest` computes them in float32, `high` in TF32, which is faster and less
    exact. Validations are in TF32, and the test is in float32, in any case."""
    gradient_checkpointing: bool = free(False)
    """Recompute the layers in the backward pass instead of storing their activations: less memory, more time."""
    compile: bool = free(False)
    """Compile the network with `torch.compile`, for all sentence lengths at once. The first update then takes minutes
    and, on a CPU, needs a C++ compiler."""
    ema_decay: float | None = fixed(None, at_least=0, below=1)
    """Decay rate of an exponential moving average of the weights, which is validated, averaged and published in their
    place; `null` disables it, as in the paper."""
    max_nonfinite_updates: int = free(10, at_least=1, at_most=10**9)
    """Consecutive updates with a non-finite loss or gradient after which the run stops. Such updates are skipped and
    logged to `nonfinite_updates.jsonl`."""
    log_every: int = free(100, at_least=1, at_most=10**9)
    """Updates between two entries of `training.jsonl` and of the trackers: loss, gradient norm and learning rate."""
    validate_every: int = fixed(1000, at_least=1, at_most=10**9)
    """Updates between two validations, which compute the loss, BLEU and chrF."""
    save_every: int = fixed(1000, at_least=1, at_most=10**9)
    """Updates between two checkpoints."""
    save_every_minutes: float | None = free(None, above=0, at_most=10**6)
    """Minutes after which a checkpoint is written in between, so that a run that is killed loses no more. It is kept
    until the next one; neither averages nor rankings use it."""
    keep_last: int = free(5, at_least=1, at_most=10**6)
    """Number of newest checkpoints to keep on disk."""
    keep_best: int = free(0, at_least=0, at_most=10**6)
    """Number of checkpoints with the best validations to keep as well. If above 0, `save_every` must be a multiple of
    `validate_every`."""
    best_by: BestBy = free("bleu")
    """Measure that ranks validations: the lowest `loss`, or the highest of another one is best. A task has some of
    them, its default first: `translation` has `bleu` and `loss`, `text_to_text` has `bleu`, `exact_match` and `loss`,
    `masked_lm` has `loss` and `accuracy`, the other objectives of running text have `loss`, `classification` has
    `accuracy`, `f1` and `loss`, and `tagging` has `f1`, `accuracy` and `loss`."""
    best_set: str | None = free(None)
    """The one of several validation sets whose measure ranks validations: a name of `validation_sets`, or a direction
    such as `en-de`; `null` takes the mean BLEU over all sets, or the loss per token or the accuracy over all their
    text."""
    patience: int | None = free(None, at_least=1, at_most=10**6)
    """Consecutive validations without a new best after which the run ends before `max_steps`; `null` disables early
    stopping."""
    average_last: int = free(5, at_least=1, at_most=10**6)
    """Number of newest checkpoints to average for the final model (Section 6.1), at most `keep_last`; 1 takes the last
    one as it is."""
    average_best: int | None = free(None, at_least=1, at_most=10**6)
    """Number of checkpoints with the best validations to average instead of the newest; they are kept on disk. If set,
    `save_every` must be a multiple of `validate_every`."""
    data_workers: int | None = free(None, at_least=0, at_most=1024)
    """Worker processes of each training process that prepare batches in advance; 0 prepares each batch when it is
    needed. `null` is 1 on a GPU or another accelerator for text that is encoded while the model trains (streams,
    running text, `tokenizer.bpe_dropout`, `data.augment`), and otherwise 0."""
    cpu_threads: int | None = free(None, at_least=1, at_most=1024)
    """Threads of each training process on a CPU; `null` divides the processors that it may use, by affinity and the
    quota of a container, among the processes of the machine, whatever `OMP_NUM_THREADS` says."""
    trackers: list[str] = free(list)
    """Experiment trackers, by their names in Accelerate: `tensorboard`, `wandb`, `trackio`, ..."""

    def batches(self, processes: int, at_once: int | None = None) -> tuple[int, int]:
        """
        Divides an update.

        Args:
            processes (`int`): number of processes.
            at_once (`int`, *optional*): what `tokens_per_batch: auto` has found; by default that of a CPU.

        Returns:
            `int` and `int`: token budget of a batch, and batches per update in each process.
        """
        usual = TOKENS_PER_BATCH if self.tokens_per_batch == "auto" else self.tokens_per_batch
        most = usual if self.tokens_per_batch != "auto" or at_once is None else at_once
        tokens = self.tokens_per_update or usual * self.accumulation_steps * processes
        count = math.ceil(tokens / (most * processes))
        return max(1, tokens // (count * processes)), count


@dataclass
class EvaluationRecipe:
    """Translation (Section 6.1) and scoring of the validation and test sets."""

    num_beams: int = fixed(4, at_least=1, at_most=1000)
    """Beam size for the test set. Saved as the model's default."""
    length_penalty: float = fixed(0.6, at_least=-10, at_most=10)
    """Exponent alpha of the length penalty. Saved as the model's default."""
    length_penalty_type: Literal["gnmt", "power"] = fixed("power")
    """Divisor of the log-probability of a hypothesis of L tokens: `power` is `L ** alpha`; `gnmt` is
    `((5 + L) / 6) ** alpha`, as in the paper. Saved as the model's default."""
    finish_candidates: Literal["all", "top"] = fixed("top")
    """Which of the `2 * num_beams` candidates of a step may end a hypothesis: the `top` `num_beams`, as in
    transformers, or `all`, as in tensor2tensor. Saved as the model's default."""
    early_stopping: bool | Literal["never"] | None = fixed(True)
    """When the search of a sentence ends: `true` with `num_beams` finished hypotheses, `false` or `never` as in
    transformers; tensor2tensor's rule is `never`. `null` means `never` for `gnmt`, and `false` for `power`. Saved as
    the model's default."""
    validation_num_beams: int = fixed(1, at_least=1, at_most=1000)
    """Beam size for the validation sets; 1 is greedy search."""
    validate_in_mixed_precision: bool = fixed(False, tasks=PAIR_TASKS)
    """Translate the validation sets in the number format of the training (`training.mixed_precision`), too. That is
    faster on a GPU, and scores differ a little. The test set is always translated in float32."""
    tokens_per_batch: int | None = free(None, at_least=1, at_most=2_000_000)
    """Token budget of a batch of sentences to translate: sentences times the longest source, padding included. `null`
    is the device's: 4096 on a CPU, and more on a GPU, which a smaller one would leave idle."""
    max_length_offset: int | None = fixed(50, at_least=0, at_most=1_000_000)
    """Maximum output length of each sentence, in tokens beyond the length of its source (Section 6.1); `null` requires
    `max_length`. Saved as the model's default."""
    # The decoder's first symbol counts, and an output needs one more token.
    max_length: int | None = fixed(None, at_least=2, at_most=1_000_000)
    """Maximum output length of all sentences, in tokens, with the decoder's first symbol included; replaces
    `max_length_offset`. Saved as the model's default."""
    tokenize: str = fixed("auto")
    """Tokenizer of sacreBLEU for BLEU: `auto` is that of each set's target language, `zh` for Chinese, `ja-mecab` for
    Japanese, `ko-mecab` for Korean, and `13a` for all others; `none` is for text that is tokenized already."""
    lowercase: bool = fixed(False)
    """Ignore case in BLEU and chrF."""
    altered: list[Alteration] = fixed(list, tasks=PAIR_TASKS)
    """Also score the test set with its sentences altered, once for each of `upper`, `title`, `typos` and
    `no_final_mark` in the list. As in `data.augment`, both sides are altered, the references too, but `typos` are in
    the source alone. The altered sets are always the same."""


@dataclass
class HubRecipe:
    """Publishing on the Hub. The token is not part of a recipe: `huggingface_hub` finds it."""

    repo_id: str | None = free(None)
    """Repository to publish to, as `user/name`; it is created if necessary. `null` publishes nothing."""
    min_bleu: float = free(0.0, tasks=PAIR_TASKS, at_least=0, at_most=100)
    """Minimum BLEU for publishing a translation model: on the test set for the model, on the validation set for a
    checkpoint. Nothing is published without a BLEU."""
    min_score: float | None = free(None, tasks=("text_to_text", *MEASURED_TASKS), at_least=0, at_most=1)
    """Minimum of the measure of `training.best_by` for publishing, where that is `accuracy`, `f1` or `exact_match`,
    for example an accuracy of 0.8; as with `min_bleu`, on the test set or on the validation set. `null` publishes with
    any score that is finite."""
    not_worse_than: str | None = free(None, tasks=PAIR_TASKS)
    """Model that a published translation model must not be worse than: `start`, the model of `initialize.from`, if the
    run takes all its parts and its vocabulary; `last_push`, what `repo_id` has now; or another model: its id on the
    Hub, its folder, or that of its run. On no test set may the BLEU be significantly lower in a paired bootstrap test
    (p < 0.05). Compared when something is published. `null` compares with none."""
    private: bool | None = free(None)
    """Visibility of a repository that is created; `null` uses the owner's default. With `true`, nothing is published
    to an existing public repository."""
    revision: str = free("main")
    """Branch to publish to; it is created if necessary."""
    every_n_checkpoints: int | None = free(None, needs="hub.repo_id", at_least=1, at_most=10**6)
    """Also publish every n-th checkpoint during training, with the score of its validation; `null` publishes only the
    final model. If set, `save_every` must be a multiple of `validate_every`. With `not_worse_than`, each of these
    checkpoints translates the test sets, too."""
    license: str | None = free(None)
    """Licence of the model, for the model card, for example `apache-2.0`."""


@dataclass
class BacktranslationRecipe:
    """
    Back-translation (Sennrich et al., 2016): `hf-vaswani backtranslate` translates text in the target language of
    `data` into synthetic source sentences, which `more_data` reads with the text as their targets. Training ignores
    this section.
    """

    model: str | None = unread(None)
    """Model that translates from the target language of `data` into its source language: the folder of a model, a
    checkpoint or a run, or an id on the Hub."""
    text: list[str] | str | None = unread(None)
    """Text in the target language, one sentence a line: a file, or a list of files, which may be compressed as `.gz`.
    Empty lines are skipped."""
    output: str | None = unread(None)
    """File for the pairs, a `.tsv` with the two language codes as its header. Unfinished work and a record of the
    settings lie beside it."""
    method: Literal["sampling", "beam"] = unread("sampling")
    """`sampling` draws each word from the probabilities of the model, which gives varied sources (Edunov et al.,
    2018); `beam` is beam search, for a model trained on little text."""
    top_k: int | None = unread(None, at_least=1, at_most=1_000_000)
    """With `sampling`, the number of most probable entries to draw from; `null` draws from the whole vocabulary."""
    temperature: float = unread(1.0, above=0, at_most=100)
    """With `sampling`, divisor of the logits: below 1, probable words become more probable."""
    num_beams: int = unread(4, at_least=1, at_most=1000)
    """Beam size of `beam`; 1 is greedy search."""


@dataclass
class TeacherRecipe:
    """
    Sequence-level knowledge distillation (Kim and Rush, 2016): `hf-vaswani distill` translates the sources of the
    training text with another model, the teacher, and the model of the recipe, the student, learns these translations
    in place of the targets.
    """

    model: list[str] | str | None = fixed(None, tasks=("translation",))
    """Teacher: the folder of a model, a checkpoint or a run, or an id on the Hub; of several with one vocabulary, the
    ensemble. If set, training reads the teacher's translations, which `hf-vaswani distill` writes first."""
    text: list[str] | str | None = fixed(None, needs="teacher.model")
    """More text in the source language of `data` for the teacher to translate, one sentence a line: a file, or a list
    of files, which may be compressed as `.gz`. Empty lines are skipped."""
    folder: str | None = free(None, needs="teacher.model")
    """Folder for the translations, which several students may share; `null` is the run's, with `.teacher` at its
    end."""
    num_beams: int = fixed(8, needs="teacher.model", at_least=1, at_most=1000)
    """Beam size of the teacher; 1 is greedy search."""
    n_best: int | None = fixed(None, needs="teacher.model", at_least=1, at_most=1000)
    """Translations of each sentence to keep for the choice; `null` is the beam size."""
    choose: Literal["model", "bleu", "chrf"] = fixed("model", needs="teacher.model")
    """Translation that the student learns: the best by the teacher (`model`), or the one that is nearest to the target
    of the training text by sentence `bleu` or `chrf`. Sentences of `teacher.text` have the best by the teacher."""
    backward_model: str | None = fixed(None, needs="teacher.model")
    """Model that translates back, by which bad pairs are found: their sources are improbable, given the
    translations."""
    drop_worst: float = fixed(0.05, needs="teacher.backward_model", at_least=0, below=1)
    """Share of the pairs to drop, those with the lowest log-probability per token under `backward_model`."""


@dataclass
class ShortlistRecipe:
    """
    Lexical shortlist: `hf-vaswani shortlist` finds in the training text which entries of the vocabulary translate
    which, and keeps them with the model of the run. With `--shortlist`, translations are searched among the likely
    entries alone. Training ignores this section.
    """

    candidates: int = unread(100, at_least=1, at_most=10_000)
    """Likely translations of each entry."""
    frequent: int = unread(100, at_least=1, at_most=100_000)
    """Most frequent entries of the target text, which any translation may have."""
    max_pairs: int = unread(100_000, at_least=1, at_most=10_000_000)
    """Number of training pairs that are read: as many of each source, evenly spaced; of a stream its first ones. They
    take 8 bytes of memory for each two tokens of a pair: 0.7 GB for 100,000 pairs with 30 tokens a side. Pairs with
    more than 512 tokens on a side are left out."""


@dataclass
class Recipe:
    """One experiment."""

    run_dir: str = free("")
    """Folder of the run; if empty, `runs/NAME`, where NAME is the recipe's file name without its extension."""
    seed: int = fixed(1, at_least=0, at_most=2**32 - 1)
    """Seed of the initial weights, the dropout, the order of the data and back-translation."""
    task: Task = fixed("translation")
    """Task of the model: `translation` of sentence pairs (Vaswani et al., 2017); `text_to_text`, several
    tasks on pairs of texts in one model, told apart by `prefix` (Raffel et al., 2019); pre-training on running text in
    one language: `masked_lm` (an encoder, BERT: Devlin et al., 2018), `causal_lm` (a decoder, GPT: Radford et
    al., 2018), `span_corruption` (both, T5: Raffel et al., 2019) or `denoise` (both, BART and MASS); or
    `classification` of texts or pairs of texts, and `tagging` of words, both from text with labels."""
    data: DataRecipe = field(default_factory=DataRecipe)
    more_data: list[SourceRecipe] = fixed(list)
    """More sources of sentence pairs, each with the keys of `data` from `source_language` to `license`. On the command
    line, `--more_data.KEY` overrides a key of the last source, and `--more_data+` adds a source."""
    validation_sets: dict[str, EvaluationSetRecipe] = fixed(dict)
    """More validation and test sets by name, as in `{domain: {validation_files: FILE, test_files: FILE}}`, each scored
    on its own. They have those keys of `data` that are not about training text; languages default to those of `data`.
    On the command line, `--validation_sets.NAME.KEY` overrides a key."""
    tokenizer: TokenizerRecipe = field(default_factory=TokenizerRecipe)
    initialize: InitializeRecipe = field(default_factory=InitializeRecipe)
    model: ModelRecipe = field(default_factory=ModelRecipe)
    objective: ObjectiveRecipe = field(default_factory=ObjectiveRecipe)
    training: TrainingRecipe = field(default_factory=TrainingRecipe)
    evaluation: EvaluationRecipe = field(default_factory=EvaluationRecipe)
    hub: HubRecipe = field(default_factory=HubRecipe)
    backtranslation: BacktranslationRecipe = field(default_factory=BacktranslationRecipe)
    teacher: TeacherRecipe = field(default_factory=TeacherRecipe)
    shortlist: ShortlistRecipe = field(default_factory=ShortlistRecipe)

    def __post_init__(self) -> None:
        # Keys that the file or the command line gives, as in "model.d_model"; the others have their defaults.
        self.given: frozenset[str] = frozenset()

    @property
    def named_sets(self) -> dict[str, SourceRecipe]:
        """Returns `validation_sets` as sources, with their languages filled in; their training text has no meaning."""
        found = {}
        for name, part in self.validation_sets.items():
            found[name] = SourceRecipe(**asdict(part))
            found[name].source_language = part.source_language or self.data.source_language
            found[name].target_language = part.target_language or self.data.target_language
        return found

    @property
    def language_pairs(self) -> list[list[str]]:
        """Returns source and target language of each direction, in the order of the sources, without duplicates."""
        pairs = ((part.source_language, part.target_language) for part in (self.data, *self.more_data))
        return [list(pair) for pair in dict.fromkeys(pairs)]

    def flat(self) -> dict[str, Any]:
        """Returns every key with its value, as the command line spells it: `{"training.max_steps": 100, ...}`."""
        return flat(self.sections())

    def sections(self) -> dict[str, Any]:
        """Returns the recipe with all its defaults as a recipe file has it."""
        return asdict(self, dict_factory=lambda items: {spelled(name): value for name, value in items})

    def as_yaml(self) -> str:
        """Returns the recipe with all its defaults as YAML, which [`load_recipe`] reads back as an equal recipe."""
        return str(yaml.dump(self.sections(), Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def flat(sections: dict[str, Any]) -> dict[str, Any]:
    """`{"training": {"max_steps": 1}, "seed": 1}` -> `{"training.max_steps": 1, "seed": 1}`."""
    keys: dict[str, Any] = {}
    for name, value in sections.items():
        if name in SECTIONS and isinstance(value, dict):
            keys.update({f"{name}.{key}": inner for key, inner in value.items()})
        else:
            keys[name] = value
    return keys


def section_in(hint: Any) -> Any:
    """Returns the dataclass that a type hint is, or has in a union, a list or a dictionary; `None` if it has none."""
    if is_dataclass(hint):
        return hint
    return next((found for part in get_args(hint) if (found := section_in(part))), None)


@cache
def keys_of(section: Any) -> dict[str, tuple["Field[Any]", Any]]:
    """Returns field and type hint of each key of a section, by its name in recipes; of `Recipe`, the sections too."""
    hints = get_type_hints(section)
    return {spelled(part.name): (part, hints[part.name]) for part in fields(section)}


@cache
def declared_keys(section: Any = Recipe, prefix: str = "") -> dict[str, "Field[Any]"]:
    """
    Returns the fields of all keys of a recipe or a section by dotted name, as in `"training.simcut.alpha"`,
    `"more_data.weight"` and `"validation_sets.NAME.license"`.
    """
    found = {}
    for name, (part, hint) in keys_of(section).items():
        if not is_dataclass(hint):
            found[prefix + name] = part
        if inner := section_in(hint):
            found |= declared_keys(inner, f"{prefix}{name}.NAME." if get_origin(hint) is dict else f"{prefix}{name}.")
    return found


# The keys of a recipe that have keys of their own in any recipe.
SECTIONS = tuple(name for name, (_, hint) in keys_of(Recipe).items() if is_dataclass(hint))


def resume_marks() -> dict[str, ResumeMark]:
    """Returns how each key is declared, as in `{"training.log_every": "free", "more_data.weight": "fixed"}`."""
    return {name: part.metadata["resume"] for name, part in declared_keys().items()}


def docstrings(section: type[Any]) -> dict[str, str]:
    """Returns the docstrings below the fields of a section and of its bases, each on one line, by the keys' names."""
    found: dict[str, str] = {}
    for part in reversed([each for each in section.__mro__ if is_dataclass(each)]):
        body = ast.parse(inspect.getsource(part)).body[0].body  # type: ignore[attr-defined]
        for statement, following in pairwise(body):
            if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
                found[spelled(ast.unparse(statement.target))] = " ".join(ast.literal_eval(following.value).split())
    return found
