"""The verb that writes which entries of the vocabulary translate which: shortlist."""

import argparse
import json
import sys
import time
from collections import Counter
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from .inputs import add_recipe_verb, print_table

if TYPE_CHECKING:
    from typing import Any

    from ..data.reading import Source
    from ..recipe import Recipe

# In tokens: a pair that is longer on one side is left out.
MAX_TOKENS = 512
PURPOSE = "Writes the likely translations of each entry of a model's vocabulary, from the training text of its recipe."


def add_verbs(verbs: "Any") -> None:
    """Adds the verb to the command line, with its function under `run`."""
    add_recipe_verb(verbs, "shortlist", "find the likely translations of each entry of the vocabulary", _shortlist)


def _shortlist(options: argparse.Namespace) -> None:
    from ..recipe_file import load_recipe

    recipe = load_recipe(options.arguments, "hf-vaswani shortlist", PURPOSE)
    from ..corpus.lexicon import likely_translations
    from ..data.tokenizer import load_tokenizer
    from ..files import atomic_write_text
    from ..model.configuration_vaswani import VaswaniConfig
    from ..recipe import PAIR_TASKS
    from ..run_folder import MODEL
    from ..training.distillation import with_teacher_text
    from ..training.preparation import task_data
    from ..translation.shortlist import FILE

    if recipe.task not in PAIR_TASKS:
        raise ValueError(f"A shortlist is for models that translate, but the task is {recipe.task!r}.")
    folder = Path(recipe.run_dir) / MODEL
    if not folder.is_dir():
        raise ValueError(f"{recipe.run_dir} has no model yet: train the recipe first, or name its run by --run_dir.")
    start = time.monotonic()
    recipe = with_teacher_text(recipe)
    tokenizer = load_tokenizer(str(folder))
    data = task_data(recipe)
    parts = [data.read_training(number) for number in range(len(data.sources))]
    sources, targets = _ids(parts, tokenizer, recipe)
    if not sources:
        raise ValueError(f"The training text has no pairs of at most {MAX_TOKENS} tokens with text on both sides.")
    settings, size = recipe.shortlist, VaswaniConfig.from_pretrained(folder).vocab_size
    frequent = [entry for entry, _ in Counter(chain.from_iterable(targets)).most_common(settings.frequent)]
    translations = likely_translations(sources, targets, size, settings.candidates, frequent)
    words = tokenizer.convert_ids_to_tokens(list(range(size)))
    content = {
        "frequent": [words[entry] for entry in frequent],
        "translations": {words[entry]: [words[other] for other in row] for entry, row in translations.items()},
    }
    atomic_write_text(folder / FILE, json.dumps(content, ensure_ascii=False, indent=0) + "\n")
    row = {
        "pairs": f"{len(sources):,}",
        "entries with translations": f"{len(translations):,} of {size:,}",
        "seconds": round(time.monotonic() - start, 1),
        "file": str(folder / FILE),
    }
    print_table([row])
    sys.stdout.flush()


def _ids(parts: "list[Source]", tokenizer: "Any", recipe: "Recipe") -> tuple[list[list[int]], list[list[int]]]:
    """Returns the ids of evenly spaced pairs of all sources, without pairs that are too long or lack a side."""
    from ..data.encoding import encode_rows
    from ..data.tables import named_errors

    share = recipe.shortlist.max_pairs // len(parts) or 1
    sources: list[list[int]] = []
    targets: list[list[int]] = []
    for part in parts:
        pairs = part.splits["train"]
        if hasattr(pairs, "select"):
            count = min(share, len(pairs))
            pairs = pairs.select([i * len(pairs) // count for i in range(count)])
        rows = list(islice(named_errors(iter(pairs), part.origin("train")), share))
        texts = [[row[side] for row in rows] for side in ("source", "target")]
        encoded = encode_rows(texts[0], texts[1], range(len(rows)), tokenizer, part.source_prefix)
        for source, target in zip(*(encoded[f"{side}_ids"].to_pylist() for side in ("source", "target")), strict=True):
            # Their products would fill the memory.
            if max(len(source), len(target)) <= MAX_TOKENS:
                sources.append(source)
                targets.append(target)
    return sources, targets
