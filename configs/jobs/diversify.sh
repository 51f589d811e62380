#!/bin/bash
# Data diversification (Nguyen et al., 2020): trains models of both directions on the pairs of a recipe, translates both
# sides of the pairs with them, and trains the model of the recipe on the pairs and all these translations:
#
#     bash configs/jobs/diversify.sh RECIPE.yaml RUN_FOLDER [--section.key value ...]
#
# MODELS (3) is the number of models of each direction, DIRECTIONS ("forward backward") may be one of them, and NUM_BEAMS
# (5) is the beam size of the translations. LAUNCHER (python) starts each step: "torchrun --nproc_per_node=2", for example.
# The models and their translations are in RUN_FOLDER.diversified. What is done is not repeated by the same command.
set -euo pipefail
if [ $# -lt 2 ]; then
    echo "usage: bash diversify.sh RECIPE.yaml RUN_FOLDER [--section.key value ...]" >&2
    exit 2
fi
recipe=$1 run=$2
shift 2
folder=$run.diversified

# The text of both sides, each sentence once; and what the recipe says about its pairs.
facts=$(python - "$folder" "$recipe" "$@" << 'PYTHON'
import json
import os
import sys
from pathlib import Path

from hf_vaswani.files import atomic_lines, tsv_cell
from hf_vaswani.recipe_file import load_recipe
from hf_vaswani.training.preparation import task_data

folder, *arguments = sys.argv[1:]
try:
    recipe = load_recipe(arguments)
    if len(recipe.language_pairs) > 1:
        raise ValueError(f"The sources must have one direction, but those of the recipe have {recipe.language_pairs}.")
    # Whatever the other direction refuses is said before hours of training.
    if "backward" in os.environ.get("DIRECTIONS", "forward backward"):
        if recipe.initialize.from_ is not None:
            raise ValueError(
                f"initialize.from is {recipe.initialize.from_}, from which models of the other direction cannot start: "
                "set DIRECTIONS=forward, or start from random weights."
            )
        load_recipe([*arguments, "--hub.repo_id", "null", "--reverse"])
    data = task_data(recipe)
    texts = [data.read_training(number).splits["train"] for number in range(len(data.sources))]
except (ValueError, OSError) as error:
    print(f"diversify.sh: {error}", file=sys.stderr)
    sys.exit(2)
Path(folder).mkdir(parents=True, exist_ok=True)
languages = dict(zip(("source", "target"), recipe.language_pairs[0]))
for side, language in languages.items():
    lines = (tsv_cell(row[side]).strip() for text in texts for row in text)
    with atomic_lines(Path(folder, f"text.{language}")) as file:
        file.writelines(f"{line}\n" for line in dict.fromkeys(lines) if line)
pairs = {f"{side}_language": language for side, language in languages.items()} | {"prefix": recipe.data.prefix}
print(recipe.seed, *languages.values(), json.dumps(pairs))
PYTHON
)
read -r seed source target pairs <<< "$facts"

verb() {
    # The launcher may be several words.
    ${LAUNCHER:-python} -m hf_vaswani.cli "$@"
}

translations=()
for direction in ${DIRECTIONS:-forward backward}; do
    # A model translates the side that it reads, which is the target of the other direction.
    if [ "$direction" = forward ]; then
        text=$folder/text.$source
        train=() translate=(--data.source_language "$target" --data.target_language "$source")
    else
        train=(--reverse) translate=() text=$folder/text.$target
    fi
    for ((i = 1; i <= ${MODELS:-3}; i++)); do
        model=$folder/$direction.$i
        options=("$recipe" "$@" --seed $((seed + i - 1)) --hub.repo_id null --run_dir "$model")
        verb train "${options[@]}" "${train[@]}"
        verb backtranslate "${options[@]}" "${translate[@]}" --backtranslation.model "$model" \
            --backtranslation.text "$text" --backtranslation.output "$model.tsv" --backtranslation.method beam \
            --backtranslation.num_beams "${NUM_BEAMS:-5}" --backtranslation.top_k null --backtranslation.temperature 1
        translations+=(--more_data+ "${pairs%\}}, \"train_files\": \"$model.tsv\"}")
    done
done
verb train "$recipe" "$@" --run_dir "$run" "${translations[@]}"
