"""A lexical shortlist: the entries of the vocabulary that translations of a batch are searched among.

A word has few translations, so most of the vocabulary is out of the question before the search begins. With a
shortlist the output matrix has rows for the likely entries alone (Jean et al., 2015): those that translate the entries
of the source, these themselves, and the most frequent ones. All sentences of a batch share them. Probabilities are
over the shortlist, so scores are higher than without one.

`hf-vaswani shortlist` writes the file. It holds entries as text:

    {"frequent": ["</s>", ",", ...], "translations": {"house": ["Haus", "Häuser", ...], ...}}
"""

import json
from pathlib import Path
from typing import Any

import torch

FILE = "shortlist.json"


class Shortlist:
    """
    The likely entries of translations.

    Args:
        frequent (`torch.LongTensor` of shape `(frequent,)`): entries that any translation may have.
        translations (`torch.LongTensor` of shape `(vocab_size, candidates)`): entries that translate each entry; a row
            may repeat some.
    """

    def __init__(self, frequent: torch.Tensor, translations: torch.Tensor) -> None:
        self.frequent, self.translations = frequent, translations

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary."""
        return len(self.translations)

    @classmethod
    def load(cls, name: str, tokenizer: Any, vocab_size: int, **hub: Any) -> "Shortlist":
        """
        Loads the shortlist of a model.

        Args:
            name (`str`): folder of the model, or its id on the Hub.
            tokenizer ([`PreTrainedTokenizerBase`]): its tokenizer.
            vocab_size (`int`): size of its vocabulary.
            hub: arguments of `cached_file`, such as `revision`.

        Returns:
            [`Shortlist`].

        Raises:
            ValueError: the file is missing or damaged, cannot be loaded, or belongs to another vocabulary.
        """
        from transformers.utils import cached_file

        try:
            found = cached_file(name, FILE, _raise_exceptions_for_missing_entries=False, **hub) if name else None
        except OSError as error:
            raise ValueError(f"{FILE} of {name} cannot be loaded: {error}") from error
        if found is None:
            raise ValueError(
                f"{name or 'The model'} has no {FILE}: hf-vaswani shortlist writes it from parallel text."
            )
        try:
            content = json.loads(Path(found).read_text(encoding="utf-8"))
            frequent, translations = list(content["frequent"]), dict(content["translations"])
            words = {word for row in (frequent, translations, *translations.values()) for word in row}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{found} is no shortlist, or it is damaged: {error!r}.") from error
        ids = tokenizer.get_vocab()
        for word in words:
            if not isinstance(word, str) or ids.get(word, vocab_size) >= vocab_size:
                raise ValueError(f"{found} is of another vocabulary: the model has no entry {word!r}.")
        width = max(map(len, translations.values()), default=0)
        rows = torch.arange(vocab_size)[:, None].repeat(1, 1 + width)
        for word, others in translations.items():
            rows[ids[word], 1 : 1 + len(others)] = torch.tensor([ids[other] for other in others], dtype=torch.long)
        return cls(torch.tensor([ids[word] for word in frequent], dtype=torch.long), rows)

    def entries(self, input_ids: torch.Tensor, always: torch.Tensor | None = None) -> torch.Tensor:
        """
        Selects the entries for a batch.

        Args:
            input_ids (`torch.LongTensor` of any shape): source tokens; padding may be among them.
            always (`torch.LongTensor` of shape `(always,)`, *optional*): further entries, such as those that end a
                translation.

        Returns:
            `torch.LongTensor` of shape `(entries,)`: in ascending order, on the device of `input_ids`.
        """
        is_in = torch.zeros(self.vocab_size, dtype=torch.bool, device="cpu")
        is_in[self.frequent] = True
        is_in[self.translations[input_ids.unique().cpu()]] = True
        if always is not None:
            is_in[always.cpu()] = True
        return is_in.nonzero()[:, 0].to(input_ids.device)
