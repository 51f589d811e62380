"""Searches in fixed places, on the CPU with the graphs of the tests, against the search of the model's files."""

import gc
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

from hf_vaswani.model import cache_vaswani
from hf_vaswani.model.generation_vaswani import FastSearchMixin
from hf_vaswani.serving.batcher import EndCriteria
from hf_vaswani.training import validation
from hf_vaswani.translation import static_search, static_steps

from .static import EOS, SEARCHES, assert_same, random_gpt, random_model, sentences, use_buckets, without

# ---- The same results --------------------------------------------------------------------------------------------

TRANSFORMERS = {"length_penalty_type": "power", "finish_candidates": "top"}
SETTINGS = [
    {},
    TRANSFORMERS,
    TRANSFORMERS | {"early_stopping": True},
    {"early_stopping": True},
    {"early_stopping": False, "length_penalty": 2.0},
    {"length_penalty": 0.0},
    {"length_penalty": -1.5, "length_penalty_type": "power"},
    {"num_return_sequences": 3},
    {"num_return_sequences": 4, "finish_candidates": "top"},
    {"eos_token_id": [2, 30]},
    {"eos_token_id": None, "max_new_tokens": 19},
    {"suppress_tokens": [5, 6]},
    {"max_length_offset": 2},
    {"max_length_offset": None, "max_new_tokens": 1},
    {"max_length_offset": None, "max_length": 40},
]


@pytest.mark.variants(3)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("count", [1, 2, 13])
def test_beam_search_finds_the_same(monkeypatch, at_home, count, settings) -> None:
    assert_same(monkeypatch, at_home, random_model(), sentences(count), num_beams=4, **settings)


BY_LENGTH = [
    {"forced_bos_token_id": 9},
    {"min_new_tokens": 20},
    {"min_length": 5, "forced_bos_token_id": 9},
    {"bad_words_ids": [[5], [7]], "begin_suppress_tokens": [11, 12]},
    {"sequence_bias": [[[5], 1.0], [[6], -2.0]], "suppress_tokens": [7]},
    {"forced_eos_token_id": 2, "max_length_offset": None, "max_new_tokens": 6},
    {"forced_eos_token_id": 2, "max_length_offset": 3},
]


@pytest.mark.parametrize("settings", BY_LENGTH, ids=str)
@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("begun", [False, True])
def test_processors_that_look_at_the_length(monkeypatch, at_home, graphs, begun, beams, settings) -> None:
    """Also if a graph of another limit is replayed."""
    model, inputs = random_model(decoder_layers=1), sentences(3)
    if begun:
        inputs |= {"decoder_input_ids": torch.tensor([[2, 7, 9]] * 3)}
    assert_same(monkeypatch, at_home, model, inputs, num_beams=beams, **settings)
    made = len(static_search.KEPT[model].steps)
    for name in ("min_new_tokens", "min_length", "max_new_tokens", "max_length_offset"):
        if settings.get(name):
            others = settings | {name: settings[name] + 2}
            assert_same(monkeypatch, at_home, model, inputs, num_beams=beams, **others)
            assert len(static_search.KEPT[model].steps) <= made + 2


GREEDY = [{}, {"max_length_offset": 2}, {"eos_token_id": [2, 30]}, {"eos_token_id": None, "max_new_tokens": 19}]
GREEDY += [{"suppress_tokens": [5, 6], "pad_token_id": 7}, {"max_length_offset": None, "max_new_tokens": 1}]


@pytest.mark.parametrize("settings", GREEDY, ids=str)
@pytest.mark.parametrize("count", [1, 2, 13])
def test_greedy_search_finds_the_same(monkeypatch, at_home, count, settings) -> None:
    assert_same(monkeypatch, at_home, random_model(), sentences(count), num_beams=1, **settings)


DRAWN = [{}, {"top_k": 5, "top_p": 0.9, "temperature": 0.7}, {"num_return_sequences": 3}]


@pytest.mark.parametrize("settings", DRAWN, ids=str)
@pytest.mark.parametrize("count", [1, 13])
def test_the_same_tokens_are_drawn(monkeypatch, at_home, count, settings) -> None:
    drawn = {"num_beams": 1, "do_sample": True} | settings
    assert_same(monkeypatch, at_home, random_model(), sentences(count), **drawn)


BUCKETS = [(16, 1), (16, 4), (8, 2), (64, 16), (4, 1)]


@pytest.mark.parametrize(("capacity", "steps"), BUCKETS)
@pytest.mark.parametrize("beams", [1, 3])
def test_wherever_the_borders_of_buffers_are(monkeypatch, at_home, beams, capacity, steps) -> None:
    use_buckets(monkeypatch, capacity, steps)
    assert_same(monkeypatch, at_home, random_model(), sentences(9), num_beams=beams, num_return_sequences=beams)


FIELDS = [
    {"norm_position": "pre", "position_encoding": "learned", "max_position_embeddings": 40},
    {"sinusoid_layout": "concatenated", "position_offset": 2, "embedding_norm": True, "attention_bias": True},
    {"d_k": 6, "d_v": 10, "tie_word_embeddings": False, "decoder_layers": 1},
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_kind_of_network(monkeypatch, at_home, attention, beams, fields) -> None:
    model = random_model(**fields)
    model.set_attn_implementation(attention)
    assert_same(monkeypatch, at_home, model, sentences(6), num_beams=beams)


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("width", [1, 33])
def test_prompts_and_sources_of_any_length(monkeypatch, at_home, width, left, beams) -> None:
    inputs = sentences(5, 2, left) if width == 1 else sentences(5, width, left)
    assert_same(monkeypatch, at_home, random_model(), inputs, num_beams=beams)
    begun = torch.tensor([[2, 7, 9, 11, 40]] * 5)
    assert_same(monkeypatch, at_home, random_model(), inputs | {"decoder_input_ids": begun}, num_beams=beams)


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("fields", [{}, {"position_encoding": "learned", "max_position_embeddings": 60}], ids=str)
@pytest.mark.parametrize("count", [1, 6])
def test_texts_go_on(monkeypatch, at_home, count, fields, beams) -> None:
    assert_same(monkeypatch, at_home, random_gpt(**fields), sentences(count, left=True), num_beams=beams)


def test_a_vocabulary_with_fewer_entries_than_candidates(monkeypatch, at_home) -> None:
    model, inputs = random_model(vocab_size=7), sentences(5)
    inputs["input_ids"] %= 7
    assert_same(monkeypatch, at_home, model, inputs, num_beams=4, num_return_sequences=2)


@pytest.mark.parametrize("beams", [1, 3])
def test_limits_of_each_sentence(monkeypatch, at_home, beams) -> None:
    """Without an end, each is as long as its source allows: they leave at different borders."""
    model, inputs = random_model(), sentences(9, 20)
    model.lm_head.bias.data[EOS] = -100
    assert_same(monkeypatch, at_home, model, inputs, num_beams=beams, max_length_offset=1)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("last", [1, 2, 3, 5])
def test_a_search_ends_when_its_time_is_up(monkeypatch, at_home, last, beams) -> None:
    model, inputs, left = random_model(), sentences(5), [0]
    model.lm_head.bias.data[EOS] = -100

    def is_over() -> bool:
        left[0] -= 1
        return left[0] == 0

    found = []
    for search in (model.generate, lambda **call: without(monkeypatch, model, {}, **call)):
        left[0] = last
        output = search(**inputs, num_beams=beams, stopping_criteria=[EndCriteria(is_over)])
        found.append(getattr(output, "sequences", output))
    assert found[0].shape == (5, 1 + last) and torch.equal(*found)
    # The next search in the same buffers has time.
    assert_same(monkeypatch, at_home, model, inputs, num_beams=beams)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_clock_may_raise_an_error(monkeypatch, at_home, beams) -> None:
    """As that of a server does, if nobody waits for the translation any more."""
    left = [3]

    def is_over() -> bool:
        left[0] -= 1
        if not left[0]:
            raise TimeoutError("overdue")
        return False

    model, inputs = random_model(), sentences(5)
    model.lm_head.bias.data[EOS] = -100
    with pytest.raises(TimeoutError, match="overdue"):
        model.generate(**inputs, num_beams=beams, stopping_criteria=[EndCriteria(is_over)])
    assert not at_home and not static_search.TURNED_OFF
    assert_same(monkeypatch, at_home, model, inputs, num_beams=beams)


@pytest.mark.parametrize("beams", [1, 3])
def test_within_inference_mode_and_without(monkeypatch, at_home, beams) -> None:
    """Its buffers outlive both."""
    model, inputs = random_model(), sentences(5)
    begun = inputs | {"decoder_input_ids": torch.tensor([[2, 7, 9]] * 5)}
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            for given in (inputs, begun):
                assert_same(monkeypatch, at_home, model, given, num_beams=beams)


@pytest.mark.parametrize("beams", [1, 3])
def test_autocast_to_bfloat16(monkeypatch, at_home, beams) -> None:
    model, inputs = random_model(), sentences(5)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(monkeypatch, at_home, model, inputs, num_beams=beams)
        # Whose prompt attends in bfloat16.
        assert random_gpt().generate(**sentences(5, left=True), num_beams=beams) is at_home[-1]
    assert_same(monkeypatch, at_home, model, inputs, num_beams=beams)


@pytest.mark.parametrize("fields", [{}, {"attention_bias": True}], ids=str)
def test_weights_are_rounded_once_a_search(monkeypatch, at_home, graphs, fields) -> None:
    """On a GPU, where autocast decides; this lets it decide here, too."""
    monkeypatch.setattr(cache_vaswani, "products_of", lambda *_: {})
    model, inputs = random_model(**fields), sentences(5)
    call = inputs | {"num_beams": 3, "return_dict_in_generate": True}
    before = None
    static_search.PROVED.add(("beam search", False))
    for _ in range(2):
        found = []
        for rounds in (True, False):
            with monkeypatch.context() as patch, torch.autocast("cpu", torch.bfloat16):
                if not rounds:
                    patch.setattr(static_search.KeptSteps, "products", lambda *_: {})
                    static_search.KEPT[model].steps.clear()
                found.append(model.generate(**call))
        assert torch.equal(found[0].sequences, found[1].sequences)
        assert torch.equal(found[0].sequences_scores, found[1].sequences_scores)
        assert before is None or not torch.equal(before, found[0].sequences_scores)
        before = found[0].sequences_scores
        (rounded,) = static_search.KEPT[model].rounded.values()
        assert len(rounded) == 10 * model.config.decoder_layers
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.3)


def test_no_graph_keeps_what_autocast_rounded() -> None:
    with torch.autocast("cpu", torch.bfloat16), static_search.in_fixed_places(torch.device("cpu")):
        assert torch.is_autocast_enabled("cpu") and not torch.is_autocast_cache_enabled()
    with static_search.in_fixed_places(torch.device("cpu")):
        assert not torch.is_autocast_enabled("cpu")


# ---- Calls that it leaves to the model's own search ----------------------------------------------------------------


def hooked(model) -> None:
    model.model.decoder.layers[0].feed_forward.register_forward_hook(lambda *_: None)


def compiled(model) -> None:
    model.model.decoder.layers[0].feed_forward.compile(backend="eager")


def replaced(model) -> None:
    model.model.decoder.layers[0].feed_forward.fc1 = nn.Sequential(model.model.decoder.layers[0].feed_forward.fc1)


@pytest.mark.parametrize("change", [hooked, compiled, replaced])
def test_changed_models(monkeypatch, at_home, change) -> None:
    model, inputs = random_model(), sentences(3)
    change(model)
    found = model.generate(**inputs, num_beams=2)
    assert at_home in ([None], [])
    assert torch.equal(found, without(monkeypatch, model, inputs, num_beams=2).sequences)


OTHERS = [{"no_repeat_ngram_size": 2}, {"repetition_penalty": 1.2}, {"bad_words_ids": [[5], [7, 8]]}]
OTHERS += [{"sequence_bias": [[[5, 6], 1.0]]}, {"suppress_tokens": list(range(5, 36))}]


@pytest.mark.parametrize("settings", OTHERS, ids=str)
def test_processors_that_look_at_the_tokens(at_home, settings) -> None:
    random_model().generate(**sentences(3), num_beams=2, **settings)
    assert at_home == [None]


def test_ensembles_and_the_switch(monkeypatch, at_home) -> None:
    model, inputs = random_model(), sentences(3)
    model.generate(**inputs, num_beams=2, ensemble=[random_model(1)])
    assert at_home == [None]
    for word, is_static in (("0", False), ("1", True), ("", True)):
        monkeypatch.setenv("HF_VASWANI_CUDA_GRAPHS", word)
        at_home.clear()
        model.generate(**inputs, num_beams=2)
        assert [each is not None for each in at_home] == [is_static]


def test_only_gpus_search_so_by_themselves(monkeypatch) -> None:
    monkeypatch.setattr(static_search, "static_search", lambda *call: call)
    call = [random_model(), SimpleNamespace(device=torch.device("cuda:1")), GenerationConfig(), None]
    assert FastSearchMixin.at_home(*call) == tuple(call)
    for kind in ("cpu", "mps", "xpu"):
        call[1] = SimpleNamespace(device=torch.device(kind))
        assert FastSearchMixin.at_home(*call) is None


# ---- Graphs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SEARCHES)
def test_graphs_find_the_same(monkeypatch, at_home, graphs, name) -> None:
    model, inputs = random_model(decoder_layers=1), sentences(3)
    assert_same(monkeypatch, at_home, model, inputs, **SEARCHES[name])
    assert graphs.made and sum(each.replays for each in graphs.made) > 5
    assert len(static_search.PROVED) == 1 and not static_search.TURNED_OFF
    # Later searches replay the same graphs, also for other sentences.
    others = [{key: each[:3] for key, each in sentences(seed).items()} for seed in (6, 7)]
    # Some of them end before their last buffers are warm.
    for again in (*others, inputs) * 3:
        assert_same(monkeypatch, at_home, model, again, **SEARCHES[name])
    made = len(graphs.made)
    for again in (*others, inputs):
        assert_same(monkeypatch, at_home, model, again, **SEARCHES[name])
    assert len(graphs.made) == made


def test_graphs_are_of_a_shape_and_of_settings(at_home, graphs) -> None:
    model = random_model()
    call = {"num_beams": 2, "max_new_tokens": 4, "length_penalty": 0.6}
    steps: list[int] = []

    def search(count: int = 4, width: int = 12, **settings) -> int:
        model.generate(**sentences(count, width), **call | settings)
        steps.append(len(static_search.KEPT[model].steps))
        return steps[-1]

    assert search() == search(3) == search(4, 5) == search(num_return_sequences=1) == 1
    assert search(5) == search(8) == 2
    assert search(4, 40) == 3
    assert search(num_beams=3) == 4
    assert search(length_penalty=1.0) == 5
    assert search(suppress_tokens=[5]) == search(suppress_tokens=[5]) == 6
    assert search(suppress_tokens=[6]) == 7


def test_few_steps_are_kept(monkeypatch, at_home, graphs) -> None:
    model = random_model()
    monkeypatch.setattr(static_search, "MAX_KEPT", 2)
    for count in (1, 2, 4, 8, 2, 8):
        assert_same(monkeypatch, at_home, model, sentences(count), num_beams=2, max_new_tokens=3)
    rows = [step.shape.rows for step, _ in static_search.KEPT[model].steps.values()]
    assert rows == [2, 8]
    monkeypatch.setattr(static_search, "MAX_KEPT", 99)
    limit = 3 * static_search.KEPT[model].memory()
    assert limit > 0
    monkeypatch.setattr(static_search, "memory_limit", lambda _: limit)
    for count in (16, 32, 64, 128):
        assert_same(monkeypatch, at_home, model, sentences(count), num_beams=2, max_new_tokens=3)
    assert len(static_search.KEPT[model].steps) == 2


@pytest.mark.parametrize("encoding", ["sinusoidal", "learned"])
def test_weights_that_change_in_their_places_are_read(monkeypatch, at_home, graphs, encoding) -> None:
    fields = {"position_encoding": encoding, "lm_head_bias": True, "attention_bias": True, "embedding_norm": True}
    model, inputs = random_model(max_position_embeddings=64, **fields), sentences(4)
    assert_same(monkeypatch, at_home, model, inputs, num_beams=2)
    kept = static_search.KEPT[model]
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.5)
    assert_same(monkeypatch, at_home, model, inputs, num_beams=2)
    assert static_search.KEPT[model] is kept


def resized(model) -> None:
    model.resize_token_embeddings(95, mean_resizing=False)
    model.eval()


def moved(model) -> None:
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = nn.Parameter(weight.detach().clone() * 1.1, requires_grad=False)


def activated(model) -> None:
    model.model.decoder.layers[0].feed_forward.activation = nn.Tanh().eval()


def attends(model) -> None:
    model.set_attn_implementation("eager")


@pytest.mark.parametrize("change", [resized, moved, activated, attends])
def test_graphs_of_other_weights_and_modules_are_not_replayed(monkeypatch, at_home, graphs, change) -> None:
    model, inputs = random_model(tie_word_embeddings=False), sentences(4)
    assert_same(monkeypatch, at_home, model, inputs, num_beams=2)
    kept = static_search.KEPT[model]
    change(model)
    assert_same(monkeypatch, at_home, model, inputs, num_beams=2)
    assert static_search.KEPT[model] is not kept


def test_steps_go_with_their_model(at_home, graphs) -> None:
    model = random_model()
    model.generate(**sentences(4), num_beams=2)
    buffer = weakref.ref(next(iter(static_search.KEPT[model].steps.values()))[0].rows["tokens"])
    assert buffer() is not None
    graphs.made.clear()
    at_home.clear()
    del model
    gc.collect()
    assert not static_search.KEPT and buffer() is None


def test_a_training_gets_the_memory_back(monkeypatch, at_home, graphs) -> None:
    model = random_model()
    model.generate(**sentences(4), num_beams=2)
    monkeypatch.setattr(validation, "share", lambda run, lines, translate_part: model.generate(**sentences(4)))
    run = SimpleNamespace(recipe=SimpleNamespace(evaluation=None))
    assert model in static_search.KEPT
    validation.translate(run, model, [], 1)
    assert model not in static_search.KEPT and len(at_home) == 2


def test_memory_is_free_at_once_when_steps_go(at_home, graphs) -> None:
    """No cycle of references has to be found first."""
    model = random_model()
    model.generate(**sentences(4), num_beams=2)
    buffer = weakref.ref(next(iter(static_search.KEPT[model].steps.values()))[0].one.cache.layers[0][0])
    graphs.made.clear()
    gc.collect()
    gc.disable()
    try:
        static_search.KEPT[model].steps.clear()
        assert buffer() is None
    finally:
        gc.enable()


def test_a_step_that_cannot_be_captured(monkeypatch, at_home, graphs, caplog) -> None:
    """It runs as it is, and is not tried again, even if its buffers are made again."""
    model, inputs = random_model(), sentences(4)
    run, wanted = static_search.BeamStep.run, [False]

    def fails(self) -> None:
        run(self)
        if wanted[0]:
            self.rows["tokens"].sum().item()

    monkeypatch.setattr(static_search.BeamStep, "run", fails)
    wanted[0] = True
    assert_same(monkeypatch, at_home, model, inputs, num_beams=2, max_new_tokens=7)
    tried = len(graphs.made)
    assert tried and not any(each.replays for each in graphs.made)
    assert [record.message[:52] for record in caplog.records].count(
        "A step of the search runs without a CUDA graph, beca"
    ) == tried
    kept = static_search.KEPT[model]
    kept.take(next(iter(kept.steps)), lambda: None, torch.device("cpu"))
    kept.steps.clear()
    assert_same(monkeypatch, at_home, model, inputs, num_beams=2, max_new_tokens=7)
    assert len(graphs.made) == tried


@pytest.mark.parametrize("name", SEARCHES)
def test_graphs_that_compute_something_else_are_given_up(monkeypatch, at_home, graphs, caplog, name) -> None:
    """The first search of a kind is made without graphs, too; what it returns is right already."""
    model, inputs, settings = random_model(), sentences(5), SEARCHES[name]
    expected = without(monkeypatch, model, inputs, **settings).sequences
    replay = graphs.replay

    def wrong(self) -> None:
        replay(self)
        for step, _ in static_search.KEPT[model].steps.values():
            step.rows["tokens"].copy_(step.rows["tokens"].add(1) % 90)

    monkeypatch.setattr(graphs, "replay", wrong)
    for _ in range(2):
        torch.manual_seed(0)
        assert torch.equal(model.generate(**inputs, **settings), expected)
    assert len(static_search.TURNED_OFF) == 1 and not static_search.PROVED
    (kind,) = static_search.TURNED_OFF
    assert [record.message for record in caplog.records if "CUDA" in record.message] == [
        f"{kind.capitalize()} runs without CUDA graphs from now on, because its graphs did not compute what was "
        "captured."
    ]


@pytest.mark.parametrize("name", ["greedy", "beams"])
@pytest.mark.parametrize("as_dict", [False, True])
def test_steps_that_find_something_else_are_given_up(monkeypatch, at_home, graphs, caplog, as_dict, name) -> None:
    model, inputs, settings = random_model(), sentences(5), SEARCHES[name]
    expected = without(monkeypatch, model, inputs, **settings)
    step = static_steps.StaticDecoder.step
    monkeypatch.setattr(static_steps.StaticDecoder, "step", lambda self, tokens: step(self, (tokens + 1) % 90))
    for _ in range(2):
        found = model.generate(**inputs, **settings, return_dict_in_generate=as_dict)
        assert torch.equal(found.sequences if as_dict else found, expected.sequences)
        if as_dict and name == "beams":
            assert torch.equal(found.sequences_scores, expected.sequences_scores)
    assert sum("because it found other tokens than without." in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), torch.OutOfMemoryError("CUDA out of memory.")])
@pytest.mark.parametrize("begun", [False, True])
def test_a_search_that_fails_is_made_as_before(monkeypatch, at_home, graphs, caplog, begun, error) -> None:
    model, inputs = random_model(), sentences(5)
    if begun:
        inputs["decoder_input_ids"] = torch.tensor([[2, 7, 9]] * 5)

    def fails(self) -> None:
        raise error

    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(static_search.BeamStep, "run", fails)
        found = model.generate(**inputs, num_beams=2)
    assert torch.equal(found, without(monkeypatch, model, inputs, num_beams=2).sequences)
    is_serious = not isinstance(error, torch.OutOfMemoryError)
    assert set(static_search.TURNED_OFF) == ({"beam search"} if is_serious else set())
    assert ("it failed: RuntimeError: CUDA error" in caplog.text) == is_serious
    # For less memory, graphs are tried again.
    for count in (5, 4):
        at_home.clear()
        model.generate(**sentences(count), num_beams=2)
        assert [each is None for each in at_home] == [is_serious or count == 5]


def test_threads_share_the_buffers_in_turn(monkeypatch, at_home, graphs) -> None:
    model = random_model(decoder_layers=1)
    inputs = [sentences(4), {key: each[:4] for key, each in sentences(9).items()}]
    expected = [without(monkeypatch, model, each, num_beams=2).sequences for each in inputs]
    found: dict[tuple[int, int], torch.Tensor] = {}

    def work(number: int) -> None:
        for turn in range(3):
            found[number, turn] = model.generate(**inputs[number], num_beams=2)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert all(each is not None for each in at_home) and not static_search.TURNED_OFF
    assert len(found) == 6 and all(torch.equal(each, expected[number]) for (number, _), each in found.items())


def test_a_search_in_bfloat16_proves_nothing_for_float32(at_home, graphs) -> None:
    """Where it cannot be compared with the model's own search."""
    model, inputs = random_model(), sentences(5)
    model.generate(**inputs, num_beams=2)
    assert {("beam search", True)} == static_search.PROVED
    model.bfloat16().generate(**inputs, num_beams=2)
    assert {("beam search", True), ("beam search", False)} == static_search.PROVED
