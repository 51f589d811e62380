"""The check that a model computes what the modelling file says, which `decoding_vaswani.py` relies on.

[`IncrementalDecoder`] bypasses the modules whose results it computes. A model with replaced, subclassed, hooked or
patched modules or functions is left to transformers' searches, which call its modules.
"""

from collections import ChainMap
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_hooks
from transformers import cache_utils, masking_utils
from transformers.activations import ACT2FN
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel

from .contract_vaswani import existing

# Modules that `IncrementalDecoder` replaces, with their submodules: each must be exactly the class of this name in the
# modelling file, or one of torch's.
PARTS = {
    "VaswaniForConditionalGeneration": {"model": "VaswaniModel", "lm_head": "linear"},
    "VaswaniForCausalLM": {"model": "VaswaniModel", "lm_head": "linear"},
    # The encoder is called, whatever it is.
    "VaswaniModel": {"encoder": "any", "decoder": "VaswaniDecoder"},
    "VaswaniDecoder": {
        "embed_tokens": "embedding",
        "positions": "VaswaniPositions",
        "layers": "list",
        "norm": "final norm",
    },
    "VaswaniPositions": {"table": "embedding", "norm": "optional norm", "dropout": "VaswaniDropout"},
    "VaswaniDecoderLayer": {
        "self_attn": "VaswaniAttention",
        "self_attn_norm": "VaswaniAddAndNorm",
        "cross_attn": "VaswaniAttention",
        "cross_attn_norm": "VaswaniAddAndNorm",
        "feed_forward": "VaswaniFeedForward",
        "feed_forward_norm": "VaswaniAddAndNorm",
    },
    "VaswaniAttention": {"q_proj": "linear", "k_proj": "linear", "v_proj": "linear", "out_proj": "linear"},
    "VaswaniAddAndNorm": {"layer_norm": "norm", "dropout": "VaswaniDropout"},
    "VaswaniFeedForward": {
        "fc1": "linear",
        "activation": "activation",
        "dropout": "VaswaniDropout",
        "fc2": "linear",
    },
    "VaswaniDropout": {},
}
# Parts that a layer without attention to a source lacks.
OF_SOURCE = {"cross_attn", "cross_attn_norm"}
TORCH: dict[str, set[Any]] = {
    "linear": {nn.Linear},
    "embedding": {nn.Embedding, type(None)},
    "norm": {nn.LayerNorm},
    "final norm": {nn.LayerNorm, nn.Identity},
    "optional norm": {nn.LayerNorm, type(None)},
    # Called as a module; each of these works elementwise.
    "activation": {entry[0] if isinstance(entry, tuple) else entry for entry in dict.values(ACT2FN)},
    "list": {nn.ModuleList},
}
# Methods that do not affect what a model computes.
NOT_COMPUTING = {"generate", "save_pretrained", "push_to_hub"}
# Functions of `torch.nn.functional` that the modules call.
FUNCTIONS = ("dropout", "embedding", "layer_norm", "linear", "relu", "scaled_dot_product_attention", "softmax")
FOREIGN = (
    GenerationMixin,
    PreTrainedModel,
    *existing(cache_utils, "EncoderDecoderCache", "DynamicCache", "DynamicLayer"),
    GradientCheckpointingLayer,
    nn.Module,
    nn.Linear,
    nn.LayerNorm,
    nn.Embedding,
    nn.Identity,
    nn.ModuleList,
    nn.Dropout,
    nn.ReLU,
)


def _is_int8(kind: type) -> bool:
    """Returns whether a class is torch's dynamically quantized linear layer; by name, because importing it is slow."""
    return (kind.__module__, kind.__name__) == ("torch.ao.nn.quantized.dynamic.modules.linear", "Linear")


def _fits(module: Any) -> bool:
    """Returns whether the weights of a linear layer or LayerNorm have the shape that its attributes say."""
    if isinstance(module, nn.LayerNorm):
        return len(module.normalized_shape) == 1
    return module.weight.shape == (module.out_features, module.in_features)


def _is_regular(attention: Any) -> bool:
    """Returns whether all projections of an attention have a bias or none has, and all widths are whole heads."""
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    biases = {callable(layer.bias) or layer.bias is not None for layer in projections}
    widths = [layer.out_features % attention.num_heads for layer in projections]
    return len(biases) == 1 and not any(widths) and isinstance(attention.scaling, float)


def mask_functions() -> dict[str, Any]:
    """Returns transformers' functions that make masks, by the name of the attention."""
    return {
        name: make for table in existing(masking_utils, "ALL_MASK_ATTENTION_FUNCTIONS") for name, make in table.items()
    }


def computes(name: str, value: Any) -> bool:
    """Returns whether an attribute of a class affects what its modules compute; torch's compiler sets others."""
    return callable(value) and (name in ("__call__", "__getattr__", "__getattribute__") or not name.startswith("__"))


def is_unchanged(kind: type, attributes: dict[str, Any]) -> bool:
    """Returns whether a class still has these attributes, and no new one that overrides a base class."""
    now = vars(kind)
    if any(now.get(name) is not value for name, value in attributes.items()):
        return False
    new = (name for name in now.keys() - attributes.keys() if computes(name, now[name]))
    return not any(hasattr(base, name) for name in new for base in kind.__bases__)


class AsWritten:
    """
    Snapshot of the modelling file at import, to check later whether a model still computes what the file says.

    Args:
        model (`str`): name of the model's class.
        files (`dict[str, Any]`): global names of each file that the model is computed by; the first has its class.
    """

    def __init__(self, model: str, *files: dict[str, Any]) -> None:
        self.model, self.names = model, ChainMap(*files)
        self.functions = [(file, name, value) for file in files for name, value in file.items() if callable(value)]
        modules = {file["__name__"] for file in files}
        ours = [value for _, _, value in self.functions if getattr(value, "__module__", "") in modules]
        self.classes = {
            kind: {name: value for name, value in vars(kind).items() if computes(name, value)}
            for kind in (*FOREIGN, *ours)
            if isinstance(kind, type)
        }
        self.torch = {name: getattr(nn.functional, name) for name in FUNCTIONS}
        self.attentions = dict(self.names["ALL_ATTENTION_FUNCTIONS"])
        self.masks = mask_functions()
        self.callables: dict[type, set[str]] = {}

    def matches(self, model: Any) -> bool:
        """
        Returns whether [`IncrementalDecoder`] computes what a model computes.

        It does not if a class, function or attention of the file was replaced, or if a module of the decoder has
        another class, an overridden method, a hook, additional parameters or submodules, or is in training mode.
        """
        return (
            not (torch_hooks._global_forward_hooks or torch_hooks._global_forward_pre_hooks)
            and all(file.get(name) is value for file, name, value in self.functions)
            and all(getattr(nn.functional, name) is value for name, value in self.torch.items())
            and all(is_unchanged(kind, attributes) for kind, attributes in self.classes.items())
            and self._is(model, self.model)
            and model.lm_head.out_features == model.config.vocab_size
        )

    def _is(self, module: Any, kind: str) -> bool:
        """Returns whether a module and its submodules are what [`PARTS`] says about its kind."""
        if kind == "any" or (module is None and type(None) in TORCH.get(kind, ())):
            return True
        if not self._is_of(type(module), kind) or not self._is_untouched(module, kind):
            return False
        if kind == "list":
            return all(self._is(layer, "VaswaniDecoderLayer") for layer in module)
        if kind == "VaswaniAttention" and not (_is_regular(module) and self._is_known(module)):
            return False
        parts = PARTS.get(kind, {})
        if kind == "VaswaniDecoderLayer" and not module.has_source:
            parts = {name: part for name, part in parts.items() if name not in OF_SOURCE}
        return all(self._is(getattr(module, name, None), part) for name, part in parts.items())

    def _is_untouched(self, module: nn.Module, kind: str) -> bool:
        """Returns whether a module has no hook or overridden method, and no additional parameter or submodule."""
        if module._forward_hooks or module._forward_pre_hooks:
            return False
        if not self._callables(type(module)).isdisjoint(vars(module)):
            return False
        # Called as a module; torch leaves it in training mode, which does not change its output.
        if _is_int8(type(module)):
            return True
        if kind in ("linear", "norm", "optional norm") and not _fits(module):
            return False
        parameters = () if kind in PARTS or kind == "activation" else ("weight", "bias")
        parts = module._modules.keys() if kind == "list" else PARTS.get(kind, {}).keys()
        return not (module.training or module._parameters.keys() - parameters or module._modules.keys() - parts)

    def _is_of(self, found: Any, kind: str) -> bool:
        """Returns whether a class is the one that a kind of module has."""
        if kind == "linear" and _is_int8(found):
            return True
        return found in TORCH[kind] if kind in TORCH else found is self.names[kind]

    def _is_known(self, attention: Any) -> bool:
        """Returns whether the implementation and masks of an attention are those that transformers had at import."""
        name = attention.config._attn_implementation
        if name not in (None, "eager") and name not in self.attentions:
            return False
        tables = ((self.names["ALL_ATTENTION_FUNCTIONS"], self.attentions), (mask_functions(), self.masks))
        return all(now.get(name) is before.get(name) for now, before in tables)

    def _callables(self, kind: type) -> set[str]:
        """Returns the names of methods that a module looks up in its class."""
        if kind not in self.callables:
            self.callables[kind] = {name for name in dir(kind) if callable(getattr(kind, name, None))} - NOT_COMPUTING
        return self.callables[kind]


def is_unmodified(model: Any) -> bool:
    """Returns whether [`IncrementalDecoder`] computes what a model with an `lm_head` on its decoder computes."""
    as_written: AsWritten = model.as_written
    return as_written.matches(model)
