"""SimCut and R-Drop in training: the batches of two passes, and runs with them."""

import shutil

import pytest
import torch

from hf_vaswani.cli.main import main
from hf_vaswani.data.batching import PairCollator
from hf_vaswani.recipe import RDropRecipe, Recipe, SimCutRecipe, TrainingRecipe
from hf_vaswani.training import consistency
from hf_vaswani.training.consistency import TwoPasses, check_padding, uniform

from ..conftest import tiny_recipe
from ..networks import tiny_model


def made_batch() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    rows = [(7, [5, 6, 7, 8, 2], [9, 10, 2]), (3, [11, 2], [12, 13, 14, 2])]
    batch = PairCollator(0)([{"number": n, "source_ids": s, "target_ids": t} for n, s, t in rows])
    return batch, batch.pop("numbers")


def recipe(**training) -> Recipe:
    return Recipe(training=TrainingRecipe(**training))


def test_without_either_the_batch_is_left_as_it_is() -> None:
    batch, numbers = made_batch()
    passes = TwoPasses(recipe(), tiny_model())
    assert passes(batch, numbers, 0) == batch


def test_simcut_cuts_source_and_target_of_the_second_pass_only(monkeypatch) -> None:
    batch, numbers = made_batch()
    # Cut every first token.
    draws = lambda seed, step, side, numbers, length: torch.ones(len(numbers), length).index_fill(  # noqa: E731
        1, torch.tensor([0]), 0.0
    )
    monkeypatch.setattr(consistency, "uniform", draws)
    doubled = TwoPasses(recipe(simcut=SimCutRecipe(alpha=3.0, p=0.5)), tiny_model())(batch, numbers, 0)
    bos = tiny_model().config.decoder_start_token_id
    assert doubled["input_ids"].tolist() == [[5, 6, 7, 8, 2], [11, 2, 0, 0, 0], [0, 6, 7, 8, 2], [0, 2, 0, 0, 0]]
    assert doubled["attention_mask"].tolist() == 2 * [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert doubled["decoder_input_ids"].tolist() == [
        [bos, 9, 10, 2],
        [bos, 12, 13, 14],
        [0, 9, 10, 2],
        [0, 12, 13, 14],
    ]
    assert doubled["labels"].tolist() == [[9, 10, 2, -100], [12, 13, 14, 2]]
    assert doubled["consistency"] == (0.0, 3.0, 0.0)


def test_a_cut_token_is_a_zero_embedding_at_its_position() -> None:
    """What the published method does to the embedding vectors, done to the ids."""
    model, (batch, numbers) = tiny_model(), made_batch()
    doubled = TwoPasses(recipe(simcut=SimCutRecipe(p=0.5)), model)(batch, numbers, 2)
    is_cut = doubled["input_ids"][2:] != batch["input_ids"]
    assert is_cut.any() and not is_cut.all()
    vectors = model.get_input_embeddings()(batch["input_ids"]) * ~is_cut[..., None]
    mask = batch["attention_mask"]
    expected = model.get_encoder()(inputs_embeds=vectors, attention_mask=mask).last_hidden_state
    found = model.get_encoder()(doubled["input_ids"][2:], attention_mask=mask).last_hidden_state
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()])


def test_r_drop_repeats_the_pairs() -> None:
    batch, numbers = made_batch()
    doubled = TwoPasses(recipe(r_drop=RDropRecipe(alpha=4.0)), tiny_model())(batch, numbers, 0)
    for name in ("input_ids", "attention_mask", "decoder_input_ids"):
        assert torch.equal(*doubled[name].chunk(2))
    assert doubled["consistency"] == (0.5, 1.0, 1.0)


def test_a_process_without_a_batch_has_an_update_all_the_same() -> None:
    batch = PairCollator(0)([])
    numbers = batch.pop("numbers")
    model = tiny_model().train()
    doubled = TwoPasses(recipe(simcut=SimCutRecipe()), model)(batch, numbers, 0)
    loss = model(**doubled, num_items_in_batch=5, loss_only=True).loss
    loss.backward()
    assert loss.item() == 0


def test_a_cut_depends_on_the_pair_and_the_update_and_not_on_the_batch() -> None:
    numbers = torch.arange(1, 2001)
    draws = uniform(1, 5, 0, numbers, 50)
    assert torch.equal(uniform(1, 5, 0, numbers.flip(0), 30), draws.flip(0)[:, :30])
    for other in (uniform(2, 5, 0, numbers, 50), uniform(1, 6, 0, numbers, 50), uniform(1, 5, 1, numbers, 50)):
        assert not torch.isclose(other, draws).float().mean() > 0.001
        assert abs(torch.corrcoef(torch.stack([other.flatten(), draws.flatten()]))[0, 1]) < 0.02
    # Uniform, and independent of the neighbours in both directions.
    assert draws.min() >= 0 and draws.max() < 1
    histogram = torch.histc(draws, 20, 0, 1) / draws.numel()
    assert (histogram - 0.05).abs().max() < 0.005
    for first, second in ((draws[1:], draws[:-1]), (draws[:, 1:], draws[:, :-1])):
        assert abs(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]) < 0.02


def test_simcut_needs_padding_that_is_zero() -> None:
    model = tiny_model(share_embeddings=False)
    check_padding(model)
    with torch.no_grad():
        model.model.decoder.embed_tokens.weight[0, 3] = 1.0
    with pytest.raises(ValueError, match="padding token whose embedding is zero, but that of id 0 is not"):
        check_padding(model)


@pytest.mark.parametrize("option", ["--training.simcut.p=0.2", "--training.r_drop.alpha=5"])
def test_a_run_resumes_bit_for_bit(tmp_path, option) -> None:
    run = tmp_path / "run"
    arguments = [*tiny_recipe(tmp_path, max_steps=8), option, "--run_dir", str(run)]
    assert main(["train", *arguments]) == 0
    uninterrupted = (run / "checkpoint-8" / "model.safetensors").read_bytes()
    for folder in ("checkpoint-8", "model"):
        shutil.rmtree(run / folder)
    assert main(["train", *arguments]) == 0
    assert (run / "checkpoint-8" / "model.safetensors").read_bytes() == uninterrupted


def test_both_together_are_refused(tmp_path, capsys) -> None:
    arguments = [*tiny_recipe(tmp_path), "--training.simcut.p=0.1", "--training.r_drop.alpha=5"]
    assert main(["train", *arguments, "--run_dir", str(tmp_path / "run")]) == 2
    assert "training.simcut and training.r_drop exclude each other" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
