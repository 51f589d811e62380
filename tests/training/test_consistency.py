"""SimCut and R-Drop in training: the batches of two passes, their losses against the formulas, and runs with them."""

from typing import Any

import pytest
import torch
from torch import nn

from hf_vaswani.data.batching import BatchOrder, PairCollator
from hf_vaswani.recipe import RDropRecipe, SimCutRecipe, TrainingRecipe
from hf_vaswani.training import consistency
from hf_vaswani.training.consistency import TwoPasses, check_padding, loss_of_two_passes, uniform

from ..networks import Sizes, batch, gradients, tiny_model, with_labels


def made_batch() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    rows = [(7, [5, 6, 7, 8, 2], [9, 10, 2]), (3, [11, 2], [12, 13, 14, 2])]
    batch = PairCollator(0)([{"number": n, "source_ids": s, "target_ids": t} for n, s, t in rows])
    return batch, batch.pop("numbers")


def two_passes(model: nn.Module, **training: Any) -> TwoPasses:
    return TwoPasses(TrainingRecipe(**training), 1, model)


def test_simcut_cuts_source_and_target_of_the_second_pass_only(monkeypatch) -> None:
    batch, numbers = made_batch()
    # Cut every first token.
    draws = lambda seed, step, side, numbers, length: torch.ones(len(numbers), length).index_fill(  # noqa: E731
        1, torch.tensor([0]), 0.0
    )
    monkeypatch.setattr(consistency, "uniform", draws)
    doubled = two_passes(tiny_model(), simcut=SimCutRecipe(alpha=3.0, p=0.5))(batch, numbers, 0)
    bos = tiny_model().config.decoder_start_token_id
    assert doubled["input_ids"].tolist() == [[5, 6, 7, 8, 2], [11, 2, 0, 0, 0], [0, 6, 7, 8, 2], [0, 2, 0, 0, 0]]
    assert doubled["attention_mask"].tolist() == 2 * [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert doubled["decoder_input_ids"].tolist() == [
        [bos, 9, 10, 2],
        [bos, 12, 13, 14],
        [0, 9, 10, 2],
        [0, 12, 13, 14],
    ]
    assert doubled["labels"].tolist() == [[9, 10, 2, -100], [12, 13, 14, 2]]


def test_a_cut_token_is_a_zero_embedding_at_its_position() -> None:
    """What the published method does to the embedding vectors, done to the ids."""
    model, (batch, numbers) = tiny_model(), made_batch()
    doubled = two_passes(model, simcut=SimCutRecipe(p=0.5))(batch, numbers, 2)
    is_cut = doubled["input_ids"][2:] != batch["input_ids"]
    assert is_cut.any() and not is_cut.all()
    vectors = model.get_input_embeddings()(batch["input_ids"]) * ~is_cut[..., None]
    mask = batch["attention_mask"]
    expected = model.get_encoder()(inputs_embeds=vectors, attention_mask=mask).last_hidden_state
    found = model.get_encoder()(doubled["input_ids"][2:], attention_mask=mask).last_hidden_state
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()])


def test_r_drop_repeats_the_pairs_and_otherwise_the_batch_is_left_as_it_is() -> None:
    batch, numbers = made_batch()
    assert two_passes(tiny_model())(batch, numbers, 0) == batch
    doubled = two_passes(tiny_model(), r_drop=RDropRecipe(alpha=4.0))(batch, numbers, 0)
    for name in ("input_ids", "attention_mask", "decoder_input_ids"):
        assert torch.equal(*doubled[name].chunk(2))


def test_a_process_without_a_batch_has_an_update_all_the_same() -> None:
    batch = PairCollator(0)([])
    numbers = batch.pop("numbers")
    model = tiny_model().train()
    passes = two_passes(model, simcut=SimCutRecipe())
    with passes.loss():
        loss = model(**passes(batch, numbers, 0), num_items_in_batch=5, loss_only=True).loss
    loss.backward()
    assert loss.item() == 0


@pytest.mark.parametrize("kind", [{}, {"simcut": SimCutRecipe(p=0.3)}, {"r_drop": RDropRecipe()}], ids=str)
def test_padding_to_few_shapes_changes_neither_loss_nor_gradients(kind) -> None:
    """The cuts of SimCut are those of the pairs, and rows of padding have none; in evaluation mode without dropout."""
    rows = [{"number": n, "source_ids": [4 + n % 7] * n, "target_ids": [5 + n % 5] * (n + 2)} for n in range(1, 18)]
    found = []
    for few in (False, True):
        batch = PairCollator(0, order=BatchOrder(99, few_shapes=few))(rows)
        model, numbers = tiny_model(), batch.pop("numbers")
        passes = two_passes(model, **kind)
        with passes.loss():
            loss = model(**passes(batch, numbers, 3), epsilon_ls=0.1, num_items_in_batch=170, loss_only=True).loss
        loss.backward()
        found.append((loss, gradients(model)))
        if few and "simcut" in kind:
            assert torch.equal(*passes(batch, numbers, 3)["input_ids"].view(2, 18, -1)[:, 17])
    assert batch["input_ids"].shape == (18, 24) and batch["labels"].shape == (18, 24)
    torch.testing.assert_close(*found)


def test_a_cut_depends_on_the_pair_and_the_update_and_not_on_the_batch() -> None:
    numbers = torch.arange(1, 2001)
    draws = uniform(1, 5, 0, numbers, 50)
    assert torch.equal(uniform(1, 5, 0, numbers.flip(0), 30), draws.flip(0)[:, :30])
    for other in (uniform(2, 5, 0, numbers, 50), uniform(1, 6, 0, numbers, 50), uniform(1, 5, 1, numbers, 50)):
        assert not torch.isclose(other, draws).float().mean() > 0.001
        assert abs(torch.corrcoef(torch.stack([other.flatten(), draws.flatten()]))[0, 1]) < 0.02
    # Uniform, and independent of the neighbours in both directions.
    assert draws.min() >= 0 and draws.max() < 1
    histogram = torch.histc(draws, 20, 0, 1) / draws.numel()
    assert (histogram - 0.05).abs().max() < 0.005
    for first, second in ((draws[1:], draws[:-1]), (draws[:, 1:], draws[:, :-1])):
        assert abs(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]) < 0.02


def simcut_by_formula(first, second, labels, alpha, epsilon_ls, items):
    """Gao et al. (2022), equation 6, position by position: CE of the first pass + alpha * KL(first || second)."""
    total = torch.zeros((), dtype=first.dtype)
    for row, column in (labels != -100).nonzero().tolist():
        p, q = first[row, column].softmax(0), second[row, column].softmax(0)
        smoothed = torch.full_like(p, epsilon_ls / (len(p) - 1))
        smoothed[labels[row, column]] = 1 - epsilon_ls
        total = total - (smoothed * p.log()).sum() + alpha * (p * (p / q).log()).sum()
    return total / items


def r_drop_by_formula(first, second, labels, alpha, epsilon_ls, items):
    """Wu et al. (2021), equations 2 to 4: the sum of both CE + alpha * the mean of both KL; all of it halved."""
    total = torch.zeros((), dtype=first.dtype)
    for row, column in (labels != -100).nonzero().tolist():
        p, q = first[row, column].softmax(0), second[row, column].softmax(0)
        smoothed = torch.full_like(p, epsilon_ls / (len(p) - 1))
        smoothed[labels[row, column]] = 1 - epsilon_ls
        divergence = ((p * (p / q).log()).sum() + (q * (q / p).log()).sum()) / 2
        total = total - (smoothed * (p.log() + q.log())).sum() + alpha * divergence
    return total / 2 / items


MODES = [{"simcut": SimCutRecipe(alpha=3.0)}, {"r_drop": RDropRecipe(alpha=5.0)}]


def see_the_logits(model: nn.Module) -> None:
    """Makes the output layer more than a matrix, so that it has to be called."""
    model.lm_head.register_forward_hook(lambda module, inputs, output: output)


@pytest.mark.parametrize("selects", [True, False])
@pytest.mark.parametrize("prepare", [lambda model: None, see_the_logits])
@pytest.mark.parametrize("at_once", [1, 4, 1000])
@pytest.mark.parametrize(("epsilon_ls", "items"), [(0.0, 12), (0.1, 31)])
@pytest.mark.parametrize(("mode", "formula"), [(MODES[0], simcut_by_formula), (MODES[1], r_drop_by_formula)])
def test_the_loss_of_two_passes_and_its_gradients_equal_the_formula(
    monkeypatch, at_once, epsilon_ls, items, mode, formula, prepare, selects
) -> None:
    monkeypatch.setattr(consistency, "selects_labels", lambda _: selects)
    monkeypatch.setattr(consistency, "positions_at_once", lambda weight: at_once)
    model = tiny_model(vocab_size=20, d_model=8)
    prepare(model)
    states, weight = torch.randn(6, 5, 8, requires_grad=True), nn.init.normal_(model.lm_head.weight)
    labels = torch.randint(0, 20, (3, 5))
    labels[0, 3:] = labels[2, 1] = -100
    inputs = [tensor.detach().double().requires_grad_() for tensor in (states, weight)]
    (alpha,) = (each.alpha for each in mode.values())
    expected = formula(*(inputs[0] @ inputs[1].T).chunk(2), labels, alpha, epsilon_ls, items)
    expected.backward()
    weights = two_passes(model, **mode).consistency
    _, loss = loss_of_two_passes(model, weights, states, labels, epsilon_ls, items)
    loss.backward()
    assert loss.dtype == torch.float32
    for ours, true in zip((loss, states.grad, weight.grad), (expected, inputs[0].grad, inputs[1].grad), strict=True):
        torch.testing.assert_close(ours.double(), true, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prepare", [lambda model: None, see_the_logits])
@pytest.mark.parametrize("pad_has_zeros", [True, False])
def test_the_loss_of_all_positions_is_that_of_those_with_a_label(monkeypatch, prepare, pad_has_zeros) -> None:
    """Which a GPU cannot count without a wait. With a pad id that ends sentences, its row is trained, too."""
    found = []
    for selects in (True, False):
        monkeypatch.setattr(consistency, "selects_labels", lambda _, selects=selects: selects)
        model = tiny_model(dropout=0, **({} if pad_has_zeros else {"pad_token_id": 2})).train()
        prepare(model)
        loss = loss_of(model, {}, with_labels())
        loss.backward()
        found.append((loss.detach(), gradients(model)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def twice(data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns a batch whose second passes equal the first ones."""
    doubled = {name: value.repeat(2, 1) for name, value in data.items() if name != "labels"}
    target = tiny_model().prepare_decoder_input_ids_from_labels(data["labels"]).repeat(2, 1)
    return doubled | {"decoder_input_ids": target, "labels": data["labels"]}


def loss_of(model: nn.Module, mode: dict[str, Any], doubled: dict[str, torch.Tensor]) -> torch.Tensor:
    with two_passes(model, **mode).loss():
        return model(**doubled, epsilon_ls=0.1, num_items_in_batch=9, loss_only=True).loss


@pytest.mark.parametrize("mode", MODES)
def test_equal_passes_have_the_loss_of_one(mode) -> None:
    """Without dropout and cuts nothing diverges, and both cross-entropies are the same."""
    model, data = tiny_model(dropout=0.0).train(), with_labels()
    expected = model(**data, epsilon_ls=0.1, num_items_in_batch=9).loss
    expected.backward()
    of_one = gradients(model)
    for prepare in (lambda model: None, see_the_logits):
        prepare(model)
        loss = loss_of(model, mode, twice(data))
        loss.backward()
        torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, of_one[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_two_passes_make_no_logits_but_a_few(monkeypatch, mode) -> None:
    monkeypatch.setattr(consistency, "positions_at_once", lambda weight: 3)
    model, data = tiny_model(vocab_size=1000).train(), batch(rows=8, target=10)
    data["labels"] = data.pop("decoder_input_ids")
    largest = []
    for prepare in (lambda model: None, see_the_logits):
        prepare(model)
        with Sizes() as sizes:
            loss_of(model, mode, twice(data)).backward()
        largest.append(sizes.largest)
    assert largest == [1000 * 16, 2 * 8 * 10 * 1000]


def test_two_passes_in_half_precision_and_without_labels() -> None:
    model, data, mode = tiny_model(dropout=0.0).train(), twice(with_labels()), MODES[0]
    data["input_ids"][3:, 0] = 0
    expected = loss_of(model, mode, data)
    expected.backward()
    gradient = gradients(model)["model.encoder.embed_tokens.weight"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = loss_of(model, mode, data)
    mixed.backward()
    torch.testing.assert_close(mixed, expected, rtol=2e-2, atol=0)
    found = gradients(model)["model.encoder.embed_tokens.weight"]
    assert (found - gradient).norm() < 0.25 * gradient.norm() and not found[0].any()
    data["labels"][:] = -100
    loss = loss_of(model, mode, data)
    loss.backward()
    assert loss.item() == 0 and not any(gradient.any() for gradient in gradients(model).values())


@pytest.mark.parametrize("mode", MODES)
def test_the_model_has_this_loss_only_while_it_is_trained(mode) -> None:
    """Elsewhere a batch with every pair twice is an error, and the model is what it was."""
    model, data = tiny_model(), with_labels()
    before = {**vars(model)}
    with pytest.raises(ZeroDivisionError), two_passes(model, **mode).loss():
        assert vars(model) != before
        raise ZeroDivisionError
    assert vars(model) == before
    with pytest.raises(ValueError, match="labels has 3 sentences, but the tokens have 6"):
        model(**twice(data), loss_only=True)
    with two_passes(model).loss():
        assert torch.equal(model(**data, loss_only=True).loss, tiny_model()(**data, loss_only=True).loss)


def test_simcut_needs_padding_that_is_zero() -> None:
    model = tiny_model(share_embeddings=False)
    check_padding(model)
    with torch.no_grad():
        model.model.decoder.embed_tokens.weight[0, 3] = 1.0
    with pytest.raises(ValueError, match="padding token whose embedding is zero, but that of id 0 is not"):
        check_padding(model)
