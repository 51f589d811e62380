"""The contract between these classes and transformers, where its releases differ or would fail in silence.

- transformers 5.24 renamed `past_key_values` to `cache`, in arguments and in outputs. These classes use the new name,
  and understand both with every release ([`takes_both_cache_names`], [`with_both_cache_names`]).
- A keyword that no module reads is refused ([`refuse_unread`]): what vanishes in `**kwargs` gives a wrong result.
- `generate()` proves at its first use that its steps with a cache compute what they compute without one
  ([`prove_generate`]).
- Names of transformers that only make something faster are looked up where they are used ([`is_of_transformers`]), or
  imported by the first search: a release without them imports this code, and loads, trains and translates.
"""

import functools
import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import modeling_outputs
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Releases of transformers that the tests pass with.
TESTED_RELEASES = "5.20 to 5.24"


# ---- Two names of the cache --------------------------------------------------------------------------------------

NAMES_OF_THE_CACHE = ("cache", "past_key_values")
# The one that this release of transformers uses.
CACHE = "cache" if "cache" in modeling_outputs.Seq2SeqLMOutput.__dataclass_fields__ else "past_key_values"


def rename_cache(keywords: dict[str, Any], name: str) -> dict[str, Any]:
    """
    Returns keyword arguments in which the cache, if there is one, is called `name`.

    Raises:
        TypeError: there are two caches, one by each name.
    """
    (other,) = {*NAMES_OF_THE_CACHE} - {name}
    if other not in keywords:
        return keywords
    keywords = dict(keywords)
    cache = keywords.pop(other)
    if cache is not None and keywords.get(name) is not None and keywords[name] is not cache:
        raise TypeError("Both cache and past_key_values were given, which are two names of one argument: pass one.")
    if keywords.get(name) is None:
        keywords[name] = cache
    return keywords


def takes_both_cache_names(forward: Callable[..., Any]) -> Callable[..., Any]:
    """
    Decorates a `forward` with an argument `cache`, which can then be passed as `past_key_values`, too. Where
    transformers has the new name, the old one is answered by a `FutureWarning`, as by the models of transformers.
    """

    @functools.wraps(forward)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        if "past_key_values" not in kwargs:
            return forward(*args, **kwargs)
        if kwargs["past_key_values"] is not None and CACHE == "cache" and not torch.compiler.is_compiling():
            warnings.warn(
                f"`past_key_values` is deprecated for `{forward.__qualname__}`. Use `cache` instead.",
                FutureWarning,
                stacklevel=2,
            )
        return forward(*args, **rename_cache(kwargs, "cache"))

    return renamed


def with_both_cache_names(output: type[Any]) -> type[Any]:
    """Returns a subclass of an output class before transformers 5.24, which has the new name of the cache, too."""

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        output.__init__(self, *args, **rename_cache(kwargs, CACHE))

    def by_old_name(method: str) -> Callable[..., Any]:
        return lambda self, key, *more: getattr(output, method)(self, CACHE if key == "cache" else key, *more)

    methods = ("__contains__", "__getitem__", "__setitem__", "get")
    members = {
        "__module__": __name__,
        "__doc__": output.__doc__,
        "__init__": make,
        "cache": property(lambda self: self.past_key_values, lambda self, value: setattr(self, CACHE, value)),
    }
    return type(output.__name__, (output,), members | {method: by_old_name(method) for method in methods})


# From 5.24 on transformers itself reads both names, and warns of the old one.
BaseModelOutputWithPastAndCrossAttentions = modeling_outputs.BaseModelOutputWithPastAndCrossAttentions
CausalLMOutputWithPast = modeling_outputs.CausalLMOutputWithPast
Seq2SeqLMOutput = modeling_outputs.Seq2SeqLMOutput
Seq2SeqModelOutput = modeling_outputs.Seq2SeqModelOutput
if CACHE == "past_key_values":
    BaseModelOutputWithPastAndCrossAttentions = with_both_cache_names(BaseModelOutputWithPastAndCrossAttentions)
    CausalLMOutputWithPast = with_both_cache_names(CausalLMOutputWithPast)
    Seq2SeqLMOutput = with_both_cache_names(Seq2SeqLMOutput)
    Seq2SeqModelOutput = with_both_cache_names(Seq2SeqModelOutput)


def is_paged(cache: Any) -> bool:
    """Returns whether a cache is that of transformers' continuous batching, which has rules of its own."""
    return type(cache).__name__ == "PagedAttentionCache"


def update_cache(
    cache: Any, key: torch.Tensor, value: torch.Tensor, layer_idx: int | None, keywords: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Adds keys and values to the cache of a layer, and returns all of them.

    Args:
        cache ([`Cache`]): the cache.
        key, value (`torch.Tensor` of shape `(batch, heads, new, head_dim)`): of the new positions.
        layer_idx (`int`): the layer's entry.
        keywords (`dict[str, Any]`): of the attention function; a paged cache reads and changes them.
    """
    if not is_paged(cache):
        return cache.update(key, value, layer_idx)
    if CACHE == "cache":
        return cache.update(key, value, layer_idx, kwargs=keywords)
    # Before transformers 5.24 the attention function updates it.
    keywords["cache"] = cache
    return key, value


# ---- Keywords that nobody reads ----------------------------------------------------------------------------------

# Keywords that transformers' decorators of a stack read, or set by themselves, and those that `generate()` hands down
# to every model after it has read them.
READ_BY_TRANSFORMERS = {
    "assistant_tokenizer",
    "debug_io",
    "debug_io_dir",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "prune_layers",
    "tokenizer",
    "use_cache",
}
# Keywords that an attention function of transformers reads without naming them, by a part of its name.
READ_BY_ATTENTION = {
    "flash": {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "deterministic"},
    "flex": {"kernel_options"},
}
# Keywords that say where the texts of a row begin, as positions do: other attention functions see it by the mask.
OF_PACKED_TEXTS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
# Arguments that a layer passes to its attention function by itself, so that callers cannot set them.
GIVEN_BY_LAYERS = {"module", "query", "key", "value", "attention_mask", "dropout", "scaling", "cache", "kwargs"}


def refuse_unread(module: Any, **keywords: Any) -> None:
    """
    Refuses keywords that nothing below a module reads. `None` counts as not given.

    Args:
        module ([`PreTrainedModel`]): the model or stack whose `forward` got them.
        keywords: what is left for its layers, whose attention functions may read it.

    Raises:
        TypeError: naming the first of them.
    """
    for name, value in keywords.items():
        if value is not None and name not in READ_BY_TRANSFORMERS and not is_read_by_attention(module, name):
            attention = module.config._attn_implementation or "eager"
            raise TypeError(
                f"{name} was given, but neither {type(module).__name__} nor its attention ({attention}) reads it."
            )


def is_read_by_attention(module: Any, keyword: str) -> bool:
    """Returns whether the attention function of a module's layers has an argument of this name."""
    implementation = module.config._attn_implementation or "eager"
    if any(part in implementation and keyword in names for part, names in READ_BY_ATTENTION.items()):
        return True
    attention = ALL_ATTENTION_FUNCTIONS.get(implementation)
    return attention is not None and keyword in inspect.signature(attention).parameters.keys() - GIVEN_BY_LAYERS


# ---- The proof of generate() -------------------------------------------------------------------------------------

# Classes whose `generate()` was proved in this process, and whether this thread is about to prove one.
PROVED: set[type] = set()
PROVING = threading.local()


def prove_generate(kind: type[Any]) -> None:
    """
    Checks once in a process, with a tiny model, that `generate()` of transformers and a class work together: its steps
    with a cache must have the logits of those without one. It takes a tenth of a second, on the CPU.

    Args:
        kind (`type`): class of this package whose `generate()` is used, or a subclass, whose base is checked.

    Raises:
        ImportError: they do not, so that the class would say other words without an error.
    """
    package = __name__.rpartition(".")[0]
    kind = next(base for base in kind.__mro__ if base.__module__.rpartition(".")[0] == package)
    # The tiny model calls `generate()`, too.
    if kind in PROVED or getattr(PROVING, "now", False):
        return
    PROVING.now = True
    try:
        cached, uncached = (_logits_of_a_tiny_model(kind, use_cache) for use_cache in (True, False))
    except Exception as error:
        raise _contract_error(kind, f"its decoding steps end with {type(error).__name__}: {error}") from error
    finally:
        PROVING.now = False
    if not torch.allclose(cached, uncached, rtol=1e-3, atol=1e-3):
        raise _contract_error(kind, "its decoding steps with a cache differ from those without one")
    PROVED.add(kind)


def _logits_of_a_tiny_model(kind: type[Any], use_cache: bool) -> torch.Tensor:
    """Returns the logits of three steps of transformers' greedy search, of shape `(steps, batch, vocab_size)`."""
    sizes = {"d_model": 8, "d_ff": 8, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    # Made without the random numbers of the caller, and computed without the settings of the caller.
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        model = kind(kind.config_class(vocab_size=16, **sizes))
    model = model.to_empty(device="cpu").float().eval()
    with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float32))
        model.generation_config.eos_token_id = None
        found = model.generate(
            torch.tensor([[0, 5, 6], [7, 8, 9]]),
            attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]]),
            max_new_tokens=3,
            do_sample=False,
            synced_gpus=False,
            use_cache=use_cache,
            # Chooses the search of transformers, which calls the modules.
            output_logits=True,
            return_dict_in_generate=True,
        )
    return torch.stack(found.logits)


def _contract_error(kind: type, reason: str) -> ImportError:
    return ImportError(
        f"generate() of transformers {transformers.__version__} does not work with {kind.__name__}, which was tested "
        f"with {TESTED_RELEASES}: {reason}. Install one of these releases, or a newer hf_vaswani; if the model's code "
        "came with its weights, renew it (hf-vaswani renew)."
    )


# ---- Names that may be missing -----------------------------------------------------------------------------------


def is_of_transformers(kind: type, names: set[str]) -> bool:
    """Returns whether a class is one of transformers with one of these names."""
    return kind.__name__ in names and kind.__module__.split(".")[0] == "transformers"


# ---- Classes that may be changed ---------------------------------------------------------------------------------

# The modules of this package and how each computes, as their files say. By it the search of `generate()` sees which
# modules of a model somebody changed.
FORWARD: dict[type, Callable[..., Any]] = {}
