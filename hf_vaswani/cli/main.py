"""The command line: hf-vaswani VERB. One sentence and exit code 2 for whatever a person can put right."""

import argparse
import io
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO, cast

from hf_vaswani import __version__

from .evaluate import add_scoring_verbs
from .translate import add_text_verbs

logger = logging.getLogger("hf_vaswani")


def main(argv: Sequence[str] | None = None, program: str = "hf-vaswani") -> int:
    """
    Runs one verb.

    Args:
        argv (`Sequence[str]`, *optional*): the command line without the program's name; by default the process's own.
        program (`str`): the program's name in help and errors.

    Returns:
        `int`: the exit code: 0, or 2 after bad input.
    """
    if sys.stderr is None:
        # It was closed; libraries write to it.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logger.setLevel(logging.INFO)
    # Accelerate warns at each checkpoint that a tied matrix is stored once, as it should be.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    # The Hub's client tells of each new try, and where nothing has changed.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with _standard_output():
            # A recipe has a command line of its own, in which every key is an option.
            if arguments[:1] == ["train"]:
                _train(arguments[1:], program)
            else:
                options = _parser().parse_args(arguments)
                options.run(options)
        return 0
    except BrokenPipeError:
        # Whoever reads the output has enough, as `head` has.
        _discard(sys.stdout)
        return 0
    except (ValueError, OSError, ImportError) as error:
        logger.debug("Where it happened:", exc_info=True)
        sys.stderr.write(f"{program}: {' '.join(str(error).split())}\n")
        return 2
    except RuntimeError as error:
        # torch has no class of its own for this on a CPU.
        if "memory" not in str(error):
            raise
        sys.stderr.write(f"{program}: There is not enough memory: {str(error).splitlines()[0]}\n")
        return 2
    except MemoryError:
        sys.stderr.write(f"{program}: There is not enough memory.\n")
        return 2
    except KeyboardInterrupt as error:
        sys.stderr.write(f"{program}: {str(error) or 'stopped.'}\n")
        return getattr(error, "exit_code", 130)


class _StandardOutput:
    """Standard output, the errors of which say that they are its own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As that of the stream."""
        with self._named():
            return self._stream.write(text)

    def flush(self) -> None:
        """As that of the stream."""
        with self._named():
            self._stream.flush()

    @contextmanager
    def _named(self) -> Iterator[None]:
        # Once more at the end, because argparse keeps such an error to itself.
        if self._error is not None:
            raise self._error
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            # Python would try again when it ends, and tell of it.
            _discard(self._stream)
            self._error = OSError(f"Standard output cannot be written: {error.strerror or error}.")
            raise self._error from error


@contextmanager
def _standard_output() -> Iterator[None]:
    """Standard output for one verb: UTF-8 as every text here, and written to its end, or one error says why not."""
    if sys.stdout is None:
        raise ValueError("Standard output is closed: send it to a file, or to /dev/null.")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A path may have bytes that are not UTF-8.
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    output = _StandardOutput(sys.stdout)
    with redirect_stdout(cast(TextIO, output)):
        try:
            yield
        finally:
            output.flush()


def _discard(stream: TextIO) -> None:
    """Lets nothing more come out of a stream, in which there may be something still."""
    with suppress(io.UnsupportedOperation):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _parser() -> argparse.ArgumentParser:
    """All verbs; each has the function that does it under `run`."""
    parser = argparse.ArgumentParser(prog="hf-vaswani", description="The 2017 Transformer: train it, use it.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verbs.add_parser("train", help="train a recipe: train RECIPE.yaml [--section.key value ...]", add_help=False)
    add_text_verbs(verbs)
    add_scoring_verbs(verbs)
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
    convert = verbs.add_parser("convert", help="from Marian or fairseq, or to Marian, CTranslate2 or ONNX")
    convert.add_argument("source", metavar="SOURCE", help="folder or file of a model, or id on the Hub")
    convert.add_argument("destination", type=Path, metavar="DESTINATION", help="the folder to write")
    convert.add_argument("--to", required=True, choices=("vaswani", "marian", "ctranslate2", "onnx"))
    convert.add_argument("--quantization", metavar="KIND", help="of ctranslate2: int8, float16, bfloat16, ...")
    convert.add_argument("--force", action="store_true", help="replace a folder that exists")
    convert.add_argument("--sentence", metavar="TEXT", help="what both sides translate in the end")
    convert.set_defaults(run=_convert)
    return parser


def _train(arguments: list[str], program: str) -> None:
    from ..recipe import load_recipe

    # Only train.py is started by launchers.
    recipe = load_recipe(arguments) if program == "train.py" else load_recipe(arguments, "hf-vaswani train")
    # Imported once the recipe is right: these take seconds.
    from accelerate import PartialState
    from tqdm.contrib.logging import logging_redirect_tqdm
    from transformers.utils.logging import disable_progress_bar

    from ..training.loop import train

    disable_progress_bar()
    with logging_redirect_tqdm():
        result = train(recipe)
    if PartialState().is_main_process:
        for sample in result.samples or []:
            sys.stdout.write("".join(f"{name:>11}  {text}\n" for name, text in sample.items()) + "\n")
        if result.signatures is not None:
            sys.stdout.write(f"Test BLEU {result.bleu:.2f}  ({result.signatures['bleu']})\n")
            sys.stdout.write(f"     chrF {result.chrf:.2f}  ({result.signatures['chrf']})\n")
        sys.stdout.write(f"Model     {result.model}\n")
        if recipe.hub.repo_id is not None:
            from ..hub.publishing import push_checkpoint, push_waiting

            sys.stdout.flush()
            push_waiting(Path(recipe.run_dir), recipe.hub)
            address = push_checkpoint(Path(recipe.run_dir), Path(str(result.model)), recipe.hub)
            sys.stdout.write(f"Published {address}\n")


def _push(options: argparse.Namespace) -> None:
    from ..recipe import check_branch, check_repo_id
    from ..run_folder import MODEL, checkpoint_folder, read_recipe

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

    step = options.checkpoint
    folder = options.run_dir / MODEL if step is None else checkpoint_folder(options.run_dir, step)
    address = push_checkpoint(options.run_dir, folder, hub)
    sys.stdout.write(f"Published {address}\n")


def _convert(options: argparse.Namespace) -> None:
    from ..conversion.convert import SENTENCE, convert
    from ..interruption import stopped_by_sigterm

    source = Path(options.source)
    if not source.exists() and not source.is_absolute() and len(source.parts) == 2:
        from huggingface_hub import snapshot_download

        try:
            # A repository may have the same weights once more for other libraries.
            source = Path(snapshot_download(options.source, ignore_patterns=["*.h5", "*.msgpack", "*.ot"]))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{options.source} is no folder here, and as a model on the Hub it cannot be had: {error}"
            ) from error
    sentence = SENTENCE if options.sentence is None else options.sentence
    if not sentence.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in sentence):
        raise ValueError(f"--sentence is not UTF-8: {sentence!r}.")
    with stopped_by_sigterm():
        lines = convert(source, options.destination, options.to, options.quantization, options.force, sentence)
    sys.stdout.write("".join(f"{line}\n" for line in [*lines, f"Model     {options.destination}"]))


def _average(options: argparse.Namespace) -> None:
    from ..averaging import save_average
    from ..run_folder import RECIPE, checkpoints_to_average, read_recipe

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
