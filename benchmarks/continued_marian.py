"""Can a Marian model from transformers be continued here? BLEU in transformers, after conversion, and after training.

    python benchmarks/continued_marian.py MULTI30K_FOLDER RUNS_FOLDER [--section.key value ...]

Transformers' `Seq2SeqTrainer` trains a `MarianMTModel` on the first half of Multi30k's training text. A run starts
from its folder, continues with the whole text, and compares both models on the test set. The options override keys of
the run's recipe. What is complete is not repeated.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from datasets import Dataset
from transformers import (
    DataCollatorForSeq2Seq,
    MarianConfig,
    MarianMTModel,
    MarianTokenizer,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from hf_vaswani.metrics import score

LANGUAGES = ("en", "de")
SPLITS = {"train": "train", "validation": "val", "test": "test_2016_flickr"}
RECIPE = {
    "training.max_steps": 2000,
    "training.tokens_per_batch": 2048,
    "training.accumulation_steps": 2,
    "training.schedule": "cosine",
    "training.peak_learning_rate": 0.0003,
    "training.warmup_steps": 100,
    "training.validate_every": 500,
    "training.save_every": 500,
    "training.average_best": 1,
    "model.dropout": 0.3,
}


def lines(path: Path) -> list[str]:
    """Returns the lines of a file."""
    return path.read_text("utf-8").removesuffix("\n").split("\n")


def write_tokenizer(text: Iterable[str], folder: Path) -> MarianTokenizer:
    """Trains a vocabulary for both languages, and writes it in the format of OPUS-MT."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "source.spm", "wb") as file:
        settings: dict[str, Any] = {
            "vocab_size": 6000,
            "eos_id": 0,
            "unk_id": 1,
            "bos_id": -1,
            "pad_id": -1,
            "minloglevel": 2,
        }
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(text), model_writer=file, **settings)
    shutil.copy(folder / "source.spm", folder / "target.spm")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "source.spm"))
    pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate([*pieces, "<pad>"])}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "MarianTokenizer"}))
    return MarianTokenizer.from_pretrained(folder)


def train_marian(multi30k: Path, folder: Path, epochs: float) -> None:
    """Trains a Marian model as transformers' documentation does, and writes its folder."""
    sources, targets = (lines(multi30k / f"train.{language}") for language in LANGUAGES)
    half = len(sources) // 2
    tokenizer = write_tokenizer([*sources[:half], *targets[:half]], folder)
    torch.manual_seed(1)
    pad = tokenizer.pad_token_id
    ids = {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": 0, "forced_eos_token_id": 0}
    sizes = {"d_model": 256, "encoder_layers": 3, "decoder_layers": 3, "max_position_embeddings": 256}
    sizes |= {f"{side}_ffn_dim": 1024 for side in ("encoder", "decoder")}
    sizes |= {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
    model = MarianMTModel(MarianConfig(vocab_size=len(tokenizer), scale_embedding=True, **sizes, **ids))
    encoded = tokenizer(sources[:half], text_target=targets[:half])
    arguments = Seq2SeqTrainingArguments(
        str(folder / "checkpoints"),
        num_train_epochs=epochs,
        per_device_train_batch_size=64,
        learning_rate=7e-4,
        warmup_steps=400,
        label_smoothing_factor=0.1,
        train_sampling_strategy="group_by_length",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)
    trainer = Seq2SeqTrainer(
        model=model, args=arguments, train_dataset=Dataset.from_dict(encoded), data_collator=collator
    )
    trainer.train()
    model.generation_config.update(num_beams=4, max_length=128, bad_words_ids=[[pad]])
    model.save_pretrained(folder)


def translate(folder: Path, sources: list[str]) -> list[str]:
    """Translates with transformers, in the search of the model's generation config."""
    tokenizer, model = MarianTokenizer.from_pretrained(folder), MarianMTModel.from_pretrained(folder)
    translations: list[str] = []
    for start in range(0, len(sources), 50):
        batch = tokenizer(sources[start : start + 50], return_tensors="pt", padding=True)
        translations += tokenizer.batch_decode(model.generate(**batch), skip_special_tokens=True)
    return translations


def main() -> None:
    """Trains both models, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "multi30k", type=Path, help="folder with train.en, val.en, test_2016_flickr.en and the same in de"
    )
    parser.add_argument("runs", type=Path, help="folder for the models")
    parser.add_argument("--epochs", type=float, default=5, help="epochs of Seq2SeqTrainer")
    arguments, more = parser.parse_known_args()
    marian, run = arguments.runs / "marian", arguments.runs / "continued"
    if not (marian / "config.json").exists():
        train_marian(arguments.multi30k, marian, arguments.epochs)
    sources, references = (lines(arguments.multi30k / f"{SPLITS['test']}.{language}") for language in LANGUAGES)
    translations = translate(marian, sources)
    if not (run / "test.json").exists():
        options = RECIPE | {"initialize.from": str(marian)}
        for split, name in SPLITS.items():
            options[f"data.{split}_files"] = json.dumps(
                {key: f"{arguments.multi30k / name}.{key}" for key in LANGUAGES}
            )
        command = [sys.executable, "-m", "hf_vaswani.cli", "train", f"--run_dir={run}"]
        subprocess.run([*command, *(f"--{key}={value}" for key, value in options.items()), *more], check=True)
    before = json.loads((run / "test.json").read_text("utf-8"))["before"]["en-de"]
    converted = lines(run / "start_translations.txt")
    same = sum(one == two for one, two in zip(translations, converted, strict=True))
    print("| model | BLEU |\n|---|---:|")
    print(f"| Marian, trained and translating in transformers | {score(translations, references)['bleu']:.2f} |")
    print(f"| converted, before the first update | {before['before']['bleu']:.2f} |")
    print(f"| continued | {before['after']['bleu']:.2f} |")
    print(
        f"\n{same} of {len(sources)} translations of the first two are the same; p of the third is {before['p']:.3f}."
    )


if __name__ == "__main__":
    main()
