"""The code that lies beside the weights of a model, and its renewal by that of this version."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..files import CODE, atomic_write_bytes, is_renewed, read_json
from ..model.configuration_vaswani import travelling_files

# Names of the files that some version has saved, without their common end. Renewal deletes those that this version no
# longer saves; any other file is somebody's own.
SAVED = """
    alignment as_written configuration contract decoding generation heads kernels loading markup modeling pipeline
    placement precision products rules search sentences sharing shortlist
"""


def installed_code(config: Mapping[str, Any]) -> dict[str, bytes]:
    """
    Returns the code that belongs to a model, as this version has it.

    Args:
        config (`Mapping[str, Any]`): contents of its config.json, which names the classes.

    Returns:
        `dict[str, bytes]`: contents by file name.
    """
    return {path.name: path.read_bytes() for path in travelling_files(config.get("auto_map") or {})}


def former_code(names: Collection[str], code: Collection[str]) -> list[str]:
    """Returns the names among those of a model's files that are code of an earlier version, and not in its `code`."""
    saved = {f"{name}{CODE}" for name in SAVED.split()}
    return sorted(name for name in names if name in saved and name not in code)


def renew_code(folder: Path) -> list[str]:
    """
    Replaces the code that a model was saved with by that of this version; all other files stay as they are.

    Args:
        folder (`Path`): folder of a model or a checkpoint.

    Returns:
        `list[str]`: names of the files that were written or deleted.

    Raises:
        ValueError: the folder has no Vaswani model.
        OSError: a file cannot be written.
    """
    config = read_json(folder / "config.json")
    check_has_code(folder, config)
    code = installed_code(config)
    new = [name for name in code if not is_renewed(folder / name)]
    for name in new:
        atomic_write_bytes(folder / name, code[name])
    # Nothing imports them any more.
    old = former_code([path.name for path in folder.iterdir()], code)
    for name in old:
        (folder / name).unlink()
    return new + old


def check_has_code(name: Path | str, config: Mapping[str, Any]) -> None:
    """Raises a `ValueError` if a config.json is of another type of model, or does not name the model's code."""
    if config.get("model_type") != "vaswani":
        raise ValueError(f"{name} has no Vaswani model, but one of the type {config.get('model_type')!r}.")
    if "auto_map" not in config:
        raise ValueError(f"config.json of {name} names no code (auto_map): load the model, and save it again.")
