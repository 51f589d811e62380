"""How often the work on a GPU would stop until the CPU has read something back: counted without a GPU."""

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.swa_utils import AveragedModel
from torch.overrides import TorchFunctionMode

from hf_vaswani import VaswaniForCausalLM
from hf_vaswani.data.tokenizer import train_tokenizer
from hf_vaswani.interruption import Interruption
from hf_vaswani.model import modeling_vaswani
from hf_vaswani.model.generation_vaswani import FastSearchMixin
from hf_vaswani.model.modeling_vaswani import VaswaniEncoder
from hf_vaswani.recipe import RDropRecipe, SimCutRecipe, TrainingRecipe
from hf_vaswani.training.consistency import TwoPasses
from hf_vaswani.training.optimization import build_optimizer
from hf_vaswani.training.update import Updater
from hf_vaswani.translation import static_search
from hf_vaswani.translation.alignment import alignments
from hf_vaswani.translation.batches import log_probabilities, translate_corpus

from .cuda_graphs import updates_of_a_gpu
from .networks import batch, tiny_model, with_labels

# Of a translation.
STEPS = 6

# What needs a value of a tensor in Python; sizes that depend on values are such values, too.
READS = {"item", "tolist", "numpy", "cpu", "nonzero", "masked_select", "unique", "unique_consecutive", "bincount"}
READS |= {f"__{name}__" for name in ("int", "bool", "float", "index", "contains", "array")}


class Stops(TorchFunctionMode):
    """Counts the functions within its block that read from a tensor, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        name = getattr(function, "__name__", "")
        if name == "__getitem__":
            # Chosen by a mask, whose number of true values is the size of the result.
            index = arguments[1] if isinstance(arguments[1], tuple) else (arguments[1],)
            if any(isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in index):
                self.counts["mask"] += 1
        elif name in READS or (name == "to" and any(each == "cpu" for each in arguments[1:] if isinstance(each, str))):
            self.counts[name] += 1
        return function(*arguments, **(keywords or {}))

    @property
    def total(self) -> int:
        return sum(self.counts.values())


def test_the_counter_sees_what_reads() -> None:
    tensor = torch.arange(3)
    reads = [getattr(tensor, name) for name in ("tolist", "cpu", "numpy", "nonzero")]
    reads += [partial(kind, tensor[0]) for kind in (int, float, bool)]
    reads += [tensor[0].item, lambda: [1, 2][tensor[0]], lambda: tensor.to("cpu"), lambda: tensor[tensor > 0]]
    reads.append(lambda: 1 in tensor)
    for number, read in enumerate(reads):
        with Stops() as stops:
            read()
        assert stops.total >= 1, number
    with Stops() as stops:
        assert len(tensor + tensor) == tensor.shape[0] and tensor.argmax().dim() == 0
    assert stops.total == 0


SEARCHES = {
    "greedy": {"num_beams": 1},
    "beam": {"num_beams": 4},
    "n-best": {"num_beams": 4, "num_return_sequences": 4, "length_penalty_type": "power"},
    "sampling": {"do_sample": True, "num_beams": 1, "top_k": 0},
    "top-k": {"do_sample": True, "num_beams": 1, "top_k": 5, "top_p": 0.9},
    "ensemble": {"num_beams": 3, "ensemble": 1},
    "processors": {"num_beams": 2, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
}


@pytest.mark.variants(2)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", SEARCHES)
def test_a_step_of_a_search_stops_once(name, padded) -> None:
    """How many translations are unfinished decides about the next step; nothing else is read back."""
    settings = dict(SEARCHES[name])
    model, inputs = tiny_model(eos=1.0), {key: batch(6)[key] for key in ("input_ids", "attention_mask")}
    if padded:
        inputs["attention_mask"][0, 5:] = 0
    if "ensemble" in settings:
        settings["ensemble"] = [tiny_model(1, eos=1.0)]
    counts = []
    for length in (10, 50):
        torch.manual_seed(1)
        with Stops() as stops:
            model.generate(**inputs, **settings, max_new_tokens=length, min_new_tokens=length)
        counts.append(stops.counts)
    steps = sum((counts[1] - counts[0]).values())
    # And once more where the memory of the search grows.
    assert steps <= 40 * 1.1, counts[1] - counts[0]


@pytest.mark.parametrize("name", ["greedy", "beam", "n-best", "sampling"])
def test_a_search_by_graphs_reads_every_other_step(monkeypatch, name) -> None:
    """And once where it moves to other buffers. On a GPU the number is there already: it is read one step later."""
    monkeypatch.setattr(FastSearchMixin, "at_home", staticmethod(static_search.static_search))
    model, counts = tiny_model(), []
    for length in (10, 50):
        with Stops() as stops:
            model.generate(batch(6)["input_ids"], **SEARCHES[name], eos_token_id=None, max_new_tokens=length)
        counts.append(stops.counts)
    assert model in static_search.KEPT
    steps = sum((counts[1] - counts[0]).values())
    assert 15 <= steps <= 40 * 0.6, counts[1] - counts[0]


def test_a_text_goes_on_with_one_stop_a_step() -> None:
    model = tiny_model(kind=VaswaniForCausalLM)
    counts = []
    for length in (10, 50):
        with Stops() as stops:
            model.generate(batch()["input_ids"], num_beams=2, max_new_tokens=length, min_new_tokens=length)
        counts.append(stops.total)
    assert counts[1] - counts[0] <= 40 * 1.1


@pytest.fixture(scope="module")
def texts():
    tokenizer = train_tokenizer(["ab abc bca cab"], 20, kind="characters")
    return tokenizer, ["abc cab", "ab", "bca ab abc"] * 4, ["cab abc", "ab ab ab", "abc"] * 4


@pytest.fixture
def unchecked(monkeypatch):
    """Leaves out the check of ids, which is made on a CPU only."""
    monkeypatch.setattr(modeling_vaswani, "check_ids", lambda *_, **__: None)


def work_on(texts, times: int) -> dict[str, Callable]:
    tokenizer, sources, targets = texts
    model = tiny_model(vocab_size=40, decoder_layers=3, eos=1.0)
    search = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "num_beams": 2, "tokens_per_batch": 24}
    return {
        "score": lambda: log_probabilities(model, tokenizer, sources * times, targets * times, tokens_per_batch=24),
        "align": lambda: alignments(model, tokenizer, sources * times, targets * times, batch_size=2),
        "translate": lambda: translate_corpus(model, tokenizer, sources * times, **search),
    }


@pytest.mark.variants(2)
@pytest.mark.parametrize(("work", "most"), [("score", 3), ("align", 3), ("translate", STEPS + 11)])
def test_stops_of_a_batch(work, most, texts, unchecked) -> None:
    """Two look whether masks have padding, one reads the result; a translation has those of its lengths, too."""
    batches, found = [], []
    for times in (1, 5):
        run, passes = work_on(texts, times)[work], list[type]()
        # Counted in a run of its own: with hooks, another search would translate.
        hook = register_module_forward_hook(lambda module, *_, seen=passes: seen.append(type(module)))
        run()
        hook.remove()
        with Stops() as stops:
            run()
        found.append(stops.total)
        batches.append(passes.count(VaswaniEncoder))
    assert batches[1] > batches[0]
    assert found[1] - found[0] <= most * (batches[1] - batches[0])


@pytest.mark.parametrize("loss", ["kernel", "torch"])
def test_stops_of_an_update(loss, unchecked) -> None:
    """
    What the host decides by: the loss, the gradient norm, and the outcome, which is then read twice; of each batch
    whether it has padding, on two sides, and how many labels, if the loss is computed for those alone.
    """
    model = tiny_model(lm_head_bias=loss == "torch").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for batches in (1, 3):
        data = [with_labels() for _ in range(batches)]
        with Stops() as stops:
            Updater(Accelerator(), model, optimizer, TrainingRecipe())(data, Interruption()).outcome()
        found.append(stops.total)
    of_a_batch = (found[1] - found[0]) / 2
    assert of_a_batch <= 2 + (loss == "kernel")
    assert found[0] - of_a_batch <= 4


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
@pytest.mark.parametrize("training", [{}, {"ema_decay": 0.9}, {"r_drop": RDropRecipe()}, {"simcut": SimCutRecipe()}])
def test_an_update_of_a_gpu_stops_for_nothing_but_its_outcome(
    monkeypatch, cuda_graphs, optimizer, training, unchecked
) -> None:
    """Which is one tensor, and read when the next update is under way."""
    updates_of_a_gpu(monkeypatch)
    model, recipe, accelerator = tiny_model().train(), TrainingRecipe(optimizer=optimizer, **training), Accelerator()
    average = AveragedModel(model) if recipe.ema_decay else None
    wrapped, prepared = accelerator.prepare(model, build_optimizer(optimizer, model.named_parameters()))
    updater, passes = Updater(accelerator, wrapped, prepared, recipe, average), TwoPasses(recipe, 1, model)
    # What is made on the host.
    ready = [updater._ready(passes(with_labels(), torch.arange(3), 1)) for _ in range(2)]
    monkeypatch.setattr(updater, "_ready", lambda batch: batch)
    for number in range(6):
        with Stops() as stops, passes.loss():
            launched = updater(ready, Interruption(), is_first=number == 0)
        assert not stops.counts
        with Stops() as stops:
            assert launched.outcome().finite
        assert stops.counts == {"tolist": 1}
