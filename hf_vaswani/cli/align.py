"""The verb that aligns the words of given translations: align."""

import argparse
import json
import logging
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from .inputs import (
    add_device,
    add_revision,
    add_target_language,
    choose_device,
    line_pairs,
    load_models,
    require_file,
)

logger = logging.getLogger("hf_vaswani")

# Pairs of lines read and aligned together, and those by which a layer is chosen.
PAIRS_AT_A_TIME = 1024


def add_verbs(verbs: Any) -> None:
    """Adds the verb to the command line, with its function under `run`."""
    align = verbs.add_parser(
        "align",
        help="print which words of given translations belong together",
        description="Print the word alignment of each pair of lines, from the model's attention to the source: the "
        "numbers of the source and target words that belong together, counted from 0, as 0-0 1-2.",
        epilog="example: hf-vaswani align --model runs/my/model test.en test.de",
    )
    align.add_argument("--model", required=True, help="model folder or Hub id, e.g. runs/my/model")
    add_revision(align)
    add_target_language(align)
    add_device(align)
    align.add_argument(
        "--method",
        choices=("argmax", "intersection"),
        default="argmax",
        help="argmax (default): each target word with the source word that it attends to most; intersection: only "
        "those where the source word is not attended to more by another",
    )
    align.add_argument("--pieces", action="store_true", help="align the tokens of the model in place of words")
    align.add_argument(
        "--layer",
        type=int,
        metavar="N",
        help="layer of the decoder, counted from 0; default: that of the model's config or, if it has none, the one "
        "that aligns these lines most consistently",
    )
    align.add_argument(
        "--shift", action="store_true", help="with --layer: read the attention at the step after each token"
    )
    align.add_argument(
        "--format",
        choices=("pharaoh", "jsonl"),
        default="pharaoh",
        help="pharaoh (default): links as 0-0 1-2; jsonl: words, and links with probabilities, as JSON lines",
    )
    align.add_argument("source", type=Path, metavar="SOURCE", help="file of source sentences, one per line")
    align.add_argument("target", type=Path, metavar="TARGET", help="file of their translations, one per line")
    align.set_defaults(run=_align)


def pharaoh(links: list[tuple[int, int, float]]) -> str:
    """Writes links as `0-0 1-2`."""
    return " ".join(f"{i}-{j}" for i, j, _ in links)


def rounded(links: list[tuple[int, int, float]]) -> list[list[float]]:
    """Returns links for JSON."""
    return [[i, j, round(attention, 4)] for i, j, attention in links]


def _align(options: argparse.Namespace) -> None:
    from ..translation.alignment import aligning_layers, alignments, choose_alignment

    if options.shift and options.layer is None:
        raise ValueError("--shift needs --layer.")
    require_file(options.source)
    require_file(options.target)
    translators = load_models(
        [options.model], options.target_language, choose_device(options.device), options.revision
    )
    model, tokenizer = translators.models[0], translators.tokenizer
    layer, shift = options.layer, options.shift
    aligning_layers(model, layer)
    pairs = line_pairs(options.source, options.target, translators)
    done = 0
    while chunk := list(islice(pairs, PAIRS_AT_A_TIME)):
        sources, targets = ([pair[side] for pair in chunk] for side in (0, 1))
        try:
            if layer is None:
                layer, shift = model.config.alignment_layer, model.config.alignment_shift
            if layer is None:
                layer, shift = choose_alignment(model, tokenizer, sources, targets)
                again = f"--layer {layer}{' --shift' if shift else ''}"
                logger.info(f"The links of these lines agree most in layer {layer}: {again} reads the same again.")
            found = alignments(
                model,
                tokenizer,
                sources,
                targets,
                unit="pieces" if options.pieces else "words",
                layer=layer,
                shift=shift,
            )
        except ValueError as error:
            raise ValueError(f"Lines {done + 1} to {done + len(chunk)}: {error}") from error
        for number, alignment in enumerate(found, start=done + 1):
            links = [(i, j, float(alignment.probabilities[j, i])) for i, j in alignment.links(options.method)]
            if options.format == "jsonl":
                entry = {"line": number, "source": alignment.source, "target": alignment.target}
                sys.stdout.write(json.dumps(entry | {"links": rounded(links)}, ensure_ascii=False) + "\n")
            else:
                sys.stdout.write(f"{pharaoh(links)}\n")
        sys.stdout.flush()
        done += len(chunk)
