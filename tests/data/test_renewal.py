"""What happens to a pair depends on the seed, its number and the pass over the text, and on nothing else."""

import pytest

from hf_vaswani.data.renewal import Renewal, renewal_of
from hf_vaswani.data.tokenizer import train_tokenizer
from hf_vaswani.recipe import AugmentRecipe, DataRecipe, Recipe, TokenizerRecipe

SENTENCES = [f"Several men in hard hats operate giant pulley number {i}." for i in range(50)]
AUGMENT = AugmentRecipe(upper=0.2, title=0.2, typos=0.5, no_final_mark=0.5)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(SENTENCES, 300)


def altered(renewal: Renewal, turn: int, numbers: range = range(50)) -> dict[int, tuple[str, str]]:
    return {i: renewal.altered(SENTENCES[i], SENTENCES[i], renewal.rng(i, turn)) for i in numbers}


def test_a_pair_is_altered_alike_whatever_is_altered_before_it(tokenizer) -> None:
    renewal = Renewal(tokenizer, 1, AUGMENT)
    first, second = altered(renewal, 0), altered(renewal, 1)
    assert first != second != altered(Renewal(tokenizer, 2, AUGMENT), 1)
    assert altered(renewal, 0, range(30, 40)).items() <= first.items()
    assert altered(Renewal(tokenizer, 1, AUGMENT), 1) == second


def test_a_recipe_without_chance_has_no_renewal(tokenizer) -> None:
    for augment in (None, AugmentRecipe()):
        assert renewal_of(Recipe(data=DataRecipe(augment=augment)), tokenizer) is None
    renewal = renewal_of(Recipe(data=DataRecipe(augment=AUGMENT), seed=3), tokenizer)
    assert (renewal.seed, renewal.augment, renewal.dropout) == (3, AUGMENT, None)
    renewal = renewal_of(Recipe(tokenizer=TokenizerRecipe(bpe_dropout=0.1)), tokenizer)
    assert (renewal.augment, renewal.dropout.p) == (AugmentRecipe(), 0.1)
