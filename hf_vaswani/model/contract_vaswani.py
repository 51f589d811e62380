"""The contract between these classes and transformers, where its releases differ or would fail in silence.

- transformers 5.24 renamed `past_key_values` to `cache`, in arguments and in outputs. These classes use the new name,
  and understand both with every release ([`takes_both_cache_names`], [`with_both_cache_names`]).
- A keyword that no module reads is refused ([`refuse_unread`]): what vanishes in `**kwargs` gives a wrong result.
- `generate()` proves at its first use that its steps with a cache compute what they compute without one
  ([`prove_generate`]).
- Names of transformers that only make something faster are looked up where they are used ([`existing`],
  [`is_of_transformers`]): a release without them imports this code, and loads, trains and translates.
"""

import functools
import inspect
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
    if cache is not None and keywords.get(name) is not None:
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
        if kwargs.get("past_key_values") is not None and CACHE == "cache" and not torch.compiler.is_compiling():
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

    members = {
        "__module__": __name__,
        "__doc__": output.__doc__,
        "__init__": make,
        "__contains__": lambda self, key: output.__contains__(self, CACHE if key == "cache" else key),
        "__getitem__": lambda self, key: output.__getitem__(self, CACHE if key == "cache" else key),
        "cache": property(lambda self: self.past_key_values),
    }
    return type(output.__name__, (output,), members)


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
# What an attention function gets from its layer is not for callers to give.
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

# Classes whose `generate()` was proved in this process.
PROVED: set[type] = set()


def prove_generate(kind: type[Any]) -> None:
    """
    Checks once in a process, with a tiny model, that `generate()` of transformers and a class work together: its steps
    with a cache must have the logits of those without one. It takes milliseconds, on the CPU.

    Args:
        kind (`type`): class of this package whose `generate()` is used, or a subclass, whose base is checked.

    Raises:
        ImportError: they do not, so that the class would say other words without an error.
    """
    kind = next(base for base in kind.__mro__ if "stacks" in vars(base))
    if kind in PROVED:
        return
    PROVED.add(kind)
    found: list[torch.Tensor] = []
    reason = None
    try:
        # Neither the random numbers nor the settings of the caller take part.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.autocast("cpu", enabled=False):
            sizes = {"d_model": 8, "d_ff": 8, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
            model = kind(kind.config_class(vocab_size=16, **sizes)).float().eval()
            model.generation_config.eos_token_id = None
            inputs = {"input_ids": torch.tensor([[0, 5, 6], [7, 8, 9]]), "attention_mask": torch.ones(2, 3).long()}
            inputs["attention_mask"][0, 0] = 0
            for use_cache in (True, False):
                # `output_logits` chooses the search of transformers, which calls the modules.
                steps = model.generate(
                    **inputs,
                    max_new_tokens=3,
                    do_sample=False,
                    synced_gpus=False,
                    use_cache=use_cache,
                    output_logits=True,
                    return_dict_in_generate=True,
                ).logits
                found.append(torch.stack(steps))
        if not torch.allclose(found[0], found[1], rtol=1e-3, atol=1e-3):
            reason = "its decoding steps with a cache differ from those without one"
    except Exception as error:
        reason = f"its decoding steps end with {type(error).__name__}: {error}"
        raise _contract_error(kind, reason) from error
    finally:
        if reason is not None:
            PROVED.discard(kind)
    if reason is not None:
        raise _contract_error(kind, reason)


def _contract_error(kind: type, reason: str) -> ImportError:
    return ImportError(
        f"generate() of transformers {transformers.__version__} does not work with {kind.__name__}, which was tested "
        f"with {TESTED_RELEASES}: {reason}. Install one of these releases, or a newer hf_vaswani; if the model's code "
        "came with its weights, renew it (hf-vaswani renew)."
    )


# ---- Names that may be missing -----------------------------------------------------------------------------------


def existing(module: Any, *names: str) -> list[Any]:
    """Returns those attributes of a module of transformers that it has."""
    return [getattr(module, name) for name in names if hasattr(module, name)]


def is_of_transformers(kind: type, names: set[str]) -> bool:
    """Returns whether a class is one of transformers with one of these names."""
    return kind.__name__ in names and kind.__module__.split(".")[0] == "transformers"
