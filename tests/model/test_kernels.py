"""Dropout, the loss over the vocabulary and products against torch's own, and packed matrices of changed weights."""

import copy
import gc
import math
import os
import subprocess
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_vaswani.model import kernels_vaswani
from hf_vaswani.model.kernels_vaswani import (
    KEPT,
    Substitutes,
    fast_products,
    has_onednn,
    is_plain_linear,
    linear,
    packed_for_onednn,
    positions_at_once,
    products_of,
    smoothed_linear_cross_entropy,
)
from hf_vaswani.model.modeling_vaswani import VaswaniDropout, smoothed_cross_entropy

from ..conftest import ROOT
from ..networks import Sizes, batch, gradients, tiny_model, with_labels
from .test_search import random_model, sentences

# ---- Dropout


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.3, 0.5, 0.9])
def test_dropout_has_its_rate_and_its_scale_in_every_place(rate) -> None:
    """Four elements share a draw of 64 bits: each has the rate for itself, and knows nothing of the others."""
    torch.manual_seed(0)
    ones = torch.ones(250_000, 4, requires_grad=True)
    output = VaswaniDropout(rate)(ones)
    dropped = (output == 0).double()
    margin = 5 * math.sqrt(rate * (1 - rate) / 250_000)
    assert dropped.mean(dim=0).tolist() == pytest.approx([rate] * 4, abs=margin)
    together = dropped.T @ dropped / 250_000  # [4, 4]
    assert together[~torch.eye(4, dtype=torch.bool)].tolist() == pytest.approx([rate**2] * 12, abs=margin)
    following = (dropped.flatten()[1:] * dropped.flatten()[:-1]).mean().item()
    assert following == pytest.approx(rate**2, abs=margin)
    # What is kept makes up for what is not, by the rate that is really drawn.
    scale = 1 / (1 - round(rate * 65536) / 65536)
    assert output[output != 0].unique().tolist() == pytest.approx([scale], rel=1e-6)
    output.backward(torch.full_like(ones, 3.0))
    torch.testing.assert_close(ones.grad, 3 * output.detach())


def test_dropout_follows_the_state_of_the_random_numbers_and_costs_nothing_without_a_rate() -> None:
    dropout, x = VaswaniDropout(0.3), torch.randn(7, 5, 3)
    state = torch.get_rng_state()
    first, second = dropout(x), dropout(x)
    assert not torch.equal(first, second)
    torch.set_rng_state(state)
    assert torch.equal(dropout(x), first) and torch.equal(dropout(x), second)
    state = torch.get_rng_state()
    assert VaswaniDropout(0.0)(x).data_ptr() == VaswaniDropout(0.3).eval()(x).data_ptr() == x.data_ptr()
    assert torch.equal(torch.get_rng_state(), state) and not VaswaniDropout(1.0)(x).any()


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 1), (2, 3, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dropout_of_any_shape_and_type(shape, dtype) -> None:
    x = torch.ones(shape, dtype=dtype)
    output = VaswaniDropout(0.5)(x)
    assert output.shape == x.shape and output.dtype == dtype and set(output.flatten().tolist()) <= {0.0, 2.0}


# ---- Loss


@pytest.mark.parametrize("at_once", [1, 4, 1000])
@pytest.mark.parametrize(("epsilon_ls", "items"), [(0.0, None), (0.1, None), (0.1, 31), (0.3, torch.tensor(7))])
def test_the_loss_and_its_gradients_equal_torchs(monkeypatch, at_once, epsilon_ls, items) -> None:
    """torch's cross-entropy in float64, with the true token's own share of its label smoothing taken out."""
    monkeypatch.setattr(kernels_vaswani, "positions_at_once", lambda weight: at_once)
    torch.manual_seed(0)
    states, weight = torch.randn(3, 5, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    labels = torch.randint(0, 20, (3, 5))
    labels[0, 3:] = labels[2, 1] = -100
    loss = smoothed_linear_cross_entropy(states, weight, labels, epsilon_ls, items)
    inputs = [tensor.detach().double().requires_grad_() for tensor in (states, weight)]
    expected = nn.functional.cross_entropy(
        (inputs[0] @ inputs[1].T).flatten(0, 1),
        labels.flatten(),
        reduction="sum",
        label_smoothing=epsilon_ls * 20 / 19,
    ) / (12 if items is None else items)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    loss.backward()
    expected.backward()
    for ours, torchs in zip((states, weight), inputs, strict=True):
        torch.testing.assert_close(ours.grad.double(), torchs.grad, rtol=1e-5, atol=1e-6)


def test_a_frozen_row_gets_no_gradient_and_changes_no_other() -> None:
    torch.manual_seed(0)
    states, weight, labels = torch.randn(2, 6, 8), torch.randn(20, 8, requires_grad=True), torch.randint(0, 20, (2, 6))
    found = []
    for frozen_row in (None, 3):
        smoothed_linear_cross_entropy(states, weight, labels, 0.1, frozen_row=frozen_row).backward()
        found.append(weight.grad)
        weight.grad = None
    assert found[0][3].any() and not found[1][3].any()
    found[0][3] = 0
    assert torch.equal(*found)


@pytest.mark.parametrize(("vocab_size", "d_model"), [(5, 4), (37_000, 512), (2**20, 64), (2**28, 1)])
def test_few_logits_exist_at_a_time_and_at_least_those_of_one_position(monkeypatch, vocab_size, d_model) -> None:
    size = positions_at_once(torch.empty(1).expand(vocab_size, d_model))
    assert 1 <= size <= 2 * d_model and (size == 1 or size * vocab_size <= 2**24)
    size = positions_at_once(torch.empty(vocab_size, d_model, device="meta"))
    assert size >= 1 and (size == 1 or size * vocab_size <= 2**27)
    for gigabytes in (4, 24, 80):
        memory = SimpleNamespace(total_memory=gigabytes * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, memory=memory: memory)
        # There may be no GPU to put it on.
        matrix: Any = SimpleNamespace(shape=(vocab_size, d_model), device=torch.device("cuda", 0))
        size = positions_at_once(matrix)
        assert size == 1 or size * vocab_size <= min(2**27, memory.total_memory // 2**8)


class Adapted(nn.Linear):
    """Another layer of the same parts."""


def test_only_a_layer_that_is_nothing_but_a_matrix_is_passed_by() -> None:
    states, plain = torch.zeros(1, 4), nn.Linear(4, 6, bias=False)
    assert is_plain_linear(plain, states) and is_plain_linear(nn.Linear(4, 6, bias=False).bfloat16(), states)
    hooked = nn.Linear(4, 6, bias=False)
    hooked.register_forward_pre_hook(lambda module, inputs: None)
    for other in (nn.Linear(4, 6), Adapted(4, 6, bias=False), nn.Linear(4, 6, bias=False).half(), hooked):
        assert not is_plain_linear(other, states)
    assert not is_plain_linear(plain, states.to("meta"))
    with torch.autocast("cpu", dtype=torch.float16):
        assert not is_plain_linear(plain, states)


@pytest.mark.variants(3)
@pytest.mark.parametrize("at_once", [1, 5, 12, 1000])
@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": False}, {"share_embeddings": False}], ids=str)
@pytest.mark.parametrize(("epsilon_ls", "items"), [(0.0, None), (0.1, None), (0.1, 31), (0.3, torch.tensor(7))])
def test_the_loss_alone_is_the_same_loss_with_the_same_gradients(
    monkeypatch, at_once, fields, epsilon_ls, items
) -> None:
    monkeypatch.setattr(kernels_vaswani, "positions_at_once", lambda weight: at_once)
    model = tiny_model(dropout=0.0, **fields).train()
    arguments = with_labels() | {"epsilon_ls": epsilon_ls, "num_items_in_batch": items}
    whole = model(**arguments)
    whole.loss.backward()
    expected = gradients(model)
    alone = model(**arguments, loss_only=True)
    alone.loss.backward()
    assert whole.logits.shape == (3, 5, 40) and alone.logits is None
    torch.testing.assert_close(alone.loss, whole.loss, atol=1e-6, rtol=1e-6)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected.pop(name), atol=1e-6, rtol=1e-5)
    assert not expected
    with torch.no_grad():
        torch.testing.assert_close(model(**arguments, loss_only=True).loss, whole.loss, atol=1e-6, rtol=1e-6)


def test_the_loss_alone_makes_no_logits_but_a_few(monkeypatch) -> None:
    monkeypatch.setattr(kernels_vaswani, "positions_at_once", lambda weight: 3)
    model, data = tiny_model(vocab_size=1000).train(), batch(rows=8, target=10)
    data["labels"] = data.pop("decoder_input_ids")
    largest = []
    for loss_only in (False, True):
        with Sizes() as sizes:
            model(**data, epsilon_ls=0.1, loss_only=loss_only).loss.backward()
        largest.append(sizes.largest)
    # What is left is as large as the matrix itself.
    assert largest == [8 * 10 * 1000, 1000 * 16]


def test_the_loss_alone_is_exact_where_probabilities_vanish() -> None:
    """Logits of hundreds: the true token's probability is 0 in float32, and its logarithm is not."""
    torch.manual_seed(0)
    states, weight = 30 * torch.randn(2, 3, 8), torch.randn(20, 8)
    labels = torch.randint(0, 20, (2, 3))
    expected = smoothed_cross_entropy((states.double() @ weight.double().T), labels, 0.1)
    assert expected > 100
    torch.testing.assert_close(smoothed_linear_cross_entropy(states, weight, labels, 0.1), expected, rtol=1e-5, atol=0)


def test_the_loss_alone_in_half_precision() -> None:
    model, data = tiny_model(dropout=0.0).train(), with_labels()
    expected = model(**data, epsilon_ls=0.1).loss
    expected.backward()
    gradient = gradients(model)["model.encoder.embed_tokens.weight"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model(**data, epsilon_ls=0.1, loss_only=True).loss
    mixed.backward()
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, expected, rtol=2e-2, atol=0)
    found = gradients(model)["model.encoder.embed_tokens.weight"]
    assert found.dtype == torch.float32 and (found - gradient).norm() < 0.1 * gradient.norm()
    model.bfloat16()(**data, epsilon_ls=0.1, loss_only=True).loss.backward()
    found = gradients(model)["model.encoder.embed_tokens.weight"]
    assert found.dtype == torch.bfloat16 and (found.float() - gradient).norm() < 0.2 * gradient.norm()


def test_the_loss_alone_of_nothing_is_nothing() -> None:
    """What a process computes that has no sentences left for an update."""
    model, data = tiny_model().train(), with_labels()
    data["labels"][:] = -100
    loss = model(**data, epsilon_ls=0.1, num_items_in_batch=9, loss_only=True).loss
    loss.backward()
    assert loss.item() == 0 and not any(gradient.any() for gradient in gradients(model).values())


@pytest.mark.parametrize("frozen", ["matrix", "states"])
def test_the_loss_alone_makes_only_the_gradients_that_are_asked_for(frozen) -> None:
    states, weight = torch.randn(2, 3, 8), torch.randn(20, 8)
    (states if frozen == "matrix" else weight).requires_grad_()
    smoothed_linear_cross_entropy(states, weight, torch.randint(0, 20, (2, 3)), 0.1).backward()
    assert (states.grad is None) == (frozen == "states") and (weight.grad is None) == (frozen == "matrix")


@pytest.mark.parametrize("kind", ["hooked", "biased", "replaced"])
def test_the_loss_alone_does_not_pass_by_an_output_layer_that_is_more_than_a_matrix(kind) -> None:
    model, data = tiny_model(lm_head_bias=kind == "biased"), with_labels()
    called = []
    if kind == "hooked":
        model.lm_head.register_forward_hook(lambda module, inputs, output: called.append(1) or 2 * output)
    elif kind == "biased":
        nn.init.normal_(model.lm_head.bias)
    else:
        model.lm_head = nn.Sequential(model.lm_head, nn.Tanh())
    alone, whole = (model(**data, epsilon_ls=0.1, loss_only=loss_only) for loss_only in (True, False))
    assert alone.logits is None and torch.equal(alone.loss, whole.loss)
    assert len(called) == (2 if kind == "hooked" else 0)


# ---- Products

CPU = torch.device("cpu")
needs_onednn = pytest.mark.skipif(not has_onednn(CPU, torch.float32), reason="this torch has no oneDNN")
needs_bfloat16 = pytest.mark.skipif(
    not has_onednn(CPU, torch.bfloat16), reason="oneDNN has no bfloat16 on this processor"
)
FORMATS = [torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16)]


def pack_from(monkeypatch: pytest.MonkeyPatch, multiplications: int) -> None:
    """Makes products with so many multiplications use oneDNN: those of small models are too small by default."""
    monkeypatch.setattr(kernels_vaswani, "MIN_ONEDNN", multiplications)


@pytest.fixture
def always(monkeypatch) -> None:
    pack_from(monkeypatch, 1)


@needs_onednn
def test_large_products_alone_use_packed_matrices() -> None:
    weight = torch.randn(1024, 256)
    assert weight not in KEPT, "a matrix of one call alone"
    least = kernels_vaswani.MIN_ONEDNN // weight.numel()
    assert packed_for_onednn(weight, weight.dtype, rows=least - 1) is None
    assert packed_for_onednn(weight, weight.dtype, rows=least) is not None
    assert packed_for_onednn(weight.double(), torch.float64, rows=1000) is None
    assert packed_for_onednn(weight.to("meta"), weight.dtype, rows=1000) is None


def product_of(layer: nn.Linear, rows: int = 8):
    """Returns what a search with so many hypotheses puts in the place of a layer."""
    return products_of(nn.ModuleDict({"fc1": layer}), rows)[layer]


def kept_of(layer: nn.Module) -> dict[torch.dtype, torch.Tensor]:
    """Returns the packed matrices of a layer."""
    return KEPT[layer.weight][1]


@needs_onednn
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 5, 40])
def test_products_equal_their_modules(rows, bias, dtype, always) -> None:
    layer = nn.Linear(24, 16, bias=bias, dtype=dtype)
    close = {"atol": 0.02, "rtol": 0.02} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
    with torch.no_grad():
        # Twice: packed, and found packed.
        for _ in range(2):
            for states in (torch.randn(5, 24, dtype=dtype), torch.randn(3, 24, 5, dtype=dtype).transpose(1, 2)):
                torch.testing.assert_close(product_of(layer, rows)(states), layer(states), **close)
    assert (layer.weight in KEPT) == (rows > 0)


def test_products_replace_plain_layers_alone(monkeypatch) -> None:
    layers = [nn.Linear(24, 16) for _ in range(4)]
    layers[0].register_forward_hook(lambda *args: None)
    layers[1].forward = lambda states: states
    stack = nn.ModuleDict(dict(zip(("q_proj", "k_proj", "fc1", "of_a_wrapper"), layers, strict=True)))
    assert [*products_of(stack)] == [layers[2]]
    states = torch.randn(2, 24)
    with Substitutes({layers[2]: torch.neg}):
        assert torch.equal(linear(layers[2], states), -states)
        assert torch.equal(linear(layers[3], states), layers[3](states))
    assert torch.equal(linear(layers[2], states), layers[2](states))
    monkeypatch.setattr(nn.Linear, "forward", lambda self, states: states)
    assert not products_of(stack)


CHANGES = {
    "nothing": lambda layer: None,
    "optimizer": lambda layer: torch.optim.SGD(layer.parameters(), lr=1.0).step(),
    "data": lambda layer: layer.weight.data.mul_(1.001),
    "one number": lambda layer: layer.weight.data[3, 5].add_(0.01),
    "rows": lambda layer: layer.weight.data.copy_(layer.weight.data.flip(0)),
    "columns": lambda layer: layer.weight.data.copy_(layer.weight.data.flip(1)),
    "other data": lambda layer: setattr(layer.weight, "data", torch.randn(16, 24)),
    "parameter": lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(16, 24))),
    "state dict": lambda layer: layer.load_state_dict({"weight": torch.randn(16, 24)}),
    "assigned": lambda layer: layer.load_state_dict({"weight": torch.randn(16, 24)}, assign=True),
    "not a number": lambda layer: layer.weight.data[0, 0].fill_(torch.nan),
}


@needs_onednn
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_changed_weights_are_packed_again(change, dtype, always) -> None:
    layer = nn.Linear(24, 16, bias=False)
    layer.weight.grad = torch.ones_like(layer.weight)
    states = torch.randn(8, 24)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        product_of(layer)
        before = kept_of(layer)[dtype]
        CHANGES[change](layer)
        found, expected = product_of(layer)(states), layer(states)
        torch.testing.assert_close(found, expected.to(found.dtype), equal_nan=True)
        assert (kept_of(layer)[dtype] is before) == (change == "nothing")


@needs_onednn
@pytest.mark.parametrize("order", [(0, 1, 0, 1), (0, 0, 1, 1, 0)], ids=str)
def test_each_number_format_is_packed_once(order, always, monkeypatch) -> None:
    """By calls with and without autocast in turns."""
    packed, layer = [], nn.Linear(24, 16, bias=False)
    # Whether the processor multiplies bfloat16 or not.
    monkeypatch.setattr(kernels_vaswani, "has_onednn", lambda *_: True)
    packs = torch.ops.mkldnn, "_reorder_linear_weight"
    monkeypatch.setattr(*packs, lambda weight, rows: packed.append(weight.dtype) or torch.zeros(1))
    formats = [(torch.float32, torch.bfloat16)[each] for each in order]
    for dtype in formats:
        packed_for_onednn(layer.weight, dtype, rows=4)
    assert packed == [torch.float32, torch.bfloat16]
    layer.weight.data.mul_(2)
    packed_for_onednn(layer.weight, torch.float32, rows=4)
    # What no call will ask for again is not kept either.
    assert [*kept_of(layer)] == [torch.float32]


@needs_onednn
def test_packed_matrices_live_as_long_as_their_weights(always) -> None:
    model, inputs = random_model(), sentences(3)
    model.generate(**inputs, num_beams=2)
    (matrix,) = kept_of(model.lm_head).values()
    kept = weakref.ref(matrix)
    del matrix
    # They are not part of the model: neither copied nor saved.
    assert copy.deepcopy(model).lm_head.weight not in KEPT
    del model
    gc.collect()
    assert kept() is None


@needs_onednn
@pytest.mark.parametrize("fields", [{}, {"attention_bias": True}], ids=str)
def test_modules_multiply_by_onednn_within_the_context(fields, always, monkeypatch) -> None:
    model, inputs = random_model(**fields), sentences(4)
    encoder, counts = model.model.encoder, []
    multiply = torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda *args: counts.append(1) or multiply(*args))
    with torch.no_grad():
        expected = encoder(**inputs).last_hidden_state
        assert not counts
        with fast_products(model.model.encoder, inputs["input_ids"]):
            torch.testing.assert_close(encoder(**inputs).last_hidden_state, expected)
    # Query, key, value, output and two of the feed-forward network.
    assert len(counts) == 6 * model.config.encoder_layers
    with fast_products(model.model.encoder, inputs["input_ids"]):
        found = encoder(**inputs).last_hidden_state
    assert found.requires_grad and len(counts) == 6 * model.config.encoder_layers


@pytest.mark.slow
@needs_onednn
def test_compilers_see_the_encoder_without_a_break(always) -> None:
    model, inputs = random_model(), sentences(4)
    with torch.no_grad():
        expected = model.model.encoder(**inputs).last_hidden_state
        compiled = torch.compile(model.model.encoder, backend="eager", fullgraph=True)
        with fast_products(model.model.encoder, inputs["input_ids"]):
            torch.testing.assert_close(compiled(**inputs).last_hidden_state, expected)


PROGRAM = """
import torch
from tests.model.test_search import random_model, sentences
from hf_vaswani.model import kernels_vaswani
kernels_vaswani.MIN_ONEDNN = 1
model, inputs = random_model(), sentences(3)
with torch.autocast("cpu", torch.bfloat16):
    model.generate(**inputs, num_beams=2, max_new_tokens=4)
model.bfloat16().generate(**inputs, num_beams=2, max_new_tokens=4)
print("well")
"""


@pytest.mark.process
def test_a_processor_without_instructions_for_bfloat16_translates_in_it() -> None:
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "well\n", done.stderr[-2000:]


@needs_onednn
def test_packed_matrices_go_when_a_model_is_moved_and_onednn_can_be_switched_off(always) -> None:
    layer = nn.Linear(24, 16, bias=False)
    with torch.backends.mkldnn.flags(enabled=False):
        product_of(layer)
    assert layer.weight not in KEPT
    product_of(layer)
    assert layer.weight in KEPT
    # Within the parameter, as to a GPU.
    weight = layer.weight
    assert layer.double().weight is weight
    product_of(layer)
    assert weight not in KEPT
