"""
The recipe: one YAML file describes one experiment. Reads it, applies the overrides of the command line, and checks
every key and value.

train.py RECIPE.yaml [--section.key value ...]

The docstrings below the fields are the manual: `--help` prints them, and docs/recipe.md is generated from them.
"""

import contextlib
import difflib
import json
import operator
import re
import stat
from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

try:
    import yaml
    from jsonargparse import ArgumentError, ArgumentParser, get_loader, set_loader, set_parsing_settings
except ImportError as error:
    raise ImportError(f"Recipes and run folders need {error.name}: pip install 'hf_vaswani[train]'") from error

set_parsing_settings(docstring_parse_attribute_docstrings=True)

Files = dict[str, str] | str | None
Schedule = Literal["noam", "inverse_sqrt", "constant", "cosine"]
Part = Literal["encoder", "decoder", "embeddings"]
Alteration = Literal["upper", "title", "typos", "no_final_mark"]
SECTIONS = ("data", "tokenizer", "initialize", "model", "training", "evaluation", "hub")

COMPARISONS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}

# Limits far above any recipe: bytes of the file, levels and entries of its YAML, and digits of a number.
MAX_BYTES = 1_000_000
MAX_LEVELS = 20
MAX_ENTRIES = 10_000
LONG_NUMBER = re.compile(r"[-+]?([0-9._:]{30,}|0[bx][0-9a-f_]{30,})", re.IGNORECASE)


def number(default: Any, **bounds: float) -> Any:
    """
    Declares a number of a recipe with its range.

    Args:
        default (`int`, `float` or `None`): the default.
        bounds (`float`): the range by the keys of `COMPARISONS`, as in `number(0.1, at_least=0, below=1)`.

    Returns:
        `dataclasses.Field`: with the range as its `metadata`.
    """
    return field(default=default, metadata=bounds)


def shown(value: object) -> str:
    """Returns a value as messages show it: its `repr`, shortened to 80 characters."""
    return _shortened(repr(value), 80)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 25]} ... {text[-20:]}"


@dataclass
class SourceRecipe:
    """One source of sentence pairs: a dataset, files, or both. Files of a split replace that split of the dataset."""

    source_language: str = "en"
    """Language code of the source text, for example `en`."""
    target_language: str = "de"
    """Language code of the target text, for example `de`."""
    dataset: str | None = None
    """Id of a dataset on the Hub, or a local dataset folder. `pocket` is the built-in English-German corpus."""
    dataset_config: str | None = None
    """Configuration of the Hub dataset, if it has several."""
    train_split: str = "train"
    """Name of the dataset's training split."""
    validation_split: str | None = "validation"
    """Name of the dataset's validation split; `null` for none."""
    test_split: str | None = "test"
    """Name of the dataset's test split; `null` for none."""
    train_files: Files = None
    """Training text: two line-aligned files as `{en: FILE, de: FILE}`, or one file with a column per language (`.tsv`,
    `.csv`, `.jsonl`, `.json` or `.parquet`). All but `.parquet` files may be compressed as `.gz`."""
    validation_files: Files = None
    """Validation text, in the formats of `train_files`."""
    test_files: Files = None
    """Test text, in the formats of `train_files`."""
    source_column: int | str | None = number(None, at_least=0, at_most=10_000)
    """Column of the source text: its name or, in a TSV or CSV file without a header line, its number, counted from 0.
    `null` means the language code."""
    target_column: int | str | None = number(None, at_least=0, at_most=10_000)
    """Column of the target text, given like `source_column`."""
    weight: float = number(1.0, above=0, at_most=1000)
    """Repetitions of each pair in an epoch: 2 takes each pair twice, 0.5 draws a new random half for each epoch.
    With `data.streaming`, the ratio in which the sources are mixed."""
    license: str | None = None
    """Licence of the text, for the model card, for example `cc-by-4.0`."""


@dataclass
class EvaluationSetRecipe:
    """A validation or test set, or both, besides those of the sources."""

    source_language: str | None = None
    """Language code of the source text; `null` is that of `data`."""
    target_language: str | None = None
    """Language code of the target text; `null` is that of `data`."""
    dataset: str | None = None
    """Id of a dataset on the Hub, or a local dataset folder."""
    dataset_config: str | None = None
    """Configuration of the Hub dataset, if it has several."""
    validation_split: str | None = "validation"
    """Name of the dataset's validation split; `null` for none."""
    test_split: str | None = "test"
    """Name of the dataset's test split; `null` for none."""
    validation_files: Files = None
    """Validation text, in the formats of `data.train_files`."""
    test_files: Files = None
    """Test text, in the formats of `data.train_files`."""
    source_column: int | str | None = number(None, at_least=0, at_most=10_000)
    """Column of the source text, as in `data`."""
    target_column: int | str | None = number(None, at_least=0, at_most=10_000)
    """Column of the target text, as in `data`."""
    license: str | None = None
    """Licence of the text, for the model card."""


@dataclass
class AugmentRecipe:
    """Probabilities of the alterations of a training pair, which are drawn anew in each epoch."""

    upper: float = number(0.0, at_least=0, at_most=1)
    """Probability of a pair to be written in capital letters, on both sides."""
    title: float = number(0.0, at_least=0, at_most=1)
    """Probability of a pair to be written with a capital letter at the beginning of each word, on both sides."""
    typos: float = number(0.0, at_least=0, at_most=1)
    """Probability of a source sentence to get typing errors: letters swapped, left out, doubled or replaced by a
    neighbour on the keyboard."""
    no_final_mark: float = number(0.0, at_least=0, at_most=1)
    """Probability of a pair to lose its final punctuation mark, on both sides."""


@dataclass
class DataRecipe(SourceRecipe):
    """The sentence pairs. The keys from `streaming` on exist only here, and apply to `more_data` as well."""

    streaming: bool = False
    """Read the training text on the fly, for text larger than the disk: it is neither copied nor counted. A vocabulary
    is then trained on the first million pairs of each source."""
    stream_window: int = number(100_000, at_least=1, at_most=10**8)
    """Pairs of a stream (`data.streaming`) that are read, shuffled and batched together; with `data.augment` or
    `tokenizer.bpe_dropout`, the pairs of an epoch that are encoded and batched together."""
    target_tag: bool = False
    """Put a tag of the target language, for example `<2de>`, in front of each source sentence. The tag is one entry of
    the vocabulary, and lets one model translate into several languages."""
    augment: AugmentRecipe | None = None
    """Alterations of the training pairs, for a model that meets capitals, missing full stops and typing errors later:
    `{upper: 0.07, title: 0.05, typos: 0.05, no_final_mark: 0.2}` are probabilities, each 0 by default. `null` alters
    nothing."""
    num_proc: int | None = number(None, at_least=1, at_most=1024)
    """Processes that tokenize the training text; `null` tokenizes in the main process, with the tokenizer's threads.
    Streams are tokenized where their batches are prepared, see `training.data_workers`."""


@dataclass
class TokenizerRecipe:
    """The vocabulary (Section 5.1)."""

    kind: Literal["bpe", "unigram", "wordpiece", "words", "characters", "bytes"] = "bpe"
    """Kind of entries: `bpe` is byte-pair encoding over bytes (the paper's for English-German), `unigram` the pieces
    of a unigram language model, as in SentencePiece, `wordpiece` word pieces (the paper's for English-French), `words`
    whole words, `characters` Unicode code points, and `bytes` the bytes of UTF-8."""
    vocab_size: int = number(37000, at_least=1, at_most=1_000_000)
    """Maximum number of entries of the vocabulary, which source and target share. The 4 special tokens and the tags of
    `data.target_tag` count. `bytes` always has 260 entries, plus the tags."""
    path: str | None = None
    """Folder or Hub id of a tokenizer to use instead of training one. `kind` and `vocab_size` then have no effect."""
    bpe_dropout: float = number(0.0, at_least=0, below=1)
    """BPE-dropout (Provilkov et al., 2020): probability of each merge to be skipped when training text is encoded,
    anew in each epoch; 0.1 is usual. Needs a vocabulary of kind `bpe`. Text to translate is encoded without it."""
    decoder_start: Literal["bos", "eos", "pad"] = "bos"
    """First symbol of the decoder's input (Section 3.1): `bos` is `<s>`; `eos` is `</s>`, as in fairseq; `pad` is
    `<pad>`, whose embedding is zero, as in tensor2tensor and Marian. A tokenizer without the symbol starts with
    `<pad>`."""


@dataclass
class InitializeRecipe:
    """
    The model that training starts from, in place of random weights. Its architecture, vocabulary and search settings
    become those of the run; dropout rates and everything in `training` stay free.
    """

    # Spelled `from` in a recipe, which Python does not allow as a name.
    from_: str | None = None
    """Model to start from: an id on the Hub, or the folder of a model, checkpoint or run; a MarianMT model such as
    OPUS-MT's, a Marian `.npz` file or a fairseq model is converted. `null` starts from random weights."""
    revision: str | None = None
    """Branch, tag or commit of a model on the Hub; `null` is its main branch."""
    parts: list[Part] | None = None
    """Parts to take from the model, of `encoder`, `decoder` (the layers of each) and `embeddings` (all embedding and
    output matrices); the others start from random weights. `null` takes all."""
    vocabulary: Literal["keep", "transfer"] = "keep"
    """`keep` keeps the vocabulary of the model; `transfer` exchanges it for that of the recipe's `tokenizer` section:
    entries that both have keep their embeddings, the others begin as the mean of the old entries that spell them."""
    add_tokens: list[str] = field(default_factory=list)
    """Entries to add to the vocabulary of the model, for example `["<2fr>"]`, the language tag of a further direction.
    Each begins as the mean of the embeddings of the pieces that spelled it."""


@dataclass
class ModelRecipe:
    """The network: the settings of `VaswaniConfig`, except those that follow from the data and the tokenizer."""

    d_model: int = number(512, at_least=1, at_most=100_000)
    """Width of the embeddings and of every sub-layer's output (Section 3.1). Must be even for sinusoidal positions."""
    d_ff: int = number(2048, at_least=1, at_most=1_000_000)
    """Width of the hidden layer of the feed-forward networks (Section 3.3)."""
    num_heads: int = number(8, at_least=1, at_most=10_000)
    """Number of attention heads, h (Section 3.2.2)."""
    d_k: int | None = number(None, at_least=1, at_most=100_000)
    """Width of the queries and keys of each head (Section 3.2.2); `null` means `d_model / num_heads`."""
    d_v: int | None = number(None, at_least=1, at_most=100_000)
    """Width of the values of each head (Section 3.2.2); `null` means `d_model / num_heads`."""
    encoder_layers: int = number(6, at_least=1, at_most=1000)
    """Number of encoder layers, N (Section 3.1)."""
    decoder_layers: int = number(6, at_least=1, at_most=1000)
    """Number of decoder layers, N (Section 3.1)."""
    dropout: float = number(0.1, at_least=0, below=1)
    """Dropout rate P_drop, on the sum of embedding and position and on each sub-layer's output (Section 5.4)."""
    attention_dropout: float = number(0.0, at_least=0, below=1)
    """Dropout rate on the attention weights; the paper uses none."""
    activation_dropout: float = number(0.0, at_least=0, below=1)
    """Dropout rate after the activation of the feed-forward networks; the paper uses none."""
    activation_function: str = "relu"
    """Activation of the feed-forward networks (Section 3.3), by its name in transformers."""
    norm_position: Literal["post", "pre"] = "post"
    """Place of LayerNorm: `post` is after each residual sum, as in the paper; `pre` is before each sub-layer, and at
    the end of each stack."""
    position_encoding: Literal["sinusoidal", "learned"] = "sinusoidal"
    """`sinusoidal` computes positions for any length (Section 3.5); `learned` trains a table of
    `max_position_embeddings` rows (Table 3, row E)."""
    sinusoid_layout: Literal["interleaved", "concatenated", "tensor2tensor"] = "interleaved"
    """`interleaved` alternates sines and cosines, as in the paper; `concatenated` puts all sines first, as in Marian;
    `tensor2tensor` does so with the wavelengths of tensor2tensor."""
    max_position_embeddings: int = number(1024, at_least=1, at_most=1_000_000)
    """Longest sentence in tokens, for `learned` positions: pairs with a longer side are skipped. Sinusoidal positions
    have no limit. With either, `hf-vaswani translate` splits lines that are longer."""
    layer_norm_eps: float = number(1e-6, above=0, at_most=1)
    """Constant added to the variance in LayerNorm."""
    attention_bias: bool = False
    """Add biases to the projections of the attention; the paper's have none."""
    lm_head_bias: bool = False
    """Add a bias to the pre-softmax linear transformation; the paper's has none."""
    scale_embedding: bool = True
    """Multiply the embeddings by `sqrt(d_model)` (Section 3.4)."""
    share_embeddings: bool = True
    """Use one embedding matrix for source and target (Section 3.4). Requires `tie_word_embeddings`: without it, no
    matrix is shared."""
    tie_word_embeddings: bool = True
    """Use the target embedding matrix as the pre-softmax linear transformation (Section 3.4)."""


@dataclass
class AdapterRecipe:
    """Low-rank adapters (LoRA, Hu et al., 2021), computed by PEFT."""

    rank: int = number(16, at_least=1, at_most=100_000)
    """Rank of the two matrices whose product is added to a weight."""
    alpha: float = number(32.0, above=0, at_most=100_000)
    """The product is scaled by `alpha / rank`."""
    dropout: float = number(0.0, at_least=0, below=1)
    """Dropout rate on the input of the adapters."""
    target: list[str] = field(default_factory=lambda: ["attention", "feed_forward"])
    """Weights that get an adapter: `attention` and `feed_forward` are all matrices of these sub-layers; other words
    are the names of single modules, as in `q_proj`."""


@dataclass
class SimCutRecipe:
    """SimCut (Gao et al., 2022)."""

    alpha: float = number(3.0, above=0, at_most=1000)
    """Weight of the divergence between the predictions for a pair and for the same pair with embeddings cut off."""
    p: float = number(0.05, above=0, below=1)
    """Probability of each source and target embedding to be cut off, that is, set to zero."""


@dataclass
class RDropRecipe:
    """R-Drop (Wu et al., 2021)."""

    alpha: float = number(5.0, above=0, at_most=1000)
    """Weight of the divergence between the predictions for a pair under two draws of the dropout."""


@dataclass
class TrainingRecipe:
    """Batches, optimizer and schedule (Sections 5.1 to 5.4), checkpoints and logs."""

    max_steps: int = number(100_000, at_least=1, at_most=10**9)
    """Number of updates of the parameters (Section 5.2)."""
    tokens_per_batch: int = number(25_000, at_least=1, at_most=2_000_000)
    """Token budget of a batch, per side and process: pairs times their longest sentence, padding included (Section
    5.1). A pair with a longer sentence is skipped."""
    accumulation_steps: int = number(1, at_least=1, at_most=100_000)
    """Batches per update in each process, over which the gradient is accumulated."""
    schedule: Schedule = "noam"
    """Learning rate after the warm-up: `noam` is equation 3 (Section 5.3); `inverse_sqrt` is `peak_learning_rate *
    sqrt(warmup_steps / step)`, as in fairseq; `constant` is `peak_learning_rate`; `cosine` falls from
    `peak_learning_rate` along half a cosine, which reaches 0 one update after `max_steps`."""
    warmup_steps: int = number(4000, at_least=1, at_most=10**9)
    """Updates during which the learning rate rises linearly from 0 (Section 5.3)."""
    learning_rate_factor: float = number(1.0, above=0, at_most=1000)
    """Factor on the learning rate of `noam`; 1 in the paper. Other schedules use `peak_learning_rate` instead."""
    peak_learning_rate: float | None = number(None, above=0, at_most=10)
    """Learning rate at the end of the warm-up. Required for every schedule but `noam`, whose peak follows from
    `d_model` and `warmup_steps`."""
    optimizer: Literal["adam", "muon"] = "adam"
    """`adam` is the paper's Adam; `muon` uses Muon for the matrices of the layers, and Adam for embeddings, biases and
    LayerNorms."""
    adam_beta1: float = number(0.9, at_least=0, below=1)
    """Decay rate of Adam's running mean of the gradient (Section 5.3)."""
    adam_beta2: float = number(0.98, at_least=0, below=1)
    """Decay rate of Adam's running mean of the squared gradient (Section 5.3)."""
    adam_epsilon: float = number(1e-9, above=0, at_most=1)
    """Constant that Adam adds to the denominator of its update (Section 5.3)."""
    weight_decay: float = number(0.0, at_least=0, at_most=100)
    """Decoupled weight decay, as in AdamW: each update also multiplies every matrix, embeddings included, by `1 -
    learning_rate * weight_decay`. Biases and LayerNorms are exempt. 0 is the paper's Adam."""
    label_smoothing: float = number(0.1, at_least=0, below=1)
    """Label smoothing epsilon_ls (Section 5.4): probability spread over the tokens of `label_smoothing_over`."""
    label_smoothing_over: Literal["others", "all"] = "others"
    """Tokens that share epsilon_ls: `others` are all tokens but the true one, as in the paper's code; `all` is the
    whole vocabulary, the true token included."""
    simcut: SimCutRecipe | None = None
    """SimCut (Gao et al., 2022), which makes more of little text, at about twice the time per update: a second pass
    sees the pair with some embeddings set to zero, and the divergence of its predictions from those of the first pass
    is added to the loss. `{alpha: 3.0, p: 0.05}` are the published weight and probability; `null` disables it."""
    r_drop: RDropRecipe | None = None
    """R-Drop (Wu et al., 2021), in about twice the time an update: two passes differ by their dropout, and the
    divergence between their predictions is added to the loss. `{alpha: 5.0}` is the published weight; `null` disables
    it. Excludes `simcut`."""
    freeze: list[Part] = field(default_factory=list)
    """Parts that are not trained, of `encoder`, `decoder` (the layers of each) and `embeddings` (all embedding and
    output matrices)."""
    adapter: AdapterRecipe | None = None
    """Train low-rank adapters in place of the weights, as in `{rank: 16, alpha: 32, dropout: 0.1}`: checkpoints are
    small, and the published model has the adapters merged into its weights. Needs `initialize.from` and the package
    `peft`; `null` trains the weights themselves."""
    clip_norm: float | None = number(None, above=0, at_most=10**6)
    """Maximum Euclidean norm of the gradient, to which longer ones are clipped; `null` disables clipping, as in the
    paper."""
    mixed_precision: Literal["no", "bf16", "fp16"] | None = None
    """Number format of the forward pass: `no`, which must be quoted in YAML, is float32; `null` uses the setting of
    `accelerate launch`."""
    gradient_checkpointing: bool = False
    """Recompute the layers in the backward pass instead of storing their activations: less memory, more time."""
    compile: bool = False
    """Compile the network with `torch.compile`, for all sentence lengths at once. The first update then takes minutes
    and, on a CPU, needs a C++ compiler."""
    ema_decay: float | None = number(None, at_least=0, below=1)
    """Decay rate of an exponential moving average of the weights, which is validated, averaged and published in their
    place; `null` disables it, as in the paper."""
    max_nonfinite_updates: int = number(10, at_least=1, at_most=10**9)
    """Consecutive updates with a non-finite loss or gradient after which the run stops. Such updates are skipped and
    logged to `nonfinite_updates.jsonl`."""
    log_every: int = number(100, at_least=1, at_most=10**9)
    """Updates between two entries of `training.jsonl` and of the trackers: loss, gradient norm and learning rate."""
    validate_every: int = number(1000, at_least=1, at_most=10**9)
    """Updates between two validations, which compute the loss, BLEU, chrF and TER."""
    save_every: int = number(1000, at_least=1, at_most=10**9)
    """Updates between two checkpoints."""
    keep_last: int = number(5, at_least=1, at_most=10**6)
    """Number of newest checkpoints to keep on disk."""
    keep_best: int = number(0, at_least=0, at_most=10**6)
    """Number of checkpoints with the best validations to keep as well. If above 0, `save_every` must be a multiple of
    `validate_every`."""
    best_by: Literal["bleu", "loss"] = "bleu"
    """Metric that ranks validations: the highest `bleu` or the lowest `loss` is best."""
    best_set: str | None = None
    """The one of several validation sets whose metric ranks validations: a name of `validation_sets`, or a direction
    such as `en-de`; `null` takes the mean BLEU over all sets, or the loss per token of all their text."""
    patience: int | None = number(None, at_least=1, at_most=10**6)
    """Consecutive validations without a new best after which the run ends before `max_steps`; `null` disables early
    stopping."""
    average_last: int = number(5, at_least=1, at_most=10**6)
    """Number of newest checkpoints to average for the final model (Section 6.1), at most `keep_last`; 1 takes the last
    one as it is."""
    average_best: int | None = number(None, at_least=1, at_most=10**6)
    """Number of checkpoints with the best validations to average instead of the newest; they are kept on disk. If set,
    `save_every` must be a multiple of `validate_every`."""
    data_workers: int = number(0, at_least=0, at_most=1024)
    """Worker processes of each training process that prepare batches in advance; 0 prepares each batch when it is
    needed."""
    cpu_threads: int | None = number(None, at_least=1, at_most=1024)
    """Threads of each training process on a CPU; `null` divides the machine's cores among its processes,
    whatever `OMP_NUM_THREADS` says."""
    trackers: list[str] = field(default_factory=list)
    """Experiment trackers, by their names in Accelerate: `tensorboard`, `wandb`, `trackio`, ..."""


@dataclass
class EvaluationRecipe:
    """Translation (Section 6.1) and scoring of the validation and test sets."""

    num_beams: int = number(4, at_least=1, at_most=1000)
    """Beam size for the test set. Saved as the model's default."""
    length_penalty: float = number(0.6, at_least=-10, at_most=10)
    """Exponent alpha of the length penalty. Saved as the model's default."""
    length_penalty_type: Literal["gnmt", "power"] = "gnmt"
    """Divisor of the log-probability of a hypothesis of L tokens: `gnmt` is `((5 + L) / 6) ** alpha`, as in the paper;
    `power` is `L ** alpha`. Saved as the model's default."""
    finish_candidates: Literal["all", "top"] = "all"
    """Which of the `2 * num_beams` candidates of a step may end a hypothesis: `all`, as in tensor2tensor, or the `top`
    `num_beams`, as in transformers. Saved as the model's default."""
    early_stopping: bool | Literal["never"] | None = None
    """When the search of a sentence ends, as in transformers: `true`, `false` or `never`. `null` means `never` for
    `gnmt`, which is tensor2tensor's rule, and `false` for `power`. Saved as the model's default."""
    validation_num_beams: int = number(1, at_least=1, at_most=1000)
    """Beam size for the validation sets; 1 is greedy search."""
    tokens_per_batch: int = number(4096, at_least=1, at_most=2_000_000)
    """Token budget of a batch of sentences to translate: sentences times the longest source, padding included."""
    max_length_offset: int | None = number(50, at_least=0, at_most=1_000_000)
    """Maximum output length of each sentence, in tokens beyond the length of its source (Section 6.1); `null` requires
    `max_length`. Saved as the model's default."""
    # The decoder's first symbol counts, and an output needs one more token.
    max_length: int | None = number(None, at_least=2, at_most=1_000_000)
    """Maximum output length of all sentences, in tokens, with the decoder's first symbol included; replaces
    `max_length_offset`. Saved as the model's default."""
    tokenize: str = "13a"
    """Tokenizer of sacreBLEU for BLEU: `13a` for plain text, `none` for text that is tokenized already."""
    lowercase: bool = False
    """Ignore case in BLEU and chrF."""
    altered: list[Alteration] = field(default_factory=list)
    """Also score the test set with its sentences altered, once for each of `upper`, `title`, `typos` and
    `no_final_mark` in the list. As in `data.augment`, both sides are altered, the references too, but `typos` are in
    the source alone. The altered sets are always the same."""


@dataclass
class HubRecipe:
    """Publishing on the Hub. The token is not part of a recipe: `huggingface_hub` finds it."""

    repo_id: str | None = None
    """Repository to publish to, as `user/name`; it is created if necessary. `null` publishes nothing."""
    min_bleu: float = number(0.0, at_least=0, at_most=100)
    """Minimum BLEU for publishing: on the test set for the model, on the validation set for a checkpoint. Nothing is
    published without a BLEU."""
    not_worse_than: str | None = None
    """Model that the published one must not be worse than: `start`, the model of `initialize.from`; `last_push`, what
    `repo_id` has now; or another model: its id on the Hub, its folder, or that of its run. On no test set may the
    BLEU be significantly lower in a paired bootstrap test (p < 0.05). `null` compares with none."""
    private: bool | None = None
    """Visibility of a repository that is created; `null` uses the owner's default. With `true`, nothing is published
    to an existing public repository."""
    revision: str = "main"
    """Branch to publish to; it is created if necessary."""
    every_n_checkpoints: int | None = number(None, at_least=1, at_most=10**6)
    """Also publish every n-th checkpoint during training, with the BLEU of its validation; `null` publishes only the
    final model. If set, `save_every` must be a multiple of `validate_every`. With `not_worse_than`, each of these
    checkpoints translates the test sets, too."""
    license: str | None = None
    """Licence of the model, for the model card, for example `apache-2.0`."""


@dataclass
class Recipe:
    """One experiment."""

    run_dir: str = ""
    """Folder of the run; if empty, `runs/NAME`, where NAME is the recipe's file name without its extension."""
    seed: int = number(1, at_least=0, at_most=2**32 - 1)
    """Seed of the initial weights, the dropout, the order of the data and the built-in corpus."""
    data: DataRecipe = field(default_factory=DataRecipe)
    more_data: list[SourceRecipe] = field(default_factory=list)
    """More sources of sentence pairs, each with the keys of `data` from `source_language` to `license`. On the command
    line, `--more_data.KEY` overrides a key of the last source, and `--more_data+` adds a source."""
    validation_sets: dict[str, EvaluationSetRecipe] = field(default_factory=dict)
    """More validation and test sets by name, as in `{domain: {validation_files: FILE, test_files: FILE}}`, each scored
    on its own. They have those keys of `data` that are not about training text; languages default to those of `data`.
    On the command line, `--validation_sets.NAME.KEY` overrides a key."""
    tokenizer: TokenizerRecipe = field(default_factory=TokenizerRecipe)
    initialize: InitializeRecipe = field(default_factory=InitializeRecipe)
    model: ModelRecipe = field(default_factory=ModelRecipe)
    training: TrainingRecipe = field(default_factory=TrainingRecipe)
    evaluation: EvaluationRecipe = field(default_factory=EvaluationRecipe)
    hub: HubRecipe = field(default_factory=HubRecipe)

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
        return {_spelled(key): value for key, value in _flat(asdict(self)).items()}

    def as_yaml(self) -> str:
        """Returns the recipe with all its defaults as YAML, which [`load_recipe`] reads back as an equal recipe."""
        sections = asdict(self)
        sections["initialize"] = {_spelled(key): value for key, value in sections["initialize"].items()}
        return str(yaml.safe_dump(sections, sort_keys=False, allow_unicode=True))


def _flat(sections: dict[str, Any]) -> dict[str, Any]:
    """`{"training": {"max_steps": 1}, "seed": 1}` -> `{"training.max_steps": 1, "seed": 1}`."""
    keys: dict[str, Any] = {}
    for name, value in sections.items():
        if name in SECTIONS and isinstance(value, dict):
            keys.update({f"{name}.{key}": inner for key, inner in value.items()})
        else:
            keys[name] = value
    return keys


def _spelled(key: str) -> str:
    """Returns a field's name as recipes spell it: `initialize.from_` is `initialize.from`."""
    return key.removesuffix("_")


def options_of(section: type) -> dict[str, Any]:
    """
    Returns the keys of a section that have keys of their own, or are null.

    Args:
        section (`type`): a dataclass of this file.

    Returns:
        `dict[str, type]`: the dataclasses of those keys, such as `{"simcut": SimCutRecipe, ...}`.
    """
    hints = {name: hint for name, hint in get_type_hints(section).items() if get_origin(hint) is UnionType}
    return {name: kind for name, hint in hints.items() for kind in get_args(hint) if is_dataclass(kind)}


def _inner_keys() -> dict[str, list[str]]:
    """Returns the keys below those keys of the recipe that have some, by the dotted name of the outer key."""
    outer: dict[str, Any] = {"more_data": SourceRecipe, "validation_sets.NAME": EvaluationSetRecipe}
    for name in SECTIONS:
        options = options_of(get_type_hints(Recipe)[name])
        outer |= {f"{name}.{option}": kind for option, kind in options.items()}
    return {key: [f"{key}.{part.name}" for part in fields(kind)] for key, kind in outer.items()}


def _general(key: str) -> str:
    """Returns a dotted key with the name of a validation set, which is the user's, as `NAME`."""
    return re.sub(r"^validation_sets\.[^.]+", "validation_sets.NAME", key)


def _check_keys(values: Mapping[str, Any], where: str) -> None:
    """
    Refuses unknown keys, and values of another structure than their key has.

    Args:
        values (`Mapping[str, Any]`): values by their dotted keys.
        where (`str`): their place in the error message.
    """
    inner = _inner_keys()
    known = [*Recipe().flat(), *SECTIONS, *(key for keys in inner.values() for key in keys)]
    for key, value in values.items():
        general = _general(key)
        if general not in known and general not in inner:
            nearest = difflib.get_close_matches(general, known, n=1, cutoff=0)[0]
            raise ValueError(f"{where} has the unknown key {shown(key)}: did you mean {nearest!r}?")
        below: list[tuple[str, Any]] = []
        if key == "more_data":
            if not isinstance(value, list) or not all(source and isinstance(source, dict) for source in value):
                raise ValueError(
                    f"{where} must have a list of sources under 'more_data', each with `key: value` lines, but it has "
                    f"{shown(value)}."
                )
            below = [(key, source) for source in value]
        elif key == "validation_sets":
            if not isinstance(value, dict) or not all(isinstance(source, dict) for source in value.values()):
                raise ValueError(
                    f"{where} must have names under 'validation_sets', each with `key: value` lines, but it has "
                    f"{shown(value)}."
                )
            for name in value:
                _check_set_name(str(name))
            below = [(f"{key}.{name}", source) for name, source in value.items()]
        elif general in inner and (value is not None or general not in Recipe().flat()):
            # Given a string, jsonargparse would import a class by that name.
            if not isinstance(value, dict):
                raise ValueError(f"{where} must have `key: value` lines under {key!r}, but it has {shown(value)}.")
            below = [(key, value)]
        for outer, source in below:
            _check_keys({f"{outer}.{name}": item for name, item in source.items()}, where)


def _load_yaml(text: str) -> Any:
    """Reads YAML for jsonargparse, with the keys of the file as the names of the fields."""
    content = get_loader("yaml")(text)
    start = content.get("initialize") if isinstance(content, dict) else None
    if isinstance(start, dict) and "from" in start:
        content["initialize"] = {"from_" if key == "from" else key: value for key, value in start.items()}
    return content


# Recipes are YAML, read and written as jsonargparse does.
set_loader("recipe", _load_yaml, (yaml.YAMLError,))


class _Loader(yaml.SafeLoader):
    """Reads values as jsonargparse does: dates are strings."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _check_yaml(text: str, where: str) -> None:
    """
    Refuses YAML that would crash or stall the parsers: deep nesting, aliases that multiply or refer to themselves,
    numbers of hundreds of digits, unpaired surrogates, and tags such as `!!timestamp`.
    """
    # For each open collection, whether it has an anchor, which an alias could refer to.
    opened: list[bool] = []
    for count, event in enumerate(yaml.parse(text, _Loader)):
        line = "" if event.start_mark is None else f"in line {event.start_mark.line + 1}"
        if isinstance(event, (yaml.CollectionStartEvent, yaml.ScalarEvent)) and event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            raise ValueError(f"{where} has the YAML tag {shown(tag)} {line}: write the value without it.")
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append(event.anchor is not None)
        elif isinstance(event, yaml.CollectionEndEvent):
            opened.pop()
        elif isinstance(event, yaml.AliasEvent) and any(opened):
            raise ValueError(
                f"{where} has the alias *{event.anchor} {line}, inside another anchor: write the value out."
            )
        elif isinstance(event, yaml.ScalarEvent) and LONG_NUMBER.fullmatch(event.value):
            raise ValueError(f"{where} has a number of {len(event.value)} digits {line}: {shown(event.value)}.")
        elif isinstance(event, yaml.ScalarEvent) and re.search("[\ud800-\udfff]", event.value):
            raise ValueError(f"{where} has an unpaired UTF-16 surrogate {line}: {shown(event.value)}.")
        if len(opened) > MAX_LEVELS or count > MAX_ENTRIES:
            raise ValueError(
                f"{where} is not a recipe: it has more than {MAX_LEVELS} levels or {MAX_ENTRIES:,} entries {line}."
            )


def _check_nodes(node: yaml.Node | None, where: str) -> None:
    """Refuses repeated keys, of which YAML keeps the last, and a bare `no` (Norwegian, a precision): it is false."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_nodes(item, where)
    if (
        isinstance(node, yaml.ScalarNode)
        and node.tag.endswith(":bool")
        and node.value.lower() not in ("true", "false")
    ):
        raise ValueError(
            f"{where} has a bare {node.value} in line {node.start_mark.line + 1}, which YAML reads as a boolean: "
            f"write '{node.value}' in quotes, or true or false."
        )
    if not isinstance(node, yaml.MappingNode):
        return
    seen = set()
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                line = key.start_mark.line + 1
                raise ValueError(f"{where} repeats the key {shown(key.value)} in line {line}.")
            seen.add(key.value)
        _check_nodes(key, where)
        _check_nodes(value, where)


def _check_file(path: Path) -> None:
    """Refuses a file that is not a mapping of known keys, before its values are parsed."""
    where = f"The recipe {str(path)!r}"
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{where} has {path.stat().st_size:,} bytes, but a recipe has at most {MAX_BYTES:,}.")
    try:
        text = path.read_text(encoding="utf-8")
        _check_yaml(text, where)
        content = yaml.load(text, _Loader)
        _check_nodes(yaml.compose(text, _Loader), where)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8: {error.reason} at byte {error.start + 1}.") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is not valid YAML: {_shortened(_said(error), 400)}.") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{where} must consist of `key: value` lines, but it is {'empty' if content is None else shown(content)}."
        )
    for name in SECTIONS:
        if not isinstance(content.get(name, {}), dict):
            raise ValueError(
                f"{where} must have `key: value` lines under {name!r}, but it has {shown(content[name])}."
            )
    _check_keys({str(key): value for key, value in _flat(content).items()}, where)


# What the keys that take any number of sources or sets take.
LISTED = {"more_data": SourceRecipe, "validation_sets": EvaluationSetRecipe}


def _explained(message: str) -> str:
    """Turns an error of jsonargparse into one sentence, in the recipe's words if it is about the value of one key."""
    # The key of an option is named after that of the option itself.
    key = ".".join(re.findall(r'Parser key "([\w.]+)":', message))
    given = re.search(r'.*Parser key "[\w.]+":.*?value: ?([^\n]*)', message, re.DOTALL)
    hint = _hint(key)
    if given is not None and hint is not None:
        kinds = list(dict.fromkeys(_kinds(hint)))
        expected = " or ".join([", ".join(kinds[:-1]), kinds[-1]]) if kinds[1:] else kinds[0]
        return f"{_spelled(key)} must be {expected}, but it is {shown(given[1].strip())}."
    message = re.sub(r"<class '(\w+)'>", r"\1", " ".join(message.split()))
    return _shortened(re.sub(r"\S{81,}", lambda word: _shortened(word[0], 80), message), 400)


def _hint(key: str) -> Any:
    """Returns the type hint of a dotted key, or `None` if the recipe does not have one value under it."""
    kind: Any = Recipe
    for name in key.split("."):
        hints = get_type_hints(kind) if is_dataclass(kind) else {}
        if name not in hints:
            return None
        kind = LISTED.get(name) or options_of(kind).get(name, hints[name])
    return None if is_dataclass(kind) else kind


def _kinds(hint: Any) -> list[str]:
    """Returns the values that a type hint allows, in words."""
    if get_origin(hint) is Literal:
        return [repr(value) for value in get_args(hint)]
    if get_origin(hint) in (Union, UnionType):
        return [kind for part in get_args(hint) for kind in _kinds(part)]
    if get_origin(hint) is list:
        words = _kinds(get_args(hint)[0])
        return [f"a list of {', '.join(words)}" if words[1:] else "a list"]
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string", NoneType: "null"}
    return [names.get(hint, "{language: file}")]


def _recipe_file(name: str) -> Path:
    path = Path(name)
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"The recipe file {str(path)!r} does not exist.") from error
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise ValueError(f"The recipe {str(path)!r} is {kind}: it must be a YAML file.")
    return path


def _check_arguments(arguments: Sequence[str]) -> None:
    """Refuses unknown keys on the command line, and values that would crash jsonargparse."""
    where = "The command line"
    for i, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if not option.startswith("--"):
            option, value = "", argument
        elif not equals:
            value = " ".join(arguments[i + 1 : i + 2])
        key = option[2:]
        if key == "recipe":
            _check_file(_recipe_file(value))
            continue
        if key in SECTIONS and not value.lstrip().startswith("{"):
            raise ValueError(
                f"The command line sets {option} to {shown(value)}: override its keys one by one, as in "
                f"{option}.KEY VALUE."
            )
        # A value that is not YAML is a string, or is refused together with its key.
        with contextlib.suppress(yaml.YAMLError):
            _check_yaml(value, f"{where}'s {shown(value)}")
        content = _value(value)
        if key.endswith("+"):
            # Adds one item to a list, or several.
            key, content = key.rstrip("+"), content if isinstance(content, list) else [content]
        if key and key not in ("help", "print_config"):
            _check_keys({str(key): value for key, value in _flat({key: content}).items()}, where)


def _said(error: yaml.YAMLError) -> str:
    """Returns the message of a YAML error with line and column, without the name of the stream and the excerpt."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    parts = ((error.context, error.context_mark), (error.problem, error.problem_mark))
    said = [
        f"{what} in line {mark.line + 1}, column {mark.column + 1}" if mark else what for what, mark in parts if what
    ]
    return ", ".join(said)


def _parser(program: str) -> ArgumentParser:
    """Makes the parser of a recipe and its overrides."""
    parser = ArgumentParser(
        prog=program,
        usage=f"{program} RECIPE.yaml [--section.key value ...]",
        description="Trains a translation model. Every key below can be set in the recipe file, or overridden here.",
        exit_on_error=False,
        allow_abbrev=False,
        parser_mode="recipe",
    )
    parser.add_argument("--recipe", action="config", help="the recipe file (YAML), if it is not the first argument")
    parser.add_class_arguments(Recipe)
    for action in parser._actions:
        # Options of jsonargparse that are refused here.
        if action.dest in SECTIONS or action.dest.endswith(".help"):
            action.help = SUPPRESS
        if action.dest == "initialize.from_":
            action.option_strings, action.metavar = ["--initialize.from"], "MODEL"
    return parser


def _with_merged_sets(arguments: Sequence[str]) -> list[str]:
    """Replaces overrides of single validation sets, of which jsonargparse keeps the last, by one of them all."""
    others: list[str] = []
    sets: dict[str, Any] = {}
    overridden = False
    remaining = iter(arguments)
    for argument in remaining:
        option, equals, value = argument.partition("=")
        words = option.removeprefix("--").split(".")
        if words[0] not in ("recipe", "validation_sets") or not option.startswith("--"):
            others.append(argument)
            continue
        value = value if equals else next(remaining, "")
        if words == ["recipe"]:
            others += ["--recipe", value]
            sets = dict(yaml.load(Path(value).read_text(encoding="utf-8"), _Loader).get("validation_sets", {}))
            continue
        overridden = True
        content = _value(value)
        if len(words) == 1:
            sets = content
        elif len(words) == 2:
            sets[words[1]] = content
        else:
            sets[words[1]] = dict(sets.get(words[1], {})) | {words[2]: content}
    return [*others, f"--validation_sets={json.dumps(sets)}"] if overridden else others


def _value(text: str) -> Any:
    """Returns what YAML reads in a value of the command line; a string need not be YAML."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        return text


def load_recipe(argv: Sequence[str], program: str = "accelerate launch train.py") -> Recipe:
    """
    Reads a recipe file and the overrides that follow it.

    Args:
        argv (`Sequence[str]`): the command line without the program's name: `RECIPE.yaml`, then any number of
            `--section.key value`. `--help` prints every key with its type, default and meaning.
        program (`str`): the command that the usage line shows.

    Returns:
        [`Recipe`]: complete and checked, with `run_dir` filled in.

    Raises:
        ValueError: a key is unknown (the message suggests the nearest one), a value has the wrong type or is out of
            range, or the file is not valid YAML.
        FileNotFoundError: the recipe file does not exist.
    """
    parser = _parser(program)
    arguments = list(argv)
    path = _recipe_file(arguments[0]) if arguments and not arguments[0].startswith("-") else None
    if path is not None:
        arguments[:1] = ["--recipe", str(path)]
    _check_arguments(arguments)
    arguments = [re.sub(r"^--initialize\.from(?=$|=)", "--initialize.from_", argument) for argument in arguments]
    arguments = _with_merged_sets(arguments)
    try:
        namespace = parser.parse_args(arguments)
        given = parser.parse_args(arguments, defaults=False)
    except ArgumentError as error:
        raise ValueError(_explained(str(error))) from error
    values = parser.instantiate(namespace).as_dict()
    recipe = Recipe(**{name: value for name, value in values.items() if name != "recipe"})
    recipe.given = frozenset(map(_spelled, given.keys()))
    check_ranges(recipe)
    if not recipe.run_dir:
        if path is None:
            raise ValueError(
                "There is no recipe: name a file, as in RECIPE.yaml, or give --run_dir and the keys as options."
            )
        recipe.run_dir = str(Path("runs") / path.stem)
    return recipe


# Keys for which null is a value, although their default is not null.
OPTIONAL = {"validation_split", "test_split", "max_length_offset"}


def check_ranges(recipe: Recipe) -> None:
    """
    Checks the values of a recipe, and that its keys agree with each other.

    Args:
        recipe ([`Recipe`]): the recipe.

    Raises:
        ValueError: a number is out of its range or not finite, a string has control characters, a value is missing, or
            two keys contradict each other; the message names the keys.
    """
    sections: list[tuple[str, Any]] = [("", recipe)]
    sections += [(f"{name}.", getattr(recipe, name)) for name in SECTIONS]
    sections += [(f"more_data[{i}].", source) for i, source in enumerate(recipe.more_data)]
    sections += [(f"validation_sets.{name}.", source) for name, source in recipe.validation_sets.items()]
    for prefix, section in sections[:]:
        options = {name: getattr(section, name) for name in options_of(type(section))}
        sections += [(f"{prefix}{name}.", option) for name, option in options.items() if option is not None]
    for prefix, section in sections:
        defaults = type(section)()
        for part in fields(section):
            name, value, default = (
                _spelled(prefix + part.name),
                getattr(section, part.name),
                getattr(defaults, part.name),
            )
            if value is None and default is not None and part.name not in OPTIONAL:
                raise ValueError(f"{name} must have a value, for example its default {default!r}, but it is null.")
            _check_value(name, value, part.metadata)
    _check_agreement(recipe.training)
    _check_initialize(recipe.initialize)
    _check_adapter(recipe)
    _check_hub(recipe.hub, recipe.training)
    check_baseline(recipe, "hub.not_worse_than")
    _check_sets(recipe)
    tokenizer = recipe.tokenizer
    kept = recipe.initialize.from_ is not None and recipe.initialize.vocabulary == "keep"
    if tokenizer.bpe_dropout and tokenizer.kind != "bpe" and tokenizer.path is None and not kept:
        raise ValueError(
            f"tokenizer.bpe_dropout ({tokenizer.bpe_dropout}) skips merges, which only tokenizer.kind 'bpe' has, but "
            f"the kind is {tokenizer.kind!r}."
        )
    if recipe.evaluation.max_length_offset is None and recipe.evaluation.max_length is None:
        raise ValueError("evaluation.max_length_offset and evaluation.max_length must not both be null.")


def _check_value(name: str, value: Any, bounds: Mapping[str, float]) -> None:
    # A NaN compares false with every bound.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and not all(COMPARISONS[word](value, bound) for word, bound in bounds.items()):
        expected = " and ".join(f"{word.replace('_', ' ')} {bound:,}" for word, bound in bounds.items())
        raise ValueError(f"{name} must be {expected}, but it is {shown(value)}.")
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
    texts = [part for part in parts if isinstance(part, str)]
    if any(re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", text) for text in texts):
        raise ValueError(f"{name} must not contain control characters, but it is {shown(value)}.")


def _check_agreement(training: TrainingRecipe) -> None:
    """Refuses keys that are valid on their own, but contradict each other."""
    if training.schedule == "noam" and training.peak_learning_rate is not None:
        raise ValueError(
            f"training.peak_learning_rate ({training.peak_learning_rate}) has no effect with training.schedule "
            "'noam', whose peak is given by equation 3: set training.learning_rate_factor instead, or choose another "
            "schedule."
        )
    if training.schedule != "noam" and training.peak_learning_rate is None:
        raise ValueError(f"training.schedule {training.schedule!r} requires training.peak_learning_rate.")
    if training.schedule != "noam" and training.learning_rate_factor != 1:
        raise ValueError(
            f"training.learning_rate_factor ({training.learning_rate_factor}) has no effect with training.schedule "
            f"{training.schedule!r}: set training.peak_learning_rate instead."
        )
    if training.simcut is not None and training.r_drop is not None:
        raise ValueError("training.simcut and training.r_drop exclude each other: set one of them to null.")
    if len(set(training.freeze)) == len(get_args(Part)):
        raise ValueError("training.freeze names all parts of the model, so that there is nothing to train.")
    if training.average_best is None and training.average_last > training.keep_last:
        raise ValueError(
            f"training.average_last ({training.average_last}) must not be above training.keep_last "
            f"({training.keep_last}): checkpoints are averaged from disk."
        )
    ranking = "average_best" if training.average_best is not None else "keep_best" if training.keep_best else None
    if ranking is not None and training.save_every % training.validate_every:
        raise ValueError(
            f"training.{ranking} ranks checkpoints by their validation, so training.save_every "
            f"({training.save_every}) must be a multiple of training.validate_every ({training.validate_every})."
        )


def _check_initialize(initialize: InitializeRecipe) -> None:
    """Refuses keys that have no effect without each other, and parts of nothing."""
    defaults = InitializeRecipe()
    for part in fields(initialize):
        value = getattr(initialize, part.name)
        if initialize.from_ is None and value != getattr(defaults, part.name):
            raise ValueError(f"initialize.{part.name} ({shown(value)}) has no effect without initialize.from.")
    if initialize.parts == []:
        raise ValueError("initialize.parts must have at least one part, but it is []: null takes all parts.")
    if initialize.add_tokens and initialize.vocabulary == "transfer":
        raise ValueError(
            "initialize.add_tokens extends the vocabulary of the model, but initialize.vocabulary 'transfer' "
            "exchanges it: leave one of them out."
        )
    if not all(token.strip() for token in initialize.add_tokens):
        raise ValueError(f"initialize.add_tokens must not have blank entries, but it is {initialize.add_tokens}.")


def _check_adapter(recipe: Recipe) -> None:
    """Refuses keys that have no meaning for adapters."""
    training, initialize = recipe.training, recipe.initialize
    if training.adapter is None:
        return
    if initialize.from_ is None:
        raise ValueError("training.adapter requires initialize.from, the model that the adapters are added to.")
    reasons = [
        ("initialize.parts", initialize.parts is not None, "parts with random weights would stay random"),
        (
            "initialize.vocabulary 'transfer'",
            initialize.vocabulary == "transfer",
            "new embeddings would stay untrained",
        ),
        ("initialize.add_tokens", bool(initialize.add_tokens), "new embeddings would stay untrained"),
        ("training.freeze", bool(training.freeze), "adapters leave all weights as they are"),
        ("training.optimizer 'muon'", training.optimizer == "muon", "Muon is for whole matrices: use 'adam'"),
        ("training.ema_decay", training.ema_decay is not None, "the average of factors is not that of their products"),
        (
            "hub.every_n_checkpoints",
            recipe.hub.every_n_checkpoints is not None,
            "only the model at the end is published whole",
        ),
    ]
    for key, is_set, reason in reasons:
        if is_set:
            raise ValueError(f"training.adapter excludes {key}: {reason}.")


def _check_hub(hub: HubRecipe, training: TrainingRecipe) -> None:
    if hub.repo_id is None and hub.every_n_checkpoints is not None:
        raise ValueError("hub.every_n_checkpoints requires hub.repo_id, the repository to publish to.")
    if hub.repo_id is not None:
        check_repo_id(hub.repo_id, "hub.repo_id")
    check_branch(hub.revision, "hub.revision")
    if hub.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", hub.license):
        raise ValueError(
            f"hub.license must be a licence identifier of the Hub, such as apache-2.0, but it is {hub.license!r}."
        )
    if hub.every_n_checkpoints is not None and training.save_every % training.validate_every:
        raise ValueError(
            "hub.every_n_checkpoints publishes a checkpoint with the BLEU of its validation, so training.save_every "
            f"({training.save_every}) must be a multiple of training.validate_every ({training.validate_every})."
        )


def check_baseline(recipe: Recipe, where: str) -> None:
    """
    Checks that `hub.not_worse_than` has the form of a model to compare with.

    Args:
        recipe ([`Recipe`]): the recipe.
        where (`str`): name of the setting in the error message.

    Raises:
        ValueError: it is `start` without `initialize.from`, or neither a word of the manual, a folder nor an id.
    """
    than = recipe.hub.not_worse_than
    if than == "start" and recipe.initialize.from_ is None:
        raise ValueError(f"{where} is 'start', but the run starts from no model: set initialize.from.")
    if than in (None, "start", "last_push") or (than and Path(than).is_dir()):
        return
    try:
        check_repo_id(str(than), where)
    except ValueError as error:
        raise ValueError(
            f"{where} must be start, last_push, the folder of a model or its id on the Hub, user/name, but it is "
            f"{shown(than)}."
        ) from error


def _check_set_name(name: str) -> None:
    """Refuses a name that could not be part of a key, or of the name of a file."""
    if not re.fullmatch(r"[\w-]{1,60}", name):
        raise ValueError(
            f"validation_sets has the name {shown(name)}, but a name consists of at most 60 letters, digits, _ or -."
        )


def _check_sets(recipe: Recipe) -> None:
    """Refuses validation sets whose names are taken or not valid."""
    directions = ["-".join(pair) for pair in recipe.language_pairs]
    for name in recipe.validation_sets:
        _check_set_name(name)
        if name in directions:
            raise ValueError(
                f"validation_sets.{name} has the name of a direction, by which the sets of data and more_data are "
                "called: choose another name."
            )


def check_repo_id(repo_id: str, where: str) -> None:
    """
    Checks the id of a repository on the Hub, without asking the Hub.

    Args:
        repo_id (`str`): the id.
        where (`str`): its name in the error message.

    Raises:
        ValueError: the id is not valid.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo_id)
        if repo_id.count("/") != 1:
            raise HFValidationError("it must contain one slash.")
    except HFValidationError as error:
        said = _shortened(str(error), 200)
        raise ValueError(f"{where} must have the form user/name, but it is {shown(repo_id)}: {said}") from error


def check_branch(name: str, where: str) -> None:
    """
    Checks the name of a branch.

    Args:
        name (`str`): the name.
        where (`str`): its name in the error message.

    Raises:
        ValueError: git does not allow the name.
    """
    if not re.fullmatch(r"[\w][\w./-]*", name) or ".." in name or "//" in name or name.endswith(("/", ".", ".lock")):
        raise ValueError(f"{where} must be the name of a branch, such as main or v2, but it is {name!r}.")
