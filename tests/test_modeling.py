"""The network: the paper's details one by one, what padding, the future and the cache may change, and saving."""

import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModel, AutoModelForSeq2SeqLM

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniModel
from hf_vaswani.modeling_vaswani import (
    VaswaniAddAndNorm,
    VaswaniAttention,
    VaswaniEncoderLayer,
    VaswaniPositions,
    eager_attention_forward,
    sinusoids,
    smoothed_cross_entropy,
)


def tiny_config(**fields) -> VaswaniConfig:
    sizes = {"vocab_size": 40, "d_model": 16, "d_ff": 24, "num_heads": 2, "encoder_layers": 2, "decoder_layers": 2}
    return VaswaniConfig(**(sizes | fields))


def tiny_model(seed: int = 0, **fields) -> VaswaniForConditionalGeneration:
    torch.manual_seed(seed)
    model = VaswaniForConditionalGeneration(tiny_config(**fields)).eval()
    # A fresh post-norm model says the same whatever it reads; larger matrices make it look.
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear) and module is not model.lm_head:
                module.weight.mul_(2)
    return model


def batch(rows: int = 3, source: int = 7, target: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "input_ids": torch.randint(4, 40, (rows, source), generator=generator),
        "attention_mask": torch.ones(rows, source, dtype=torch.long),
        "decoder_input_ids": torch.randint(4, 40, (rows, target), generator=generator),
    }


# ---- 3.2 Attention


def test_attention_of_the_worked_example() -> None:
    """Scores under the causal mask: row 2 sees two equal scores, so each weight is one half."""
    scores = torch.tensor([[1.0, 0, -1, -1], [1, 1, -1, 0], [0, 1, 1, -1], [-1, -1, 2, 1]])
    mask = torch.full((4, 4), torch.finfo(torch.float32).min).triu(1)[None, None]
    # Q K^T gives the scores when K is the unit matrix.
    query, key, value = scores[None, None], torch.eye(4)[None, None], torch.eye(4)[None, None]
    attended, weights = eager_attention_forward(nn.Module().eval(), query, key, value, mask, scaling=1.0)
    assert weights[0, 0, 1].tolist() == [0.5, 0.5, 0, 0]
    assert weights[0, 0, 0].tolist() == [1, 0, 0, 0]
    torch.testing.assert_close(attended[0, :, 0], weights[0, 0])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_is_softmax_of_qk_over_root_dk(implementation) -> None:
    config = tiny_config(d_k=3, d_v=5)
    config._attn_implementation = implementation
    torch.manual_seed(0)
    attention = VaswaniAttention(config).eval()
    x, memory = torch.randn(2, 4, 16), torch.randn(2, 6, 16)
    heads = []
    for head in range(2):
        q = x @ attention.q_proj.weight[3 * head : 3 * head + 3].T
        k = memory @ attention.k_proj.weight[3 * head : 3 * head + 3].T
        v = memory @ attention.v_proj.weight[5 * head : 5 * head + 5].T
        heads.append(torch.softmax(q @ k.transpose(1, 2) / math.sqrt(3), dim=-1) @ v)
    expected = torch.cat(heads, dim=-1) @ attention.out_proj.weight.T
    torch.testing.assert_close(attention(x, encoder_hidden_states=memory)[0], expected)


def test_the_paper_has_no_biases_in_attention_and_two_in_feed_forward() -> None:
    layer = VaswaniModel(tiny_config()).encoder.layers[0]
    biases = {name for name, _ in layer.named_parameters() if name.endswith("bias")}
    assert biases == {
        "self_attn_norm.layer_norm.bias",
        "feed_forward.fc1.bias",
        "feed_forward.fc2.bias",
        "feed_forward_norm.layer_norm.bias",
    }
    assert VaswaniAttention(tiny_config(attention_bias=True)).q_proj.bias is not None


# ---- 3.5 Positions


def test_sinusoids_of_the_worked_example() -> None:
    expected = torch.tensor(
        [[0, 1, 0, 1], [0.84, 0.54, 0.10, 0.995], [0.91, -0.42, 0.20, 0.98], [0.14, -0.99, 0.30, 0.96]]
    )
    torch.testing.assert_close(sinusoids(torch.arange(4), 4, base=100.0), expected, atol=6e-3, rtol=0)


def test_sinusoids_are_right_far_out() -> None:
    row = sinusoids(torch.tensor([100_000]), 512)[0]
    for i in (0, 1, 100, 255):
        angle = 100_000 / 10_000 ** (2 * i / 512)
        assert row[2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
        assert row[2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_sinusoids_are_neither_parameter_nor_buffer_nor_saved() -> None:
    model = tiny_model()
    assert not list(model.buffers())
    assert not [name for name in model.state_dict() if "position" in name]


def test_embedding_is_scaled_and_position_added_in_float32() -> None:
    positions = VaswaniPositions(tiny_config(dropout=0.0))
    embeds = torch.randn(1, 3, 16)
    torch.testing.assert_close(positions(embeds, past_length=5)[0], embeds[0] * 4 + sinusoids(torch.arange(5, 8), 16))
    embeds = torch.randn(1, 200, 16).bfloat16()
    half = positions(embeds)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, (embeds.float() * 4 + sinusoids(torch.arange(200), 16)).bfloat16())


# ---- 3.1 Layers


@pytest.mark.parametrize("norm_position", ["post", "pre"])
def test_encoder_layer_equals_torchs(norm_position) -> None:
    config = tiny_config(norm_position=norm_position, attention_bias=True, dropout=0.0)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    ours = VaswaniEncoderLayer(config).eval()
    theirs = nn.TransformerEncoderLayer(
        16, 2, 24, 0.0, layer_norm_eps=1e-6, batch_first=True, norm_first=norm_position == "pre"
    ).eval()
    with torch.no_grad():
        attention = ours.self_attn
        for name in ("weight", "bias"):
            parts = [getattr(module, name) for module in (attention.q_proj, attention.k_proj, attention.v_proj)]
            getattr(theirs.self_attn, f"in_proj_{name}").copy_(torch.cat(parts))
            getattr(theirs.self_attn.out_proj, name).copy_(getattr(attention.out_proj, name))
            getattr(theirs.linear1, name).copy_(getattr(ours.feed_forward.fc1, name))
            getattr(theirs.linear2, name).copy_(getattr(ours.feed_forward.fc2, name))
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=0)


def test_post_norm_stacks_have_no_norm_on_top_and_pre_norm_stacks_have_one() -> None:
    post, pre = VaswaniModel(tiny_config()), VaswaniModel(tiny_config(norm_position="pre"))
    for stack in ("encoder", "decoder"):
        assert not list(getattr(post, stack).norm.parameters())
        assert isinstance(getattr(pre, stack).norm, nn.LayerNorm)


def test_dropout_sites() -> None:
    """On embedding + position and on each sub-layer's output, nowhere else (Section 5.4)."""
    model = VaswaniForConditionalGeneration(tiny_config(dropout=0.25))
    rates = {name: module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout)}
    active = {name for name, rate in rates.items() if rate}
    assert all(rates[name] == 0.25 for name in active)
    assert all(name.endswith(("norm.dropout", "positions.dropout")) for name in active)
    assert len(active) == 2 + 2 * 2 + 2 * 3


def test_dropout_on_embedding_and_position() -> None:
    positions, embeds = VaswaniPositions(tiny_config(dropout=0.25)).train(), torch.ones(1, 500, 16)
    dropped = positions(embeds) == 0
    assert dropped.float().mean().item() == pytest.approx(0.25, abs=0.03)
    assert not (positions.eval()(embeds) == 0).any()


@pytest.mark.parametrize("norm_position", ["post", "pre"])
def test_dropout_on_a_sublayers_output_before_it_is_added(norm_position) -> None:
    torch.manual_seed(0)
    add_and_norm = VaswaniAddAndNorm(tiny_config(dropout=0.25, norm_position=norm_position)).train()
    x = torch.randn(50, 20, 16)
    # What the sub-layer says is large, so that the sum shows where it was dropped.
    if norm_position == "pre":
        dropped = add_and_norm(x, lambda y: 100 * torch.ones_like(y)) < 50
    else:
        add_and_norm.layer_norm = nn.Identity()
        dropped = add_and_norm(x, lambda y: 100 * torch.ones_like(y)) < 50
    assert dropped.float().mean().item() == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("rate", ["attention_dropout", "activation_dropout"])
def test_the_other_dropouts_act_in_training_alone(rate, implementation) -> None:
    model, data = tiny_model(dropout=0.0, **{rate: 0.5}), batch()
    model.set_attn_implementation(implementation)
    assert torch.equal(model(**data).logits, model(**data).logits)
    model.train()
    assert not torch.equal(model(**data).logits, model(**data).logits)


# ---- 3.4 Weights


def test_one_matrix_for_both_embeddings_and_the_output(tmp_path: Path) -> None:
    model = tiny_model()
    pointers = {
        model.model.encoder.embed_tokens.weight.data_ptr(),
        model.model.decoder.embed_tokens.weight.data_ptr(),
        model.lm_head.weight.data_ptr(),
    }
    assert len(pointers) == 1
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = [name for name in file.keys() if file.get_tensor(name).shape == (40, 16)]  # noqa: SIM118
    assert len(stored) == 1


@pytest.mark.parametrize(
    ("fields", "matrices"), [({"share_embeddings": False}, 2), ({"tie_word_embeddings": False}, 3)]
)
def test_fewer_ties(fields, matrices, tmp_path) -> None:
    model = tiny_model(**fields)
    weights = (model.model.encoder.embed_tokens, model.model.decoder.embed_tokens, model.lm_head)
    assert len({module.weight.data_ptr() for module in weights}) == matrices
    model.save_pretrained(tmp_path)
    loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded.eval()(**batch()).logits, model(**batch()).logits, atol=0, rtol=0)


def test_initial_weights() -> None:
    torch.manual_seed(0)
    model = VaswaniForConditionalGeneration(tiny_config(vocab_size=4000, d_model=64, d_ff=256))
    embedding = model.get_input_embeddings().weight
    assert embedding[1:].std().item() == pytest.approx(64**-0.5, rel=0.02)
    assert not embedding[0].any()
    fc1 = model.model.encoder.layers[0].feed_forward.fc1
    bound = math.sqrt(6 / (64 + 256))
    assert bound * 0.98 < fc1.weight.abs().max().item() <= bound
    assert fc1.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)
    assert not fc1.bias.any()


def test_padding_row_stays_zero_in_training() -> None:
    model = tiny_model().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    data = batch()
    data["input_ids"][0, 3:] = 0
    data["attention_mask"][0, 3:] = 0
    labels = data.pop("decoder_input_ids")
    for _ in range(2):
        model(**data, labels=labels, epsilon_ls=0.1).loss.backward()
        optimizer.step()
    assert not model.get_input_embeddings().weight[0].any()
    assert model.get_input_embeddings().weight[5].any()


# ---- The whole


def test_padding_changes_nothing() -> None:
    model, data = tiny_model(), batch()
    padded = {
        "input_ids": nn.functional.pad(data["input_ids"], (0, 4), value=0),
        "attention_mask": nn.functional.pad(data["attention_mask"], (0, 4)),
        "decoder_input_ids": nn.functional.pad(data["decoder_input_ids"], (0, 3), value=0),
    }
    torch.testing.assert_close(model(**padded).logits[:, :5], model(**data).logits, atol=1e-5, rtol=0)


def test_the_source_mask_is_not_dropped() -> None:
    model, data = tiny_model(), batch()
    masked = data | {"attention_mask": torch.tensor([[1] * 4 + [0] * 3] * 3)}
    assert (model(**masked).logits - model(**data).logits).abs().max() > 1e-3


def test_the_future_changes_nothing_before_it() -> None:
    model, data = tiny_model(), batch()
    changed = data | {"decoder_input_ids": data["decoder_input_ids"].clone()}
    changed["decoder_input_ids"][:, 3] = 39
    difference = (model(**changed).logits - model(**data).logits).abs().amax(dim=(0, 2))
    assert difference[:3].max() < 1e-6
    assert difference[3:].min() > 1e-3


def test_positions_matter() -> None:
    model, data = tiny_model(), batch()
    turned = data | {"input_ids": data["input_ids"].flip(1)}
    assert (model(**turned).logits - model(**data).logits).abs().max() > 1e-3


def test_eager_equals_sdpa_and_gives_attentions() -> None:
    model, data = tiny_model(), batch()
    data["attention_mask"][1, 4:] = 0
    expected = model(**data).logits
    model.set_attn_implementation("eager")
    output = model(**data, output_attentions=True, output_hidden_states=True)
    torch.testing.assert_close(output.logits, expected, atol=1e-5, rtol=0)
    assert [a.shape for a in output.encoder_attentions] == [(3, 2, 7, 7)] * 2
    assert [a.shape for a in output.decoder_attentions] == [(3, 2, 5, 5)] * 2
    assert [a.shape for a in output.cross_attentions] == [(3, 2, 5, 7)] * 2
    torch.testing.assert_close(output.cross_attentions[0].sum(-1), torch.ones(3, 2, 5))
    assert output.cross_attentions[0][1, :, :, 4:].max() == 0
    assert len(output.encoder_hidden_states) == len(output.decoder_hidden_states) == 3


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("fields", [{}, {"norm_position": "pre"}, {"d_k": 3, "d_v": 5, "decoder_layers": 3}])
def test_cached_decoding_equals_uncached(num_beams, fields) -> None:
    model, data = tiny_model(**fields), batch()
    data["attention_mask"][1, 4:] = 0
    del data["decoder_input_ids"]
    arguments = {"num_beams": num_beams, "max_new_tokens": 12, "output_scores": True, "return_dict_in_generate": True}
    cached, uncached = model.generate(**data, **arguments), model.generate(**data, **arguments, use_cache=False)
    assert cached.sequences.tolist() == uncached.sequences.tolist()
    for a, b in zip(cached.scores, uncached.scores, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def test_generation_starts_with_bos_and_translates_each_row_as_if_alone() -> None:
    model, data = tiny_model(), batch(rows=4)
    data["attention_mask"][1, 3:] = 0
    together = model.generate(data["input_ids"], attention_mask=data["attention_mask"], num_beams=3, max_new_tokens=8)
    assert together[:, 0].tolist() == [1] * 4
    for row in range(4):
        kept = data["attention_mask"][row].bool()
        alone = model.generate(data["input_ids"][row : row + 1, kept], num_beams=3, max_new_tokens=8)[0].tolist()
        assert together[row].tolist()[: len(alone)] == alone


def test_labels_are_shifted_and_the_loss_is_the_mean_over_true_tokens() -> None:
    model, data = tiny_model(), batch()
    del data["decoder_input_ids"]
    labels = torch.tensor([[5, 6, 2, -100], [7, 2, -100, -100], [8, 9, 10, 2]])
    output = model(**data, labels=labels)
    shifted = torch.tensor([[1, 5, 6, 2], [1, 7, 2, 0], [1, 8, 9, 10]])
    log_probs = torch.log_softmax(model(**data, decoder_input_ids=shifted).logits, dim=-1)
    picked = [-log_probs[r, t, labels[r, t]] for r in range(3) for t in range(4) if labels[r, t] >= 0]
    assert output.loss.item() == pytest.approx(torch.stack(picked).mean().item(), abs=1e-5)
    summed = model(**data, labels=labels, num_items_in_batch=18).loss
    assert summed.item() == pytest.approx(torch.stack(picked).sum().item() / 18, abs=1e-5)


def test_label_smoothing_gives_the_others_an_equal_share() -> None:
    logits, labels = torch.randn(1, 2, 7), torch.tensor([[3, 5]])
    log_probs = torch.log_softmax(logits, dim=-1)[0]
    expected = 0.0
    for position, true in enumerate((3, 5)):
        for token in range(7):
            expected -= (0.9 if token == true else 0.1 / 6) * log_probs[position, token].item()
    assert smoothed_cross_entropy(logits, labels, 0.1).item() == pytest.approx(expected / 2, abs=1e-5)


def test_the_loss_of_half_precision_logits_is_taken_in_float32() -> None:
    logits, labels = torch.randn(4, 50, 7).bfloat16(), torch.randint(0, 7, (4, 50))
    loss = smoothed_cross_entropy(logits, labels, 0.1, num_items_in_batch=3)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, smoothed_cross_entropy(logits.float(), labels, 0.1, num_items_in_batch=3))


def test_transformers_finds_the_labels_and_nothing_else_by_that_name() -> None:
    from transformers.utils.generic import find_labels

    assert find_labels(VaswaniForConditionalGeneration) == ["labels"]


def test_giving_embeddings_equals_giving_ids() -> None:
    model, data = tiny_model(), batch()
    embeds = {
        "inputs_embeds": model.get_input_embeddings()(data["input_ids"]),
        "decoder_inputs_embeds": model.get_input_embeddings()(data["decoder_input_ids"]),
    }
    torch.testing.assert_close(model(**embeds).logits, model(**data).logits)
    with pytest.raises(ValueError, match="exactly one"):
        model(**data, inputs_embeds=embeds["inputs_embeds"])
    with pytest.raises(ValueError, match="exactly one"):
        model(input_ids=data["input_ids"])


def test_auto_classes_load_what_was_saved(tmp_path, capfd) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    loaded, report = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is VaswaniForConditionalGeneration
    assert not any(report.values())
    torch.testing.assert_close(loaded(**batch()).logits, model(**batch()).logits, atol=0, rtol=0)
    bare = AutoModel.from_pretrained(tmp_path)
    assert type(bare) is VaswaniModel
    torch.testing.assert_close(bare.decoder.embed_tokens.weight, model.lm_head.weight, atol=0, rtol=0)
    assert "MISSING" not in capfd.readouterr().err


def test_a_model_learns_to_copy() -> None:
    """A translation system must first learn to copy."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 14, "d_model": 32, "d_ff": 64, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0}
    model = VaswaniForConditionalGeneration(tiny_config(**sizes)).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(400):
        words = torch.randint(4, 14, (64, 6))
        ids = torch.cat([words, torch.full((64, 1), 2)], dim=1)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    words = torch.randint(4, 14, (20, 6))
    ids = torch.cat([words, torch.full((20, 1), 2)], dim=1)
    copied = model.eval().generate(input_ids=ids, num_beams=1, max_new_tokens=8)[:, 1:8]
    assert (copied == ids).all(dim=1).float().mean() >= 0.9
