"""Checks of a saved model while it is loaded: errors in its files that transformers passes over or only logs."""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from huggingface_hub import hf_hub_download, is_offline_mode
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError


def check_shapes(model: Any, report: dict[str, Any]) -> None:
    """
    Checks that every weight has the same shape in the file and in the model.

    Args:
        model ([`PreTrainedModel`]): the loaded model.
        report (`dict[str, Any]`): report of `from_pretrained(..., output_loading_info=True)`.

    Raises:
        RuntimeError: a weight has another shape.
    """
    misfits = report["mismatched_keys"]
    if misfits:
        name, there, here = min(misfits)
        raise RuntimeError(
            f"The weights of {model.name_or_path} do not match its config.json: {len(misfits)} of another shape "
            f"(first: {name}, {tuple(there)} in the file and {tuple(here)} in the model)."
        )


def check_names(model: Any, report: dict[str, Any]) -> None:
    """
    Checks that no weight has another name in the file than in the model, which would leave it random.

    Args:
        model ([`PreTrainedModel`]): the loaded model.
        report (`dict[str, Any]`): report of `from_pretrained(..., output_loading_info=True)`.

    Raises:
        ValueError: the file has weights that the model lacks, and lacks some of the same stack, or of a model of the
            same class; or one matrix was saved for two that the config does not tie.
    """
    missing, unexpected = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    if model.config.architectures != [type(model).__name__]:
        # A model of another class: the heads, and a stack that the file lacks, are new.
        missing, unexpected = ([name for name in names if _stack_of(name)] for names in (missing, unexpected))
        parts = {_stack_of(name) for name in missing} & {_stack_of(name) for name in unexpected}
        missing, unexpected = ([name for name in names if _stack_of(name) in parts] for names in (missing, unexpected))
    if missing and unexpected:
        raise ValueError(
            f"The weights of {model.name_or_path} do not match its config.json: they have {unexpected[0]}, which the "
            f"model lacks, and lack {missing[0]}. Rename them as the model names them."
        )
    source, target = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"
    config = model.config
    if missing == [target] and config.share_embeddings and not config.tie_word_embeddings:
        raise ValueError(
            f"The weights of {model.name_or_path} lack {target}: it was saved as {source}, to which "
            "tie_word_embeddings=false does not tie it. Load the model with tie_word_embeddings=True, which leaves an "
            "output matrix of its own as it is, and save it again."
        )


def _stack_of(name: str) -> str:
    """Returns the stack that a weight belongs to, or an empty string."""
    return next((stack for stack in ("encoder", "decoder") if stack in name.split(".")[:2]), "")


def load_stored(model: Any, weights: Mapping[str, Any], is_new: Callable[[str], bool] = lambda name: False) -> None:
    """
    Loads weights into a model by their names. A matrix that is tied to another may be named once.

    Args:
        model (`nn.Module`): the model.
        weights (`Mapping[str, torch.Tensor]`): weights by name.
        is_new (`Callable[[str], bool]`): whether a weight of the model keeps its value if it is not among them.

    Raises:
        ValueError: the model lacks one of the weights, or they lack one of the model.
    """
    own = model.state_dict(keep_vars=True)
    named = {id(weight) for name, weight in own.items() if name in weights}
    kinds = {
        "missing": [name for name, weight in own.items() if id(weight) not in named and not is_new(name)],
        "unexpected": [name for name in weights if name not in own],
    }
    found = [f"{len(names)} {kind} (first: {min(names)})" for kind, names in kinds.items() if names]
    if found:
        raise ValueError(f"Weights do not fit to the {type(model).__name__}: {', '.join(found)}.")
    model.load_state_dict(weights, strict=False)


def find_loading_error(model: Any, report: dict[str, Any]) -> str | None:
    """
    Describes weights that are missing in the file of a model, unexpected there, or non-finite.

    Args:
        model ([`PreTrainedModel`]): the loaded model.
        report (`dict[str, Any]`): report of `from_pretrained(..., output_loading_info=True)`.

    Returns:
        `str`: one sentence, or `None` if the weights are complete and finite.
    """
    kinds = {"missing_keys": "missing", "unexpected_keys": "unexpected"}
    found = [f"{len(names)} {kind} (first: {min(names)})" for key, kind in kinds.items() if (names := report[key])]
    if not found and (name := find_non_finite(model)):
        found = [f"{name} has non-finite values"]
    if not found:
        return None
    return f"The weights of {model.name_or_path} do not match its config.json: {', '.join(found)}."


def find_non_finite(model: Any) -> str | None:
    """Returns the name of the first parameter or buffer of a model with NaN or infinity, or `None`."""
    by_device: dict[torch.device, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        if each.device.type != "meta" and (flag := _all_finite(each)) is not None:
            by_device[each.device][name] = flag
    # One read for each device: a GPU waits for each.
    for flags in by_device.values():
        for name, is_finite in zip(flags, torch.stack([*flags.values()]).tolist(), strict=True):
            if not is_finite:
                return name
    return None


def _all_finite(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns whether a tensor has finite numbers alone, on its device; `None` if its format cannot say."""
    try:
        # torch computes with numbers of 8 bits in other formats only, and bfloat16 has the range of all of them.
        is_small = tensor.is_floating_point() and tensor.dtype.itemsize == 1
        return (tensor.to(torch.bfloat16) if is_small else tensor).isfinite().all()
    except NotImplementedError:
        return None


def check_settings_file(name: str, **kwargs: Any) -> None:
    """
    Checks a generation_config.json that transformers has not read: it treats a file that is damaged, or cannot be
    downloaded, like a missing one.

    Args:
        name (`str`): folder of the model, or its id on the Hub.
        kwargs: arguments of `from_pretrained` that say where the files are.

    Raises:
        ValueError: the file is not valid JSON.
        OSError: the Hub could not be asked whether the file exists.
    """
    place: dict[str, Any] = {key: kwargs.get(key) for key in ("cache_dir", "revision", "subfolder", "token")}
    offline = bool(kwargs.get("local_files_only")) or is_offline_mode()
    path = os.path.join(name, place["subfolder"] or "", "generation_config.json")
    if not os.path.isdir(name):
        try:
            path = hf_hub_download(name, "generation_config.json", local_files_only=offline, **place)
        except LocalEntryNotFoundError:
            if not offline:
                raise
            return
        except EntryNotFoundError:
            return
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            json.load(file)
