"""The verb that converts a model to another format: convert."""

import argparse
import sys
from pathlib import Path
from typing import Any

from ..conversion.formats import TARGETS
from .inputs import add_revision


def add_verbs(verbs: Any) -> None:
    """Adds the verb to the command line, with its function under `run`."""
    convert = verbs.add_parser(
        "convert",
        help="convert from Marian or fairseq, or to Marian, CTranslate2 or ONNX",
        description="Convert a model from Marian or fairseq, or to Marian, CTranslate2 or ONNX, and check that both "
        "models compute the same.",
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

    (name,) = with_revision([options.source], options.revision)
    source = resolve_model(name, "SOURCE")
    sentence = SENTENCE if options.sentence is None else options.sentence
    if not sentence.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in sentence):
        raise ValueError(f"--sentence is not UTF-8: {sentence!r}.")
    with stopped_by_sigterm():
        lines = convert(source, options.destination, options.to, options.quantization, options.force, sentence)
    sys.stdout.write("".join(f"{line}\n" for line in [*lines, f"Model     {options.destination}"]))
