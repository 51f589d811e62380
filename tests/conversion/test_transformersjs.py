"""Graphs for transformers.js translate as the greedy search of our models does, in batches and one by one."""

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from hf_vaswani import VaswaniForConditionalGeneration
from hf_vaswani.conversion import fairseq, marian
from hf_vaswani.conversion.convert import convert
from hf_vaswani.conversion.formats import Loaded
from hf_vaswani.conversion.settings import SETTINGS as ALL_SETTINGS
from hf_vaswani.conversion.settings import eos_token_ids, fixed_limit, forces_eos
from hf_vaswani.data.tokenizer import KINDS, train_tokenizer
from hf_vaswani.translation.batches import translate_corpus
from hf_vaswani.translation.loading import load_translator

from ..conftest import dear
from ..javascript import in_node
from ..networks import random_model
from .fairseq_folders import LONG_WORDS, codes_folder, sentences
from .marian_folders import TEXTS, marian_folder
from .test_settings import ON

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from hf_vaswani.conversion import transformersjs  # noqa: E402 - it needs them
from hf_vaswani.conversion.transformersjs import (  # noqa: E402
    DECODER,
    ENCODER,
    IN_8_BITS,
    Graphs,
    _is_tie,
    _notes,
    _tokenizer_files,
    save,
)

from .test_ctranslate2 import random_sentences, save_random  # noqa: E402

PAD, EOS, END, SENTENCE = 0, 2, "end", "ba de fi"
MODELS = {
    "plain": {},
    "post": {"layer_norm_eps": 0.05, "sinusoid_layout": "tensor2tensor", "position_offset": 2, "type_vocab_size": 3}
    | {"embedding_norm": True, "scale_embedding": False, "activation_function": "silu", "d_k": 9, "d_v": 4},
    "pre": {"norm_position": "pre", "position_encoding": "learned", "max_position_embeddings": 16}
    | {"activation_function": "gelu", "attention_bias": True, "lm_head_bias": True, "d_k": 5, "d_v": 7}
    | {"tie_word_embeddings": False, "share_embeddings": False, "encoder_layers": 1, "decoder_layers": 3},
    "tied": {"share_embeddings": False, "sinusoid_layout": "concatenated", "encoder_layers": 3, "decoder_layers": 1},
    "from eos": {"decoder_start_token_id": EOS, "norm_position": "pre", "lm_head_bias": True, "seed": 1},
    "from pad": {"decoder_start_token_id": PAD, "tie_word_embeddings": False},
}
# Settings besides source + 4, with a word for the token that ends a translation.
SETTINGS = {
    "fixed": {"max_length": 7, "max_length_offset": None},
    "new": {"max_new_tokens": 6, "forced_eos_token_id": END},
    "forced": {"max_length_offset": 3, "forced_eos_token_id": END},
    "none": {"max_length_offset": None},
    "two ends": {"eos_token_id": [END, 9], "max_length_offset": 1},
}


@pytest.fixture(scope="module", params=["plain", *map(dear, [*MODELS, *SETTINGS][1:])])
def converted(request, tmp_path_factory) -> tuple[Loaded, Path, list[str]]:
    """A random model, the folder of its graphs, and the report of the conversion."""
    folder, fields = tmp_path_factory.mktemp("model"), MODELS.get(request.param, {})
    model = save_random(folder / "ours", **{"seed": 3, "max_length_offset": 4} | fields)
    end = EOS if request.param == "from eos" else common_token(model)
    settings = {"eos_token_id": END} | SETTINGS.get(request.param, {})
    model.generation_config.update(**json.loads(json.dumps(settings).replace(json.dumps(END), str(end))))
    model.generation_config.save_pretrained(folder / "ours")
    lines = convert(folder / "ours", folder / "theirs", "transformers.js", sentence=SENTENCE)
    return Loaded(*load_translator(folder / "ours", torch.float32), folder / "ours"), folder / "theirs", lines


def sources(rows: int, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids of all lengths up to the longest, and their mask."""
    generator = torch.Generator().manual_seed(rows)
    mask = torch.arange(longest) <= (torch.arange(rows) % longest)[:, None]
    ids = torch.randint(3, 46, (rows, longest), generator=generator)
    return ids.masked_fill(~mask, PAD), mask.long()


def ours(model: VaswaniForConditionalGeneration, ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    """Returns our greedy translations, made one by one, each with its `</s>` if it has one."""
    rows = [ids[row : row + 1, : int(mask[row].sum())] for row in range(len(ids))]
    return [model.generate(row, attention_mask=torch.ones_like(row), num_beams=1)[0, 1:].tolist() for row in rows]


def common_token(model: VaswaniForConditionalGeneration) -> int:
    """Returns a token that is in about half of the translations."""
    counts = Counter(id_ for row in ours(model, *sources(60, 12)) for id_ in set(row))
    return min(counts, key=lambda id_: abs(counts[id_] - 30))


def without_end(loaded: Loaded, texts: list[str]) -> list[str]:
    """Cuts translations at the tokens that end them, which are words of these models' tokenizer."""
    words = loaded.tokenizer.convert_ids_to_tokens(eos_token_ids(loaded.model.generation_config))
    pattern = "|".join(rf"\s*\b{re.escape(word.strip())}\b" for word in words if word is not None)
    return [re.split(pattern, text)[0] for text in texts] if pattern else texts


def one_by_one(loaded: Loaded, texts: list[str], **settings: object) -> list[str]:
    """Returns our translations; in batches, a forced `</s>` would be that of the longest alone."""
    return [translate_corpus(loaded.model, loaded.tokenizer, [text], **settings)[0] for text in texts]


def test_batches_are_translated_as_each_sentence_is_alone(converted) -> None:
    loaded, folder, _ = converted
    model, (ids, mask) = loaded.model, sources(60, 12)
    expected, graphs = ours(model, ids, mask), Graphs(folder)
    ends = graphs.ends.tolist()
    without_end = [row[:-1] if row[-1] in ends else row for row in expected]
    assert graphs.search(ids, mask) == without_end
    assert [graphs.search(ids[row : row + 1], mask[row : row + 1])[0] for row in range(12)] == without_end[:12]
    # They end at different steps, and some are cut.
    assert len({len(row) for row in expected}) > 2
    assert 1 < sum(row[-1] in ends for row in expected) < 59 or forces_eos(model.generation_config)


def test_behind_an_end_there_are_only_ends(converted) -> None:
    """Nobody else remembers that a sentence of a batch has ended."""
    loaded, folder, _ = converted
    graphs, ids, mask = Graphs(folder), torch.tensor([[7, 8, 9, 10, EOS]]).numpy(), torch.ones(1, 5).long().numpy()
    (states,) = graphs.encoder.run(None, {"input_ids": ids, "attention_mask": mask})
    shapes = {each.name: each.shape for each in graphs.decoder.get_inputs() if each.name.startswith("past")}
    inputs = {name: torch.zeros(1, heads, 0, width).numpy() for name, (_, heads, _, width) in shapes.items()}
    inputs |= {"encoder_attention_mask": mask, "encoder_hidden_states": states}
    for end in graphs.ends.tolist():
        tokens = torch.tensor([[graphs.start, 11, end, end]]).numpy()
        logits = torch.from_numpy(graphs.decoder.run(None, {"input_ids": tokens} | inputs)[0])[0]
        is_finite = logits.isfinite().sum(dim=1).tolist()
        assert is_finite == [loaded.model.config.vocab_size] * 2 + [1, 1]
        assert logits[2:].argmax(dim=1).tolist() == [graphs.ends[0]] * 2


def test_the_graphs_are_what_engines_of_browsers_can_run(converted) -> None:
    """Without float64, with their weights inside, and with the axes and shapes that JavaScript expects."""
    loaded, folder, _ = converted
    assert {path.name for path in (folder / "onnx").iterdir()} == {
        f"{name}{kind}.onnx" for name in (ENCODER, DECODER) for kind in ("", IN_8_BITS)
    }
    for path in (folder / "onnx").iterdir():
        graph = onnx.shape_inference.infer_shapes(onnx.load(path)).graph
        types = {value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.input, *graph.output)}
        types |= {tensor.data_type for tensor in graph.initializer}
        types |= {each.i for node in graph.node for each in node.attribute if node.op_type == "Cast"}
        assert onnx.TensorProto.FLOAT in types and onnx.TensorProto.DOUBLE not in types
    inputs = {
        value.name: value.type.tensor_type.shape.dim
        for value in onnx.load(folder / "onnx" / f"{DECODER}.onnx").graph.input
    }
    config = loaded.model.config
    for name, shape in inputs.items():
        assert shape[0].dim_param == "batch_size"
        if name.startswith("past_key_values."):
            assert shape[1].dim_value == config.num_heads and shape[2].dim_param == "past" and shape[3].dim_value
    assert len(inputs) == 3 + 2 * config.decoder_layers


def test_the_report_names_what_was_compared(converted) -> None:
    loaded, _, lines = converted
    assert re.fullmatch(
        r"Greedy translations of \d random sources, ONNX Runtime [\d.]+: the same \d+ tokens", lines[0]
    )
    assert lines[1] == SENTENCE and "in 8 bits: " in lines[3]
    translations = [line.split(": ", 1)[1].removesuffix("   (differs)") for line in (lines[2], lines[4])]
    expected = translate_corpus(loaded.model, loaded.tokenizer, [SENTENCE])
    assert without_end(loaded, translations) == without_end(loaded, expected * 2)
    assert lines[5].startswith("Note: transformers.js searches greedily")
    positions = loaded.model.config.max_position_embeddings
    learned = [f"Note: For more than {positions} positions, transformers.js raises an error."]
    assert lines[6:] == learned * (loaded.model.config.position_encoding == "learned")


def test_the_files_beside_the_graphs_are_those_that_javascript_reads(converted) -> None:
    loaded, folder, _ = converted
    names = ("config", "generation_config", "tokenizer", "tokenizer_config")
    config, settings, tokenizer, words = (json.loads((folder / f"{name}.json").read_text("utf-8")) for name in names)
    assert {path.name for path in folder.iterdir()} == {"onnx", *(f"{name}.json" for name in names)}
    assert config["model_type"] == "marian" and config["is_encoder_decoder"]
    assert config["decoder_layers"] == loaded.model.config.decoder_layers
    ends = loaded.model.generation_config.eos_token_id
    assert config["eos_token_id"] == (ends if len(ends) > 1 else ends[0]) if isinstance(ends, list) else ends
    limit = fixed_limit(loaded.model.generation_config)
    assert (
        settings["max_length"]
        == (1024 + loaded.model.generation_config.max_length_offset if limit is None else limit) + 2
    )
    assert tokenizer["added_tokens"] == [] and words["additional_special_tokens"] == ["<pad>", "<s>", "</s>", "<unk>"]


def test_settings_that_javascript_does_not_follow_are_named() -> None:
    model = random_model()
    model.generation_config.update(num_beams=4, do_sample=True, no_repeat_ngram_size=2, min_length=3)
    tokenizer = train_tokenizer(random_sentences(), 60, kind="unigram")
    greedy, ignored, batches, unknown = _notes(Loaded(model, tokenizer, Path()))
    assert "searches greedily, whatever num_beams says" in greedy and "one sentence at a time" in batches
    assert ignored.endswith("may find other translations: do_sample=True.")
    assert unknown.startswith("With the Unigram vocabulary, transformers.js reads an unknown word and")


# ---- What is refused ---------------------------------------------------------------------------------------------


def test_graphs_that_translate_otherwise_are_refused(converted, tmp_path, monkeypatch) -> None:
    loaded, folder, _ = converted

    def write(_, onnx_folder: Path) -> None:
        for name in (ENCODER, DECODER):
            graph = onnx.load(folder / "onnx" / f"{name}.onnx")
            if name == DECODER:
                matrix = next(
                    each for each in graph.graph.initializer if each.dims[1:] == [loaded.model.config.vocab_size]
                )
                matrix.CopyFrom(onnx.numpy_helper.from_array(-onnx.numpy_helper.to_array(matrix), matrix.name))
            onnx.save(graph, onnx_folder / f"{name}.onnx")

    monkeypatch.setattr(transformersjs, "_write_graphs", write)
    words = (
        "ONNX Runtime .* and the Vaswani model find different translations of a source of 1 random tokens: they begin"
    )
    with pytest.raises(ValueError, match=words):
        convert(loaded.folder, tmp_path / "out", "transformers.js")
    assert not list(tmp_path.iterdir())


def test_equally_likely_tokens_are_no_difference() -> None:
    model, (ids, mask) = random_model(3), sources(1, 5)
    with torch.no_grad():
        model.lm_head.weight[7] = model.lm_head.weight[8]
        best = int(model(input_ids=ids, attention_mask=mask, decoder_input_ids=torch.tensor([[1]])).logits.argmax())
        assert _is_tie(model, ids, mask, [7, 9], [8, 10]) and _is_tie(model, ids, mask, [5, 7], [5, 8])
        assert not _is_tie(model, ids, mask, [best], [])


def test_a_tokenizer_that_javascript_does_not_have_is_refused(tmp_path) -> None:
    tokenizer = train_tokenizer(random_sentences(), 60, kind="unigram")
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["byte_fallback"] = True
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))
    with pytest.raises(
        ValueError, match="a Unigram model with byte_fallback, for which transformers.js finds other tok"
    ):
        save(Loaded(random_model(), tokenizer, tmp_path), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_model_without_an_end_is_refused(tmp_path) -> None:
    model = save_random(tmp_path / "ours")
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    with pytest.raises(ValueError, match="The generation config has no eos_token_id, which engines need to end"):
        save(Loaded(model, None, tmp_path), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"ours"}


# ---- In JavaScript -----------------------------------------------------------------------------------------------

TRANSLATE = """
const translate = await pipeline("translation", given.folder, { dtype: given.dtype });
const texts = async (source, options) => (await translate(source, options)).map((each) => each.translation_text);
found = { batches: [], alone: [] };
for (const options of given.options) {
    found.batches.push("no_repeat_ngram_size" in options ? null : await texts(given.sources, options));
    found.alone.push([]);
    for (const source of given.sources) found.alone.at(-1).push(...(await texts(source, options)));
}
"""


@pytest.mark.browser
def test_the_pipeline_of_javascript_translates_as_ours(converted) -> None:
    loaded, folder, _ = converted
    given = [text for text in random_sentences() if len(text.split()) < 12]
    found = in_node(TRANSLATE, folder=str(folder), dtype="fp32", sources=given, options=[{}])
    expected = without_end(loaded, one_by_one(loaded, given))
    assert [without_end(loaded, texts) for texts in (*found["batches"], *found["alone"])] == [expected] * 2
    found = in_node(TRANSLATE, folder=str(folder), dtype="q8", sources=given, options=[{}])
    expected = [Graphs(folder, IN_8_BITS).translator(loaded.tokenizer)([text])[0] for text in given]
    assert without_end(loaded, found["alone"][0]) == expected


@pytest.mark.browser
def test_javascript_follows_the_settings_that_it_is_said_to_follow(converted) -> None:
    loaded, folder, _ = converted
    given = random_sentences(12)
    names = {name for name, each in ALL_SETTINGS.items() if each.javascript and each.marian} - {"early_stopping"}
    options = [{name: ON[name]} for name in sorted(names)]
    found = in_node(TRANSLATE, folder=str(folder), dtype="fp32", sources=given, options=options)
    for row, settings in enumerate(options):
        expected = without_end(loaded, one_by_one(loaded, given, **settings))
        assert without_end(loaded, found["alone"][row]) == expected, settings
        # Of n-grams, it also forbids those of `</s>`, behind sentences that have ended.
        if "no_repeat_ngram_size" not in settings:
            assert without_end(loaded, found["batches"][row]) == expected, settings


ENCODE = """
const tokenizer = await AutoTokenizer.from_pretrained(given.folder);
const decode = (ids) => (ids.length ? tokenizer.decode(ids, { skip_special_tokens: true }) : "");
found = [given.texts.map((text) => tokenizer.encode(text)), given.rows.map(decode)];
"""
# Special tokens are text; U+FEFF is no white space, U+0085 is; letters of several characters; digits of other scripts.
ODD = [
    *TEXTS,
    "</s>",
    "<pad> a <s>b</s>",
    "<2de> hello",
    "hello<2de>there",
    " <2de>  x",
    "don't",
    "1 2\t３٤ Ⅷ²½ 12,345.67",
]
ODD += [
    "\ufeffa\ufeff",
    "\u0085a\u2028b\u200bc",
    "\x00\x07\x1c",
    "e\u0301\u0300 ﬁ ǅ",
    "👨‍👩‍👧‍👦🇩🇪",
    "日本語、한국어。",
    "“a—b…”_c_",
]


@pytest.mark.browser
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"split_digits": True, "languages": ["de", "fr"]}], ids=["plain", "more"])
def test_texts_have_the_same_tokens_in_javascript(kind, options, tmp_path) -> None:
    # What is not among these is unknown, except to a unigram model, of which the report says what differs.
    known = [*random_sentences(), *(ODD if kind == "unigram" else TEXTS)]
    assert_same_tokens(train_tokenizer(known, 600, kind=kind, **options), ODD, tmp_path)


@pytest.mark.browser
@pytest.mark.parametrize("origin", ["fairseq", "marian"])
def test_texts_have_the_same_tokens_if_the_vocabulary_is_converted(origin, spms, tmp_path) -> None:
    if origin == "fairseq":
        folder = codes_folder(tmp_path, sentences(LONG_WORDS, 30))[0]
        assert_same_tokens(fairseq.load(folder).tokenizer, [*sentences(LONG_WORDS, 30), *ODD], tmp_path)
    else:
        (tmp_path / "marian").mkdir()
        marian_folder(tmp_path / "marian", spms)
        texts = [text for text in ODD if "\u200d" not in text]
        assert_same_tokens(marian.load(tmp_path / "marian").tokenizer, texts, tmp_path)


def assert_same_tokens(tokenizer: Any, texts: list[str], folder: Path) -> None:
    for name, content in zip(("tokenizer", "tokenizer_config"), _tokenizer_files(tokenizer), strict=True):
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "config.json").write_text('{"model_type": "marian"}')
    ids, draw = tokenizer(texts)["input_ids"], random.Random(2)
    rows = ids + [draw.choices(range(len(tokenizer)), k=draw.randint(1, 12)) for _ in range(200)]
    found, decoded = in_node(ENCODE, folder=str(folder), texts=texts, rows=rows)
    assert dict(zip(texts, found, strict=True)) == dict(zip(texts, ids, strict=True))
    assert decoded == tokenizer.batch_decode(rows, skip_special_tokens=True)
