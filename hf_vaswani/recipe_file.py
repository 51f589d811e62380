"""
Recipe files: reads one, applies the overrides of the command line, and checks every key and value.

train.py RECIPE.yaml [--section.key value ...]
"""

import contextlib
import difflib
import json
import re
import stat
from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .recipe import SECTIONS, EvaluationSetRecipe, Recipe, SourceRecipe, flat, options_of, shortened, shown, spelled
from .recipe_checks import check_ranges, check_set_name, settle_task

try:
    import yaml
    from jsonargparse import ArgumentError, ArgumentParser, get_loader, set_loader, set_parsing_settings
except ImportError as error:
    raise ImportError(f"Recipe files need {error.name}: pip install 'hf_vaswani[train]'") from error

set_parsing_settings(docstring_parse_attribute_docstrings=True)

# Limits far above any recipe: bytes of the file, levels and entries of its YAML, and digits of a number.
MAX_BYTES = 1_000_000
MAX_LEVELS = 20
MAX_ENTRIES = 10_000
LONG_NUMBER = re.compile(r"[-+]?([0-9._:]{30,}|0[bx][0-9a-f_]{30,})", re.IGNORECASE)


def _inner_keys() -> dict[str, list[str]]:
    """Returns the keys below those keys of the recipe that have some, by the dotted name of the outer key."""
    outer: dict[str, Any] = {"more_data": SourceRecipe, "validation_sets.NAME": EvaluationSetRecipe}
    for name in SECTIONS:
        options = options_of(get_type_hints(Recipe)[name])
        outer |= {f"{name}.{option}": kind for option, kind in options.items()}
    return {key: [f"{key}.{part.name}" for part in fields(kind)] for key, kind in outer.items()}


def _general(key: str) -> str:
    """Returns a dotted key with the name of a validation set, which is the user's, as `NAME`."""
    return re.sub(r"^validation_sets\.[^.]+", "validation_sets.NAME", key)


def _check_keys(values: Mapping[str, Any], where: str) -> None:
    """
    Refuses unknown keys, and values of another structure than their key has.

    Args:
        values (`Mapping[str, Any]`): values by their dotted keys.
        where (`str`): their place in the error message.
    """
    inner = _inner_keys()
    known = [*Recipe().flat(), *SECTIONS, *(key for keys in inner.values() for key in keys)]
    for key, value in values.items():
        general = _general(key)
        if general not in known and general not in inner:
            # A section is not what somebody meant by one of its keys.
            keys = [name for name in known if "." in name] if "." in general else known
            nearest = difflib.get_close_matches(general, keys, n=1, cutoff=0)[0]
            raise ValueError(f"{where} has the unknown key {shown(key)}: did you mean {nearest!r}?")
        below: list[tuple[str, Any]] = []
        if key == "more_data":
            if not isinstance(value, list) or not all(source and isinstance(source, dict) for source in value):
                raise ValueError(
                    f"{where} must have a list of sources under 'more_data', each with `key: value` lines, but it has "
                    f"{shown(value)}."
                )
            below = [(key, source) for source in value]
        elif key == "validation_sets":
            if not isinstance(value, dict) or not all(isinstance(source, dict) for source in value.values()):
                raise ValueError(
                    f"{where} must have names under 'validation_sets', each with `key: value` lines, but it has "
                    f"{shown(value)}."
                )
            for name in value:
                check_set_name(str(name))
            below = [(f"{key}.{name}", source) for name, source in value.items()]
        elif general in inner and (value is not None or general not in Recipe().flat()):
            # Given a string, jsonargparse would import a class by that name.
            if not isinstance(value, dict):
                raise ValueError(f"{where} must have `key: value` lines under {key!r}, but it has {shown(value)}.")
            below = [(key, value)]
        for outer, source in below:
            _check_keys({f"{outer}.{name}": item for name, item in source.items()}, where)


def _load_yaml(text: str) -> Any:
    """Reads YAML for jsonargparse, with the keys of the file as the names of the fields."""
    content = get_loader("yaml")(text)
    start = content.get("initialize") if isinstance(content, dict) else None
    if isinstance(start, dict) and "from" in start:
        content["initialize"] = {"from_" if key == "from" else key: value for key, value in start.items()}
    return content


# Recipes are YAML, read and written as jsonargparse does.
set_loader("recipe", _load_yaml, (yaml.YAMLError,))


class _Loader(yaml.SafeLoader):
    """Reads values as jsonargparse does: dates are strings."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _check_yaml(text: str, where: str) -> None:
    """
    Refuses YAML that would crash or stall the parsers: deep nesting, aliases that multiply or refer to themselves,
    numbers of hundreds of digits, unpaired surrogates, and tags such as `!!timestamp`.
    """
    # For each open collection, whether it has an anchor, which an alias could refer to.
    opened: list[bool] = []
    for count, event in enumerate(yaml.parse(text, _Loader)):
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
        if len(opened) > MAX_LEVELS or count > MAX_ENTRIES:
            raise ValueError(
                f"{where} is not a recipe: it has more than {MAX_LEVELS} levels or {MAX_ENTRIES:,} entries {line}."
            )


def _check_nodes(node: yaml.Node | None, where: str) -> None:
    """Refuses repeated keys, of which YAML keeps the last, and a bare `no` (Norwegian, a precision): it is false."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_nodes(item, where)
    if (
        isinstance(node, yaml.ScalarNode)
        and node.tag.endswith(":bool")
        and node.value.lower() not in ("true", "false")
    ):
        raise ValueError(
            f"{where} has a bare {node.value} in line {node.start_mark.line + 1}, which YAML reads as a boolean: "
            f"write '{node.value}' in quotes, or true or false."
        )
    if not isinstance(node, yaml.MappingNode):
        return
    seen = set()
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                line = key.start_mark.line + 1
                raise ValueError(f"{where} repeats the key {shown(key.value)} in line {line}.")
            seen.add(key.value)
        _check_nodes(key, where)
        _check_nodes(value, where)


def _check_file(path: Path) -> None:
    """Refuses a file that is not a mapping of known keys, before its values are parsed."""
    where = f"The recipe {str(path)!r}"
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{where} has {path.stat().st_size:,} bytes, but a recipe has at most {MAX_BYTES:,}.")
    try:
        text = path.read_text(encoding="utf-8")
        _check_yaml(text, where)
        content = yaml.load(text, _Loader)
        _check_nodes(yaml.compose(text, _Loader), where)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8: {error.reason} at byte {error.start + 1}.") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is not valid YAML: {shortened(_said(error), 400)}.") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{where} must consist of `key: value` lines, but it is {'empty' if content is None else shown(content)}."
        )
    for name in SECTIONS:
        if not isinstance(content.get(name, {}), dict):
            raise ValueError(
                f"{where} must have `key: value` lines under {name!r}, but it has {shown(content[name])}."
            )
    _check_keys({str(key): value for key, value in flat(content).items()}, where)


# The classes of the keys that take any number of sources or sets.
LISTED = {"more_data": SourceRecipe, "validation_sets": EvaluationSetRecipe}


def _explained(message: str) -> str:
    """Turns an error of jsonargparse into one sentence, in the recipe's words if it is about the value of one key."""
    # The key of an option is named after that of the option itself.
    key = ".".join(re.findall(r'Parser key "([\w.]+)":', message))
    given = re.search(r'.*Parser key "[\w.]+":.*?value: ?([^\n]*)', message, re.DOTALL)
    hint = _hint(key)
    if given is not None and hint is not None:
        kinds = list(dict.fromkeys(_kinds(hint)))
        expected = " or ".join([", ".join(kinds[:-1]), kinds[-1]]) if kinds[1:] else kinds[0]
        # The value of a list that is wrong may be one of its items.
        found = "it is or has" if "a list" in expected else "it is"
        return f"{spelled(key)} must be {expected}, but {found} {shown(given[1].strip())}."
    message = re.sub(r"<class '(\w+)'>", r"\1", " ".join(message.split()))
    return shortened(re.sub(r"\S{81,}", lambda word: shortened(word[0], 80), message), 400)


def _hint(key: str) -> Any:
    """Returns the type hint of a dotted key, or `None` if the recipe does not have one value under it."""
    kind: Any = Recipe
    for name in key.split("."):
        hints = get_type_hints(kind) if is_dataclass(kind) else {}
        if name not in hints:
            return None
        kind = LISTED.get(name) or options_of(kind).get(name, hints[name])
    return None if is_dataclass(kind) else kind


def _kinds(hint: Any) -> list[str]:
    """Returns the values that a type hint allows, in words."""
    if get_origin(hint) is Literal:
        return [repr(value) for value in get_args(hint)]
    if get_origin(hint) in (Union, UnionType):
        return [kind for part in get_args(hint) for kind in _kinds(part)]
    if get_origin(hint) is list:
        words = _kinds(get_args(hint)[0])
        return [f"a list of {', '.join(words)}" if words[1:] else "a list, as in [a, b]"]
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string", NoneType: "null"}
    return [names.get(hint, "{language: file}")]


def _recipe_file(name: str) -> Path:
    path = Path(name)
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"The recipe file {str(path)!r} does not exist.") from error
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise ValueError(f"The recipe {str(path)!r} is {kind}: it must be a YAML file.")
    return path


def _check_arguments(arguments: Sequence[str]) -> None:
    """Refuses unknown keys on the command line, and values that would crash jsonargparse."""
    where = "The command line"
    for i, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if not option.startswith("--"):
            option, value = "", argument
        elif not equals:
            value = " ".join(arguments[i + 1 : i + 2])
        key = option[2:]
        if key == "recipe":
            _check_file(_recipe_file(value))
            continue
        if key in SECTIONS and not value.lstrip().startswith("{"):
            raise ValueError(
                f"The command line sets {option} to {shown(value)}: override its keys one by one, as in "
                f"{option}.KEY VALUE."
            )
        # A value that is not YAML is a string, or is refused together with its key.
        with contextlib.suppress(yaml.YAMLError):
            _check_yaml(value, f"{where}'s {shown(value)}")
        content = _value(value)
        if key.endswith("+"):
            # Adds one item to a list, or several.
            key, content = key.rstrip("+"), content if isinstance(content, list) else [content]
        if key and key not in ("help", "print_config"):
            _check_keys({str(key): value for key, value in flat({key: content}).items()}, where)


def _said(error: yaml.YAMLError) -> str:
    """Returns the message of a YAML error with line and column, without the name of the stream and the excerpt."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    parts = ((error.context, error.context_mark), (error.problem, error.problem_mark))
    said = [
        f"{what} in line {mark.line + 1}, column {mark.column + 1}" if mark else what for what, mark in parts if what
    ]
    return ", ".join(said)


def _parser(program: str, purpose: str) -> ArgumentParser:
    """Makes the parser of a recipe and its overrides."""
    parser = ArgumentParser(
        prog=program,
        usage=f"{program} RECIPE.yaml [--section.key value ...]",
        description=f"{purpose} Every key below can be set in the recipe file, or overridden here.",
        exit_on_error=False,
        allow_abbrev=False,
        parser_mode="recipe",
    )
    parser.add_argument("--recipe", action="config", help="the recipe file (YAML), if it is not the first argument")
    parser.add_class_arguments(Recipe)
    for action in parser._actions:
        # Options of jsonargparse that are refused here.
        if action.dest in SECTIONS or action.dest.endswith(".help"):
            action.help = SUPPRESS
        if action.dest == "initialize.from_":
            action.option_strings, action.metavar = ["--initialize.from"], "MODEL"
    return parser


def _with_merged_sets(arguments: Sequence[str]) -> list[str]:
    """Replaces overrides of single validation sets, of which jsonargparse keeps the last, by one of them all."""
    others: list[str] = []
    sets: dict[str, Any] = {}
    overridden = False
    remaining = iter(arguments)
    for argument in remaining:
        option, equals, value = argument.partition("=")
        words = option.removeprefix("--").split(".")
        if words[0] not in ("recipe", "validation_sets") or not option.startswith("--"):
            others.append(argument)
            continue
        value = value if equals else next(remaining, "")
        if words == ["recipe"]:
            others += ["--recipe", value]
            sets = dict(yaml.load(Path(value).read_text(encoding="utf-8"), _Loader).get("validation_sets", {}))
            continue
        overridden = True
        content = _value(value)
        if len(words) == 1:
            sets = content
        elif len(words) == 2:
            sets[words[1]] = content
        else:
            sets[words[1]] = dict(sets.get(words[1], {})) | {words[2]: content}
    return [*others, f"--validation_sets={json.dumps(sets)}"] if overridden else others


def _value(text: str) -> Any:
    """Returns what YAML reads in a value of the command line; a string need not be YAML."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        return text


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
    parser = _parser(program, purpose)
    arguments = list(argv)
    path = _recipe_file(arguments[0]) if arguments and not arguments[0].startswith("-") else None
    if path is not None:
        arguments[:1] = ["--recipe", str(path)]
    _check_arguments(arguments)
    arguments = [re.sub(r"^--initialize\.from(?=$|=)", "--initialize.from_", argument) for argument in arguments]
    arguments = _with_merged_sets(arguments)
    try:
        namespace = parser.parse_args(arguments)
        given = parser.parse_args(arguments, defaults=False)
    except ArgumentError as error:
        raise ValueError(_explained(str(error))) from error
    values = parser.instantiate(namespace).as_dict()
    recipe = Recipe(**{name: value for name, value in values.items() if name != "recipe"})
    recipe.given = frozenset(map(spelled, given.keys()))
    settle_task(recipe)
    check_ranges(recipe)
    if not recipe.run_dir:
        if path is None:
            raise ValueError(
                "There is no recipe: name a file, as in RECIPE.yaml, or give --run_dir and the keys as options."
            )
        recipe.run_dir = str(Path("runs") / path.stem)
    return recipe
