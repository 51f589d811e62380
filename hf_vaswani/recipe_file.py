"""
Recipe files: reads one, applies the overrides of the command line, and checks every key and value.

train.py RECIPE.yaml [--section.key value ...]
"""

import difflib
import functools
import re
import stat
from argparse import SUPPRESS
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .extras import extra
from .recipe import SECTIONS, EvaluationSetRecipe, Recipe, SourceRecipe, flat, options_of, shortened, shown, spelled
from .recipe_checks import apply_task_defaults, check_ranges, check_set_name

with extra("train"):
    import yaml
    from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

# Limits far above any recipe: bytes of the file, levels and entries of its YAML, and digits of a number.
MAX_BYTES = 1_000_000
MAX_LEVELS = 20
MAX_ENTRIES = 10_000
LONG_NUMBER = re.compile(r"[-+]?([0-9._:]{30,}|0[bx][0-9a-f_]{30,})", re.IGNORECASE)


@functools.cache
def _known_keys() -> list[str]:
    """Returns all keys of a recipe that have no keys below them, by their dotted names."""
    return list(Recipe().flat())


@functools.cache
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
    known = [*_known_keys(), *SECTIONS, *(key for keys in inner.values() for key in keys)]
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
        elif general in inner and (value is not None or general not in _known_keys()):
            # Given a string, jsonargparse would import a class by that name.
            if not isinstance(value, dict):
                raise ValueError(f"{where} must have `key: value` lines under {key!r}, but it has {shown(value)}.")
            below = [(key, value)]
        for outer, source in below:
            _check_keys({f"{outer}.{name}": item for name, item in source.items()}, where)


class _Loader(yaml.SafeLoader):
    """
    Reads the YAML of recipes: dates are strings, and `1e-4` is a number. Refuses what would crash or stall a parser:
    deep nesting, aliases that multiply or refer to themselves, numbers of hundreds of digits, unpaired surrogates, and
    tags such as `!!timestamp`.

    Args:
        text (`str`): YAML.
        where (`str`): its place in the error message.
    """

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
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


# YAML 1.1 takes a number without a point, or without a sign in its exponent, for a string: 1e-4 and 1.0e5.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), "-+0123456789"
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


def _read_file(path: Path, extended_by: tuple[Path, ...] = ()) -> dict[str, Any]:
    """
    Returns the content of a recipe file and of the one that it extends: a mapping of known keys, whose values are not
    checked yet.
    """
    where = f"The recipe {str(path)!r}"
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{where} has {path.stat().st_size:,} bytes, but a recipe has at most {MAX_BYTES:,}.")
    try:
        loader = _Loader(path.read_text(encoding="utf-8"), where)
        node = loader.get_single_node()
        _check_nodes(node, where)
        content = None if node is None else loader.construct_document(node)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8: {error.reason} at byte {error.start + 1}.") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is not valid YAML: {shortened(_said(error), 400)}.") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{where} must consist of `key: value` lines, but it is {'empty' if content is None else shown(content)}."
        )
    base = content.pop("extends", None)
    for name in REMOVED_SECTIONS:
        content.pop(name, None)
    for name in SECTIONS:
        if not isinstance(content.get(name, {}), dict):
            raise ValueError(
                f"{where} must have `key: value` lines under {name!r}, but it has {shown(content[name])}."
            )
    _check_keys({str(key): value for key, value in flat(content).items()}, where)
    if base is None:
        return content
    if not isinstance(base, str):
        raise ValueError(f"{where} must have the path of another recipe under 'extends', but it has {shown(base)}.")
    extended_by = (*extended_by, path.resolve())
    if (path.parent / base).resolve() in extended_by:
        raise ValueError(f"{where} extends {base!r}, which extends this recipe in turn: remove one of the two lines.")
    return _merged(_read_file(_recipe_file(str(path.parent / base)), extended_by), content)


def _merged(base: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of a recipe with that of another one in front of it; sections are merged key by key."""
    return base | {name: base.get(name, {}) | part if name in SECTIONS else part for name, part in content.items()}


# Sections of version 0.1 whose verbs are gone: recipes that have them are read without them.
REMOVED_SECTIONS = ("diversification",)

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


def _override(content: dict[str, Any], key: str, text: str) -> None:
    """
    Sets a key to a value of the command line.

    Args:
        content (`dict[str, Any]`): content of the recipe, which is changed in place.
        key (`str`): dotted key. With a final `+`, the value is one more item of a list, or several.
        text (`str`): the value as YAML, or a string.

    Raises:
        ValueError: the key is unknown, or has another structure than the value.
    """
    value: Any = _value(text)
    name = key.removesuffix("+")
    if name in SECTIONS and not isinstance(value, dict):
        option = f"--{name}"
        raise ValueError(
            f"The command line sets {option} to {shown(text)}: override its keys one by one, as in {option}.KEY VALUE."
        )
    items = value if isinstance(value, list) else [value]
    _check_keys(flat({name: items if key.endswith("+") else value}), "The command line")
    *outer, last = name.split(".")
    place = content
    for part in outer:
        # Copies, because an alias of YAML is the same object in several places.
        if part == "more_data":
            # A key alone is that of the last source.
            *others, source = place.get(part) or [{}]
            place[part] = [*others, dict(source)]
            place = place[part][-1]
        else:
            place[part] = dict(place.get(part) or {})
            place = place[part]
    has_keys = name in SECTIONS or name in LISTED or _general(name) in _inner_keys()
    if key.endswith("+"):
        before = place.get(last, Recipe().flat().get(name))
        before = _value(before) if isinstance(before, str) else before
        if not isinstance(before, list | None):
            raise ValueError(f"The command line adds to {name}, which is no list: it is {shown(before)}.")
        place[last] = [*(before or []), *items]
    elif has_keys and name not in LISTED and isinstance(value, dict):
        place[last] = (place.get(last) or {}) | value
    else:
        # A string may look like YAML: jsonargparse knows what a key without further keys takes.
        place[last] = value if has_keys else text


def _said(error: yaml.YAMLError) -> str:
    """Returns the message of a YAML error with line and column, without the name of the stream and the excerpt."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    parts = ((error.context, error.context_mark), (error.problem, error.problem_mark))
    said = [
        f"{what} in line {mark.line + 1}, column {mark.column + 1}" if mark else what for what, mark in parts if what
    ]
    return ", ".join(said)


@functools.cache
def _parser(program: str | None = None, purpose: str = "") -> ArgumentParser:
    """Makes the parser of a recipe; that of a program has its help, from the docstrings."""
    # Reading the docstrings takes longer than everything else together.
    set_parsing_settings(docstring_parse_attribute_docstrings=program is not None)
    parser = ArgumentParser(
        prog=program,
        usage=f"{program} RECIPE.yaml [--section.key value ...]",
        description=f"{purpose} Every key below can be set in the recipe file, or overridden here.",
        exit_on_error=False,
    )
    parser.add_argument("--recipe", metavar="FILE", help="the recipe file (YAML), if it is not the first argument")
    parser.add_argument(
        "--reverse",
        action="store_true",
        help="swap the languages, and the columns of the text: the model translates in the other direction. The run "
        "folder gets -reverse at its end, unless --run_dir names one",
    )
    parser.add_class_arguments(Recipe)
    for action in parser._actions:
        # Options of jsonargparse that are refused here.
        if action.dest in SECTIONS or action.dest.endswith(".help"):
            action.help = SUPPRESS
        if action.dest == "initialize.from_":
            action.option_strings, action.metavar = ["--initialize.from"], "MODEL"
    return parser


def _value(text: str) -> Any:
    """Returns what YAML reads in a value of the command line; a string need not be YAML."""
    try:
        return _Loader(text, f"The command line's {shown(text)}").get_single_data()
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
    if {"-h", "--help"} & set(argv):
        _parser(program, purpose).parse_args(["--help"])
    is_reversed, argv = "--reverse" in argv, [word for word in argv if word != "--reverse"]
    path = _recipe_file(argv[0]) if argv and not argv[0].startswith("-") else None
    content = {} if path is None else _read_file(path)
    options = list(_options(argv if path is None else argv[1:]))
    for key, value in options:
        if key == "recipe":
            content = _merged(content, _read_file(_recipe_file(value)))
        else:
            _override(content, key, value)
    given = frozenset(flat(content))
    if "from" in content.get("initialize", {}):
        start = dict(content["initialize"])
        content["initialize"] = start | {"from_": start.pop("from")}
    try:
        values = _parser().parse_object(content, defaults=False)
    except ArgumentError as error:
        raise ValueError(_explained(str(error))) from error
    recipe = Recipe(**_parser().instantiate(values).as_dict())
    recipe.given = given
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
