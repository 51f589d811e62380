"""The contract with transformers: both names of the cache, no keyword that vanishes, and no release that lies."""

import ast
import importlib
import inspect
import itertools
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from hf_vaswani import (
    VaswaniEncoderModel,
    VaswaniForCausalLM,
    VaswaniForConditionalGeneration,
    VaswaniForMaskedLM,
    VaswaniForPreTraining,
    VaswaniForSequenceClassification,
    VaswaniForTokenClassification,
    VaswaniModel,
)
from hf_vaswani.model import generation_vaswani, heads_vaswani, modeling_vaswani
from hf_vaswani.model.configuration_vaswani import CACHE, NAMES_OF_THE_CACHE
from hf_vaswani.model.generation_vaswani import HOOKS, prove_generate
from hf_vaswani.model.modeling_vaswani import VaswaniAttention, VaswaniDecoder, VaswaniEncoder, eager_attention_forward
from hf_vaswani.model.search_vaswani import ROW_BY_ROW

from ..conftest import ROOT, dear
from ..networks import tiny_config, tiny_model

IDS = torch.arange(4, 16).view(2, 6)
ENCODER, DECODER = {"is_encoder_decoder": False}, {"is_encoder_decoder": False, "is_decoder": True}
SOURCE, BOTH = {"input_ids": IDS}, {"input_ids": IDS, "decoder_input_ids": IDS}


def make(kind: type, **fields: Any) -> Any:
    torch.manual_seed(0)
    return kind(tiny_config(**fields)).eval()


# Each class, in each form that it can have, and what its `forward` needs.
MODELS: dict[str, tuple[Callable[[], Any], dict[str, torch.Tensor]]] = {
    "encoder": (lambda: make(VaswaniEncoder), SOURCE),
    "decoder": (
        lambda: make(VaswaniDecoder),
        {"input_ids": IDS, "encoder_hidden_states": torch.ones(2, 3, 16)},
    ),
    "decoder alone": (lambda: make(VaswaniDecoder, **DECODER), SOURCE),
    "model": (lambda: make(VaswaniModel), BOTH),
    "model of an encoder": (lambda: make(VaswaniModel, **ENCODER), SOURCE),
    "model of a decoder": (lambda: make(VaswaniModel, **DECODER), SOURCE),
    "translation": (lambda: make(VaswaniForConditionalGeneration), BOTH),
    "encoder model": (lambda: make(VaswaniEncoderModel), SOURCE),
    "masked": (lambda: make(VaswaniForMaskedLM), SOURCE),
    "pre-training": (lambda: make(VaswaniForPreTraining), SOURCE),
    "causal": (lambda: make(VaswaniForCausalLM), SOURCE),
    "text classifier of an encoder": (lambda: make(VaswaniForSequenceClassification), SOURCE),
    "text classifier of a decoder": (lambda: make(VaswaniForSequenceClassification, **DECODER), SOURCE),
    "token classifier": (lambda: make(VaswaniForTokenClassification), SOURCE),
}
WITH_CACHE = ["decoder", "decoder alone", "model", "model of a decoder", "translation", "causal"]


def test_the_models_are_of_every_class() -> None:
    ours = {
        value
        for file in (modeling_vaswani, heads_vaswani)
        for value in vars(file).values()
        if isinstance(value, type) and issubclass(value, PreTrainedModel) and value.forward is not nn.Module.forward
    }
    has_forward = {kind for kind in ours if kind is not PreTrainedModel and "forward" in vars(kind)}
    assert has_forward | {VaswaniEncoderModel} == {type(build()) for build, _ in MODELS.values()}


def call(name: str, **keywords: Any) -> Any:
    build, inputs = MODELS[name]
    with torch.no_grad():
        return build()(**inputs | keywords)


# ---- Two names of the cache --------------------------------------------------------------------------------------


def last(output: Any) -> torch.Tensor:
    return output.logits if "logits" in output else output.last_hidden_state


@pytest.mark.parametrize("argument", NAMES_OF_THE_CACHE)
@pytest.mark.parametrize("name", WITH_CACHE)
def test_a_cache_is_used_by_each_of_its_names(name, argument, transformers_log) -> None:
    build, inputs = MODELS[name]
    ids = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    model = build()
    with torch.no_grad(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        expected = last(model(**inputs, use_cache=False))
        first = model(**inputs | {ids: IDS[:, :4]}, use_cache=True)
        cache = first[CACHE]
        for column in (4, 5):
            step = model(**inputs | {ids: IDS[:, column : column + 1], argument: cache})
            torch.testing.assert_close(last(step)[:, 0], expected[:, column])
            assert step[CACHE] is cache
    assert cache.get_seq_length() == 6
    # Where transformers has the new name, its models warn of the old one, and so do ours.
    is_old = argument == "past_key_values" and CACHE == "cache"
    assert [str(each.message)[:31] for each in warned] == 2 * is_old * ["`past_key_values` is deprecated"]
    assert {Path(each.filename).name for each in warned} <= {"test_contract.py", "module.py"}
    assert not transformers_log.records


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_an_attention_alone_uses_a_cache_by_each_of_its_names() -> None:
    attention, cache = VaswaniAttention(tiny_config(), is_causal=True, layer_idx=0), DynamicCache()
    for argument in NAMES_OF_THE_CACHE:
        attention(torch.randn(1, 1, attention.config.d_model), **{argument: cache})
    assert cache.get_seq_length() == 2


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("argument", NAMES_OF_THE_CACHE)
@pytest.mark.parametrize("name", MODELS)
def test_a_cache_is_used_or_refused(name, argument) -> None:
    cache = DynamicCache()
    if name in ("decoder", "model", "translation"):
        cache = EncoderDecoderCache(cache, DynamicCache())
    if name in [*WITH_CACHE, "text classifier of a decoder"]:
        call(name, **{argument: cache})
        assert cache.get_seq_length() == 6
    else:
        with pytest.raises(TypeError, match="cache was given|past_key_values was given"):
            call(name, **{argument: cache})


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", WITH_CACHE)
def test_two_caches_are_refused(name) -> None:
    with pytest.raises(TypeError, match="Both cache and past_key_values were given"):
        call(name, cache=DynamicCache(), past_key_values=DynamicCache())
    call(name, cache=None, past_key_values=None)


@pytest.mark.parametrize("argument", NAMES_OF_THE_CACHE)
@pytest.mark.parametrize("kind", [VaswaniForConditionalGeneration, VaswaniForCausalLM])
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_generate_takes_a_cache_by_each_of_its_names(kind, argument) -> None:
    """transformers 5.24 warns of the old name by itself."""
    model = tiny_model(kind=kind)
    cache = DynamicCache(config=model.config)
    if kind is VaswaniForConditionalGeneration:
        cache = EncoderDecoderCache(cache, DynamicCache(config=model.config))
    settings = {"max_new_tokens": 5, "min_new_tokens": 5}
    found = model.generate(IDS, **settings, **{argument: cache})
    assert torch.equal(found, model.generate(IDS, **settings, use_cache=False))
    assert cache.get_seq_length() == found.shape[1] - 1


def test_an_output_is_one_of_transformers() -> None:
    output = call("translation", use_cache=True)
    assert type(output) is transformers.modeling_outputs.Seq2SeqLMOutput
    copied = type(output)(**dict(output.items()))
    assert copied[CACHE] is copied.to_tuple()[1] is output.to_tuple()[1] is output[CACHE]
    # Since 5.24 the old name is understood there, too.
    assert output.past_key_values is output[CACHE]


@pytest.mark.slow
@pytest.mark.skipif(CACHE == "past_key_values", reason="continuous batching needs transformers 5.24")
def test_continuous_batching_writes_what_generate_writes() -> None:
    model = tiny_model(eos=-torch.inf, kind=VaswaniForCausalLM)
    texts = [[5, 6, 7], [8, 9]]
    expected = [model.generate(torch.tensor([ids]), max_new_tokens=4)[0, len(ids) :].tolist() for ids in texts]
    settings = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=2)
    sizes = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    found = model.generate_batch(texts, generation_config=settings, continuous_batching_config=sizes)
    assert [each.generated_tokens for each in found.values()] == expected


# ---- Keywords that nobody reads ----------------------------------------------------------------------------------

NOBODY_READS = ["kv_cache", "labls", "shift_labels", "decoder_position_ids", "seq_idx", "output_router_logits"]
OF_ANOTHER_STACK = {
    "encoder": ["decoder_input_ids", "encoder_outputs", "position_ids"],
    "decoder": ["token_type_ids", "encoder_outputs", "decoder_input_ids"],
    "decoder alone": ["encoder_attention_mask", "decoder_input_ids"],
    "model": ["position_ids", "labels"],
    "model of an encoder": ["decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds", "encoder_outputs"],
    "model of a decoder": ["decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds", "encoder_outputs"],
    "translation": ["position_ids", "logits_to_keep", "next_sentence_label"],
    "encoder model": ["decoder_input_ids", "position_ids", "labels"],
    "masked": ["decoder_input_ids", "encoder_outputs", "position_ids", "next_sentence_label"],
    "pre-training": ["decoder_input_ids", "encoder_outputs", "position_ids"],
    "causal": ["decoder_input_ids", "decoder_attention_mask", "encoder_outputs"],
    "text classifier of an encoder": ["decoder_input_ids", "position_ids"],
    "text classifier of a decoder": ["decoder_input_ids"],
    "token classifier": ["decoder_input_ids", "position_ids", "use_cashe"],
}


@pytest.mark.parametrize("name", MODELS)
def test_a_keyword_that_nobody_reads_is_refused_by_name(name) -> None:
    build, inputs = MODELS[name]
    model, keywords = build(), NOBODY_READS + OF_ANOTHER_STACK[name]
    for keyword in keywords:
        message = rf"^{keyword} was given, but neither Vaswani\w+ nor its attention \(sdpa\)"
        with pytest.raises(TypeError, match=message):
            model(**inputs, **{keyword: IDS})
    # As everywhere in transformers, None is as good as nothing.
    model(**inputs, **dict.fromkeys(keywords))


@pytest.mark.parametrize("name", MODELS)
def test_keywords_that_somebody_reads_are_taken(name) -> None:
    build, inputs = MODELS[name]
    output = call(name, output_hidden_states=True, output_attentions=True, use_cache=False)
    assert [key for key in output if "hidden_states" in key] and [key for key in output if "attentions" in key]
    assert isinstance(build()(**inputs, return_dict=False), tuple)


@pytest.mark.parametrize("name", MODELS)
def test_an_attention_function_gets_the_keywords_that_it_names(name) -> None:
    got = []

    def listening(module, query, key, value, attention_mask, loudness=None, **kwargs):
        got.append(loudness)
        return eager_attention_forward(module, query, key, value, attention_mask, kwargs["scaling"])

    transformers.AttentionInterface.register("listening", listening)
    transformers.AttentionMaskInterface.register("listening", transformers.masking_utils.eager_mask)
    build, inputs = MODELS[name]
    model = build()
    model.set_attn_implementation("listening")
    model(**inputs, loudness=11)
    assert got and set(got) == {11}
    with pytest.raises(TypeError, match=r"volume was given, but neither Vaswani\w+ nor its attention \(listening\)"):
        model(**inputs, volume=11)
    for keyword in ("scaling", "query"):
        with pytest.raises(TypeError, match=f"{keyword} was given"):
            model(**inputs, **{keyword: 11})


def test_packed_texts_may_be_described_twice() -> None:
    """As transformers' flattening collator does: attention that is not flash sees them by their positions."""
    packed = {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]), "input_ids": IDS[:1]}
    lengths = {"cu_seq_lens_q": torch.tensor([0, 3, 6]), "cu_seq_lens_k": torch.tensor([0, 3, 6])}
    lengths |= {"max_length_q": 3, "max_length_k": 3}
    twice = packed | lengths | {"seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1]])}
    assert torch.equal(call("causal", **twice).logits, call("causal", **packed).logits)
    # The lengths alone are for flash attention.
    with pytest.raises(TypeError, match=r"cu_seq_lens_q was given, .*\(sdpa\)"):
        call("causal", **lengths)
    model = make(VaswaniForCausalLM)
    model.config._attn_implementation_internal = "flash_attention_2"
    modeling_vaswani.refuse_unread(model.model.decoder, **lengths)


# ---- The proof of generate() -------------------------------------------------------------------------------------

GENERATING = [VaswaniForConditionalGeneration, VaswaniForCausalLM]


@pytest.fixture
def unproved(monkeypatch: pytest.MonkeyPatch) -> set[type]:
    proved: set[type] = set()
    monkeypatch.setattr(generation_vaswani, "PROVED", proved)
    return proved


@pytest.mark.parametrize("kind", GENERATING)
def test_generate_is_proved_once_and_in_silence(kind, unproved, transformers_log) -> None:
    model = tiny_model(kind=kind)

    class Mine(kind):
        stacks = kind.stacks

        def __init__(self, config, more) -> None:
            super().__init__(config)

    mine = Mine(model.config, "more").eval()
    before = torch.random.get_rng_state()
    for each in (model, mine, model):
        each.generate(IDS, max_new_tokens=2, min_new_tokens=2)
    assert unproved == {kind}
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not transformers_log.records


@pytest.mark.parametrize("kind", GENERATING)
def test_the_proof_does_not_depend_on_where_it_is_called(kind, unproved) -> None:
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            prove_generate(kind)
    finally:
        torch.set_default_dtype(dtype)
    assert unproved == {kind}


def test_a_proof_that_was_interrupted_is_made_again(monkeypatch, unproved) -> None:
    model = tiny_model()
    with monkeypatch.context() as changed, pytest.raises(KeyboardInterrupt):

        def interrupt(*args, **kwargs):
            raise KeyboardInterrupt

        changed.setattr(VaswaniForConditionalGeneration, "prepare_inputs_for_generation", interrupt)
        model.generate(IDS, max_new_tokens=3)
    assert not unproved
    model.generate(IDS, max_new_tokens=3)
    assert unproved == {VaswaniForConditionalGeneration}


def forgets_the_cache(kind: type, monkeypatch: pytest.MonkeyPatch) -> str:
    """What happened to models whose `forward` did not know the name that transformers 5.24 gave the cache."""
    forward = kind.forward

    def forgetful(self, *args, **kwargs):
        for name in NAMES_OF_THE_CACHE:
            kwargs.pop(name, None)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", forgetful)
    if kind is VaswaniForCausalLM:
        # The positions of its padding do not fit a single token.
        return "its decoding steps end with "
    return "its decoding steps with a cache differ from those without one"


def another_name_of_the_cache(kind: type, monkeypatch: pytest.MonkeyPatch) -> str:
    prepare = kind.prepare_inputs_for_generation

    def renaming(self, *args, **kwargs):
        inputs = prepare(self, *args, **kwargs)
        return {"kv_cache" if name == CACHE else name: value for name, value in inputs.items()}

    monkeypatch.setattr(kind, "prepare_inputs_for_generation", renaming)
    return "its decoding steps end with TypeError: kv_cache was given, but neither VaswaniDecoder"


def the_whole_target_at_each_step(kind: type, monkeypatch: pytest.MonkeyPatch) -> str:
    """The cache is right, but its tokens are read again."""
    prepare = kind.prepare_inputs_for_generation

    def whole(self, *args, next_sequence_length=None, **kwargs):
        return prepare(self, *args, next_sequence_length=None, **kwargs)

    monkeypatch.setattr(kind, "prepare_inputs_for_generation", whole)
    return "its decoding steps"


@pytest.mark.parametrize("kind", GENERATING)
@pytest.mark.parametrize("change", [forgets_the_cache, another_name_of_the_cache, the_whole_target_at_each_step])
def test_a_broken_contract_is_an_error_that_names_the_versions(monkeypatch, unproved, kind, change) -> None:
    model = tiny_model(kind=kind)
    with monkeypatch.context() as changed:
        reason = change(kind, changed)
        # Whichever search would run, and each time.
        for settings in ({}, {"num_beams": 2}, {"use_cache": False}):
            with pytest.raises(ImportError) as error:
                model.generate(IDS, max_new_tokens=3, **settings)
            said = str(error.value)
            assert said.startswith(f"generate() of transformers {transformers.__version__} does not work with ")
            assert f"{kind.__name__}, which was tested with {generation_vaswani.TESTED_RELEASES}: {reason}" in said
    model.generate(IDS, max_new_tokens=3)
    assert unproved == {kind}


# ---- Names that may be missing -----------------------------------------------------------------------------------

FILES = sorted((ROOT / "hf_vaswani" / "model").glob("*_vaswani.py"))
# What the network, its settings and its pipeline are made of, and what types name: without it there is no model.
NEEDED = {
    *("ACT2FN", "ALL_ATTENTION_FUNCTIONS", "Cache", "DynamicCache", "EncoderDecoderCache", "GenerationConfig"),
    *("GenerationMixin", "GradientCheckpointingLayer", "MaxLengthCriteria", "ModelOutput", "OutputRecorder"),
    *("Pipeline", "PreTrainedConfig", "PreTrainedModel", "PreTrainedTokenizerBase", "StoppingCriteria"),
    *("TransformersKwargs", "Unpack", "can_return_tuple", "capture_outputs", "create_bidirectional_mask"),
    *("create_causal_mask", "initialization", "logging", "merge_with_config_defaults", "BaseModelOutput"),
    *("BaseModelOutputWithPastAndCrossAttentions", "CausalLMOutputWithPast", "MaskedLMOutput", "Seq2SeqLMOutput"),
    *("Seq2SeqModelOutput", "SequenceClassifierOutput", "TokenClassifierOutput"),
    *("LogitsProcessorList", "PreTrainedTokenizerFast", "StoppingCriteriaList", "modeling_outputs"),
}


TREES = [ast.parse(path.read_text("utf-8")) for path in FILES]
# Imported by the first call of `generate()`, which does without them if they cannot be.
LATER = {"cache_vaswani", "search_vaswani"}


def imported(later: bool) -> Iterator[tuple[str, str]]:
    """Modules and names that the travelling files import from transformers, when a model is imported or later."""
    for path, tree in zip(FILES, TREES, strict=True):
        lazy = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) or path.stem in LATER]
        inside = {id(each) for node in lazy for each in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (id(node) in inside) == later:
                module = str(node.module)
                if node.level == 0 and module.split(".")[0] == "transformers":
                    yield from ((module, alias.name) for alias in node.names)


def optional_names() -> list[tuple[str, str]]:
    """Modules and names that are looked up where they are used."""
    found = {*imported(later=True)}
    found |= {("transformers.generation.logits_process", name) for name in ROW_BY_ROW}
    found |= {("transformers.generation.stopping_criteria", "EosTokenCriteria")}
    return sorted(each for each in found if each[1] not in NEEDED)


def test_the_import_of_a_model_needs_nothing_but_what_it_is_made_of() -> None:
    assert {name for _, name in imported(later=False)} <= NEEDED
    assert ("transformers.generation.utils", "GenerateBeamOutput") in optional_names()


class Without(ModuleType):
    """A module of transformers as another release may have it: without one of its names."""

    def __init__(self, module: ModuleType, name: str) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(__path__=getattr(module, "__path__", []), hidden=(module, name))

    def __getattr__(self, key: str) -> Any:
        module, name = self.__dict__["hidden"]
        if key == name:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        return getattr(module, key)


COPIES = itertools.count()


def copy_of_the_code(folder: Path = ROOT / "hf_vaswani" / "model") -> tuple[ModuleType, ModuleType]:
    """Imports the travelling files once more, as the code of a saved model is, and returns two of them."""
    package = ModuleType(f"transformers_modules_copy_{next(COPIES)}")
    package.__path__ = [str(folder)]
    sys.modules[package.__name__] = package
    names = ("heads_vaswani", "pipeline_vaswani")
    heads, pipelines = (importlib.import_module(f"{package.__name__}.{name}") for name in names)
    return heads, pipelines


def what_it_does(heads: ModuleType, pipelines: ModuleType, folder: Path, with_pipeline: bool = True) -> list[Any]:
    """Loads, trains, translates and writes with a copy of the code."""
    modeling = sys.modules[heads.__package__ + ".modeling_vaswani"]
    done: list[Any] = []
    model = modeling.VaswaniForConditionalGeneration.from_pretrained(folder)
    torch.manual_seed(0)
    model.train()(input_ids=IDS, labels=IDS, epsilon_ls=0.1, loss_only=True).loss.backward()
    done.append(model.model.encoder.embed_tokens.weight.grad)
    model.eval()
    settings = {"repetition_penalty": 1.2, "max_new_tokens": 6, "return_dict_in_generate": True}
    for each in ({}, {"num_beams": 3}, {"num_beams": 3, "output_scores": True}, {"do_sample": True, "top_k": 3}):
        torch.manual_seed(0)
        done.append(model.generate(IDS, **settings, **each).sequences)
    causal = heads.VaswaniForCausalLM(tiny_config(lm_head_bias=True)).eval()
    causal.load_state_dict({name: weight.sin() + 0.01 for name, weight in causal.state_dict().items()})
    done += [causal.generate(IDS, max_new_tokens=6, num_beams=beams) for beams in (1, 2)]
    if not with_pipeline:
        return done
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    translator = pipelines.VaswaniTranslationPipeline(model, tokenizer)
    done.append([each["translation_text"] for each in translator(["one two", "three"], max_new_tokens=6)])
    return done


@pytest.fixture(scope="module")
def folder(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    VaswaniForConditionalGeneration.from_pretrained(tiny_run / "model").save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(tiny_run / "model").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Any]:
    return what_it_does(heads_vaswani, importlib.import_module("hf_vaswani.model.pipeline_vaswani"), folder)


def assert_the_same(found: list[Any], expected: list[Any]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


@pytest.mark.variants(2)
@pytest.mark.parametrize(
    ("module", "name"), [each if i % 3 == 0 else dear(*each) for i, each in enumerate(optional_names())]
)
def test_without_a_name_of_transformers_a_model_loads_trains_and_translates(
    monkeypatch, folder, expected, module, name
) -> None:
    whole = importlib.import_module(module)
    assert hasattr(whole, name)
    parent, _, child = module.rpartition(".")
    without = Without(whole, name)
    monkeypatch.setitem(sys.modules, module, without)
    monkeypatch.setattr(importlib.import_module(parent), child, without)
    # Where transformers reads the name itself, it is still there: another release has its own.
    assert_the_same(what_it_does(*copy_of_the_code(), folder), expected)


@pytest.mark.variants(3)
@pytest.mark.parametrize("name", [*HOOKS, "_maybe_prepare_encoder_kwargs_for_generation", "adjust_generation_fn"])
def test_without_a_method_of_transformers_a_model_loads_trains_and_translates(
    monkeypatch, folder, expected, name
) -> None:
    """By transformers' own rules if a method is missing that these classes override."""
    theirs = inspect.getattr_static(GenerationMixin, name)
    owner = next(kind for kind in GenerationMixin.__mro__ if name in vars(kind))
    with monkeypatch.context() as hidden:
        # While the code is imported, as in a release in which the method has another name.
        hidden.delattr(owner, name)
        copied = copy_of_the_code()
    assert inspect.getattr_static(GenerationMixin, name) is theirs
    found = what_it_does(*copied, folder)
    assert torch.equal(found[0], expected[0])
    if name in HOOKS:
        return
    assert_the_same(found, expected)


# Private names by which a model, and its attention, tell transformers what they are.
DECLARED = {"_attn_implementation", "_init_weights", "_tied_weights_keys"}
# Files of transformers whose private names ours may use.
THEIRS = (
    *("cache_utils", "configuration_utils", "core_model_loading", "modeling_utils"),
    *("generation/configuration_utils", "generation/utils"),
    *("pipelines/base", "pipelines/text_to_text", "utils/hub"),
)


# Fields of a node of Python's syntax that may be a name, which of a constant is looked up.
NAMING = ("name", "id", "attr", "arg", "value")


def private_names() -> dict[str, set[str]]:
    """Private names of transformers' models, configs, searches and pipelines, and the files of ours that have them."""
    place = Path(transformers.__file__).parent
    theirs = {
        name
        for file in THEIRS
        if (place / f"{file}.py").is_file()
        for name in re.findall(r"\b_[a-z]\w+", (place / f"{file}.py").read_text("utf-8"))
    }
    found: dict[str, set[str]] = {}
    for path, tree in zip(FILES, TREES, strict=True):
        within = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            for name in (getattr(node, field, None) for field in NAMING if id(node) not in within):
                if isinstance(name, str) and name in theirs - DECLARED and not hasattr(nn.Module(), name):
                    found.setdefault(name, set()).add(path.name)
    return found


def test_the_private_names_are_found() -> None:
    assert private_names().keys() >= {*HOOKS, "_is_user_defined", "_weight_conversions", "_no_split_modules"}


class Renamed(ast.NodeTransformer):
    """Gives what has a private name another one, as code has it that looks for a name of another release."""

    def __init__(self, name: str) -> None:
        self.name = name

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for field in NAMING:
            if getattr(node, field, None) == self.name:
                setattr(node, field, f"{self.name}_of_another_release")
        return super().generic_visit(node)


@pytest.mark.variants(3)
@pytest.mark.parametrize(
    "name", [each if i % 6 == 0 else dear(each) for i, each in enumerate(sorted(private_names()))]
)
def test_without_a_private_name_a_model_loads_trains_and_translates(tmp_path, folder, expected, name) -> None:
    """Whether it is a method, an attribute or a keyword; of a pipeline's, only pipelines may need it."""
    places = private_names()[name]
    for path in FILES:
        code = path.read_text("utf-8")
        if path.name in places:
            code = ast.unparse(Renamed(name).visit(ast.parse(code)))
        (tmp_path / path.name).write_text(code, "utf-8")
    has_pipeline = "pipeline_vaswani.py" not in places
    found = what_it_does(*copy_of_the_code(tmp_path), folder, with_pipeline=has_pipeline)
    torch.testing.assert_close(found[0], expected[0])
    if name not in HOOKS:
        assert_the_same(found[1:], expected[1 : len(found)])
