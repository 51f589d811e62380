"""The family: parity with BERT, GPT and GPT-2, padding, packed texts, losses, generation, loading across classes."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoModelForTokenClassification,
    BertConfig,
    BertForPreTraining,
    BertForSequenceClassification,
    BertForTokenClassification,
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PreTrainedTokenizerFast,
    StaticCache,
    Trainer,
    TrainingArguments,
    pipeline,
)

from hf_vaswani import (
    VaswaniConfig,
    VaswaniEncoderModel,
    VaswaniForCausalLM,
    VaswaniForConditionalGeneration,
    VaswaniForMaskedLM,
    VaswaniForPreTraining,
    VaswaniForSequenceClassification,
    VaswaniForTokenClassification,
    VaswaniModel,
)
from hf_vaswani.data.tokenizer import train_tokenizer

from ..networks import gradients, tiny_config

CLASSES = {
    VaswaniForMaskedLM: AutoModelForMaskedLM,
    VaswaniForPreTraining: AutoModelForPreTraining,
    VaswaniForCausalLM: AutoModelForCausalLM,
    VaswaniForSequenceClassification: AutoModelForSequenceClassification,
    VaswaniForTokenClassification: AutoModelForTokenClassification,
}
# Every switch that a model of the family has and the paper has not.
BERT = {
    "position_encoding": "learned",
    "max_position_embeddings": 24,
    "activation_function": "gelu",
    "layer_norm_eps": 1e-12,
    "attention_bias": True,
    "lm_head_bias": True,
    "scale_embedding": False,
    "type_vocab_size": 2,
    "embedding_norm": True,
    "lm_head_transform": True,
}
GPT = {
    "position_encoding": "learned",
    "max_position_embeddings": 24,
    "activation_function": "gelu_new",
    "layer_norm_eps": 1e-5,
    "attention_bias": True,
    "scale_embedding": False,
    "pad_token_id": None,
}
VARIANTS = {
    "paper": {},
    "pre": {"norm_position": "pre"},
    "learned": {"position_encoding": "learned", "max_position_embeddings": 24},
    "pre-learned": {"norm_position": "pre", "position_encoding": "learned", "max_position_embeddings": 24},
}


def with_noise(model: Any) -> Any:
    """Makes every weight of a model random, biases and norms too, for an evaluation."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return model.eval()


def build(kind: type, seed: int = 0, **fields: Any) -> Any:
    """A model with random weights, but a padding row of zeros."""
    torch.manual_seed(seed)
    model = with_noise(kind(tiny_config(**fields)))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0
    return model


def texts(rows: int = 3, length: int = 7, seed: int = 1) -> torch.Tensor:
    return torch.randint(4, 40, (rows, length), generator=torch.Generator().manual_seed(seed))


# ---- Parity with models that are not ours

BERT_NAMES = {
    r"^bert\.embeddings\.word_embeddings": "model.encoder.embed_tokens",
    r"^bert\.embeddings\.position_embeddings": "model.encoder.positions.table",
    r"^bert\.embeddings\.token_type_embeddings": "model.encoder.embed_segments",
    r"^bert\.embeddings\.LayerNorm": "model.encoder.positions.norm",
    r"^bert\.encoder\.layer\.(\d+)": r"model.encoder.layers.\1",
    r"attention\.self\.query": "self_attn.q_proj",
    r"attention\.self\.key": "self_attn.k_proj",
    r"attention\.self\.value": "self_attn.v_proj",
    r"attention\.output\.dense": "self_attn.out_proj",
    r"attention\.output\.LayerNorm": "self_attn_norm.layer_norm",
    r"intermediate\.dense": "feed_forward.fc1",
    r"(?<=\d)\.output\.dense": ".feed_forward.fc2",
    r"(?<=\d)\.output\.LayerNorm": ".feed_forward_norm.layer_norm",
    r"^bert\.pooler": "pooler",
    r"^cls\.predictions\.transform\.dense": "lm_transform.dense",
    r"^cls\.predictions\.transform\.LayerNorm": "lm_transform.layer_norm",
    r"^cls\.predictions\.decoder": "lm_head",
    r"^cls\.predictions\.bias": "lm_head.bias",
    r"^cls\.seq_relationship": "next_sentence",
}


def renamed(name: str, names: dict[str, str]) -> str:
    for pattern, replacement in names.items():
        name = re.sub(pattern, replacement, name)
    return name


def from_bert(kind: type, bert: nn.Module, **fields: Any) -> Any:
    weights = {
        renamed(name, BERT_NAMES): weight for name, weight in bert.state_dict().items() if "position_ids" not in name
    }
    model = kind(tiny_config(**(BERT | fields))).eval()
    # Strict: each weight of one is a weight of the other.
    model.load_state_dict(weights, strict=True)
    return model


def random_bert(kind: type, **fields: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24}
    config = BertConfig(**sizes, num_attention_heads=2, num_hidden_layers=2, max_position_embeddings=24, **fields)
    return with_noise(kind(config))


def bert_inputs() -> dict[str, torch.Tensor]:
    ids = texts()
    mask = torch.ones_like(ids)
    ids[0, 5:], mask[0, 5:] = 0, 0
    segments = torch.tensor([[0, 0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]])
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments}


def test_bert_has_the_same_predictions_and_losses() -> None:
    bert = random_bert(BertForPreTraining)
    model = from_bert(VaswaniForPreTraining, bert)
    labels = texts(seed=2).masked_fill(torch.rand(3, 7, generator=torch.Generator().manual_seed(3)) < 0.7, -100)
    inputs = bert_inputs()
    real = inputs["attention_mask"].bool()
    targets = {"labels": labels.masked_fill(~real, -100), "next_sentence_label": torch.tensor([0, 1, 1])}
    theirs, ours = bert(**inputs, **targets), model(**inputs, **targets)
    torch.testing.assert_close(ours.prediction_logits[real], theirs.prediction_logits[real], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.seq_relationship_logits, theirs.seq_relationship_logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.loss, theirs.loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model(**inputs, **targets, loss_only=True).loss, theirs.loss, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("theirs", "ours", "labels"),
    [
        (BertForSequenceClassification, VaswaniForSequenceClassification, torch.tensor([2, 0, 1])),
        (
            BertForSequenceClassification,
            VaswaniForSequenceClassification,
            torch.tensor([[1.0, 0, 1], [0, 0, 1], [0, 1, 0]]),
        ),
        (BertForSequenceClassification, VaswaniForSequenceClassification, torch.tensor([0.5, -1.0, 2.0])),
        (BertForTokenClassification, VaswaniForTokenClassification, torch.arange(21).view(3, 7) % 4 - 1),
    ],
    ids=["text", "several labels", "regression", "tokens"],
)
def test_bert_classifies_the_same(theirs, ours, labels) -> None:
    num_labels = 1 if labels.is_floating_point() and labels.dim() == 1 else 3
    bert = random_bert(theirs, num_labels=num_labels)
    model = from_bert(ours, bert, num_labels=num_labels)
    inputs = bert_inputs()
    if labels.shape == (3, 7):
        labels = labels.masked_fill((labels == -1) | (inputs["attention_mask"] == 0), -100)
    expected, got = bert(**inputs, labels=labels), model(**inputs, labels=labels)
    real = inputs["attention_mask"].bool() if got.logits.dim() == 3 else slice(None)
    torch.testing.assert_close(got.logits[real], expected.logits[real], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.loss, expected.loss, atol=1e-5, rtol=1e-5)


def from_gpt(gpt: nn.Module, **fields: Any) -> VaswaniForCausalLM:
    """GPT and GPT-2 have the same names, but for the embeddings; their matrices are transposed."""
    names = {
        r"^transformer\.(wte|tokens_embed)": "model.decoder.embed_tokens",
        r"^transformer\.(wpe|positions_embed)": "model.decoder.positions.table",
        r"^transformer\.h\.": "model.decoder.layers.",
        r"^transformer\.ln_f": "model.decoder.norm",
        r"attn\.c_proj": "self_attn.out_proj",
        r"mlp\.c_fc": "feed_forward.fc1",
        r"mlp\.c_proj": "feed_forward.fc2",
        r"\.ln_1": ".self_attn_norm.layer_norm",
        r"\.ln_2": ".feed_forward_norm.layer_norm",
    }
    weights = {}
    for name, weight in gpt.state_dict().items():
        name = renamed(name, names)
        if "feed_forward." in name or "attn." in name:
            weight = weight.t() if weight.dim() == 2 else weight
        if "attn.c_attn" in name:
            for letter, part in zip("qkv", weight.chunk(3), strict=True):
                weights[name.replace("attn.c_attn", f"self_attn.{letter}_proj")] = part
        elif "position_ids" not in name and not name.endswith("attn.bias"):
            weights[name] = weight
    model = VaswaniForCausalLM(tiny_config(**(GPT | fields))).eval()
    # Strict: each weight of one is a weight of the other.
    model.load_state_dict(weights, strict=True)
    return model


def random_gpt(name: str) -> tuple[nn.Module, VaswaniForCausalLM]:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 24}
    if name == "GPT":
        gpt = OpenAIGPTLMHeadModel(OpenAIGPTConfig(**sizes))
    else:
        gpt = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))
    gpt = with_noise(gpt)
    return gpt, from_gpt(gpt, norm_position="post" if name == "GPT" else "pre", d_ff=64)


@pytest.mark.parametrize("name", ["GPT", "GPT-2"])
def test_gpt_has_the_same_predictions_and_losses(name) -> None:
    gpt, model = random_gpt(name)
    ids = texts()
    theirs, ours = gpt(ids, labels=ids), model(ids, labels=ids)
    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.loss, theirs.loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model(ids, labels=ids, loss_only=True).loss, theirs.loss, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 9, "top_p": 0.9, "temperature": 0.7}]
)
def test_gpt_2_generates_the_same(options) -> None:
    gpt, model = random_gpt("GPT-2")
    ids, mask = texts(), torch.ones(3, 7, dtype=torch.long)
    ids[0, :2], mask[0, :2] = 0, 0
    both = []
    for each in (gpt, model):
        torch.manual_seed(5)
        both.append(each.generate(ids, attention_mask=mask, max_new_tokens=9, pad_token_id=0, **options))
    assert torch.equal(*both)


# ---- Padding, texts of one row, the future


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", CLASSES)
def test_padding_on_either_side_changes_nothing(kind, variant) -> None:
    model, ids = build(kind, **VARIANTS[variant]), texts(1, 6)
    zeros = torch.zeros(1, 3, dtype=torch.long)
    expected = model(ids)
    names = [name for name, value in expected.items() if isinstance(value, torch.Tensor)]
    for parts in ((zeros, ids), (ids, zeros)):
        padded = torch.cat(parts, dim=1)
        got = model(padded, attention_mask=(padded != 0).long())
        for name in names:
            value = got[name][(padded != 0)][None] if expected[name].dim() == 3 else got[name]
            torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-5)
    # Without a mask, a decoder knows the end of a text by the padding's id.
    if kind is VaswaniForSequenceClassification:
        decoder = build(kind, **VARIANTS[variant], is_encoder_decoder=False, is_decoder=True)
        padded = torch.cat((ids, zeros), dim=1)
        torch.testing.assert_close(decoder(padded).logits, decoder(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_texts_of_one_row_do_not_see_each_other(variant, implementation) -> None:
    model = build(VaswaniForCausalLM, **VARIANTS[variant])
    model.set_attn_implementation(implementation)
    a, b, c = texts(1, 4), texts(1, 3, seed=2), texts(1, 5, seed=3)
    positions = torch.cat([torch.arange(text.shape[1]) for text in (a, b, c)])[None]
    got = model(torch.cat((a, b, c), dim=1), position_ids=positions).logits
    expected = torch.cat([model(text).logits for text in (a, b, c)], dim=1)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


# ---- Losses


def test_the_loss_alone_is_that_of_the_logits() -> None:
    for kind in (VaswaniForMaskedLM, VaswaniForCausalLM):
        model, ids = build(kind, dropout=0.0).train(), texts()
        labels = ids.masked_fill(torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.5, -100)
        whole = model(ids, labels=labels, epsilon_ls=0.1, num_items_in_batch=17).loss
        whole.backward()
        expected = gradients(model)
        alone = model(ids, labels=labels, epsilon_ls=0.1, num_items_in_batch=17, loss_only=True)
        assert alone.logits is None
        alone.loss.backward()
        torch.testing.assert_close(alone.loss, whole, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(gradients(model), expected, atol=1e-5, rtol=1e-4)


def test_losses_of_parts_add_up() -> None:
    ids, labels = texts(4), torch.tensor([0, 1, 1, 0])
    cases = [
        (VaswaniForSequenceClassification, {}, labels),
        (VaswaniForSequenceClassification, {"num_labels": 1}, torch.tensor([0.5, 1, 2, 3])),
        (VaswaniForSequenceClassification, {}, torch.tensor([[0.0, 1], [1, 1], [1, 0], [0, 0]])),
        (VaswaniForTokenClassification, {}, torch.arange(28).view(4, 7) % 2),
    ]
    for kind, fields, labels in cases:
        model = build(kind, **fields)
        items = 28 if labels.shape == (4, 7) else 4
        parts = [model(ids[rows], labels=labels[rows], num_items_in_batch=items).loss for rows in ([0], [1, 2, 3])]
        torch.testing.assert_close(sum(parts), model(ids, labels=labels).loss)
    model = build(VaswaniForPreTraining)
    parts = [
        model(
            ids[rows],
            labels=ids[rows],
            next_sentence_label=cases[0][2][rows],
            num_items_in_batch=28,
            num_texts_in_batch=4,
        ).loss
        for rows in ([0], [1, 2, 3])
    ]
    torch.testing.assert_close(sum(parts), model(ids, labels=ids, next_sentence_label=cases[0][2]).loss)


# ---- Generation


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_cache_changes_nothing(variant) -> None:
    model = build(VaswaniForCausalLM, encoder_layers=1, decoder_layers=3, **VARIANTS[variant])
    ids, mask = texts(), torch.ones(3, 7, dtype=torch.long)
    ids[1, :3], mask[1, :3] = 0, 0
    for options in ({}, {"num_beams": 3}):
        options = {"attention_mask": mask, "max_new_tokens": 9, "eos_token_id": None, **options}
        expected = model.generate(ids, use_cache=False, **options)
        assert expected.shape == (3, 16)
        assert torch.equal(model.generate(ids, **options), expected)
        static = StaticCache(model.config, max_cache_len=24)
        assert len(static.layers) == 3
        if not options.get("num_beams"):
            assert torch.equal(model.generate(ids, cache=static, **options), expected)


def test_the_last_logits_alone() -> None:
    model, ids = build(VaswaniForCausalLM), texts()
    whole = model(ids).logits
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, whole[:, -2:])
    torch.testing.assert_close(model(ids, logits_to_keep=torch.tensor([1, 3])).logits, whole[:, [1, 3]])


def test_a_model_names_the_layers_that_it_has() -> None:
    """FSDP and `device_map` look for each of them."""
    for kind in CLASSES:
        stack = "Decoder" if kind is VaswaniForCausalLM else "Encoder"
        assert set(kind(tiny_config())._no_split_modules) == {f"Vaswani{stack}Layer"}
    both = {"VaswaniEncoderLayer", "VaswaniDecoderLayer"}
    assert set(VaswaniForConditionalGeneration(tiny_config())._no_split_modules) == both


# ---- Saving, and loading across classes


@pytest.mark.parametrize("fields", [{}, BERT], ids=["paper", "bert"])
@pytest.mark.parametrize("kind", CLASSES)
def test_a_saved_model_is_the_same_again(kind, fields, tmp_path) -> None:
    model, ids = build(kind, **fields), texts()
    model.save_pretrained(tmp_path)
    again, report = CLASSES[kind].from_pretrained(tmp_path, output_loading_info=True)
    assert type(again) is kind and not any(report.values())
    for name, value in model(ids).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(again(ids)[name], value)


def test_the_output_is_the_embedding() -> None:
    for kind, stack in ((VaswaniForMaskedLM, "encoder"), (VaswaniForCausalLM, "decoder")):
        model = kind(tiny_config())
        assert model.lm_head.weight is getattr(model.model, stack).embed_tokens.weight
        model.resize_token_embeddings(50)
        assert model.lm_head.weight is getattr(model.model, stack).embed_tokens.weight
        assert model.lm_head.weight.shape[0] == model.config.vocab_size == 50


WHOLE = {"shared": {}, "two matrices": {"share_embeddings": False}, "three matrices": {"tie_word_embeddings": False}}


@pytest.mark.parametrize("fields", WHOLE.values(), ids=WHOLE)
@pytest.mark.parametrize("kind", [*CLASSES, VaswaniEncoderModel])
def test_a_translation_model_and_each_class_give_each_other_what_both_have(kind, fields, tmp_path) -> None:
    """Whatever is loaded from the folder of another class has its stack, and is the same again by its own."""
    ids, whole, part = texts(), VaswaniForConditionalGeneration, build(kind, **fields)
    stack = part.config.stacks[0]
    both = (build(whole, **fields), kind, {"pooler", "next_sentence", "classifier"}), (part, whole, None)
    for number, (saved, asked, new) in enumerate(both):
        saved.save_pretrained(tmp_path / f"saved {number}")
        loaded, report = asked.from_pretrained(tmp_path / f"saved {number}", output_loading_info=True)
        theirs, ours = (getattr(each.base_model, stack) for each in (saved, loaded))
        for name, weight in theirs.named_parameters():
            assert "cross_attn" in name or torch.equal(weight, ours.get_parameter(name)), name
        if new is None:
            known = [name for name in report["missing_keys"] if name.startswith(f"model.{stack}.")]
            assert not [name for name in known if "cross_attn" not in name] and report["missing_keys"]
        else:
            assert {name.split(".")[0] for name in report["missing_keys"]} <= new
        loaded.save_pretrained(tmp_path / f"again {number}")
        again, report = asked.from_pretrained(tmp_path / f"again {number}", output_loading_info=True)
        assert not any(report.values())
        inputs = {"input_ids": ids, "decoder_input_ids": ids} if asked is whole else {"input_ids": ids}
        assert torch.equal(again(**inputs)[0], loaded.eval()(**inputs)[0])


def test_the_base_of_each_class_is_its_stack(tmp_path) -> None:
    ids = texts()
    for kind in (*CLASSES, VaswaniForConditionalGeneration):
        model, is_decoder = build(kind), kind is VaswaniForCausalLM
        model.save_pretrained(tmp_path / kind.__name__)
        base = (AutoModel if is_decoder else AutoModelForTextEncoding).from_pretrained(tmp_path / kind.__name__)
        assert type(base) is (VaswaniModel if is_decoder else VaswaniEncoderModel)
        expected = (model.model.decoder if is_decoder else model.model.encoder)(ids).last_hidden_state
        assert torch.equal(base(ids).last_hidden_state, expected)
        if kind is not VaswaniForConditionalGeneration:
            assert type(AutoModel.from_pretrained(tmp_path / kind.__name__)) is VaswaniModel
    folder = tmp_path / VaswaniForCausalLM.__name__
    classifier = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=4)
    assert classifier.pooler is None and classifier(ids).logits.shape == (3, 4) and classifier.num_labels == 4


@pytest.mark.parametrize(
    ("saved", "asked", "message"),
    [
        (VaswaniForCausalLM, VaswaniForMaskedLM, "a decoder and no encoder, which VaswaniForMaskedLM needs"),
        (VaswaniForCausalLM, VaswaniEncoderModel, "a decoder and no encoder, which VaswaniEncoderModel needs"),
        (VaswaniForCausalLM, VaswaniForTokenClassification, "a decoder and no encoder"),
        (VaswaniForMaskedLM, VaswaniForCausalLM, "an encoder and no decoder, which VaswaniForCausalLM needs"),
    ],
)
def test_a_folder_with_none_of_the_parts_is_refused(saved, asked, message, tmp_path) -> None:
    build(saved).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path))} has {message}"):
        asked.from_pretrained(tmp_path)


# ---- Pipelines and Trainer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A vocabulary with a mask token."""
    lines = ["one two three four five", "six seven eight nine ten", "the end of the text"] * 3
    tokenizer = train_tokenizer(lines, vocab_size=300)
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    tokenizer.split_special_tokens = False
    return tokenizer


def save_with(tokenizer: PreTrainedTokenizerFast, kind: type, folder: Path, **fields: Any) -> str:
    build(kind, vocab_size=len(tokenizer), **fields).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_fill_mask(tokenizer, tmp_path) -> None:
    fill = pipeline("fill-mask", model=save_with(tokenizer, VaswaniForMaskedLM, tmp_path), top_k=3)
    found = fill("one <mask> three")
    inputs = tokenizer("one <mask> three", return_tensors="pt")
    column = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
    scores = fill.model(**inputs).logits[0, column].softmax(dim=0).topk(3)
    assert [each["token"] for each in found] == scores.indices.tolist()
    assert [each["score"] for each in found] == pytest.approx(scores.values.tolist(), rel=1e-4)


def test_text_generation(tokenizer, tmp_path) -> None:
    write = pipeline("text-generation", model=save_with(tokenizer, VaswaniForCausalLM, tmp_path))
    prompt, options = "one two", {"max_new_tokens": 5, "do_sample": False}
    alone = write(prompt, **options)[0]["generated_text"]
    assert alone.startswith(prompt) and alone != prompt
    tokenizer.padding_side = "left"
    together = write([prompt, "six seven eight nine ten"], batch_size=2, **options)
    assert together[0][0]["generated_text"] == alone


def test_text_and_token_classification(tokenizer, tmp_path) -> None:
    fields = {"id2label": {0: "short", 1: "long"}, "label2id": {"short": 0, "long": 1}}
    classify = pipeline(
        "text-classification",
        model=save_with(tokenizer, VaswaniForSequenceClassification, tmp_path / "text", **fields),
    )
    text = "one two three"
    found = classify([text, {"text": text, "text_pair": "four"}], top_k=2)
    assert {each["label"] for each in found[0]} == {"short", "long"}
    scores = classify.model(**tokenizer(text, return_tensors="pt")).logits[0].softmax(dim=0)
    assert {each["label"]: each["score"] for each in found[0]} == pytest.approx(
        {"short": scores[0].item(), "long": scores[1].item()}, rel=1e-4
    )
    tag = pipeline(
        "token-classification", model=save_with(tokenizer, VaswaniForTokenClassification, tmp_path / "tag", **fields)
    )
    assert {each["entity"] for each in tag(text)} <= {"short", "long"}
    assert [text[each["start"] : each["end"]].strip() for each in tag(text)] == ["one", "two", "three"]


@pytest.mark.parametrize("kind", CLASSES)
def test_feature_extraction(kind, tokenizer, tmp_path) -> None:
    extract = pipeline("feature-extraction", model=save_with(tokenizer, kind, tmp_path), return_tensors=True)
    features = extract("one two three")
    assert features.shape == (1, 4, 16)
    assert torch.equal(features, extract.model(**tokenizer("one two three", return_tensors="pt"))[0])


@pytest.mark.slow
def test_trainer_trains_a_masked_language_model(tokenizer, tmp_path) -> None:
    torch.manual_seed(0)
    model = VaswaniForMaskedLM(tiny_config(vocab_size=len(tokenizer)))
    data = [tokenizer(text) for text in ("one two three four five", "six seven eight nine ten") * 8]
    settings = {"max_steps": 60, "learning_rate": 0.01, "logging_steps": 10, "gradient_accumulation_steps": 2}
    quiet = {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    arguments = TrainingArguments(str(tmp_path), **settings, **quiet)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3)
    trainer = Trainer(model, arguments, train_dataset=data, data_collator=collator)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.7 * losses[0]


# ---- Bad input


@pytest.mark.parametrize(
    ("kind", "inputs", "message"),
    [
        (VaswaniForMaskedLM, {"labels": torch.full((3, 6), 4)}, "labels is 6 tokens wide, but there are 7"),
        (VaswaniForMaskedLM, {"labels": torch.full((3, 7), 40)}, "labels has 40, but vocab_size is 40"),
        (VaswaniForMaskedLM, {"loss_only": True}, "loss_only needs labels"),
        (VaswaniForCausalLM, {"labels": torch.full((2, 7), 4)}, "labels has 2 sentences, but the tokens have 3"),
        (VaswaniForCausalLM, {"loss_only": True}, "loss_only needs labels"),
        (VaswaniForCausalLM, {"encoder_hidden_states": torch.zeros(3, 7, 16)}, "no attention to a source"),
        (VaswaniForCausalLM, {"attention_mask": torch.ones(2, 7)}, "^attention_mask has 2 sentences"),
        (VaswaniForMaskedLM, {"token_type_ids": torch.ones(3, 7).long()}, "the number of segments is 1"),
        (VaswaniForSequenceClassification, {"labels": torch.tensor([0, 1])}, r"labels has the shape \(2,\), but"),
        (VaswaniForSequenceClassification, {"labels": torch.tensor([0, 1, 2])}, "labels has 2, but num_labels is 2"),
        (VaswaniForTokenClassification, {"labels": torch.full((3, 7), 2)}, "labels has 2, but num_labels is 2"),
        (VaswaniForPreTraining, {"next_sentence_label": torch.tensor([0, 1, 2])}, "next_sentence_label has 2"),
        (BERT, {"token_type_ids": torch.full((3, 7), 2)}, "token_type_ids has 2, but type_vocab_size is 2"),
        (BERT, {"token_type_ids": torch.zeros(3, 6).long()}, "token_type_ids is 6 tokens wide"),
    ],
)
def test_bad_input_is_named(kind, inputs, message) -> None:
    model = build(VaswaniForMaskedLM, **BERT) if kind is BERT else build(kind)
    with pytest.raises(ValueError, match=message):
        model(texts(), **inputs)


@pytest.mark.parametrize("settings", [{}, {"loss_only": True}, {"epsilon_ls": 0.1}], ids=str)
@pytest.mark.parametrize("kind", [each for each in CLASSES if each is not VaswaniForPreTraining])
def test_a_loss_over_one_label_is_refused(kind, settings) -> None:
    """It would be 0 whatever a model says."""
    is_language_model = kind in (VaswaniForMaskedLM, VaswaniForCausalLM)
    model = build(kind, **({"vocab_size": 1, "pad_token_id": None} if is_language_model else {"num_labels": 1}))
    # A config with both is refused by transformers.
    model.config.problem_type = "single_label_classification"
    ids = torch.zeros(3, 7, dtype=torch.long)
    labels = ids[:, 0] if kind is VaswaniForSequenceClassification else ids
    with pytest.raises(ValueError, match=r"^A loss needs at least 2 labels .*num_labels \(or vocab_size\) is 1"):
        model(ids, labels=labels, **settings)


# ---- The papers' sizes

SIZES = {
    "BERT base": ({"d_model": 768, "d_ff": 3072, "num_heads": 12, "encoder_layers": 12}, 30522, 512),
    "BERT large": ({"d_model": 1024, "d_ff": 4096, "num_heads": 16, "encoder_layers": 24}, 30522, 512),
    "GPT": ({"d_model": 768, "d_ff": 3072, "num_heads": 12, "decoder_layers": 12}, 40478, 512),
    "GPT-2": ({"d_model": 768, "d_ff": 3072, "num_heads": 12, "decoder_layers": 12}, 50257, 1024),
}


@pytest.mark.parametrize("name", SIZES)
def test_the_papers_models_have_as_many_parameters(name) -> None:
    sizes, vocab_size, length = SIZES[name]
    width, layers = sizes["d_model"], sizes.get("encoder_layers") or sizes["decoder_layers"]
    with torch.device("meta"):
        if name.startswith("BERT"):
            config = BertConfig(
                hidden_size=width,
                num_hidden_layers=layers,
                num_attention_heads=sizes["num_heads"],
                intermediate_size=sizes["d_ff"],
            )
            theirs, kind, fields = BertForPreTraining(config), VaswaniForPreTraining, BERT
        else:
            kind, fields = VaswaniForCausalLM, GPT
            theirs = OpenAIGPTLMHeadModel(OpenAIGPTConfig()) if name == "GPT" else GPT2LMHeadModel(GPT2Config())
        fields = fields | {"norm_position": "pre" if name == "GPT-2" else "post", "max_position_embeddings": length}
        ours = kind(VaswaniConfig(vocab_size=vocab_size, **sizes, **fields))
    assert ours.num_parameters() == theirs.num_parameters()
