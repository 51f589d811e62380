"""Steps of a search in fixed places: the next one has the same operators, and reads nothing."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig

from hf_vaswani.model import cache_vaswani
from hf_vaswani.model.rules_vaswani import MISSING, BeamSearchRules
from hf_vaswani.translation import static_search, static_steps

from .static import EOS, SEARCHES, assert_same, random_model, sentences, use_buckets


def step_of(monkeypatch, model, inputs, **settings) -> static_steps.StaticStep:
    """Returns a step of a search that has taken some."""
    steps: list[Any] = []
    take_steps = static_search.StaticSearch.take_steps

    def spy(self, step, captured):
        steps.append(step)
        return take_steps(self, step, captured)

    with monkeypatch.context() as patch:
        patch.setattr(static_search.StaticSearch, "take_steps", spy)
        model.generate(**inputs, **settings, max_new_tokens=3)
    return steps[0]


class Trace(TorchDispatchMode):
    """Notes operators with the shapes, strides and types of their tensors, and their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        describe = lambda each: (  # noqa: E731
            (each.shape, each.stride(), each.dtype) if isinstance(each, torch.Tensor) else each
        )
        self.calls.append(torch.utils._pytree.tree_map(describe, (str(function), args, kwargs, result)))
        return result


@pytest.fixture(params=SEARCHES)
def a_step(request, monkeypatch, at_home):
    use_buckets(monkeypatch, 64, 8)
    return step_of(monkeypatch, random_model(), sentences(5), **SEARCHES[request.param])


@torch.no_grad()
def test_two_steps_have_equal_operators_and_read_nothing(a_step) -> None:
    traces = []
    for _ in range(3):
        with Trace() as trace:
            a_step.run()
        traces.append(trace.calls)
    assert traces[0] == traces[1] == traces[2] and len(traces[0]) > 50
    names = {call[0] for call in traces[0]}
    assert not [name for name in names if any(read in name for read in ("_local_scalar", "nonzero", "equal", "item"))]


@torch.no_grad()
def test_a_step_is_one_graph_of_the_compiler(monkeypatch, a_step) -> None:
    # A compiler cannot trace context variables, and calls the layers themselves.
    monkeypatch.setattr(cache_vaswani, "Substitutes", lambda _: nullcontext())
    torch._dynamo.reset()
    compiled_step = torch.compile(a_step.run, fullgraph=True, dynamic=False, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            compiled_step()


def tensors_of(step) -> dict[str, torch.Tensor]:
    """Returns what a step reads and writes, but for the weights."""
    decoder = step.one
    found = {f"rows.{name}": each for name, each in step.rows.items()}
    found |= {f"recorded.{name}": each for name, each in step.recorded.items()}
    owners = {"step": step, "decoder": decoder, "cache": decoder.cache}
    for owner, object_ in owners.items():
        found |= {f"{owner}.{key}": each for key, each in vars(object_).items() if isinstance(each, torch.Tensor)}
    for number, (keys, values) in enumerate(decoder.cache.layers):
        found |= {f"keys.{number}": keys, f"values.{number}": values}
    for number, layer in enumerate(decoder.cache.cross_attention_cache.layers):
        found |= {f"source_keys.{number}": layer.keys, f"source_values.{number}": layer.values}
    return found


def put(step, tensors: dict[str, torch.Tensor]) -> None:
    """Gives a step other tensors, by the names of `tensors_of`."""
    decoder = step.one
    cache = decoder.cache
    owners = {"step": step, "decoder": decoder, "cache": cache}
    for path, tensor in tensors.items():
        owner, name = path.split(".")
        if owner in owners:
            setattr(owners[owner], name, tensor)
        elif owner in ("rows", "recorded"):
            getattr(step, owner)[name] = tensor
        elif owner.startswith("source_"):
            setattr(cache.cross_attention_cache.layers[int(name)], owner.removeprefix("source_"), tensor)
        else:
            cache.layers[int(name)][["keys", "values"].index(owner)] = tensor


@torch.no_grad()
def test_a_trace_of_a_step_computes_all_steps(a_step) -> None:
    """Nothing that changes comes from Python."""
    tensors = tensors_of(a_step)
    assert {"step.length", "decoder.lengths", "cache.places", "rows.tokens", "keys.1", "source_values.0"} <= {*tensors}
    start, found = {name: each.clone() for name, each in tensors.items()}, []

    def step(given: dict[str, torch.Tensor]) -> None:
        put(a_step, given)
        a_step.run()

    traced = make_fx(step)(tensors)
    for run in (step, traced):
        for name, each in tensors.items():
            each.copy_(start[name])
        torch.manual_seed(0)
        for _ in range(7):
            run(tensors)
        found.append({name: each.clone() for name, each in tensors.items()})
    for name, each in found[0].items():
        assert torch.equal(each, found[1][name]), name
    changed = {name for name, each in found[0].items() if not torch.equal(each, start[name])}
    assert {"step.length", "decoder.lengths", "cache.mask", "cache.places", "rows.tokens", "keys.1"} <= changed


class Elsewhere(TorchDispatchMode):
    """Asserts that no tensor is on the CPU: a graph would keep its value."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves((args, kwargs, result)):
            assert not isinstance(each, torch.Tensor) or each.device.type == "meta", function
        return result


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", SEARCHES)
@torch.no_grad()
def test_nothing_of_a_step_is_on_the_cpu(monkeypatch, at_home, name, attention) -> None:
    """The meta device stands for a GPU: without one, torch slices no fake tensors of CUDA's."""
    model = random_model()
    model.set_attn_implementation(attention)
    step = step_of(monkeypatch, model, sentences(5), **SEARCHES[name])
    model.to("meta")
    put(step, {key: each.to("meta") for key, each in tensors_of(step).items()})
    step.decoder.projections, step.device = [model.lm_head], torch.device("meta")
    # Its products are for the CPU, and it has no autocast.
    functions = step.one.functions.items()
    step.one.functions = {module: each for module, each in functions if each is cache_vaswani.attend}
    monkeypatch.setattr(cache_vaswani, "without_autocast", lambda _: nullcontext())
    with Elsewhere():
        step.run()
        with pytest.raises(AssertionError):
            step.length.add(torch.tensor(1))


def test_reads_of_a_search(monkeypatch, at_home) -> None:
    """One in two steps, and one at each border."""
    reads: list[int] = []
    read = static_search.LateNumber.read
    monkeypatch.setattr(static_search.LateNumber, "read", lambda self: reads.append(1) or read(self))
    use_buckets(monkeypatch, 128, 8)
    model = random_model()
    model.lm_head.bias.data[EOS] = -100
    model.generate(**sentences(3), num_beams=2, max_new_tokens=40)
    assert 15 <= len(reads) <= 20


@torch.no_grad()
def test_finished_sentences_do_not_change(a_step) -> None:
    """The CPU learns late that all of them are finished."""
    a_step.rows["unfinished"].fill_(True)[0] = False
    a_step.rows["max_lengths"].fill_(100)
    if "can_improve" in a_step.rows:
        a_step.rows["can_improve"].fill_(True)
        a_step.rows["is_finished"].fill_(False)
        a_step.rows["scores"].fill_(MISSING)
    names = {*a_step.rows} & {"unfinished", "scores", "is_finished", "end_positions", "numbers"}
    before = {name: a_step.rows[name].clone() for name in names}

    def run() -> None:
        # At the same place of the buffers, which are full some time.
        a_step.number.fill_(0)
        a_step.one.cache.places.copy_(torch.arange(a_step.beams))
        a_step.run()
        for name, each in before.items():
            assert torch.equal(each[0], a_step.rows[name][0]), name

    for _ in range(30):
        run()
    while a_step.remaining:
        run()
    needed = int(a_step.needed)
    run()
    assert needed == a_step.needed < a_step.length


@torch.no_grad()
def test_no_step_reads_beyond_the_table_of_positions(a_step) -> None:
    """A GPU would end all work of the process."""
    a_step.one.lengths.fill_(10_000)
    a_step.run()


@pytest.mark.parametrize("beams", [1, 3])
def test_what_earlier_searches_left_is_not_seen(monkeypatch, at_home, beams) -> None:
    model, inputs = random_model(), sentences(5)
    for _ in range(2):
        assert_same(monkeypatch, at_home, model, inputs, num_beams=beams)
        for step, _ in static_search.KEPT[model].steps.values():
            for each in tensors_of(step).values():
                if each.is_floating_point() and each is not step.one.encoding and each is not step.one.cache.own:
                    each.fill_(torch.nan)


@pytest.mark.parametrize("settings", [{}, {"length_penalty_type": "power"}], ids=str)
@pytest.mark.parametrize("alpha", [0, 1, 0.6, 1.7, -1, -0.3])
def test_length_penalties_are_equal_to_the_last_bit(alpha, settings) -> None:
    config = GenerationConfig(length_penalty=alpha, length_penalty_type="gnmt")
    vars(config).update(settings)
    ends, scores = torch.tensor([2]), torch.randn(1000, generator=torch.Generator().manual_seed(0))
    rules = BeamSearchRules(config, ends, torch.tensor([[9]]), 9)
    static = static_steps.StaticRules(config, ends, torch.tensor([[9]]), 9, torch.tensor(False))
    for length in range(1, 200):
        assert torch.equal(scores / static.penalty(torch.tensor(length)), scores / rules.penalty(length))
