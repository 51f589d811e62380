"""The running text of a recipe: its sources, vocabulary, blocks and sets, and what it refuses."""

from itertools import islice

import pytest
import torch

from hf_vaswani.recipe import (
    DataRecipe,
    ObjectiveRecipe,
    Recipe,
    SourceRecipe,
    TokenizerRecipe,
    TrainingRecipe,
)
from hf_vaswani.training.preparation import task_data

from .texts import build_updates, prepared

LINES = ["the cat sees a dog", "the dog sees a cat", "", "an old house", "a red tree near the house", "a book"] * 6


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(LINES), encoding="utf-8")
    return str(path)


def ids_from(updates, position, count: int, name: str = "input_ids") -> list[list[list[int]]]:
    """Returns the ids of the next updates from a position on."""
    found = [batches for batches, _ in islice(updates.after(position), count)]
    return [batch[name].tolist() for batches in found for batch in batches]


def recipe(text: str, task: str = "masked_lm", more: list[SourceRecipe] | None = None, **data) -> Recipe:
    return Recipe(
        task=task,
        data=DataRecipe(source_language="en", train_files=text, validation_files=text, **data),
        more_data=more or [],
        tokenizer=TokenizerRecipe(vocab_size=300),
        objective=ObjectiveRecipe(block_length=24),
        training=TrainingRecipe(tokens_per_batch=64, cpu_threads=1),
    )


def test_a_source_has_its_language_and_documents(text) -> None:
    (source,) = task_data(recipe(text)).read()
    assert source.name == "en" and set(source.splits) == {"train", "validation"}
    train = source.splits["train"]
    assert train["text"] == [line for line in LINES if line]
    assert len(set(train["document"])) == 7


@pytest.mark.parametrize("task", ["masked_lm", "causal_lm", "span_corruption", "denoise"])
def test_the_vocabulary_has_what_the_task_needs(text, task) -> None:
    settings = recipe(text, task, target_tag=True)
    tokenizer = task_data(settings).make_tokenizer(task_data(settings).read())
    assert len(tokenizer) <= 300
    ids = tokenizer("the cat")["input_ids"]
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert (ids[0] == bos) == (task in ("masked_lm", "causal_lm"))
    assert (ids[-1] == eos) == (task != "causal_lm")
    assert "<2en>" in tokenizer.get_vocab()
    assert ("<mask>" in tokenizer.get_vocab()) == (task in ("masked_lm", "denoise"))
    assert ("<extra_0>" in tokenizer.get_vocab()) == (task == "span_corruption")


def test_updates_have_every_block_once_and_go_on_anywhere(text) -> None:
    settings = recipe(text, more=[SourceRecipe(source_language="fr", train_files=text, weight=2)])
    sources = task_data(settings).read()
    assert [source.name for source in sources] == ["en", "fr"]
    tokenizer = task_data(settings).make_tokenizer(sources)
    updates = build_updates(settings, sources, tokenizer)
    numbers, positions, batches = [], [updates.start], []
    for found, position in updates.after(updates.start):
        numbers += [int(number) for batch in found for number in batch["numbers"]]
        positions.append(position)
        batches.append(found)
        # The position behind the last update of an epoch is the start of the next one.
        if position["epoch"] > 0:
            break
    count = max(numbers)
    first = count // 2
    # The second source is taken twice in an epoch.
    assert {number: numbers.count(number) for number in set(numbers)} == {
        number: 1 if number <= first else 2 for number in range(1, count + 1)
    }
    expected = [batch["input_ids"].tolist() for found in batches[2:] for batch in found]
    assert ids_from(updates, positions[2], len(batches) - 2) == expected


@pytest.mark.parametrize("task", ["masked_lm", "causal_lm"])
def test_a_stream_has_every_token_once_in_a_pass_and_goes_on_anywhere(text, task) -> None:
    settings = recipe(text, task, streaming=True, stream_window=12)
    settings.objective.noise_rate = 0.5
    sources, tokenizer = prepared(settings)
    updates = build_updates(settings, sources, tokenizer)
    tokens, positions, batches = [], [updates.start], []
    for found, position in updates.after(updates.start):
        batches.append(found)
        positions.append(position)
        for batch in found:
            true = batch["input_ids"] if task == "causal_lm" else batch["labels"]
            tokens += [token for token in true.flatten().tolist() if token > 3]
        if position["places"][0]["passes"] == 1 and position["update"] == 0:
            break
    assert len({position["window"] for position in positions}) == 4
    if task == "causal_lm":
        expected = [token for line in LINES for token in tokenizer(line)["input_ids"] if token > 3]
        assert sorted(tokens) == sorted(expected)
    for start in (1, len(batches) // 2):
        expected = [batch["input_ids"].tolist() for found in batches[start:] for batch in found]
        assert ids_from(updates, positions[start], len(batches) - start) == expected
    # Another pass has other masks.
    if task == "masked_lm":
        passes = [ids_from(updates, position, len(batches), "labels") for position in (positions[0], positions[-1])]
        assert passes[0] != passes[1]


def test_a_tag_stands_in_front_of_a_noisy_block(text) -> None:
    settings = recipe(text, "denoise", target_tag=True)
    sources, tokenizer = prepared(settings)
    (found,) = task_data(settings).encode_sets(sources, tokenizer)["validation"]
    tag = tokenizer.convert_tokens_to_ids("<2en>")
    assert all(row["source_ids"][0] == tag and tag not in row["target_ids"] for row in found.encoded)
    # Validation is the same each time.
    (again,) = task_data(settings).encode_sets(sources, tokenizer)["validation"]
    assert again.encoded["source_ids"] == found.encoded["source_ids"]


def test_text_is_needed(text, tmp_path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"The train set of en is empty: .*empty\.txt"):
        task_data(recipe(str(empty))).read()
    settings = recipe(text)
    settings.data.train_files = {"en": text, "de": text}
    with pytest.raises(ValueError, match="running text is in one language"):
        task_data(settings).read()


@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_next_sentence_needs_another_document(text, tmp_path, split) -> None:
    single = tmp_path / "single.txt"
    single.write_text("\n".join(line for line in LINES if line), encoding="utf-8")
    settings = recipe(text)
    settings.objective.next_sentence = True
    assert len(task_data(settings).read()) == 1
    setattr(settings.data, f"{split}_files", str(single))
    words = rf"several documents, but the {split} text of en is one: .*single\.txt\. Put blank lines between documents"
    with pytest.raises(ValueError, match=words):
        task_data(settings).read()
    settings.objective.next_sentence = False
    assert len(task_data(settings).read()) == 1


@pytest.mark.real_data
@pytest.mark.slow
@pytest.mark.parametrize(("task", "unit"), [("masked_lm", "blocks"), ("causal_lm", "blocks"), ("denoise", "lines")])
def test_little_of_a_real_text_is_padding(multi30k, task, unit) -> None:
    """In blocks and in single lines, at most 5 % of the positions of an update."""
    settings = recipe(str(multi30k / "train.en"), task)
    settings.objective = ObjectiveRecipe(block_length=128, unit=unit)
    settings.tokenizer.vocab_size = 2000
    settings.training.tokens_per_batch = 2048
    sources, tokenizer = prepared(settings)
    updates = build_updates(settings, sources, tokenizer)
    batches = [batch for some, _ in islice(updates.after(updates.start), 50) for batch in some]
    is_token = torch.cat([(batch["input_ids"] != tokenizer.pad_token_id).flatten() for batch in batches])
    assert is_token.numel() > 50_000 and is_token.float().mean() > 0.95


def test_a_block_must_fit_the_batches_of_a_process(text) -> None:
    settings = recipe(text)
    settings.training = TrainingRecipe(tokens_per_update=320, tokens_per_batch=64)
    sources, tokenizer = prepared(settings)
    with pytest.raises(
        ValueError, match=r"leaves batches of 20 tokens to 16 processes, fewer than objective.block_le"
    ):
        build_updates(settings, sources, tokenizer, (), 16, 0)
