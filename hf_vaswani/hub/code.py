"""The code that lies beside the weights of a model, and its renewal by that of this version."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..files import CODE, atomic_write_bytes, read_json
from ..model.configuration_vaswani import travelling_files

# Names of the files that some version has saved, without their common end. Renewal deletes those that this version no
# longer saves; any other file is somebody's own.
SAVED = """
    alignment as_written cache configuration contract decoding generation heads kernels loading markup modeling
    pipeline placement precision products rules search sentences sharing shortlist
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


def renewed_files(name: Path | str, names: Iterable[str], find: Callable[[str], Path]) -> dict[str, bytes | None]:
    """
    Compares the code that a model was saved with to that of this version.

    Args:
        name (`Path` or `str`): the model's name in error messages.
        names (`Iterable[str]`): names of its files.
        find (`Callable[[str], Path]`): finds or downloads one of them.

    Returns:
        `dict[str, bytes | None]`: the files to write by name, then those to delete, which have `None`.

    Raises:
        ValueError: it is no Vaswani model.
    """
    config, present = read_json(find("config.json")), set(names)
    if config.get("model_type") != "vaswani":
        raise ValueError(f"{name} has no Vaswani model, but one of the type {config.get('model_type')!r}.")
    if "auto_map" not in config:
        raise ValueError(f"config.json of {name} names no code (auto_map): load the model, and save it again.")
    code = installed_code(config)
    new = {each: text for each, text in code.items() if each not in present or find(each).read_bytes() != text}
    former = {f"{each}{CODE}" for each in SAVED.split()} - code.keys()
    return {**new, **dict.fromkeys(sorted(former & present))}


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
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file, not a model folder.")
    files = renewed_files(folder, (path.name for path in folder.iterdir()), folder.joinpath)
    for name, content in files.items():
        if content is None:
            (folder / name).unlink()
        else:
            atomic_write_bytes(folder / name, content)
    return list(files)
