"""A citizen of transformers: what works with its sequence-to-sequence models works with these classes."""

import copy
import re
import warnings
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForSeq2SeqLM,
    AutoModelForTextEncoding,
    DataCollatorForSeq2Seq,
    DynamicCache,
    EncoderDecoderCache,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    StaticCache,
)
from transformers import logging as transformers_logging
from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_vaswani import VaswaniEncoderModel, VaswaniForConditionalGeneration, VaswaniModel
from hf_vaswani.data.tokenizer import train_tokenizer

from ..conftest import SEED, dear
from ..networks import batch, tiny_config, tiny_model

# A random model repeats itself; without repetitions its output shows each small difference.
SPEAK = {"max_new_tokens": 9, "no_repeat_ngram_size": 1}
# Every switch of the attention at once: widths that differ from d_model / num_heads and from each other.
ODD = {"d_k": 6, "d_v": 10, "encoder_layers": 1, "decoder_layers": 3}


def padded(side: str) -> dict[str, torch.Tensor]:
    """Sources of 7, 5 and 2 tokens, padded on one side."""
    data = batch()
    for row, length in enumerate((7, 5, 2)):
        tokens, padding = data["input_ids"][row, :length], torch.zeros(7 - length, dtype=torch.long)
        parts = (tokens, padding) if side == "right" else (padding, tokens)
        data["input_ids"][row] = torch.cat(parts)
        data["attention_mask"][row] = (data["input_ids"][row] != 0).long()
    return data


# ---- Attention


@pytest.fixture
def not_compiled():
    """flex_attention compiles itself, for which not every machine has a C++ compiler."""
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        yield


@pytest.mark.variants(2)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
@pytest.mark.parametrize("fields", [{}, ODD], ids=["even", "odd"])
def test_attention_implementations_agree(not_compiled, implementation, side, fields) -> None:
    model, data = tiny_model(**fields).requires_grad_(False), padded(side)
    data["decoder_attention_mask"] = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    model.set_attn_implementation("eager")
    expected = model(**data)
    model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == implementation
    got = model(**data)
    real = data["decoder_attention_mask"].bool()
    torch.testing.assert_close(got.logits[real], expected.logits[real], atol=1e-5, rtol=1e-5)
    real = data["attention_mask"].bool()
    torch.testing.assert_close(
        got.encoder_last_hidden_state[real], expected.encoder_last_hidden_state[real], atol=1e-5, rtol=1e-5
    )
    options = SPEAK | {"num_beams": 2}
    source = {name: data[name] for name in ("input_ids", "attention_mask")}
    translated = model.generate(**source, **options)
    model.set_attn_implementation("eager")
    assert torch.equal(translated, model.generate(**source, **options))


def test_flash_attention_2_would_get_what_it_needs(monkeypatch) -> None:
    """Its kernels need a GPU; in their place a function that knows what they are told: no mask of four dimensions."""

    def kernel(module, query, key, value, attention_mask, dropout, scaling, **kwargs):
        allowed = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
        if module.is_causal and query.shape[2] > 1:
            allowed = allowed.tril(key.shape[2] - query.shape[2])
        if attention_mask is not None:
            assert attention_mask.dim() == 2
            allowed = allowed & attention_mask.bool()[:, None, None]
        scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~allowed, -torch.inf)
        return (torch.softmax(scores, dim=-1) @ value).transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", kernel)
    model, data = tiny_model(), padded("right")
    source = {name: data[name] for name in ("input_ids", "attention_mask")}
    logits, translated = model(**data).logits, model.generate(**source, **SPEAK, num_beams=2)
    model.config._attn_implementation = "flash_attention_2"
    torch.testing.assert_close(model(**data).logits, logits, atol=1e-5, rtol=1e-5)
    assert torch.equal(model.generate(**source, **SPEAK, num_beams=2), translated)


def test_attentions_come_out_with_the_documented_shapes() -> None:
    model = tiny_model(encoder_layers=1, decoder_layers=3, attn_implementation="eager")
    model.set_attn_implementation("eager")
    outputs = model(**batch(), output_attentions=True, output_hidden_states=True)
    assert [tuple(weights.shape) for weights in outputs.encoder_attentions] == [(3, 2, 7, 7)]
    assert [tuple(weights.shape) for weights in outputs.decoder_attentions] == [(3, 2, 5, 5)] * 3
    assert [tuple(weights.shape) for weights in outputs.cross_attentions] == [(3, 2, 5, 7)] * 3
    assert [tuple(states.shape) for states in outputs.encoder_hidden_states] == [(3, 7, 16)] * 2
    assert [tuple(states.shape) for states in outputs.decoder_hidden_states] == [(3, 5, 16)] * 4
    torch.testing.assert_close(outputs.decoder_hidden_states[-1] @ model.lm_head.weight.T, outputs.logits)
    for weights in (*outputs.encoder_attentions, *outputs.decoder_attentions, *outputs.cross_attentions):
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
    assert outputs.decoder_attentions[0].triu(1).abs().max() == 0


# ---- Caches


@pytest.mark.parametrize("fields", [{}, ODD, {"encoder_layers": 3, "decoder_layers": 1}], ids=["even", "odd", "deep"])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_static_cache_translates_like_a_dynamic_one_and_like_none(num_beams, fields) -> None:
    model = tiny_model(**fields)
    source = {name: padded("right")[name] for name in ("input_ids", "attention_mask")}
    options = SPEAK | {"num_beams": num_beams}
    expected = model.generate(**source, **options, use_cache=False)
    assert torch.equal(model.generate(**source, **options), expected)
    model.generation_config.disable_compile = True
    assert torch.equal(model.generate(**source, **options, cache_implementation="static"), expected)


@pytest.mark.parametrize("position_encoding", ["sinusoidal", "learned"])
def test_padding_of_the_target_on_the_left_changes_nothing(position_encoding) -> None:
    """Nor does a cache, with which the rows are at different positions in the same column."""
    model, data = tiny_model(position_encoding=position_encoding), batch()
    mask = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    whole = model(**data, decoder_attention_mask=mask).logits
    for row, first in enumerate((2, 1, 0)):
        alone = {name: ids[row : row + 1] for name, ids in data.items()}
        alone["decoder_input_ids"] = alone["decoder_input_ids"][:, first:]
        torch.testing.assert_close(model(**alone).logits[0], whole[row, first:], atol=1e-5, rtol=1e-5)
    cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    for start, end in ((0, 3), (3, 4), (4, 5)):
        part = {"decoder_input_ids": data["decoder_input_ids"][:, start:end], "decoder_attention_mask": mask[:, :end]}
        logits = model(**data | part, cache=cache, use_cache=True).logits
        real = mask[:, start:end].bool()
        torch.testing.assert_close(logits[real], whole[:, start:end][real])


# ---- torch.compile


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{}, dear({"norm_position": "pre", "position_encoding": "learned"})], ids=["post", "pre"]
)
def test_forward_and_backward_compile_in_one_graph(fresh_compiler, fields) -> None:
    model, data = tiny_model(dropout=0.0, **fields).train(), padded("right")
    data["labels"] = data.pop("decoder_input_ids")
    expected = model(**data, epsilon_ls=0.1).loss
    expected.backward()
    gradient = model.model.encoder.embed_tokens.weight.grad.clone()
    model.zero_grad()
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(**data, epsilon_ls=0.1).loss
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(model.model.encoder.embed_tokens.weight.grad, gradient)


@pytest.mark.slow
def test_a_decoding_step_compiles_in_one_graph(fresh_compiler) -> None:
    """One graph for all steps: the position is data, not a number that the graph is built for."""
    model, data = tiny_model(), padded("right")
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=False)
    encoded = model.get_encoder()(data["input_ids"], data["attention_mask"])
    expected = model(**data).logits
    cache = EncoderDecoderCache(*(StaticCache(model.config, max_cache_len=n) for n in (8, 7)))
    with torch.no_grad():
        for step in range(5):
            forward = compiled if step else model
            with torch.compiler.set_stance("fail_on_recompile" if step > 1 else "default"):
                logits = forward(
                    encoder_outputs=encoded,
                    attention_mask=data["attention_mask"],
                    decoder_input_ids=data["decoder_input_ids"][:, step : step + 1],
                    cache=cache,
                    use_cache=True,
                ).logits
            torch.testing.assert_close(logits, expected[:, step : step + 1])


# ---- Memory


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, dear(torch.float16)])
@pytest.mark.parametrize("norm_position", ["post", dear("pre")])
def test_half_precision_trains_without_nan(dtype, implementation, norm_position) -> None:
    """With rows of 600 tokens, and one whose source is padding throughout."""
    torch.manual_seed(0)
    model = VaswaniForConditionalGeneration(tiny_config(norm_position=norm_position)).to(dtype).train()
    model.set_attn_implementation(implementation)
    source, labels = torch.randint(4, 40, (3, 600)), torch.randint(4, 40, (3, 600))
    mask = torch.ones_like(source)
    mask[1], mask[2, 300:], labels[2, 5:] = 0, 0, -100
    loss = model(input_ids=source, attention_mask=mask, labels=labels, epsilon_ls=0.1).loss
    assert loss.dtype == torch.float32 and torch.isfinite(loss)
    # What a gradient scaler starts with.
    (loss * (2**10 if dtype == torch.float16 else 1)).backward()
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name


# ---- Saving and loading


@pytest.fixture
def no_warnings(caplog):
    """Fails the test for anything that transformers or Python warns of."""
    transformers_logging.enable_propagation()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    transformers_logging.disable_propagation()
    assert not [record.message for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


TIES = {
    "all": {},
    "target": {"share_embeddings": False},
    "none": {"tie_word_embeddings": False},
}


def matrices(model: VaswaniForConditionalGeneration) -> list[torch.Tensor]:
    return [model.model.encoder.embed_tokens.weight, model.model.decoder.embed_tokens.weight, model.lm_head.weight]


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("size", [45, 33])
def test_resizing_keeps_every_use_of_the_vocabulary_as_tied_as_it_was(tmp_path, no_warnings, ties, size) -> None:
    model, data = tiny_model(lm_head_bias=True, **TIES[ties]), batch()
    data = {name: ids.clamp(max=32) for name, ids in data.items()}
    distinct = {weight.data_ptr() for weight in matrices(model)}
    before = model(**data).logits
    model.resize_token_embeddings(size, mean_resizing=False)
    assert model.config.vocab_size == size
    assert [tuple(weight.shape) for weight in matrices(model)] == [(size, 16)] * 3
    assert (
        len({weight.data_ptr() for weight in matrices(model)}) == len(distinct) == {"all": 1, "target": 2}.get(ties, 3)
    )
    assert model.model.encoder.embed_tokens.padding_idx == model.model.decoder.embed_tokens.padding_idx == 0
    kept = min(size, 40)
    torch.testing.assert_close(model(**data).logits[..., :kept], before[..., :kept])
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(**data).logits, model(**data).logits, atol=0, rtol=0)


@pytest.mark.parametrize("ties", TIES)
def test_a_folder_has_each_matrix_once_and_loads_without_a_word(tmp_path, no_warnings, ties) -> None:
    model, data = tiny_model(**TIES[ties]), batch()
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    names = [name for shard in shards for name in load_file(shard)]
    vocabularies = [name for name in names if "embed_tokens" in name or "lm_head" in name]
    assert len(vocabularies) == {"all": 1, "target": 2, "none": 3}[ties]
    loaded, info = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert type(loaded) is VaswaniForConditionalGeneration
    torch.testing.assert_close(loaded.eval()(**data).logits, model(**data).logits, atol=0, rtol=0)
    bare, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert type(bare) is VaswaniModel and not info["missing_keys"]
    torch.testing.assert_close(bare(**data)[0], model.model(**data)[0], atol=0, rtol=0)


@pytest.mark.parametrize("ties", ["all", "none"])
def test_weights_may_stay_on_disk(tmp_path, ties) -> None:
    """As `device_map="auto"` leaves those for which there is no room."""
    model, data = tiny_model(**TIES[ties]), padded("right")
    model.save_pretrained(tmp_path / "saved", max_shard_size="4KB")
    source = {name: data[name] for name in ("input_ids", "attention_mask")}
    parts = {"model.encoder": "cpu", "model.decoder": "disk", "lm_head": "cpu"}
    # accelerate does not part what is tied.
    for device_map in ("auto", {"": "disk"}, *([parts] if ties == "none" else [])):
        loaded = AutoModelForSeq2SeqLM.from_pretrained(
            tmp_path / "saved", device_map=device_map, offload_folder=tmp_path / "offload"
        )
        torch.testing.assert_close(loaded(**data).logits, model(**data).logits, atol=0, rtol=0)
        assert torch.equal(loaded.generate(**source, **SPEAK), model.generate(**source, **SPEAK))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_keep_their_positions(tmp_path, dtype) -> None:
    """The same position, to the last bit, however the model came to its type."""
    model = tiny_model(dropout=0.0)
    model.save_pretrained(tmp_path)
    embeds = torch.zeros(1, 300, 16, dtype=dtype)
    expected = model.model.encoder.positions(embeds.float()).to(dtype)
    with torch.device("meta"):
        empty = VaswaniForConditionalGeneration(tiny_config(dropout=0.0))
    resized = copy.deepcopy(model).to(dtype)
    resized.resize_token_embeddings(50)
    for half in (
        model.to(dtype),
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=dtype),
        empty.to_empty(device="cpu").to(dtype),
        resized,
    ):
        for stack in (half.model.encoder, half.model.decoder):
            assert torch.equal(stack.positions.eval()(embeds), expected)


# ---- Training by others


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["one two three four five six", "eins zwei drei vier fünf sechs"] * 3, 290)


@pytest.fixture(scope="module")
def rows(tokenizer) -> list[dict[str, list[int]]]:
    pairs = [
        ("one two", "eins zwei"),
        ("three", "drei"),
        ("four five six", "vier fünf sechs"),
        ("six one", "sechs eins"),
    ]
    return [{"input_ids": tokenizer(a)["input_ids"], "labels": tokenizer(b)["input_ids"]} for a, b in pairs * 2]


def trained(model, tokenizer, rows, folder: Path, **arguments) -> Seq2SeqTrainer:
    settings = {"learning_rate": 1e-2, "num_train_epochs": 1, "per_device_train_batch_size": 4, "seed": SEED}
    trainer = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(str(folder), use_cpu=True, report_to=[], **(settings | arguments)),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        compute_metrics=lambda prediction: {"width": prediction.predictions.shape[1]},
    )
    trainer.train()
    return trainer


def trainable(tokenizer, **fields) -> VaswaniForConditionalGeneration:
    torch.manual_seed(SEED)
    return VaswaniForConditionalGeneration(tiny_config(vocab_size=len(tokenizer), dropout=0.0, **fields))


@pytest.mark.slow
@pytest.mark.portable
@pytest.mark.parametrize("label_smoothing_factor", [dear(0.0), 0.1])
def test_seq2seq_trainer_trains_evaluates_and_generates(tmp_path, tokenizer, rows, label_smoothing_factor) -> None:
    trainer = trained(
        trainable(tokenizer),
        tokenizer,
        rows,
        tmp_path,
        num_train_epochs=80,
        predict_with_generate=True,
        generation_max_length=16,
        label_smoothing_factor=label_smoothing_factor,
        save_strategy="no",
    )
    first, last = trainer.state.log_history[0], trainer.evaluate()
    assert last["eval_loss"] < (2.0 if label_smoothing_factor else 0.5) and last["eval_width"] > 1, (first, last)
    predictions = trainer.predict(rows[:4]).predictions
    texts = tokenizer.batch_decode(
        [[i for i in row if i >= 0] for row in predictions.tolist()], skip_special_tokens=True
    )
    assert texts == ["eins zwei", "drei", "vier fünf sechs", "sechs eins"]
    trainer.save_model(str(tmp_path / "model"))
    assert type(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")) is VaswaniForConditionalGeneration


def test_accumulated_batches_of_the_trainer_are_one_batch(tmp_path, tokenizer, rows) -> None:
    """Rows of unlike length: a mean of the batches' means would differ."""
    models = []
    for size, steps in ((8, 1), (2, 4)):
        model = trainable(tokenizer)
        arguments = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps, "optim": "sgd"}
        trained(model, tokenizer, rows, tmp_path, save_strategy="no", max_grad_norm=0.0, **arguments)
        models.append(model)
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "v_proj", "fc1", "out_proj"], "r": 4},
        {"target_modules": ["q_proj"], "trainable_token_indices": [5, 6]},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["feed_forward"]},
    ],
    ids=["matrices", "tokens", "embeddings", "whole modules"],
)
def test_adapters_attach_train_load_and_merge(tmp_path, tokenizer, rows, settings) -> None:
    model = peft.get_peft_model(trainable(tokenizer), peft.LoraConfig(task_type="SEQ_2_SEQ_LM", **settings))
    data = {name: torch.tensor([rows[0][name]]) for name in rows[0]}
    before, weights = model.eval()(**data).logits, {name: weight.clone() for name, weight in model.named_parameters()}
    arguments = {"num_train_epochs": 3, "save_strategy": "no", "predict_with_generate": True}
    trained(model, tokenizer, rows, tmp_path / "trainer", **arguments)
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, weights[name])}
    assert changed and all(re.search("lora_|trainable_tokens_delta|modules_to_save", name) for name in changed)
    expected = model.eval()(**data).logits
    assert (expected - before).abs().max() > 1e-3
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(trainable(tokenizer), tmp_path / "adapter").eval()
    torch.testing.assert_close(again(**data).logits, expected)
    # PEFT merges into an embedding what its tied output did not have.
    if settings["target_modules"] != ["embed_tokens"]:
        torch.testing.assert_close(model.merge_and_unload()(**data).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ties", TIES)
def test_a_merged_model_is_saved_whole(tmp_path, tokenizer, rows, ties) -> None:
    """Also where only target and output share a matrix, which PEFT takes for no tie at all."""
    trainable(tokenizer, **TIES[ties]).save_pretrained(tmp_path / "plain")
    plain = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "plain")
    settings = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", target_modules=["q_proj"], init_lora_weights=False)
    merged = peft.get_peft_model(plain, settings).merge_and_unload().eval()
    merged.save_pretrained(tmp_path / "merged")
    loaded, info = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info.values())
    data = {name: torch.tensor([rows[0][name]]) for name in rows[0]}
    torch.testing.assert_close(loaded(**data).logits, merged(**data).logits, atol=0, rtol=0)


# ---- generate()


def test_beginnings_of_unlike_length_are_continued_as_each_alone() -> None:
    model, data = tiny_model(), padded("right")
    starts = torch.tensor([[1, 9, 8], [0, 1, 7], [0, 0, 1]])
    source = {name: data[name] for name in ("input_ids", "attention_mask")}
    together = model.generate(**source, decoder_input_ids=starts, decoder_attention_mask=(starts != 0).long(), **SPEAK)
    for row in range(3):
        alone = {name: values[row : row + 1] for name, values in source.items()}
        outputs = model.generate(**alone, decoder_input_ids=starts[row : row + 1, row:], **SPEAK)
        assert outputs[0].tolist() == together[row, row:][: outputs.shape[1]].tolist()


# ---- The encoder alone


def test_the_encoder_alone_loads_from_a_translation_model(tmp_path, no_warnings) -> None:
    model, data = tiny_model(), padded("right")
    source = {name: data[name] for name in ("input_ids", "attention_mask")}
    expected = model.get_encoder()(**source).last_hidden_state
    for saved in (model, VaswaniModel(model.config)):
        saved.save_pretrained(tmp_path)
        encoder, info = AutoModelForTextEncoding.from_pretrained(tmp_path, output_loading_info=True)
        assert type(encoder) is VaswaniEncoderModel and not info["missing_keys"]
        assert not any("decoder" in name or "lm_head" in name for name in encoder.state_dict())
        assert not encoder.config.is_encoder_decoder and not encoder.can_generate()
        assert saved is not model or torch.equal(encoder(**source).last_hidden_state, expected)


# ---- Graphs


def of_other_shapes() -> dict[str, torch.Tensor]:
    data = batch(rows=4, source=9, target=6)
    data["attention_mask"][2, 5:] = 0
    return data


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [dear({}), {"norm_position": "pre", "position_encoding": "learned"} | ODD], ids=["post", "pre"]
)
def test_an_exported_graph_has_the_same_logits_for_other_shapes(fields) -> None:
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    model, data = tiny_model(**fields).requires_grad_(False), of_other_shapes()
    exported = DynamoExporter().export(model, padded("left"), config=DynamoConfig(dynamic=True))
    in_onnx = OnnxExporter().export(model, padded("left"), config=OnnxConfig(dynamic=True))
    plain = torch.export.export(model, (), data).module()
    for graph in (exported, plain, in_onnx):
        atol = 1e-4 if graph is in_onnx else 1e-5
        torch.testing.assert_close(graph(**data).logits, model(**data).logits, atol=atol, rtol=0)


@pytest.mark.slow
def test_prefill_and_step_with_a_cache_export_as_graphs_of_their_own() -> None:
    model, data = tiny_model().requires_grad_(False), padded("right")
    del data["decoder_input_ids"]
    exported = DynamoExporter().export_for_generation(model, data, config=DynamoConfig(dynamic=True))
    assert list(exported.components) == ["prefill", "decode"]
