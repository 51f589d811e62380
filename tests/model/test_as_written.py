"""Modified models: what translates is always the model as it is, whichever search runs."""

import copy
import itertools
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from hf_vaswani import VaswaniForConditionalGeneration
from hf_vaswani.model import generation_vaswani, modeling_vaswani
from hf_vaswani.model.modeling_vaswani import eager_attention_forward, position_ids

from ..conftest import dear
from .test_search import fast_and_stock, prompts, random_gpt, random_model, sentences


class Gated(nn.Module):
    """A feed-forward network with the same submodules, whose hidden layer gates itself."""

    def __init__(self, old: nn.Module) -> None:
        super().__init__()
        self.fc1, self.fc2, self.activation, self.dropout = old.fc1, old.fc2, old.activation, old.dropout

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        hidden = self.fc1(states)
        return self.fc2(self.activation(hidden) * hidden.sigmoid())


def other(output):
    """Returns a different output of the same form, which changes everything that follows."""
    if isinstance(output, torch.Tensor):
        return output * torch.linspace(-2, 2, output.shape[-1])
    if isinstance(output, tuple):
        return other(output[0]), *output[1:]
    for key in ("logits", "last_hidden_state"):
        if getattr(output, key, None) is not None:
            output[key] = other(output[key])
    return output


def by_subclass(module: nn.Module, monkeypatch) -> None:
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"forward": lambda *a, **k: other(kind.forward(*a, **k))})


def by_the_class(module: nn.Module, monkeypatch) -> None:
    forward = type(module).forward
    monkeypatch.setattr(type(module), "forward", lambda *args, **kwargs: other(forward(*args, **kwargs)))


def by_the_instance(module: nn.Module, monkeypatch) -> None:
    forward = module.forward
    module.forward = lambda *args, **kwargs: other(forward(*args, **kwargs))


def by_a_hook(module: nn.Module, monkeypatch) -> None:
    module.register_forward_hook(lambda module, inputs, output: other(output))


def by_a_global_hook(module: nn.Module, monkeypatch) -> None:
    hook = nn.modules.module.register_module_forward_hook(
        lambda each, inputs, output: other(output) if each is module else None
    )
    monkeypatch.callback = hook.remove


def by_a_wrapper(module: nn.Module, monkeypatch) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wrapped = module

        def __getattr__(self, name: str):
            return super().__getattr__(name) if name in ("wrapped",) else getattr(self.wrapped, name)

        def forward(self, *args, **kwargs):
            return other(self.wrapped(*args, **kwargs))

    monkeypatch.replace(Wrapper().eval())


CHANGES = [by_subclass, by_the_class, by_the_instance, by_a_hook, by_a_global_hook, by_a_wrapper]
# Every kind of module in a model, in both stacks.
PLACES = [
    "model.encoder.layers.0",
    "model.encoder.layers.0.self_attn",
    "model.encoder.layers.0.feed_forward",
    "model.encoder.positions",
    "model.encoder.embed_tokens",
    "model.decoder",
    "model.decoder.embed_tokens",
    "model.decoder.positions",
    "model.decoder.positions.dropout",
    "model.decoder.layers.1",
    "model.decoder.layers.1.self_attn",
    "model.decoder.layers.0.self_attn.k_proj",
    "model.decoder.layers.1.self_attn.out_proj",
    "model.decoder.layers.1.self_attn_norm",
    "model.decoder.layers.1.self_attn_norm.layer_norm",
    "model.decoder.layers.1.cross_attn_norm.dropout",
    "model.decoder.layers.1.cross_attn",
    "model.decoder.layers.0.cross_attn.q_proj",
    "model.decoder.layers.1.feed_forward",
    "model.decoder.layers.1.feed_forward.fc1",
    "model.decoder.layers.1.feed_forward.activation",
    "model.decoder.layers.1.feed_forward.dropout",
    "model.decoder.layers.1.feed_forward.fc2",
    "model.decoder.norm",
    "lm_head",
]


def test_the_places_are_of_every_class() -> None:
    model = random_model(norm_position="pre")
    kinds = {type(module) for module in model.modules()} - {nn.ModuleList}
    changed = {type(model.get_submodule(place)) for place in PLACES}
    # The outermost modules are modified below, by subclasses.
    assert {kind.__name__ for kind in kinds - changed} == {
        "VaswaniForConditionalGeneration",
        "VaswaniModel",
        "VaswaniEncoder",
    }


def both_searches(monkeypatch, model, inputs, **settings) -> list[torch.Tensor]:
    """Returns the output of `generate()` as it is, and with the fast search disabled."""
    found = [model.generate(**inputs, **settings)]
    with monkeypatch.context() as without:
        without.setattr(generation_vaswani, "fast_search_inputs", lambda *args, **kwargs: None)
        return [*found, model.generate(**inputs, **settings)]


def each_change(places: list[str]) -> list[Any]:
    """Every place with one of the changes, which take turns; with the others, they are left to `make test-all`."""
    turns = {(place, CHANGES[i % len(CHANGES)]) for i, place in enumerate(places)}
    pairs = itertools.product(places, CHANGES)
    return [pytest.param(*pair, marks=[] if pair in turns else pytest.mark.slow) for pair in pairs]


@pytest.mark.variants(3)
@pytest.mark.parametrize("beams", [dear(1), 4])
@pytest.mark.parametrize(("place", "change"), each_change(PLACES), ids=lambda each: getattr(each, "__name__", each))
def test_a_changed_module_is_what_translates(monkeypatch, place, change, beams) -> None:
    assert_what_generates(random_model(norm_position="pre"), sentences(5), monkeypatch, place, change, beams)


@pytest.mark.variants(3)
@pytest.mark.parametrize(
    ("place", "change"),
    each_change([place for place in PLACES if "encoder" not in place and "cross" not in place]),
    ids=lambda each: getattr(each, "__name__", each),
)
def test_a_changed_module_is_what_writes(monkeypatch, place, change) -> None:
    model = random_gpt(norm_position="pre")
    model.lm_head.bias.data[2] = -100  # no text ends early
    assert_what_generates(model, prompts(20), monkeypatch, place, change, beams=1)


def assert_what_generates(model, inputs, monkeypatch, place, change, beams) -> None:
    """Asserts that both searches generate the same after a change, and something else than before it."""
    plain = model.generate(**inputs, num_beams=beams)
    monkeypatch.replace = lambda module: model.set_submodule(place, module)
    monkeypatch.callback = lambda: None
    try:
        change(model.get_submodule(place), monkeypatch)
        fast, stock = both_searches(monkeypatch, model, inputs, num_beams=beams)
    finally:
        monkeypatch.callback()
    assert torch.equal(fast, stock)
    assert fast.tolist() != plain.tolist()


def gated(model, monkeypatch):
    for layer in model.model.decoder.layers:
        layer.feed_forward = Gated(layer.feed_forward)


def rms_norm(model, monkeypatch):
    for module in model.modules():
        if hasattr(module, "layer_norm"):
            module.layer_norm = nn.RMSNorm(16)


def subclassed(model, monkeypatch):
    class Louder(VaswaniForConditionalGeneration):
        def forward(self, *args, **kwargs):
            return other(super().forward(*args, **kwargs))

    model.__class__ = Louder


def another_middle(model, monkeypatch):
    class Middle(type(model.model)):
        def forward(self, *args, encoder_outputs=None, **kwargs):
            encoder_outputs.last_hidden_state = encoder_outputs.last_hidden_state.flip(1)
            return super().forward(*args, encoder_outputs=encoder_outputs, **kwargs)

    model.model.__class__ = Middle


def another_attention(model, monkeypatch):
    def backwards(module, query, key, value, mask, scaling, **kwargs):
        return eager_attention_forward(module, query, key, value, mask, -3 * scaling)

    transformers.AttentionInterface.register("backwards", backwards)
    transformers.AttentionMaskInterface.register("backwards", transformers.masking_utils.eager_mask)
    model.set_attn_implementation("backwards")


def another_function(model, monkeypatch):
    monkeypatch.setattr(modeling_vaswani, "position_ids", lambda *args: position_ids(*args) // 2)


def a_method_of_its_own(model, monkeypatch):
    for layer in model.model.decoder.layers:
        split = layer.self_attn.split_heads
        layer.self_attn.split_heads = lambda states, split=split: split(states).flip(1)


def parametrized(model, monkeypatch):
    nn.utils.parametrizations.weight_norm(model.model.decoder.layers[0].feed_forward.fc1)
    model.model.decoder.layers[0].feed_forward.fc1.parametrizations.weight.original0.data.mul_(-3)


def another_input(model, monkeypatch):
    prepare = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda ids, **kwargs: prepare((ids + 1) % 90, **kwargs)


def a_layer_in_training(model, monkeypatch):
    # As for Monte Carlo dropout.
    model.model.decoder.layers[1].train()


def a_bias_for(name):
    def change(model, monkeypatch):
        torch.manual_seed(5)
        for layer in model.model.decoder.layers:
            old = getattr(layer.self_attn, name)
            new = nn.Linear(old.in_features, old.out_features).eval()
            new.weight, new.bias.data = old.weight, 3 * torch.randn(old.out_features)
            setattr(layer.self_attn, name, new)

    change.__name__ = f"a_bias_for_{name}"
    return change


def no_norm(model, monkeypatch):
    for layer in model.model.decoder.layers:
        layer.self_attn_norm.layer_norm = nn.Identity().eval()


def normalized_over_the_length(model, monkeypatch):
    for layer in model.model.decoder.layers:
        layer.feed_forward.activation = nn.Softmax(dim=1).eval()


def pruned_heads(model, monkeypatch):
    """Removes one of two heads of each self-attention; `num_heads` still says 2."""
    for layer in model.model.decoder.layers:
        attention = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(attention, name).weight = nn.Parameter(getattr(attention, name).weight[:8].clone())
        attention.out_proj.weight = nn.Parameter(attention.out_proj.weight[:, :8].clone())


def a_scaling_of_each_head(model, monkeypatch):
    model.set_attn_implementation("eager")
    for layer in model.model.decoder.layers:
        layer.self_attn.scaling = torch.tensor([-4.0, 5.0])[:, None, None]


def another_mask(model, monkeypatch):
    masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    blind = lambda *args, **kwargs: None  # noqa: E731
    monkeypatch.setitem(masks._global_mapping, "sdpa", blind)


def another_cache(model, monkeypatch):
    kind = transformers.cache_utils.DynamicLayer
    update = kind.update
    monkeypatch.setattr(kind, "update", lambda self, key, value, *args: update(self, key, value.flip(-1), *args))


def another_product(model, monkeypatch):
    linear = nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda states, weight, bias=None: -linear(states, weight, bias))


@pytest.mark.variants(3)
@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize(
    "change",
    [
        *map(a_bias_for, ("q_proj", "v_proj")),
        no_norm,
        normalized_over_the_length,
        pruned_heads,
        a_scaling_of_each_head,
        another_mask,
        another_cache,
        another_product,
        gated,
        rms_norm,
        subclassed,
        another_middle,
        another_attention,
        another_function,
        a_method_of_its_own,
        parametrized,
        another_input,
        a_layer_in_training,
    ],
    ids=lambda change: change.__name__,
)
def test_a_changed_model_is_what_translates(monkeypatch, change, beams) -> None:
    model, inputs = random_model(), sentences(5)
    plain = model.generate(**inputs, num_beams=beams)
    change(model, monkeypatch)
    with monkeypatch.context() as seeded:
        # Dropout must draw the same in both searches.
        generate = model.generate
        seeded.setattr(model, "generate", lambda **kwargs: (torch.manual_seed(3), generate(**kwargs))[1])
        fast, stock = both_searches(monkeypatch, model, inputs, num_beams=beams)
    assert torch.equal(fast, stock)
    assert fast.tolist() != plain.tolist()


def test_layers_that_share_a_place_of_the_cache_are_refused_where_it_is_used() -> None:
    model, inputs = random_model(), sentences(5)
    model.model.decoder.layers[1] = copy.deepcopy(model.model.decoder.layers[0])
    # The fast search has its own cache for each layer, so it equals the search without a cache.
    without = model.generate(**inputs, num_beams=2, use_cache=False)
    assert torch.equal(model.generate(**inputs, num_beams=2), without)
    slow = {"output_scores": True, "return_dict_in_generate": True}
    with pytest.raises(ValueError, match="attention of decoder layer 1 has layer_idx 0"):
        model.generate(**inputs, num_beams=2, **slow)
    for name in ("self_attn", "cross_attn"):
        getattr(model.model.decoder.layers[1], name).layer_idx = 1
    assert torch.equal(model.generate(**inputs, num_beams=2, **slow).sequences, without)


def test_an_unchanged_model_takes_the_fast_search(monkeypatch) -> None:
    """Also after changes that do not affect what the decoder computes."""
    model, inputs = random_model(), sentences(3)
    model.model.encoder.layers[0].register_forward_hook(lambda *args: None)
    model.train().eval()
    model.note = "a note"
    copied = copy.deepcopy(model)
    for each in (model, copied, VaswaniForConditionalGeneration(model.config).eval()):
        fast_and_stock(monkeypatch, each, inputs, num_beams=2)
