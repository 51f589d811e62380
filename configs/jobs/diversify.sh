#!/bin/bash
# Data diversification (Nguyen et al., 2020): models of both directions translate the training text, and the model of the
# recipe learns the pairs and all these translations.
#
#     bash configs/jobs/diversify.sh RECIPE.yaml FOLDER TEXT.SOURCE TEXT.TARGET [MODELS]
#
# The texts are the two sides of the recipe's training text, one sentence a line, in files with the languages at the end
# of their names. MODELS is the number of models of each
# direction, by default 3, with the seeds from 1 on. FOLDER gets the models, their translations as files of pairs, and the
# last model in FOLDER/final. The same command goes on after a stop: what is done is not repeated. LAUNCH starts each
# training and each translation, for example LAUNCH="torchrun --nproc_per_node=2"; by default, it is python.
#
# The recipe's schedule may be too short for all the text: its last training goes on with
# hf-vaswani train RECIPE.yaml ... --training.max_steps N. If its sources have a prefix, add it to the sources below.
set -euo pipefail

recipe=$1
folder=$2
source_text=$3
target_text=$4
models=${5:-3}
read -ra run <<< "${LAUNCH:-python} -m hf_vaswani.cli"
mkdir -p "$folder"
# Each sentence once.
source_sentences=$folder/text.${source_text##*.}
target_sentences=$folder/text.${target_text##*.}
awk '!seen[$0]++' "$source_text" > "$source_sentences"
awk '!seen[$0]++' "$target_text" > "$target_sentences"

# translate NAME TEXT [--reverse]: of a source of pairs, the model has the other direction.
translate() {
    "${run[@]}" backtranslate "$recipe" "${@:3}" --hub.repo_id null --backtranslation.model "$folder/$1" \
        --backtranslation.text "$2" --backtranslation.output "$folder/$1.tsv" \
        --backtranslation.method beam --backtranslation.num_beams 5
}

sources=()
for ((i = 1; i <= models; i++)); do
    "${run[@]}" train "$recipe" --run_dir "$folder/forward.$i" --seed "$i" --hub.repo_id null
    translate "forward.$i" "$source_sentences" --reverse
    "${run[@]}" train "$recipe" --reverse --run_dir "$folder/backward.$i" --seed "$i" --hub.repo_id null
    translate "backward.$i" "$target_sentences"
    sources+=(--more_data+ "{train_files: '$folder/forward.$i.tsv'}" --more_data+ "{train_files: '$folder/backward.$i.tsv'}")
done
"${run[@]}" train "$recipe" --run_dir "$folder/final" "${sources[@]}"
