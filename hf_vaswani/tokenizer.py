"""The shared vocabulary of both languages (Section 5.1): byte-pair encoding, as a plain fast tokenizer.

The pieces are those of bytes (byte-level BPE), so that every text has ids and decodes back to itself, also one with
letters that the training text did not have; `<unk>` has an id because users of transformers expect one.
"""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<unk>"]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")

# A word or a run of punctuation, each with the space before it: "red book." -> " red", " book", "."
WORD = r" ?[\p{L}\p{M}\p{N}]+| ?[^\s\p{L}\p{M}\p{N}]+| "


def train_tokenizer(sentences: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """
    Learns a joint byte-pair encoding and wraps it as a fast tokenizer.

    Args:
        sentences (`Iterable[str]`): the training text of both sides.
        vocab_size (`int`): entries to have at most, the four special tokens and the 256 bytes among them.

    Returns:
        [`PreTrainedTokenizerFast`] with `<pad> <s> </s> <unk>` as ids 0 to 3. It puts `</s>` at the end of each
        sentence, and decodes to the same sentence up to Unicode normalisation (NFC) and runs of white space.

    Raises:
        ValueError: `vocab_size` has no room for the special tokens and the bytes.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(SPECIAL_TOKENS) + len(alphabet):
        raise ValueError(
            f"The vocabulary needs {len(SPECIAL_TOKENS)} special tokens and {len(alphabet)} bytes, "
            f"so vocab_size must be at least {len(SPECIAL_TOKENS) + len(alphabet)}, but it is {vocab_size}."
        )
    bpe = Tokenizer(models.BPE())
    # With a space in front, a word is the same piece at the start of a sentence as inside it.
    bpe.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip(), normalizers.Prepend(" ")]
    )
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(sentences, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", bpe.token_to_id("</s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        # A "</s>" that somebody wrote in a sentence is text, not the end of it.
        split_special_tokens=True,
    )


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """
    Loads a tokenizer that a translation model can use.

    Args:
        name (`str`): a folder, or the id of a repository on the Hub.

    Returns:
        [`PreTrainedTokenizerBase`].

    Raises:
        ValueError: there is none, or it lacks what translation needs.
    """
    if Path(name).is_dir() and not any((Path(name) / file).is_file() for file in TOKENIZER_FILES):
        raise ValueError(f"The folder {name} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is in it.")
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
    if not tokenizer.is_fast:
        raise ValueError(
            f"The tokenizer {name} is not a fast one (with a tokenizer.json), which is what is used here."
        )
    for token in ("pad_token", "eos_token"):
        if getattr(tokenizer, token) is None:
            raise ValueError(f"The tokenizer {name} has no {token}, which a translation model needs.")
    return tokenizer
