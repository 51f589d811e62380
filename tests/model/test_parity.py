"""Equal to implementations that are not ours, given their weights: torch's stacks and transformers' Marian."""

import pytest
import torch
from torch import nn

from benchmarks.parity import (
    BEAM_SENTENCES,
    IMPLEMENTATIONS,
    MARIAN_NETWORKS,
    MARIAN_SHAPE,
    TORCH_NETWORKS,
    beam_search,
    copy_weights,
    marian_pair,
    max_difference,
    random_batch,
    torch_pair,
)

from ..conftest import dear

SMALL = {"d_model": 20, "d_ff": 37, "num_heads": 5, "encoder_layers": 2, "decoder_layers": 2}


# The small ones also with attention biases where the table has them without, and the other way round.
TURNED = [(fields | {"attention_bias": "attention_bias" not in fields}, shape) for fields, shape in TORCH_NETWORKS[:2]]


@pytest.mark.variants(2)
@pytest.mark.parametrize("norm_position", ["post", "pre"])
@pytest.mark.parametrize(
    ("fields", "shape"), [*TORCH_NETWORKS[:2], *TURNED, *(dear(*each) for each in TORCH_NETWORKS[2:])]
)
def test_stacks_equal_torchs(fields, shape, norm_position) -> None:
    reference, ours = torch_pair(norm_position=norm_position, **fields)
    for padding in ("none", "right", "left"):
        batch = random_batch(ours.config, *shape, padding)
        for implementation in IMPLEMENTATIONS:
            difference = max_difference(reference, ours, batch, implementation)
            assert difference <= 1e-5, (padding, implementation)


def test_stacks_equal_torchs_on_embeddings_without_masks() -> None:
    reference, ours = torch_pair(**SMALL)
    batch = random_batch(ours.config, 3, 7, 5, padding="none")
    expected = reference(**batch).last_hidden_state
    actual = ours(
        inputs_embeds=reference.source_embedding(batch["input_ids"]),
        decoder_inputs_embeds=reference.target_embedding(batch["decoder_input_ids"]),
    ).last_hidden_state
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@pytest.mark.variants(2)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("fields", MARIAN_NETWORKS)
def test_logits_equal_marians(fields, implementation) -> None:
    reference, ours = marian_pair(**fields)
    for padding in ("none", "right"):
        batch = random_batch(ours.config, *MARIAN_SHAPE, padding)
        assert max_difference(reference, ours, batch, implementation) <= 1e-5, padding


@pytest.mark.variants(3)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("fields", MARIAN_NETWORKS)
def test_beam_search_finds_what_marians_finds(fields, implementation) -> None:
    reference, ours = marian_pair(**fields)
    expected = beam_search(reference, implementation)
    # Were they all the same, or none with an end of its own, then to be equal would say little.
    assert len({tuple(translation) for translation in expected}) > BEAM_SENTENCES / 2
    assert len({len(translation) for translation in expected}) > 5
    assert beam_search(ours, implementation) == expected


@pytest.mark.variants(2)
@pytest.mark.parametrize(
    "settings",
    [
        {"length_penalty": 0.6, "early_stopping": True},
        {"length_penalty": 2.0, "early_stopping": "never"},
        {"no_repeat_ngram_size": 0, "bad_words_ids": None, "forced_eos_token_id": None},
        {"num_beams": 1},
        {"use_cache": False},
    ],
)
def test_beam_search_finds_what_marians_finds_by_other_rules(settings) -> None:
    reference, ours = marian_pair()
    assert beam_search(ours, "sdpa", **settings) == beam_search(reference, "sdpa", **settings)


# ---- The copy leaves nothing out


def test_copying_refuses_two_weights_of_one_name() -> None:
    reference, ours = marian_pair()
    reference.model.shared = nn.Embedding.from_pretrained(reference.model.shared.weight + 1)
    with pytest.raises(
        ValueError, match=r"Two different weights of the reference map to model\.encoder\.embed_tokens\.weight\."
    ):
        copy_weights(reference, ours)


def test_every_weight_that_was_copied_is_compared() -> None:
    reference, ours = torch_pair(**SMALL, norm_position="pre", attention_bias=True)
    batch = random_batch(ours.config, 3, 7, 5)
    for name, weight in ours.named_parameters():
        # A softmax does not see what is added to all of its scores alike: the bias of the keys says nothing.
        if not name.endswith("k_proj.bias"):
            before = weight.detach().clone()
            weight.data.mul_(1.5)
            assert max_difference(reference, ours, batch, "eager") > 1e-3, name
            weight.data.copy_(before)
