"""
The decoder step by step against the decoder without a cache, on any device, and of changed models: what translates is
always the model as it is, whichever search runs.
"""

import contextlib
import copy
import itertools
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

from hf_vaswani import VaswaniForConditionalGeneration, VaswaniTranslationPipeline
from hf_vaswani.model import search_vaswani
from hf_vaswani.model.cache_vaswani import EnsembleDecoder, IncrementalDecoder, find_change
from hf_vaswani.model.modeling_vaswani import VaswaniAttention, eager_attention_forward
from hf_vaswani.translation.quantization import to_int8

from ..conftest import dear
from .test_kernels import needs_bfloat16, pack_from
from .test_search import BOS, fast_and_stock, prompts, random_gpt, random_model, sentences

EOS = 2


@pytest.mark.variants(3)
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize(("count", "beams"), [(4, 1), (4, 3), (14, 3)])
@pytest.mark.parametrize("fields", [{}, {"attention_bias": True, "d_k": 8, "d_v": 6}], ids=str)
def test_each_step_equals_the_decoder_without_a_cache(count, beams, fields, packed, monkeypatch) -> None:
    pack_from(monkeypatch, 1 if packed else 10**9)
    model, inputs = random_model(**fields), sentences(count)
    decoder = model.model.decoder
    states = model.model.encoder(**inputs).last_hidden_state
    with torch.no_grad():
        step = IncrementalDecoder(decoder, states, inputs["attention_mask"], beams)
        generator = torch.Generator().manual_seed(0)
        written = torch.full((count, 1, 1), BOS)
        step.step(written[:, :, 0])
        written = written.expand(count, beams, 1)
        which = torch.arange(count)
        for length in range(2, 40):
            tokens = torch.randint(3, 90, (*written.shape[:2], 1), generator=generator)
            written = torch.cat((written, tokens), dim=2)
            found = step.step(tokens[:, :, 0])
            expected = decoder(
                written.flatten(0, 1),
                encoder_hidden_states=states[which].repeat_interleave(beams, dim=0),
                encoder_attention_mask=inputs["attention_mask"][which].repeat_interleave(beams, dim=0),
            ).last_hidden_state[:, -1]
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
            parents = torch.randint(beams, written.shape[:2], generator=generator)
            step.cache.reorder(parents)
            written = torch.take_along_dim(written, parents[:, :, None], dim=1)
            if length in (10, 30):
                kept = torch.arange(len(written) - 1)
                step.keep(kept)
                written, which = written[kept], which[kept]
        # Places that no hypothesis sees are removed.
        assert step.cache.used < beams * 39 or beams == 1


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs_bfloat16)], ids=["", "packed"])
@pytest.mark.parametrize("fields", [{}, {"norm_position": "pre"}, {"attention_bias": True}], ids=str)
def test_autocast_rounds_the_factors_of_products_alone(fields, packed, monkeypatch) -> None:
    """Outputs are in float32, near to those without autocast, and nearer than those of weights in bfloat16."""
    pack_from(monkeypatch, 1 if packed else 10**9)
    model, inputs = random_model(**fields), sentences(16)
    outputs = []
    for each, autocast in ((model, False), (model, True), (copy.deepcopy(model).bfloat16(), False)):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            states = each.model.encoder(**inputs).last_hidden_state
            decoder = EnsembleDecoder([each], [states], inputs["attention_mask"], 3)
            decoder.read(torch.full((16, 1), BOS))
            generator, found = torch.Generator().manual_seed(0), []
            for _ in range(12):
                decoder.read(torch.randint(3, 90, (16, 3), generator=generator))
                found.append(torch.cat((decoder.states[0].float(), decoder.log_probs()), dim=1))
                assert decoder.states[0].dtype == each.dtype
        outputs.append(torch.stack(found))
    errors = [(outputs[0] - other).abs().mean().item() for other in outputs[1:]]
    assert 0 < errors[0] < 0.05 and errors[0] < errors[1]


# ---- Another default device


@contextlib.contextmanager
def everything_elsewhere():
    """Makes `meta` the default device: a tensor created without a device fails as it would beside a model on a GPU."""
    with torch.device("meta"):
        yield


WAYS = [
    {"num_beams": 1},
    {"num_beams": 4, "num_return_sequences": 3},
    {"num_beams": 4, "no_repeat_ngram_size": 2, "bad_words_ids": [[5]], "repetition_penalty": 1.2},
    {"num_beams": 3, "max_new_tokens": 5},
    {"num_beams": 1, "ensemble": True},
    {"num_beams": 3, "ensemble": True},
    {"num_beams": 1, "do_sample": True},
    # These two fall back to transformers' own searches.
    {"num_beams": 1, "output_scores": True, "return_dict_in_generate": True},
    {"num_beams": 3, "output_scores": True, "return_dict_in_generate": True},
]


@pytest.mark.variants(3)
@pytest.mark.parametrize("fields", [{}, {"position_encoding": "learned", "max_position_embeddings": 70}], ids=str)
@pytest.mark.parametrize("settings", WAYS, ids=str)
# `best_tokens` compares many tokens in groups.
@pytest.mark.parametrize("vocab_size", [dear(90), 1000])
def test_every_search_runs_where_the_model_is(settings, vocab_size, fields) -> None:
    models = [random_model(seed, vocab_size, **fields) for seed in range(2)]
    settings = settings | ({"ensemble": models[1:]} if "ensemble" in settings else {})
    found = []
    for place in (contextlib.nullcontext, everything_elsewhere):
        torch.manual_seed(0)
        inputs = sentences(40, vocab_size=vocab_size)
        with place():
            found.append(models[0].generate(**inputs, **settings))
    one, other = (getattr(each, "sequences", each) for each in found)
    assert torch.equal(one, other)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("loss_only", [False, True])
def test_an_update_is_made_where_the_model_is(attention, loss_only) -> None:
    model, inputs = random_model().train(), sentences(9)
    model.set_attn_implementation(attention)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    found = []
    for place in (contextlib.nullcontext, everything_elsewhere):
        torch.manual_seed(0)
        model.zero_grad()
        with place():
            loss = model(**inputs, labels=labels, epsilon_ls=0.1, loss_only=loss_only).loss
            loss.backward()
        found.append([loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_the_pipeline_runs_where_the_model_is(tiny_run) -> None:
    """Starts from ids, which transformers' tokenizers create on the default device."""
    kinds = (VaswaniForConditionalGeneration, transformers.AutoTokenizer)
    model, tokenizer = (kind.from_pretrained(tiny_run / "model") for kind in kinds)
    translator = VaswaniTranslationPipeline(model, tokenizer, device="cpu")
    for text in ("one two", ""):
        encoding, found = translator.preprocess(text), []
        for place in (contextlib.nullcontext, everything_elsewhere):
            with place():
                found.append(translator._forward(dict(encoding), num_return_sequences=2))
        ids, elsewhere = (each["passage"].ids[0] for each in found)
        assert torch.equal(ids, elsewhere) and len(ids) == 2


# ---- Changed models


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


def both_searches(monkeypatch, model, inputs, **settings) -> list[torch.Tensor]:
    """Returns the output of `generate()` as it is, and with the fast search disabled."""
    found = [model.generate(**inputs, **settings)]
    with monkeypatch.context() as without:
        without.setattr(search_vaswani, "fast_search_inputs", lambda *args, **kwargs: None)
        return [*found, model.generate(**inputs, **settings)]


def each_change() -> list[Any]:
    """Every place with one of the changes, which take turns; with the others, they are left to `make test-all`."""
    in_texts = [place for place in PLACES if "encoder" not in place and "cross" not in place]
    found = []
    for kind, places in (("translation", PLACES), ("text", in_texts)):
        turns = {(place, CHANGES[i % len(CHANGES)]) for i, place in enumerate(places)}
        pairs = itertools.product(places, CHANGES)
        found += [pytest.param(kind, *pair, marks=[] if pair in turns else pytest.mark.slow) for pair in pairs]
    return found


@pytest.mark.variants(3)
@pytest.mark.parametrize(("kind", "place", "change"), each_change(), ids=lambda each: getattr(each, "__name__", each))
def test_a_changed_module_is_what_generates(monkeypatch, kind, place, change) -> None:
    """Both searches generate the same after a change, and something else than before it."""
    if kind == "translation":
        model, inputs, beams = random_model(norm_position="pre"), sentences(5), 4
    else:
        model, inputs, beams = random_gpt(norm_position="pre"), prompts(20), 1
        model.lm_head.bias.data[2] = -100  # no text ends early
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


def another_product(model, monkeypatch):
    linear = nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda states, weight, bias=None: -linear(states, weight, bias))


@pytest.mark.variants(3)
@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize(
    "change",
    [
        *map(a_bias_for, ("q_proj", "v_proj")),
        pruned_heads,
        a_scaling_of_each_head,
        another_product,
        gated,
        subclassed,
        another_middle,
        another_attention,
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


def test_another_function_under_the_name_of_an_attention_is_what_translates(monkeypatch) -> None:
    theirs = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]

    def sharper(*args, scaling, **kwargs):
        return theirs(*args, scaling=3 * scaling, **kwargs)

    model, inputs = random_model(), sentences(5)
    plain = model.generate(**inputs, num_beams=3)
    monkeypatch.setitem(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS, "sdpa", sharper)
    fast, stock = fast_and_stock(monkeypatch, model, inputs, fast=False, num_beams=3)
    assert torch.equal(fast.sequences, stock.sequences) and fast.sequences.tolist() != plain.tolist()
    assert find_change(model) == f"has the attention sdpa of {__name__}"


def test_layers_that_share_an_entry_of_the_cache_are_refused() -> None:
    model, inputs = random_model(), sentences(5)
    model.model.decoder.layers[1] = copy.deepcopy(model.model.decoder.layers[0])
    without = model.generate(**inputs, num_beams=2, use_cache=False)
    for slow in ({}, {"output_scores": True, "return_dict_in_generate": True}):
        with pytest.raises(ValueError, match="attention of decoder layer 1 has layer_idx 0"):
            model.generate(**inputs, num_beams=2, **slow)
    for name in ("self_attn", "cross_attn"):
        getattr(model.model.decoder.layers[1], name).layer_idx = 1
    assert torch.equal(model.generate(**inputs, num_beams=2), without)


def unchanged(model) -> None:
    model.model.encoder.layers[0].register_forward_hook(lambda *args: None)
    model.train().eval()
    model.note = "a note"


def hooked(model) -> None:
    """In every kind of module that the search calls."""
    for place in PLACES:
        if "decoder.layers" in place or place == "lm_head":
            by_a_hook(model.get_submodule(place), None)


def adapted(model) -> None:
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "fc1", "fc2"], init_lora_weights=False)
    peft.inject_adapter_in_model(settings, model.eval()).eval()


def compiled(model) -> None:
    for layer in model.model.decoder.layers:
        layer.feed_forward = torch.compile(layer.feed_forward, backend="eager")
        layer.feed_forward_norm.compile(backend="eager")


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize(
    "change",
    [unchanged, hooked, adapted, pytest.param(compiled, marks=pytest.mark.slow)],
    ids=lambda each: each.__name__,
)
def test_models_with_other_modules_take_the_fast_search(monkeypatch, change, beams) -> None:
    """With the others that a search of several models, or among some entries, needs."""
    model, inputs = random_model(), sentences(9)
    change(model)
    fast, stock = fast_and_stock(monkeypatch, model, inputs, num_beams=beams)
    assert torch.equal(fast.sequences, stock.sequences)
    alone = model.generate(**inputs, num_beams=beams)
    assert torch.equal(model.generate(**inputs, num_beams=beams, ensemble=[model]), alone)


@pytest.mark.parametrize("beams", [1, 4])
def test_a_model_in_int8_takes_the_fast_search(beams, monkeypatch) -> None:
    """Its numbers are rounded by the largest of a batch, so that the two searches differ a little."""
    fast, stock = fast_and_stock(monkeypatch, to_int8(random_model()), sentences(40), num_beams=beams)
    length = min(fast.sequences.shape[1], stock.sequences.shape[1])
    same = (fast.sequences[:, :length] == stock.sequences[:, :length]).all(dim=1)
    assert same.float().mean() > 0.5


class ALiBi(VaswaniAttention):
    """Attention that decreases with the distance of two positions."""

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        cache = getattr(kwargs["cache"], "self_attention_cache", None)
        past = 0 if cache is None else cache.get_seq_length(self.layer_idx)
        places = torch.arange(past + hidden_states.shape[1])
        distance = (places - places[past:, None]).clamp(max=0)[None, None].float()
        return super().forward(hidden_states, distance + (0 if attention_mask is None else attention_mask), **kwargs)


def alibi(model) -> None:
    for layer in model.model.decoder.layers:
        layer.self_attn.__class__ = ALiBi


class Convolution(nn.Conv1d):
    """Mixes each position with the one before."""

    def forward(self, states):
        return states + super().forward(nn.functional.pad(states.transpose(1, 2), (1, 0))).transpose(1, 2)


def convolution(model) -> None:
    torch.manual_seed(0)
    for layer in model.model.decoder.layers:
        layer.feed_forward.dropout = Convolution(32, 32, 2).eval()


def a_hook_that_counts_positions(model) -> None:
    def hook(module, inputs, output):
        return output * torch.arange(output.shape[1])[:, None]

    model.model.decoder.layers[0].feed_forward.register_forward_hook(hook)


def a_hook_that_counts_calls(model) -> None:
    calls = itertools.count()
    model.model.decoder.layers[0].feed_forward.register_forward_hook(lambda *args: args[-1] * next(calls))


@pytest.mark.parametrize(
    "change",
    [alibi, convolution, a_hook_that_counts_positions, a_hook_that_counts_calls],
    ids=lambda each: each.__name__,
)
def test_modules_that_mix_positions_are_left_to_transformers(monkeypatch, change) -> None:
    model, inputs = random_model(), sentences(3)
    model.generate(**inputs, num_beams=2)
    change(model)
    assert "mixes positions" in find_change(model)
    fast_and_stock(monkeypatch, model, inputs, fast=False, num_beams=2)
    with pytest.raises(ValueError, match="but this model has a .* that mixes positions"):
        model.generate(**inputs, num_beams=2, ensemble=[random_model(1)])


def test_a_changed_module_is_asked_once_and_again_when_it_changes(monkeypatch) -> None:
    model, calls = random_model(), []
    model.model.decoder.layers[0].register_forward_hook(lambda *args: calls.append(1))
    convolution(model)
    kernels = [layer.feed_forward.dropout for layer in model.model.decoder.layers]
    with torch.no_grad():
        for kernel in kernels:
            kernel.weight.zero_()
        assert find_change(model) is None and calls
        before = len(calls)
        assert find_change(model) is None and len(calls) == before
        kernels[1].weight[:, :, 0] = 1
    assert "a Convolution that mixes positions" in find_change(model) and len(calls) == 2 * before
