"""The typed records of a run folder, to JSON and back, checked; and what others may read of the URLs in them."""

import re
from copy import copy
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from types import UnionType
from typing import Any, ClassVar, TypeVar, cast, get_args, get_origin

from .metrics import METRICS, Comparison

T = TypeVar("T")

# The fields of a record are the keys of its JSON object, in this order. A field whose default is None may be absent,
# because a run does not always have it, or because earlier versions did not write it.


@dataclass(frozen=True)
class Scored:
    """
    A model with its scores. In JSON, each metric, and the loss of a validation, is a key of the record, and all other
    measures are in `measures`.

    Attributes:
        step (`int`): updates so far.
        scores (`dict[str, float]`): by measure; `None` for one that is not finite. With several sets, the means of
            their metrics, and the other measures over all their text. The loss is in nats per label.
        signatures (`dict[str, str]`, *optional*): sacreBLEU's, by metric; if those of the sets differ, all of them.
        sets (`dict[str, dict[str, float]]`, *optional*): the scores of each set, if there are several.
        seconds (`float`, *optional*): duration of the training so far, validations included.
        files (`dict[str, str]`, *optional*): SHA-256 of the model's files, by name.
        set_signatures (`dict[str, dict[str, str]]`, *optional*): the signatures of each set, if they differ.
    """

    keys: ClassVar[tuple[str, ...]] = tuple(METRICS)
    step: int
    scores: dict[str, float | None] = field(default_factory=dict)
    signatures: dict[str, str] | None = None
    sets: dict[str, dict[str, float | None]] | None = None
    seconds: float | None = None
    files: dict[str, str] | None = None
    set_signatures: dict[str, dict[str, str]] | None = None


@dataclass(frozen=True)
class Validation(Scored):
    """
    Loss and scores of one validation: a line of `validations.jsonl`, which has neither `seconds` nor `files`.

    Attributes:
        best (`bool`): True for the best validation of the run.

    Raises:
        ValueError: there is no loss, or no score besides it.
    """

    keys = ("loss", *METRICS)
    best: bool = False

    def __post_init__(self) -> None:
        if "loss" not in self.scores:
            raise ValueError("loss is missing")
        if len(self.scores) == 1:
            raise ValueError("bleu is missing")


@dataclass(frozen=True)
class Verdict:
    """
    A model compared with another one before it is published.

    Attributes:
        than (`str`): the other model, as `hub.not_worse_than` names it.
        sets (`dict[str, Comparison]`): the comparison on each test set; empty if nothing was published before.
    """

    than: str
    sets: dict[str, Comparison]


@dataclass(frozen=True)
class Result(Scored):
    """
    The result of a run: `test.json`, without scores if there is no test set.

    Attributes:
        averaged (`list[str]`): names of the checkpoints whose mean the model is.
        model (`str`): folder that `from_pretrained` loads.
        altered (`dict[str, dict[str, dict[str, float]]]`, *optional*): scores of each test set with its sentences
            altered, by set and alteration.
        samples (`list[dict[str, str]]`): `source`, `translation` and `reference` of some sentences of the test set.
        translations (`dict[str, str]`): SHA-256 of the files with translations of the test set, by name.
        before (`dict[str, Comparison]`, *optional*): the model compared with the one that the training started from,
            by test set.
    """

    averaged: list[str] = field(kw_only=True)
    model: str | None = None
    altered: dict[str, dict[str, dict[str, float]]] | None = None
    samples: list[dict[str, str]] | None = None
    translations: dict[str, str] | None = None
    before: dict[str, Comparison] | None = None


@dataclass(frozen=True)
class Progress:
    """
    How far a run had come at a checkpoint: its `progress.json`.

    Attributes:
        step (`int`): updates so far.
        position (`dict[str, Any]`): position in the data.
        data (`dict[str, Any]`): fingerprint of the data.
        launch (`dict[str, Any]`): number of processes, precision and sharding.
        nonfinite (`int`): skipped updates in a row, up to this one.
        seconds (`float`): duration of the training so far.
        files (`dict[str, str]`): SHA-256 of the model's files, by name.
        state (`dict[str, str]`, *optional*): SHA-256 of weights that are not the model's, by name: those behind a
            moving average, and shards; in 0.1 of all files that are not the model's.
        recipe (`dict[str, Any]`, *optional*): settings that a resumed run may not change.
        validations (`list[Validation]`, *optional*): validations so far.
        start (`dict[str, str]`, *optional*): SHA-256 of the files of the model that adapters belong to, by name.
    """

    step: int
    position: dict[str, Any]
    data: dict[str, Any]
    launch: dict[str, Any]
    nonfinite: int
    seconds: float
    files: dict[str, str]
    state: dict[str, str] | None = None
    recipe: dict[str, Any] | None = None
    validations: list[Validation] | None = None
    start: dict[str, str] | None = None

    @property
    def digests(self) -> dict[str, str]:
        """All digests of the checkpoint, by file name."""
        return self.files | (self.state or {})


@dataclass(frozen=True, kw_only=True)
class Text:
    """
    One source of training text, as [`Environment`] describes it.

    Attributes:
        direction (`str`, *optional*): languages, as `"en-de"`.
        dataset_is_local (`bool`): False only if the source is a dataset on the Hub.
        pairs (`dict[str, int]`): number of sentence pairs by split; a stream has no known number.
        held_out (`dict[str, int]`, *optional*): by split, the validation or test pairs that have their source or
            target in the training text, too; unknown if that is a stream.
    """

    direction: str | None = None
    dataset_is_local: bool = True
    pairs: dict[str, int]
    held_out: dict[str, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Environment:
    """
    Versions, machine and command of a run: `environment.json`.

    Attributes:
        python (`str`), packages (`dict[str, str]`), git_revision (`str`, *optional*): versions; the last one is that
            of this package, if it runs from a repository.
        machine (`str`), cpu (`str`), gpu (`str`), device (`str`): hardware, as far as it is known.
        processes (`int`), cpu_threads (`int`), mixed_precision (`str`): how the training was launched.
        seed (`int`): the recipe's.
        command (`list[str]`): program and arguments.
        start_is_local (`bool`, *optional*): False only if the training started from a model on the Hub.
        data (`list[Text]`, *optional*): the sources of text, if they were read.
        commits (`dict[str, str]`, *optional*): the commits of the models, tokenizers and datasets that came from the
            Hub, by their ids there.
        tokens_at_once (`int`, *optional*): tokens of a batch that `training.tokens_per_batch: auto` has found.
        padding (`float`, *optional*), shapes (`int`, *optional*): share of the positions that are padding, and number
            of shapes of the batches, on a device that needs few shapes, of text that is encoded once for all.
    """

    python: str
    packages: dict[str, str]
    git_revision: str | None = None
    machine: str | None = None
    cpu: str | None = None
    gpu: str | None = None
    device: str | None = None
    processes: int
    cpu_threads: int
    mixed_precision: str
    seed: int
    command: list[str]
    start_is_local: bool | None = None
    data: list[Text] | None = None
    commits: dict[str, str] | None = None
    tokens_at_once: int | None = None
    padding: float | None = None
    shapes: int | None = None


def to_json(record: Any) -> Any:
    """Returns the JSON object of a record, without absent values; a loss of null is not absent, but not finite."""
    if isinstance(record, dict):
        return {name: to_json(value) for name, value in record.items()}
    if isinstance(record, list):
        return [to_json(value) for value in record]
    if not is_dataclass(record):
        return record
    content = {each.name: to_json(getattr(record, each.name)) for each in fields(record)}
    if isinstance(record, Scored):
        scores = content.pop("scores")
        beside = {name: scores.pop(name) for name in record.keys if name in scores}
        content = {"step": content.pop("step")} | beside | content | {"measures": scores or None}
    return {name: value for name, value in content.items() if value is not None or name == "loss"}


def from_json(kind: type[T], content: dict[str, Any]) -> T:
    """Makes a record of a JSON object and ignores the keys of other versions; raises `ValueError` for bad values."""
    values = {}
    for each in fields(cast(Any, kind)):
        if each.name in content:
            values[each.name] = _checked(each.name, content[each.name], each.type)
        elif each.default is MISSING and each.default_factory is MISSING:
            raise ValueError(f"{each.name} is missing")
    if issubclass(kind, Scored):
        beside = {name: content[name] for name in kind.keys if name in content}
        optional = {"loss": float | None}
        values["scores"] = {name: _checked(name, each, optional.get(name, float)) for name, each in beside.items()}
        values["scores"] |= _checked("measures", content.get("measures"), dict[str, float | None] | None) or {}
    return kind(**values)


def _checked(name: str, value: Any, kind: Any) -> Any:
    try:
        return _typed(value, kind)
    except TypeError as error:
        raise ValueError(f"{name} is {str(value)[:80]!r}") from error


def _typed(value: Any, kind: Any) -> Any:
    """Checks a JSON value against a type annotation, and makes records of objects; raises `TypeError`."""
    if isinstance(kind, UnionType):
        kind = type(None) if value is None else get_args(kind)[0]
    outer, inner = get_origin(kind) or kind, get_args(kind)
    if outer is Any:
        return value
    # Exact types: JSON's true is no number.
    if type(value) not in ((int, float) if outer is float else (dict,) if is_dataclass(outer) else (outer,)):
        raise TypeError
    if is_dataclass(outer):
        return from_json(cast(type[Any], outer), value)
    if outer is list:
        return [_typed(each, inner[0]) for each in value]
    if outer is dict:
        return {name: _typed(each, inner[1]) for name, each in value.items()}
    return value


# ---- Addresses ---------------------------------------------------------------------------------------------------

# A path that was made of a URL has lost a slash.
_URL = re.compile(r"[\w+.-]{2,}:/")
# Where a quotation begins with the URL, it ends with its quotation mark.
_URLS = re.compile(r"""(?<=')[\w+.-]{2,}:/[^\s'"<>`]*|(?<![\w+.'-])[\w+.-]{2,}:/[^\s"<>`]*""")
# The query of a URL whose beginning is missing, as in the messages of HTTP libraries.
_QUERY = re.compile(r"""(?<=[^\s?])\?[\w.~%-]+=[^\s'"<>`]*""")


def public(value: T) -> T:
    """
    Reduces the URLs in a value to scheme, host and path, for whatever others may read: user, password, query and
    fragment may be secrets.

    Args:
        value: a string, which is a URL or a text with some; or a dict, list or record of values.

    Returns:
        The same kind of value; the argument stays as it is.
    """
    if isinstance(value, str):
        return cast(T, _address(value) if _URL.match(value) else public_text(value))
    if isinstance(value, dict):
        return cast(T, {public(name): public(each) for name, each in value.items()})
    if isinstance(value, list | tuple | set | frozenset):
        return cast(T, type(value)(public(each) for each in value))
    if is_dataclass(value) and not isinstance(value, type):
        found = copy(value)
        for each in fields(value):
            object.__setattr__(found, each.name, public(getattr(value, each.name)))
        return found
    return value


def public_text(text: str) -> str:
    """Reduces the URLs within a text to scheme, host and path, as [`public`] does; each ends at white space."""

    def reduced(match: re.Match[str]) -> str:
        # Punctuation behind a URL belongs to the text.
        url = match[0].rstrip(".,;:!)]}'")
        return _address(url) + match[0][len(url) :]

    return _QUERY.sub("", _URLS.sub(reduced, text))


def _address(url: str) -> str:
    """Returns scheme, host and path of a URL, and of each URL in a chain of fsspec, such as `zip://a::https://b/c`."""
    kept: list[str] = []
    is_cut = False
    for part in re.split(r"::(?=[\w+.-]+(?:::|:/))", url):
        scheme, colon, rest = part.partition(":/")
        if not colon:
            # The name of a layer, such as simplecache; or the rest of a query.
            kept += [] if is_cut else re.findall(r"^[\w+.-]+$", part)
            continue
        slashes = re.match("/*", rest)[0]  # type: ignore[index]
        path = re.split("[?#]", rest[len(slashes) :], maxsplit=1)[0]
        is_cut = path != rest[len(slashes) :]
        if len(slashes) < 2:
            path = _without_user(path)
        kept.append(f"{scheme}:/{slashes}{path}")
    return "::".join(kept)


def _without_user(path: str) -> str:
    """Removes user and password in front of the host."""
    host, slash, rest = path.partition("/")
    if "@" in host:
        return f"{host.rpartition('@')[2]}{slash}{rest}"
    # A password with a slash in it: what follows the colon is no port.
    if re.search(r":(?!\d*$)", re.sub(r"^\[[^\]]*\]", "", host)) and "@" in rest:
        return rest.rpartition("@")[2]
    return path
