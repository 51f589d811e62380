"""Imports of optional dependencies, whose error prints the command that installs them."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(name: str, what: str = "This") -> Iterator[None]:
    """
    Surrounds imports of packages that one of the extras of `pyproject.toml` installs.

    Args:
        name (`str`): the extra.
        what (`str`): what needs the packages, the subject of the error's sentence.

    Raises:
        ImportError: if one of them is missing, with the command that installs it.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{what} needs {error.name}: pip install 'hf_vaswani[{name}]'", name=error.name) from error
