"""The verbs that read given translations beside their sources: score, align."""

import argparse
import json
import logging
import sys
from typing import Any

from .inputs import add_budget, add_model, add_pairs, check_counts, line_pairs, load_one, require_file

logger = logging.getLogger("hf_vaswani")


def add_verbs(verbs: Any) -> None:
    """Adds the verbs to the command line, each with its function under `run`."""
    score = verbs.add_parser(
        "score",
        help="print the log-probabilities of given translations",
        description="Print the log-probability of each translation under the model: the sum over its tokens, the mean "
        "per token and the number of tokens, separated by tabs.",
        epilog="example: hf-vaswani score --model runs/my/model test.en test.de",
    )
    add_model(score)
    add_budget(score)
    add_pairs(score)
    score.set_defaults(run=_score)

    align = verbs.add_parser(
        "align",
        help="print which words of given translations belong together",
        description="Print the word alignment of each pair of lines, from the model's attention to the source: the "
        "numbers of the source and target words that belong together, counted from 0, as 0-0 1-2.",
        epilog="example: hf-vaswani align --model runs/my/model test.en test.de",
    )
    add_model(align)
    add_budget(align)
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
    add_pairs(align)
    align.set_defaults(run=_align)


def pharaoh(links: list[tuple[int, int, float]]) -> str:
    """Writes links as `0-0 1-2`."""
    return " ".join(f"{i}-{j}" for i, j, _ in links)


def rounded(links: list[tuple[int, int, float]]) -> list[list[float]]:
    """Returns links for JSON."""
    return [[i, j, round(attention, 4)] for i, j, attention in links]


def _score(options: argparse.Namespace) -> None:
    from ..translation.batches import log_probabilities

    check_counts(options, "tokens_per_batch")
    require_file(options.source)
    require_file(options.target)
    translators = load_one(options)
    model, tokenizer, most = translators.models[0], translators.tokenizer, translators.tokens_per_batch
    for done, sources, targets in line_pairs(options, translators):
        try:
            found = log_probabilities(model, tokenizer, sources, targets, most)
        except ValueError as error:
            raise ValueError(f"Lines {done + 1} to {done + len(sources)}: {error}") from error
        for log_probability, tokens in found:
            sys.stdout.write(f"{log_probability:.4f}\t{log_probability / tokens:.4f}\t{tokens}\n")
        sys.stdout.flush()


def _align(options: argparse.Namespace) -> None:
    from ..translation.alignment import aligning_layers, alignments, choose_alignment

    check_counts(options, "tokens_per_batch")
    if options.shift and options.layer is None:
        raise ValueError("--shift needs --layer.")
    require_file(options.source)
    require_file(options.target)
    translators = load_one(options)
    model, tokenizer = translators.models[0], translators.tokenizer
    aligning_layers(model, options.layer)
    layer, shift = options.layer, options.shift
    how: dict[str, Any] = {
        "unit": "pieces" if options.pieces else "words",
        "tokens_per_batch": translators.tokens_per_batch,
    }
    for done, sources, targets in line_pairs(options, translators):
        try:
            if layer is None:
                layer, shift = model.config.alignment_layer, model.config.alignment_shift
            if layer is None:
                layer, shift = choose_alignment(
                    model, tokenizer, sources, targets, tokens_per_batch=translators.tokens_per_batch
                )
                again = f"--layer {layer}{' --shift' if shift else ''}"
                logger.info(f"The links of these lines agree most in layer {layer}: {again} reads the same again.")
            found = alignments(model, tokenizer, sources, targets, layer=layer, shift=shift, **how)
        except ValueError as error:
            raise ValueError(f"Lines {done + 1} to {done + len(sources)}: {error}") from error
        for number, alignment in enumerate(found, start=done + 1):
            links = [(i, j, float(alignment.probabilities[j, i])) for i, j in alignment.links(options.method)]
            if options.format == "jsonl":
                entry = {"line": number, "source": alignment.source, "target": alignment.target}
                sys.stdout.write(json.dumps(entry | {"links": rounded(links)}, ensure_ascii=False) + "\n")
            else:
                sys.stdout.write(f"{pharaoh(links)}\n")
        sys.stdout.flush()
