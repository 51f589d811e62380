"""The verb that makes a page of what a model does with a text: explore."""

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
)

logger = logging.getLogger("hf_vaswani")


def add_verbs(verbs: Any) -> None:
    """Adds the verb to the command line, with its function under `run`."""
    explore = verbs.add_parser(
        "explore",
        help="make a page that shows what a model does with a sentence",
        description="Make one HTML file that shows what a model does with a sentence: translation and alignment, the "
        "search step by step, attention of all heads, positions and embeddings. It opens in any browser, and needs no "
        "other file or host.",
        epilog='example: hf-vaswani explore --model runs/my/model "A dog runs." --output page.html',
    )
    explore.add_argument("--model", required=True, help="model folder or Hub id, e.g. runs/my/model")
    add_revision(explore)
    add_target_language(explore)
    add_device(explore)
    explore.add_argument("--num-beams", type=int, metavar="N", help="beam size, e.g. 4; default: the model's own")
    explore.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        default=Path("explorer.html"),
        help="file to write; default: %(default)s",
    )
    explore.add_argument("text", metavar="TEXT", help="the sentence")
    explore.set_defaults(run=_explore)


def _explore(options: argparse.Namespace) -> None:
    from ..model.configuration_vaswani import VaswaniConfig
    from ..model_names import resolve_model, with_revision
    from ..translation.loading import load_single_stack
    from ..visualization.explorer import explore

    check_counts(options, "num_beams")
    if options.output.is_dir():
        raise ValueError(f"--output {options.output} is a folder, not a file.")
    if not options.output.resolve().parent.is_dir():
        raise ValueError(f"There is no folder {str(options.output.parent)!r} for --output.")
    (name,) = with_revision([options.model], options.revision)
    text: str = options.text
    device = choose_device(options.device)
    settings = {} if options.num_beams is None else {"num_beams": options.num_beams}
    if options.num_beams == 1:
        # They have no effect on greedy search, and transformers would warn about each.
        settings |= {"length_penalty": None, "early_stopping": None}
    folder = resolve_model(name, "--model")
    kind = read_json(folder / "config.json").get("model_type")
    if kind != "vaswani":
        raise ValueError(
            f"The explorer needs a Vaswani model, but {options.model} is of the type {kind!r}: hf-vaswani convert "
            "turns some into one."
        )
    config = VaswaniConfig.from_pretrained(folder)
    if options.num_beams is not None and config.stacks == ("encoder",):
        raise ValueError(f"--num-beams is for models that write text, but {options.model} does not.")
    if config.is_encoder_decoder:
        translators = load_models([str(folder)], options.target_language, device)
        model, tokenizer = translators.models[0], translators.tokenizer
        (text,) = translators.tagged([text], "The text")
    else:
        if options.target_language is not None:
            raise ValueError(f"--target-language is for models that translate, but {options.model} does not.")
        model, tokenizer = load_single_stack(folder)
        model = model.to(device)
    page = explore(model, tokenizer, text, name=name, settings=settings)
    page.save(options.output)
    logger.info(f"{options.output}: {len(page.html.encode()) / 1000:,.0f} kB; open it in a browser.")
