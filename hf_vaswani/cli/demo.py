"""The verb that serves a page to try a model: demo."""

import argparse
import logging
from pathlib import Path
from typing import Any

from ..files import read_json
from .inputs import (
    add_device,
    add_revision,
    add_target_language,
    check_counts,
    choose_device,
    load_models,
    require_file,
    text_lines,
)

logger = logging.getLogger("hf_vaswani")

MAX_EXAMPLES = 6


def add_verbs(verbs: Any) -> None:
    """Adds the verb to the command line, with its function under `run`."""
    demo = verbs.add_parser(
        "demo",
        help="serve a page to try a model in a browser",
        description="Serve a page to try a translation model in a browser: translations, words in the colours of "
        "their alignment, and the explorer. Needs the extra `demo`.",
        epilog="example: hf-vaswani demo --model runs/my/model",
    )
    demo.add_argument("--model", required=True, help="model folder or Hub id, e.g. runs/my/model")
    add_revision(demo)
    add_target_language(demo)
    add_device(demo)
    demo.add_argument("--num-beams", type=int, metavar="N", help="beam size at first; default: the model's own")
    demo.add_argument(
        "--examples",
        type=Path,
        metavar="FILE",
        help="text file with an example in each line; default: sentences of the test of the model's run",
    )
    demo.add_argument(
        "--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 for every network; default: %(default)s"
    )
    demo.add_argument("--port", type=int, default=7860, metavar="N", help="port to listen at; default: %(default)s")
    demo.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> None:
    from ..serving.demo import MAX_BEAMS, build_demo, serve_demo

    check_counts(options, "num_beams")
    if options.num_beams is not None and options.num_beams > MAX_BEAMS:
        raise ValueError(f"--num-beams must be from 1 to {MAX_BEAMS}, but it is {options.num_beams}.")
    if not 0 < options.port < 2**16:
        raise ValueError(f"--port must be from 1 to {2**16 - 1}, but it is {options.port}.")
    if options.examples is not None:
        require_file(options.examples)
    translators = load_models(
        [options.model], options.target_language, choose_device(options.device), options.revision
    )
    model = translators.models[0]
    if options.num_beams is not None:
        model.generation_config.num_beams = options.num_beams
    examples = _examples(options.examples, translators.folders[0], translators.tags)
    demo = build_demo(model, translators.tokenizer, options.model, examples, options.target_language)
    logger.info(f"http://{options.host}:{options.port} (Ctrl-C stops it)")
    serve_demo(demo, options.host, options.port)


def _examples(path: Path | None, model: Path, tags: Any) -> list[str]:
    """Returns the lines of a file, or the samples of the run's test, without language tags."""
    if path is not None:
        return [line for line in text_lines(path) if line.strip()][:MAX_EXAMPLES]
    result = model.resolve().parent / "test.json"
    if not result.is_file():
        return []
    samples = read_json(result).get("samples") or ()
    return [tags.split(str(sample["source"]))[1] for sample in samples][:MAX_EXAMPLES]
