"""The verbs about runs: train, average, push."""

import argparse
import sys
from pathlib import Path
from typing import Any


def add_verbs(verbs: Any) -> None:
    """Adds the three to the verbs of a command line; each puts the function that does it under `run`."""
    # A recipe has a command line of its own, --help included, in which every key is an option: here none is.
    train = verbs.add_parser(
        "train", help="train a recipe: train RECIPE.yaml [--section.key value ...]", add_help=False, prefix_chars="\0"
    )
    train.add_argument("arguments", nargs="*")
    train.set_defaults(run=_train)
    average = verbs.add_parser("average", help="write the mean of several checkpoints as a model")
    average.add_argument("folders", nargs="+", metavar="FOLDER", help="checkpoints or models, or one run")
    average.add_argument("--last", type=int, metavar="N", help="of a run: its last N checkpoints")
    average.add_argument("--best", type=int, metavar="N", help="of a run: the N checkpoints of its best validations")
    average.add_argument("--by", choices=("bleu", "loss"), help="what is best; default: what the run's recipe says")
    average.add_argument(
        "--output", required=True, metavar="FOLDER", help="the model's folder, which must not exist yet"
    )
    average.set_defaults(run=_average)
    push = verbs.add_parser("push", help="publish the model of a run on the Hub, if its BLEU is high enough")
    push.add_argument("run_dir", type=Path, metavar="RUN", help="the run's folder")
    push.add_argument(
        "--checkpoint", type=int, metavar="N", help="publish its checkpoint-N, with its validation's BLEU"
    )
    push.add_argument(
        "--repo-id", metavar="USER/NAME", help="repository; this and the rest default to the recipe's hub"
    )
    push.add_argument("--min-bleu", type=float, metavar="BLEU", help="what has less is not published")
    push.add_argument("--private", action="store_true", default=None, help="only for its owners")
    push.add_argument("--revision", metavar="BRANCH", help="branch; it is made if there is none")
    push.set_defaults(run=_push)


def _train(options: argparse.Namespace) -> None:
    from ..recipe import load_recipe

    # Only train.py is started by launchers.
    program = "accelerate launch train.py" if options.program == "train.py" else "hf-vaswani train"
    recipe = load_recipe(options.arguments, program)
    # Imported once the recipe is right: these take seconds.
    from accelerate import PartialState
    from tqdm.contrib.logging import logging_redirect_tqdm
    from transformers.utils.logging import disable_progress_bar

    from ..training.loop import train

    disable_progress_bar()
    with logging_redirect_tqdm():
        result = train(recipe)
    if PartialState().is_main_process:
        for sample in result.get("samples", []):
            sys.stdout.write("".join(f"{name:>11}  {text}\n" for name, text in sample.items()) + "\n")
        if "bleu" in result:
            sys.stdout.write(f"Test BLEU {result['bleu']:.2f}  ({result['signatures']['bleu']})\n")
            sys.stdout.write(f"     chrF {result['chrf']:.2f}  ({result['signatures']['chrf']})\n")
        sys.stdout.write(f"Model     {result['model']}\n")
        if recipe.hub.repo_id is not None:
            from ..hub.publishing import push_checkpoint, push_waiting

            sys.stdout.flush()
            push_waiting(Path(recipe.run_dir), recipe.hub)
            address = push_checkpoint(Path(recipe.run_dir), Path(result["model"]), recipe.hub)
            sys.stdout.write(f"Published {address}\n")


def _average(options: argparse.Namespace) -> None:
    from ..run_folder import RECIPE, checkpoints_to_average, read_recipe, save_average

    folders = [Path(name) for name in options.folders]
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"There is no folder {str(folder)!r}.")
    counts = [count for count in (options.last, options.best) if count is not None]
    if counts:
        if len(counts) > 1 or counts[0] < 1 or len(folders) > 1:
            raise ValueError("Of one run, give --last N or --best N, N being 1 or more.")
        training = read_recipe(folders[0]).training
        best_by = options.by or training.best_by
        found = checkpoints_to_average(folders[0], training.save_every, options.last, options.best, best_by)
        if len(found) < counts[0]:
            raise ValueError(f"{folders[0]} has {len(found)} such checkpoints, and not {counts[0]}.")
        folders = found
    elif (folders[0] / RECIPE).is_file():
        raise ValueError(f"{folders[0]} is the folder of a run: say which of its checkpoints by --last N or --best N.")
    save_average(folders, Path(options.output))
    sys.stdout.write(f"The mean of {', '.join(map(str, folders))}\nModel     {options.output}\n")


def _push(options: argparse.Namespace) -> None:
    from ..recipe import check_branch, check_repo_id
    from ..run_folder import MODEL, read_recipe

    hub = read_recipe(options.run_dir).hub
    for key in ("repo_id", "min_bleu", "private", "revision"):
        if getattr(options, key) is not None:
            setattr(hub, key, getattr(options, key))
    if hub.repo_id is None:
        raise ValueError("Say where to: --repo-id USER/NAME, or hub.repo_id in the recipe.")
    check_repo_id(hub.repo_id, "--repo-id")
    check_branch(hub.revision, "--revision")
    if not 0 <= hub.min_bleu <= 100:
        raise ValueError(f"--min-bleu must be from 0 to 100, but it is {hub.min_bleu}.")
    from ..hub.publishing import push_checkpoint

    name = MODEL if options.checkpoint is None else f"checkpoint-{options.checkpoint}"
    address = push_checkpoint(options.run_dir, options.run_dir / name, hub)
    sys.stdout.write(f"Published {address}\n")
