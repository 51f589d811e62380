"""The verbs about runs and folders of models: train, average, push, renew, convert."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ..conversion import TARGETS
from ..extras import extra
from ..recipe import BestBy
from .inputs import add_device, add_recipe_verb, add_revision, check_counts, choose_device
from .serve import add_javascript, static_page

if TYPE_CHECKING:
    from ..recipe import Recipe
    from ..records import Result


def add_verbs(verbs: Any) -> None:
    """Adds the verbs to the command line, each with its function under `run`."""
    add_recipe_verb(verbs, "train", "train a model", _train)
    for add in (_add_average, _add_push, _add_renew, _add_convert):
        add(verbs)


# ---- train -------------------------------------------------------------------------------------------------------


def _train(options: argparse.Namespace) -> None:
    from ..recipe_file import load_recipe

    # Launchers start train.py only.
    program = "accelerate launch train.py" if options.program == "train.py" else "hf-vaswani train"
    train_recipe(load_recipe(options.arguments, program))


def check_trainable(recipe: "Recipe") -> None:
    """Raises what a training would raise before it reads its training text, for a work that makes this text first."""
    from ..data.tokenizer import load_tokenizer
    from ..run_folder import list_checkpoints
    from ..training.loop import check_recipe
    from ..training.preparation import task_data
    from ..training.start import load_start

    recipe = check_recipe(recipe)
    if not list_checkpoints(Path(recipe.run_dir)):
        if recipe.initialize.from_ is not None:
            load_start(recipe)
        elif recipe.tokenizer.path is not None:
            load_tokenizer(recipe.tokenizer.path)
    task_data(recipe).read_evaluation()


def train_recipe(recipe: "Recipe") -> "Result | None":
    """Trains a recipe, prints the result and publishes it; returns it in process 0."""
    # Imported once the recipe is valid: they take seconds.
    with extra("train"):
        from accelerate import PartialState
    from tqdm.contrib.logging import logging_redirect_tqdm
    from transformers.utils.logging import disable_progress_bar

    from ..training.loop import train

    disable_progress_bar()
    with logging_redirect_tqdm(), _advice_on_memory():
        result = train(recipe)
    if not PartialState().is_main_process:
        return None
    _print_result(result)
    if recipe.hub.repo_id is not None:
        from ..hub.publishing import push_checkpoint, push_waiting, read_candidate
        from ..training.comparison import judge

        sys.stdout.flush()
        push_waiting(Path(recipe.run_dir), recipe.hub)
        run_dir, model = Path(recipe.run_dir), Path(str(result.model))
        candidate = read_candidate(run_dir, model, recipe.hub)
        address = push_checkpoint(candidate, judge(candidate))
        sys.stdout.write(f"Published {address}\n")
    return result


@contextmanager
def _advice_on_memory() -> Iterator[None]:
    """Adds to the message of an accelerator whose memory is full what to do about it."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(
            f"{str(error).splitlines()[0]} Set training.tokens_per_batch to auto, or lower it and raise "
            "accumulation_steps by the same factor. A run that has begun may set training.gradient_checkpointing "
            "true, or HF_VASWANI_CUDA_GRAPHS=0 in the environment."
        ) from error


def _print_result(result: "Result") -> None:
    from ..metrics import COMPARED_BY, METRICS, in_order, measure_of

    judged = METRICS[COMPARED_BY]
    for sample in result.samples or []:
        sys.stdout.write("".join(f"{name:>11}  {text}\n" for name, text in sample.items()) + "\n")
    first = "Test"
    for metric in METRICS.values():
        if metric.name in result.scores and not metric.is_slow:
            signature = (result.signatures or {})[metric.name]
            sys.stdout.write(f"{first:4} {metric.title} {metric.shown(result.scores[metric.name])}  ({signature})\n")
            first = ""
    others = in_order({name: value for name, value in result.scores.items() if name not in METRICS})
    if others:
        shown = ", ".join(f"{measure_of(name).title} {measure_of(name).shown(others[name])}" for name in others)
        sys.stdout.write(f"Test {shown}\n")
    for name, each in (result.before or {}).items():
        before, after = (judged.shown(side[judged.name]) for side in (each.before, each.after))
        sys.stdout.write(f"     {judged.title} {before} before, {after} after  ({name}, p = {each.p:.3f})\n")
    for direction, altered in (result.altered or {}).items():
        for name, scores in altered.items():
            sys.stdout.write(f"     {judged.title} {judged.shown(scores[judged.name])}  ({direction}, {name})\n")
    sys.stdout.write(f"Model     {result.model}\n")


# ---- average -----------------------------------------------------------------------------------------------------


def _add_average(verbs: Any) -> None:
    average = verbs.add_parser(
        "average",
        help="average the weights of several checkpoints",
        description="Average the weights of several checkpoints or models, and write the mean as a model.",
        epilog="example: hf-vaswani average runs/my --last 5 --output averaged",
    )
    average.add_argument("folders", nargs="+", metavar="FOLDER", help="checkpoints or models, or one run folder")
    average.add_argument("--last", type=int, metavar="N", help="average the last N checkpoints of the run, e.g. 5")
    average.add_argument("--best", type=int, metavar="N", help="average the N checkpoints with the best validations")
    average.add_argument(
        "--by",
        choices=get_args(BestBy),
        help="measure that --best ranks by; default: best_by of the run's recipe",
    )
    average.add_argument("--output", required=True, metavar="FOLDER", help="new folder for the model")
    average.set_defaults(run=_average)


def _average(options: argparse.Namespace) -> None:
    from ..averaging import save_average

    folders = _folders_to_average(options)
    save_average(folders, Path(options.output))
    sys.stdout.write(f"The mean of {', '.join(map(str, folders))}\nModel     {options.output}\n")


def _folders_to_average(options: argparse.Namespace) -> list[Path]:
    """The folders as given, or the checkpoints that --last or --best select."""
    from ..model_names import resolve_model
    from ..run_folder import RECIPE

    check_counts(options, "last", "best")
    first, *others = options.folders
    if options.last is not None or options.best is not None:
        if others:
            raise ValueError(f"--last and --best take one run folder, but {1 + len(others)} folders are given.")
        return _selected_checkpoints(Path(first), options)
    if not others and (Path(first) / RECIPE).is_file():
        raise ValueError(f"{first} is a run folder: select its checkpoints with --last N or --best N.")
    return [resolve_model(name, "FOLDER") for name in options.folders]


def _selected_checkpoints(run_dir: Path, options: argparse.Namespace) -> list[Path]:
    from ..recipe_checks import check_ranges
    from ..run_folder import checkpoints_to_average, read_recipe

    if options.last is not None and options.best is not None:
        raise ValueError("--last and --best exclude each other: give one of them.")
    recipe = read_recipe(run_dir)
    training = recipe.training
    training.best_by = options.by or training.best_by
    check_ranges(recipe)
    last = training.average_last if options.last is None else options.last
    training = replace(training, average_last=last, average_best=options.best)
    found = checkpoints_to_average(run_dir, training)
    option, count = ("--last", options.last) if options.best is None else ("--best", options.best)
    if len(found) < count:
        raise ValueError(f"{run_dir} has fewer checkpoints than {option} {count} asks for: {len(found)}.")
    return found


# ---- push --------------------------------------------------------------------------------------------------------


def _add_push(verbs: Any) -> None:
    push = verbs.add_parser(
        "push",
        help="publish the model of a run on the Hub",
        description="Publish the model of a run on the Hub with its model card, unless its BLEU is below --min-bleu, "
        "or significantly below that of --not-worse-than, or, for tasks other than translation, the measure of "
        "training.best_by is below --min-score. "
        "Options default to the hub section of the run's recipe.",
        epilog="example: hf-vaswani push runs/my --repo-id me/my-model --min-bleu 30",
    )
    push.add_argument("run_dir", type=Path, metavar="RUN", help="run folder, e.g. runs/my")
    push.add_argument(
        "--checkpoint", type=int, metavar="N", help="publish checkpoint-N with its validation score instead, e.g. 4000"
    )
    push.add_argument("--repo-id", metavar="USER/NAME", help="repository, e.g. me/my-model")
    push.add_argument("--min-bleu", type=float, metavar="BLEU", help="lowest BLEU to publish, from 0 to 100")
    push.add_argument(
        "--min-score",
        type=float,
        metavar="SCORE",
        help="lowest accuracy or other measure of training.best_by to publish, from 0 to 1",
    )
    push.add_argument(
        "--not-worse-than",
        metavar="MODEL",
        help="model that must not be significantly better on a test set: start, last_push, a folder or a Hub id",
    )
    push.add_argument("--private", action="store_true", default=None, help="create a private repository")
    push.add_argument(
        "--space", metavar="USER/NAME", help="also publish the demo of the model, as this Space, e.g. me/my-demo"
    )
    push.add_argument(
        "--static",
        action="store_true",
        help="with --space: publish a page that translates in the browser, without a server; it contains the model",
    )
    add_javascript(push, "--static")
    push.add_argument("--revision", metavar="BRANCH", help="branch, e.g. v2; created if it does not exist")
    add_device(push)
    push.set_defaults(run=_push)


def _push(options: argparse.Namespace) -> None:
    from ..recipe_checks import check_ranges, check_repo_id
    from ..run_folder import MODEL, checkpoint_folder, read_recipe

    for name, other in (("static", "space"), ("javascript", "static")):
        if getattr(options, name) and not getattr(options, other):
            raise ValueError(f"--{name} is for --{other}, which is not given.")
    recipe = read_recipe(options.run_dir)
    hub = recipe.hub
    for key in ("repo_id", "min_bleu", "min_score", "not_worse_than", "private", "revision"):
        if getattr(options, key) is not None:
            setattr(hub, key, getattr(options, key))
    if hub.repo_id is None:
        raise ValueError(
            "There is no repository to publish to: give --repo-id USER/NAME, or hub.repo_id in the recipe."
        )
    check_ranges(recipe)
    device = choose_device(options.device)
    if options.space is not None:
        check_repo_id(options.space, "--space")
    from ..hub.publishing import push_checkpoint, read_candidate
    from ..hub.space import HOSTS, check_space, push_space
    from ..training.comparison import judge

    step = options.checkpoint
    folder = options.run_dir / MODEL if step is None else checkpoint_folder(options.run_dir, step)
    if options.space is not None:
        # Before anything is published.
        check_space(folder)
    candidate = read_candidate(options.run_dir, folder, hub, recipe)
    page = None
    if options.static:
        page = replace(static_page(str(folder), options.javascript), title=hub.repo_id).folder(HOSTS)
    address = push_checkpoint(candidate, judge(candidate, device))
    sys.stdout.write(f"Published {address}\n")
    if options.space is not None:
        demo = push_space(options.run_dir, folder, hub, options.space, address.rsplit("/", 1)[-1], page)
        sys.stdout.write(f"Published {demo}\n")


# ---- renew -------------------------------------------------------------------------------------------------------


def _add_renew(verbs: Any) -> None:
    renew = verbs.add_parser(
        "renew",
        help="replace the code that a model was saved with by that of this version",
        description="Replace the code that lies beside the weights of a model by that of this version, for users "
        "without this package, who load it with trust_remote_code=True. Weights, settings and tokenizer stay as they "
        "are. A model on the Hub gets one commit, for which a token with write permission is necessary.",
        epilog="example: hf-vaswani renew me/my-model",
    )
    renew.add_argument("models", nargs="+", metavar="MODEL", help="folder of a model, or its id on the Hub")
    renew.add_argument(
        "--revision", metavar="BRANCH", default="main", help="branch of the models on the Hub; default: main"
    )
    renew.set_defaults(run=_renew)


def _renew(options: argparse.Namespace) -> None:
    from ..hub.code import renew_code
    from ..model_names import is_on_hub, resolve_model

    published = [model for model in options.models if is_on_hub(model, "MODEL")]
    if published:
        # The Hub needs an extra, which a folder does not.
        from ..hub.publishing import renew_published_code
        from ..recipe_checks import check_branch, check_repo_id

        check_branch(options.revision, "--revision")
        for model in published:
            check_repo_id(model, "MODEL")
    for model in options.models:
        renewed = (
            renew_published_code(model, options.revision) if model in published else renew_code(resolve_model(model))
        )
        sys.stdout.write(f"{model} {'has new code' if renewed else 'had the code of this version'}\n")


# ---- convert ------------------------------------------------------------------------------------------------------


def _add_convert(verbs: Any) -> None:
    convert = verbs.add_parser(
        "convert",
        help="convert from Marian or fairseq, or to Marian, CTranslate2, ONNX or transformers.js",
        description="Convert a model from Marian or fairseq, or to Marian, CTranslate2, ONNX or transformers.js "
        "(JavaScript), and check that both models compute the same.",
        epilog="example: hf-vaswani convert runs/my/model served --to ctranslate2",
    )
    convert.add_argument("source", metavar="SOURCE", help="model folder or file, or Hub id; its format is detected")
    add_revision(convert)
    convert.add_argument("destination", type=Path, metavar="DESTINATION", help="folder to write")
    convert.add_argument("--to", required=True, choices=TARGETS, help="format to write")
    convert.add_argument(
        "--quantization", metavar="KIND", help="weight type for ctranslate2, e.g. int8, float16 or bfloat16"
    )
    convert.add_argument("--force", action="store_true", help="replace DESTINATION if it exists")
    convert.add_argument(
        "--sentence", metavar="TEXT", help='sample that both models translate; default: "The cat sleeps."'
    )
    convert.set_defaults(run=_convert)


def _convert(options: argparse.Namespace) -> None:
    from ..conversion.convert import SENTENCE, convert
    from ..interruption import stopped_by_sigterm
    from ..model_names import resolve_model, with_revision
    from ..processes import limit_threads

    limit_threads()
    (name,) = with_revision([options.source], options.revision)
    source = resolve_model(name, "SOURCE")
    sentence = SENTENCE if options.sentence is None else options.sentence
    if not sentence.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in sentence):
        raise ValueError(f"--sentence is not UTF-8: {sentence!r}.")
    with stopped_by_sigterm():
        lines = convert(source, options.destination, options.to, options.quantization, options.force, sentence)
    sys.stdout.write("".join(f"{line}\n" for line in [*lines, f"Model     {options.destination}"]))
