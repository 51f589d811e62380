"""The chance in training text that is made anew in each epoch: altered sentences, and BPE-dropout."""

import random

from transformers import PreTrainedTokenizerBase

from ..recipe import AugmentRecipe, Recipe
from .alterations import altered_pair
from .bpe_dropout import BpeDropout


class Renewal:
    """
    Alters pairs and skips merges at random. What happens to a pair depends on the seed, the pair's number in the text
    and the pass over the text, and on nothing else: not on processes, workers or batches, nor on where a run resumed.

    Args:
        tokenizer ([`PreTrainedTokenizerBase`]): encodes the text.
        seed (`int`): seed of the run.
        augment ([`AugmentRecipe`]): probabilities of the alterations.
        bpe_dropout (`float`): probability of each merge to be skipped.

    Raises:
        ValueError: the tokenizer has no merges that could be skipped.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, seed: int, augment: AugmentRecipe, bpe_dropout: float = 0.0
    ) -> None:
        self.seed = seed
        self.augment = augment
        self.dropout = BpeDropout(tokenizer, bpe_dropout) if bpe_dropout else None

    def rng(self, number: int, repetition: int) -> random.Random:
        """Returns the random numbers for a pair, by its number in the text and how often it was taken before."""
        return random.Random(f"{self.seed} {number} {repetition}")

    def altered(self, source: str, target: str, rng: random.Random) -> tuple[str, str]:
        """Alters a pair as [`altered_pair`] does."""
        return altered_pair(source, target, self.augment, rng)


def renewal_of(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Renewal | None:
    """
    Returns the renewal that a recipe asks for by `data.augment` and `tokenizer.bpe_dropout`, or `None` if it asks for
    none. Raises the errors of [`Renewal`].
    """
    augment, dropout = recipe.data.augment or AugmentRecipe(), recipe.tokenizer.bpe_dropout
    if not dropout and augment == AugmentRecipe():
        return None
    return Renewal(tokenizer, recipe.seed, augment, dropout)
