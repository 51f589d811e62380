"""Checks of a saved model while it is loaded: errors in its files that transformers passes over or only logs."""

import json
import os
from typing import Any

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
    tensors = (*model.named_parameters(), *model.named_buffers())
    return next((name for name, each in tensors if each.device.type != "meta" and not each.isfinite().all()), None)


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
