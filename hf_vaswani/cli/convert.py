"""The verb that writes a model in another format: convert."""

import argparse
import sys
from pathlib import Path
from typing import Any


def add_verbs(verbs: Any) -> None:
    """Adds it to the verbs of a command line, with the function that does it under `run`."""
    convert = verbs.add_parser("convert", help="from Marian or fairseq, or to Marian, CTranslate2 or ONNX")
    convert.add_argument("source", metavar="SOURCE", help="folder or file of a model, or id on the Hub")
    convert.add_argument("destination", type=Path, metavar="DESTINATION", help="the folder to write")
    convert.add_argument("--to", required=True, choices=("vaswani", "marian", "ctranslate2", "onnx"))
    convert.add_argument("--quantization", metavar="KIND", help="of ctranslate2: int8, float16, bfloat16, ...")
    convert.add_argument("--force", action="store_true", help="replace a folder that exists")
    convert.add_argument("--sentence", metavar="TEXT", help="what both sides translate in the end")
    convert.set_defaults(run=_convert)


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
