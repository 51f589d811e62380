"""
Recipe files: reads one, applies the overrides of the command line, and checks every key and value.

train.py RECIPE.yaml [--section.key value ...]
"""

import difflib
import json
import re
import stat
import sys
import textwrap
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from .extras import extra
from .recipe import FLOAT, SECTIONS, Recipe, declared_keys, docstrings, flat, keys_of, section_in, shortened, shown
from .recipe_checks import apply_task_defaults, check_ranges

with extra("train"):
    import yaml

# Limits far above any recipe: bytes of the file, levels and entries of its YAML, and digits of a number.
MAX_BYTES = 1_000_000
MAX_LEVELS = 20
MAX_ENTRIES = 10_000
LONG_NUMBER = re.compile(r"[-+]?([0-9._:]{30,}|0[bx][0-9a-f_]{30,})", re.IGNORECASE)

# Sections of version 0.1 whose verbs are gone: recipes that have them are read without them.
REMOVED_SECTIONS = ("diversification",)

TYPES = {int: "an integer", float: "a number", bool: "true or false", str: "a string", NoneType: "null"}

WORDS = {"yes": True, "on": True, "no": False, "off": False}

COMMAND_LINE = "The command line"
HELP = """ Every key below can be set in the recipe file, or overridden here.
A list is continued with a final +, as in --training.trackers+ wandb.

  --recipe FILE
        The recipe file (YAML), if it is not the first argument.
  --reverse
        Swap the languages, and the columns of the text: the model translates in the other direction. The run folder
        gets -reverse at its end, unless --run_dir names one.
  -h, --help
        Print this help.
"""


class _Loader(yaml.SafeLoader):
    """
    Reads the YAML of recipes: `no` and dates are strings, and `1e-4` is a number. Refuses repeated keys, and what
    would crash or stall a parser: deep nesting, aliases that multiply or refer to themselves, numbers of hundreds of
    digits, unpaired surrogates, and tags such as `!!timestamp`.

    Args:
        text (`str`): YAML.
        where (`str`): its place in the error message.
    """

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":bool"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str, where: str) -> None:
        super().__init__(text)
        self._where = where
        self._count = 0
        # For each open collection, whether it has an anchor, which an alias could refer to.
        self._opened: list[bool] = []

    def get_event(self) -> yaml.Event:
        """Returns the next event of the parser, checked."""
        event = super().get_event()
        self._check(event)
        return event

    def _check(self, event: yaml.Event) -> None:
        where, opened = self._where, self._opened
        line = "" if event.start_mark is None else f"in line {event.start_mark.line + 1}"
        if isinstance(event, (yaml.CollectionStartEvent, yaml.ScalarEvent)) and event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            raise ValueError(f"{where} has the YAML tag {shown(tag)} {line}: write the value without it.")
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append(event.anchor is not None)
        elif isinstance(event, yaml.CollectionEndEvent):
            opened.pop()
        elif isinstance(event, yaml.AliasEvent) and any(opened):
            raise ValueError(
                f"{where} has the alias *{event.anchor} {line}, inside another anchor: write the value out."
            )
        elif isinstance(event, yaml.ScalarEvent) and LONG_NUMBER.fullmatch(event.value):
            raise ValueError(f"{where} has a number of {len(event.value)} digits {line}: {shown(event.value)}.")
        elif isinstance(event, yaml.ScalarEvent) and re.search("[\ud800-\udfff]", event.value):
            raise ValueError(f"{where} has an unpaired UTF-16 surrogate {line}: {shown(event.value)}.")
        self._count += 1
        if len(opened) > MAX_LEVELS or self._count > MAX_ENTRIES:
            raise ValueError(
                f"{where} is not a recipe: it has more than {MAX_LEVELS} levels or {MAX_ENTRIES:,} entries {line}."
            )

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Returns a mapping, whose keys differ."""
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for i, name in enumerate(names):
            if name in names[:i]:
                line = [key for key, _ in node.value if key.value == name][1].start_mark.line + 1
                raise ValueError(f"{self._where} repeats the key {shown(name)} in line {line}.")
        return super().construct_mapping(node, deep)


# As in YAML 1.2: version 1.1 reads `no`, Norwegian or a precision, as a boolean.
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("(true|True|TRUE|false|False|FALSE)$"), "tTfF")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, "-+0123456789")


# ---- Files -------------------------------------------------------------------------------------------------------


def _read_file(path: Path, extended_by: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Returns the content of a recipe file and of the one that it extends; keys and types are checked."""
    where = f"The recipe {str(path)!r}"
    try:
        about = path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"The recipe file {str(path)!r} does not exist.") from error
    if not stat.S_ISREG(about.st_mode):
        kind = "a folder" if stat.S_ISDIR(about.st_mode) else "not a regular file"
        raise ValueError(f"{where} is {kind}: it must be a YAML file.")
    if about.st_size > MAX_BYTES:
        raise ValueError(f"{where} has {about.st_size:,} bytes, but a recipe has at most {MAX_BYTES:,}.")
    try:
        content = _Loader(path.read_text(encoding="utf-8"), where).get_single_data()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8: {error.reason} at byte {error.start + 1}.") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is not valid YAML: {shortened(_said(error), 400)}.") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{where} must consist of `key: value` lines, but it is {'empty' if content is None else shown(content)}."
        )
    content = _nested(content, Recipe)
    base = content.pop("extends", None)
    for name in REMOVED_SECTIONS:
        content.pop(name, None)
    _built(Recipe, content, "", where)
    if base is None:
        return content
    if not isinstance(base, str):
        raise ValueError(f"{where} must have the path of another recipe under 'extends', but it has {shown(base)}.")
    extended_by = (*extended_by, path.resolve())
    if (path.parent / base).resolve() in extended_by:
        raise ValueError(f"{where} extends {base!r}, which extends this recipe in turn: remove one of the two lines.")
    return _merged(_read_file(path.parent / base, extended_by), content)


def _nested(content: dict[str, Any], section: Any) -> dict[str, Any]:
    """Returns the content of a section in which dotted keys, `training.max_steps: 10`, stand below the first name."""
    sections = {
        name: section_in(hint)
        for name, (_, hint) in keys_of(section).items()
        if section_in(hint) and get_origin(hint) not in (list, dict)
    }
    found: dict[str, Any] = {}
    for name, value in content.items():
        outer, _, key = str(name).partition(".")
        if key and outer in sections and isinstance(found.get(outer) or {}, dict):
            name, value = outer, {key: value}
        both = isinstance(value, dict) and isinstance(found.get(name), dict)
        found[name] = found[name] | value if both else value
    for name in sections:
        if isinstance(found.get(name), dict):
            found[name] = _nested(found[name], sections[name])
    return found


def _merged(base: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of a recipe with that of another one in front of it; sections are merged key by key."""
    return base | {name: base.get(name, {}) | part if name in SECTIONS else part for name, part in content.items()}


def _said(error: yaml.YAMLError) -> str:
    """Returns the message of a YAML error with line and column, without the name of the stream and the excerpt."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    parts = ((error.context, error.context_mark), (error.problem, error.problem_mark))
    said = [
        f"{what} in line {mark.line + 1}, column {mark.column + 1}" if mark else what for what, mark in parts if what
    ]
    return ", ".join(said)


# ---- Types -------------------------------------------------------------------------------------------------------


def _built(hint: Any, value: Any, key: str, where: str) -> Any:
    """
    Returns a value of YAML as the type hint of its key has it: a mapping becomes a section.

    Args:
        hint: the type hint.
        value: the value.
        key (`str`): dotted name of the key; empty for the whole recipe.
        where (`str`): place of the value in the error message.

    Raises:
        ValueError: a key is unknown, or a value has another type than its key.
    """
    section = section_in(hint)
    if section is None or (value is None and NoneType in get_args(hint)):
        if isinstance(value, str):
            value = _unquoted(value, hint)
        if not _has_type(value, hint):
            expected = _in_words(hint)
            # The value of a list that is wrong may be one of its items.
            found = "it is or has" if "a list" in expected else "it is"
            given = "null" if value is None else shown(value)
            raise ValueError(f"{key} must be {expected}, but {found} {given}.")
        return float(value) if isinstance(value, int) and float in (hint, *get_args(hint)) else value
    lines = "`key: value` lines"
    if get_origin(hint) is list:
        if not isinstance(value, list) or not all(item and isinstance(item, dict) for item in value):
            raise ValueError(
                f"{where} must have a list of sources under {key!r}, each with {lines}, but it has {shown(value)}."
            )
        return [_built(section, item, f"{key}[{i}]", where) for i, item in enumerate(value)]
    if get_origin(hint) is dict:
        if not isinstance(value, dict) or not all(isinstance(item, dict) for item in value.values()):
            raise ValueError(f"{where} must have names under {key!r}, each with {lines}, but it has {shown(value)}.")
        return {str(name): _built(section, item, f"{key}.{name}", where) for name, item in value.items()}
    if not isinstance(value, dict):
        raise ValueError(f"{where} must have {lines} under {key!r}, but it has {shown(value)}.")
    values = {}
    for name, item in value.items():
        below = f"{key}.{name}" if key else str(name)
        if name not in keys_of(section):
            raise ValueError(_unknown(below, where))
        field, inner = keys_of(section)[name]
        values[field.name] = _built(inner, item, below, where)
    return section(**values)


def _unquoted(text: str, hint: Any) -> Any:
    """
    Returns the number, boolean (also `yes` and `off`) or null that a string has within quotes, as version 0.1 reads it
    for a key that has no strings, and for the number of a column; otherwise, the string.
    """
    try:
        value = WORDS.get(text.lower(), _Loader(text, "").get_single_data())
    except (ValueError, yaml.YAMLError):
        return text
    is_meant = text.strip() and _has_type(value, hint) and (type(value) is int or not _has_type(text, hint))
    return value if is_meant else text


def _has_type(value: Any, hint: Any) -> bool:
    """Says whether a value of YAML has a type: an integer is a number, but neither true nor a string is one."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is Literal:
        return isinstance(value, str) and value in parts
    if kind in (Union, UnionType):
        return any(_has_type(value, part) for part in parts)
    if kind is list:
        return isinstance(value, list) and all(_has_type(item, parts[0]) for item in value)
    if kind is dict:
        return isinstance(value, dict) and all(_has_type(item, str) for pair in value.items() for item in pair)
    return type(value) in ((int, float) if hint is float else (hint,))


def _in_words(hint: Any) -> str:
    """Returns a type in words: `int | None` is "an integer or null"."""
    kinds = list(dict.fromkeys(_kinds(hint)))
    return " or ".join([", ".join(kinds[:-1]), kinds[-1]]) if kinds[1:] else kinds[0]


def _kinds(hint: Any) -> list[str]:
    """Returns the values that a type allows, in words."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is Literal:
        return [repr(value) for value in parts]
    if kind in (Union, UnionType):
        return [word for part in parts for word in _kinds(part)]
    if kind is list:
        words = _kinds(parts[0])
        return [f"a list of {', '.join(words)}" if words[1:] else "a list, as in [a, b]"]
    if kind is dict:
        return ["{language: file}" if parts[1] is str else "{name: keys}"]
    return [TYPES.get(hint, "keys")]


def _unknown(key: str, where: str) -> str:
    """Returns the message about a key that no recipe has."""
    # The name of a validation set is the user's.
    general = re.sub(r"^validation_sets\.[^.]+", "validation_sets.NAME", re.sub(r"\[\d+\]", "", key))
    # A section is not what somebody meant by one of its keys.
    known = [name for name in (*declared_keys(), *SECTIONS) if "." in name or "." not in general]
    if general in known:
        outer = key.partition(".")[0]
        return f"{where} has the key {shown(key)} outside of {outer!r}: write it below {outer!r}, where it belongs."
    nearest = difflib.get_close_matches(general, known, n=1)
    if not nearest:
        return f"{where} has the unknown key {shown(key)}: --help lists all keys."
    return f"{where} has the unknown key {shown(key)}: did you mean {nearest[0]!r}?"


# ---- The command line --------------------------------------------------------------------------------------------


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the options of a command line, without their dashes, and their values."""
    remaining = iter(arguments)
    for argument in remaining:
        option, equals, value = argument.partition("=")
        if not option.startswith("--") or option == "--":
            raise ValueError(f"The command line has {shown(argument)}, but an option was expected, as in --seed 2.")
        if not equals:
            value = next(remaining, "--")
            if value.startswith("--"):
                raise ValueError(f"The command line has {option} without a value, as in {option}=VALUE.")
        yield option[2:], value


def _value(text: str) -> Any:
    """Returns what YAML reads in a value of the command line; a string need not be YAML."""
    try:
        return _Loader(text, f"The command line's {shown(text)}").get_single_data()
    except yaml.YAMLError:
        return text


def _overridden(hint: Any, content: Any, path: Sequence[str], option: str, text: str) -> Any:
    """
    Returns the content of a recipe, or of a part of it, in which a key has the value of the command line.

    Args:
        hint: the type hint of the part.
        content: the part, in YAML's types; `None` if the recipe does not have it.
        path (`Sequence[str]`): names that lead from the part to the key.
        option (`str`): the whole dotted key. With a final `+`, the value is one more item of a list, or several.
        text (`str`): the value as YAML, or a string.

    Raises:
        ValueError: the key is unknown, or has another structure than the value.
    """
    section, kind = section_in(hint), get_origin(hint)
    if path and kind is list:
        # A key alone is that of the last source.
        *others, last = content or [{}]
        return [*others, _overridden(section, last, path, option, text)]
    if path:
        name, *below = path
        if kind is not dict and (section is None or name not in keys_of(section)):
            raise ValueError(_unknown(option.removesuffix("+"), COMMAND_LINE))
        inner = section if kind is dict else keys_of(section)[name][1]
        before = content or {}
        return before | {name: _overridden(inner, before.get(name), below, option, text)}
    value = _value(text)
    if option.endswith("+"):
        key = option.removesuffix("+")
        items = Recipe().flat().get(key) if content is None else content
        if not isinstance(items, list | None):
            raise ValueError(f"The command line adds to {key}, which is no list: it is {shown(items)}.")
        return [*(items or []), *(value if isinstance(value, list) else [value])]
    if option in SECTIONS and not isinstance(value, dict):
        raise ValueError(
            f"The command line sets --{option} to {shown(text)}: override its keys one by one, as in --{option}.KEY "
            "VALUE."
        )
    if section is not None:
        return (content or {}) | value if kind not in (list, dict) and isinstance(value, dict) else value
    # A string is what was written, even if it looks like YAML.
    return text if isinstance(value, str) or not text or not _has_type(value, hint) else value


def _help(program: str, purpose: str) -> str:
    """Returns every key with its type, default and meaning."""
    lines = [f"usage: {program} RECIPE.yaml [--section.key value ...]", "", purpose + HELP]
    defaults = Recipe().flat()
    for outer in ("", *SECTIONS):
        section = keys_of(Recipe)[outer][1] if outer else Recipe
        lines += ["", textwrap.fill(" ".join(str(section.__doc__).split()), 100), ""]
        meanings = docstrings(section)
        for name, (_, hint) in keys_of(section).items():
            key = f"{outer}.{name}" if outer else name
            if key in defaults:
                lines.append(f"  --{key}  ({_in_words(hint)}; default: {json.dumps(defaults[key])})")
                lines += textwrap.wrap(
                    f"        {meanings[name]}", 100, subsequent_indent=" " * 8, break_on_hyphens=False
                )
    return "\n".join(lines) + "\n"


def load_recipe(
    argv: Sequence[str],
    program: str = "accelerate launch train.py",
    purpose: str = "Trains a model by a recipe.",
) -> Recipe:
    """
    Reads a recipe file and the overrides that follow it.

    Args:
        argv (`Sequence[str]`): the command line without the program's name: `RECIPE.yaml`, then any number of
            `--section.key value`. `--help` prints every key with its type, default and meaning.
        program (`str`): the command that the usage line shows.
        purpose (`str`): what it does, for `--help`.

    Returns:
        [`Recipe`]: complete and checked, with `run_dir` filled in.

    Raises:
        ValueError: a key is unknown (the message suggests the nearest one), a value has the wrong type or is out of
            range, or the file is not valid YAML.
        FileNotFoundError: the recipe file does not exist.
    """
    if {"-h", "--help"} & set(argv):
        sys.stdout.write(_help(program, purpose))
        raise SystemExit(0)
    is_reversed, argv = "--reverse" in argv, [word for word in argv if word != "--reverse"]
    path = Path(argv[0]) if argv and not argv[0].startswith("-") else None
    content = {} if path is None else _read_file(path)
    options = list(_options(argv if path is None else argv[1:]))
    for option, text in options:
        if option == "recipe":
            content = _merged(content, _read_file(Path(text)))
        else:
            content = _overridden(Recipe, content, option.removesuffix("+").split("."), option, text)
            # One at a time, because the next one may go on from its value.
            _built(Recipe, content, "", COMMAND_LINE)
    recipe: Recipe = _built(Recipe, content, "", COMMAND_LINE)
    recipe.given = frozenset(flat(content))
    apply_task_defaults(recipe)
    check_ranges(recipe)
    if not recipe.run_dir:
        if path is None:
            raise ValueError(
                "There is no recipe: name a file, as in RECIPE.yaml, or give --run_dir and the keys as options."
            )
        recipe.run_dir = str(Path("runs") / path.stem)
    if is_reversed:
        _reverse(recipe, dict(options))
    return recipe


def _reverse(recipe: Recipe, overrides: Collection[str]) -> None:
    """
    Turns a recipe into that of the other direction, on the same text. The overrides are keys of the command line.

    Raises:
        ValueError: the task has no directions, or the recipe names something that belongs to its own direction.
    """
    if recipe.task != "translation":
        raise ValueError(f"--reverse needs task 'translation', but the task is {recipe.task!r}.")
    fixed = {"initialize.from": recipe.initialize.from_, "teacher.model": recipe.teacher.model}
    for key, value in (fixed | {"hub.repo_id": recipe.hub.repo_id}).items():
        if value is not None and key not in overrides:
            raise ValueError(
                f"{key} is {shown(value)}, which is of the recipe's own direction. With --reverse, name another "
                f"one, or none, as in --{key} null."
            )
    # Languages of a validation set that are not given are those of `data`, which change sides as well.
    for part in (recipe.data, *recipe.more_data, *recipe.validation_sets.values()):
        for name in ("language", "column"):
            source, target = f"source_{name}", f"target_{name}"
            part.__dict__ |= {source: getattr(part, target), target: getattr(part, source)}
    if "run_dir" not in overrides:
        recipe.run_dir += "-reverse"
