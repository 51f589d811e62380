"""Products by oneDNN against those of torch's modules, and packed matrices of weights that change."""

import copy
import gc
import os
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

from hf_vaswani.model import products_vaswani
from hf_vaswani.model.products_vaswani import (
    KEPT,
    fast_products,
    has_onednn,
    linear,
    packed_for_onednn,
    products_of,
    using,
)

from ..conftest import ROOT
from .test_search import random_model, sentences

CPU = torch.device("cpu")
needs_onednn = pytest.mark.skipif(not has_onednn(CPU, torch.float32), reason="this torch has no oneDNN")
needs_bfloat16 = pytest.mark.skipif(
    not has_onednn(CPU, torch.bfloat16), reason="oneDNN has no bfloat16 on this processor"
)
FORMATS = [torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16)]


def pack_from(monkeypatch: pytest.MonkeyPatch, multiplications: int) -> None:
    """Makes products with so many multiplications use oneDNN: those of small models are too small by default."""
    monkeypatch.setattr(products_vaswani, "MIN_ONEDNN", multiplications)


@pytest.fixture
def always(monkeypatch) -> None:
    pack_from(monkeypatch, 1)


@needs_onednn
def test_large_products_alone_use_packed_matrices() -> None:
    weight = torch.randn(1024, 256)
    assert weight not in KEPT, "a matrix of one call alone"
    assert packed_for_onednn(weight, weight.dtype, rows=15) is None
    assert packed_for_onednn(weight, weight.dtype, rows=16) is not None
    assert packed_for_onednn(weight.double(), torch.float64, rows=1000) is None
    assert packed_for_onednn(weight.to("meta"), weight.dtype, rows=1000) is None


def product_of(layer: nn.Linear, rows: int = 8):
    """Returns what a search with so many hypotheses puts in the place of a layer."""
    return products_of(layer, rows)[layer]


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


def test_products_replace_plain_layers_alone() -> None:
    layers = [nn.Linear(24, 16) for _ in range(3)]
    layers[0].register_forward_hook(lambda *args: None)
    layers[1].forward = lambda states: states
    assert [*products_of(nn.ModuleList(layers))] == layers[2:]
    states = torch.randn(2, 24)
    with using({layers[2]: torch.neg}):
        assert torch.equal(linear(layers[2], states), -states)
        assert torch.equal(linear(layers[0], states), layers[0](states))
    assert torch.equal(linear(layers[2], states), layers[2](states))


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
        before = KEPT[layer.weight][dtype]
        CHANGES[change](layer)
        found, expected = product_of(layer)(states), layer(states)
        torch.testing.assert_close(found, expected.to(found.dtype), equal_nan=True)
        assert (KEPT[layer.weight][dtype] is before) == (change == "nothing")


@needs_onednn
@pytest.mark.parametrize("order", [(0, 1, 0, 1), (0, 0, 1, 1, 0)], ids=str)
def test_each_number_format_is_packed_once(order, always, monkeypatch) -> None:
    """By calls with and without autocast in turns."""
    packed, layer = [], nn.Linear(24, 16, bias=False)
    # Whether the processor multiplies bfloat16 or not.
    monkeypatch.setattr(products_vaswani, "has_onednn", lambda *_: True)
    monkeypatch.setattr(products_vaswani, "_packed", lambda weight, dtype: packed.append(dtype) or torch.zeros(1))
    formats = [(torch.float32, torch.bfloat16)[each] for each in order]
    for dtype in formats:
        packed_for_onednn(layer.weight, dtype, rows=4)
    assert packed == [torch.float32, torch.bfloat16]
    layer.weight.data.mul_(2)
    packed_for_onednn(layer.weight, torch.float32, rows=4)
    # What no call will ask for again is not kept either.
    assert [*KEPT[layer.weight]] == [torch.float32]


@needs_onednn
def test_packed_matrices_go_when_a_model_is_moved(always) -> None:
    layer = nn.Linear(24, 16, bias=False)
    weight = layer.weight
    product_of(layer)
    assert weight in KEPT
    # Within the parameter, as to a GPU.
    assert layer.double().weight is weight
    product_of(layer)
    assert weight not in KEPT


@needs_onednn
def test_packed_matrices_live_as_long_as_their_weights(always) -> None:
    model, inputs = random_model(), sentences(3)
    model.generate(**inputs, num_beams=2)
    (matrix,) = KEPT[model.lm_head.weight].values()
    kept = weakref.ref(matrix)
    del matrix
    # They are not part of the model: neither copied nor saved.
    assert copy.deepcopy(model).lm_head.weight not in KEPT
    del model
    gc.collect()
    assert kept() is None


@needs_onednn
def test_a_search_sees_weights_that_were_edited_in_place(always) -> None:
    model, other, inputs = random_model(), random_model(1), sentences(5)
    settings = {"num_beams": 3, "max_new_tokens": 12}
    before = model.generate(**inputs, **settings)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        mine.data.copy_(theirs.data)
    after, expected = model.generate(**inputs, **settings), other.generate(**inputs, **settings)
    assert torch.equal(after, expected) and not torch.equal(before, after)


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
from hf_vaswani.model import products_vaswani
products_vaswani.MIN_ONEDNN = 1
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
def test_onednn_can_be_switched_off(always) -> None:
    layer = nn.Linear(24, 16)
    with torch.backends.mkldnn.flags(enabled=False):
        product_of(layer)
    assert layer.weight not in KEPT
