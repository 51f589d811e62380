"""Graphs for transformers.js translate as the greedy search of our models does, in batches and one by one."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from hf_vaswani import VaswaniForConditionalGeneration
from hf_vaswani.conversion.formats import Foreign, Loaded
from hf_vaswani.conversion.settings import forces_eos
from hf_vaswani.translation.loading import load_translator

from ..conftest import dear

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from hf_vaswani.conversion.transformersjs import (  # noqa: E402 - it needs them
    DECODER,
    ENCODER,
    IN_8_BITS,
    Graphs,
    save,
)

from .test_ctranslate2 import save_random  # noqa: E402

PAD, EOS, END = 0, 2, "end"
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
def converted(request, tmp_path_factory) -> tuple[VaswaniForConditionalGeneration, Path, Foreign]:
    """A random model, the folder of its graphs, and the model in ONNX Runtime."""
    folder, fields = tmp_path_factory.mktemp("model"), MODELS.get(request.param, {})
    model = save_random(folder / "ours", **{"seed": 3, "max_length_offset": 4} | fields)
    end = EOS if request.param == "from eos" else common_token(model)
    settings = {"eos_token_id": END} | SETTINGS.get(request.param, {})
    model.generation_config.update(**json.loads(json.dumps(settings).replace(json.dumps(END), str(end))))
    model.generation_config.save_pretrained(folder / "ours")
    loaded = Loaded(*load_translator(folder / "ours", torch.float32), folder / "ours")
    (folder / "theirs").mkdir()
    return loaded.model, folder / "theirs", save(loaded, folder / "theirs")


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


def test_batches_are_translated_as_each_sentence_is_alone(converted) -> None:
    model, folder, _ = converted
    ids, mask = sources(60, 12)
    expected, graphs = ours(model, ids, mask), Graphs(folder)
    ends = graphs.ends.tolist()
    without_end = [row[:-1] if row[-1] in ends else row for row in expected]
    assert graphs.search(ids, mask) == without_end
    assert [graphs.search(ids[row : row + 1], mask[row : row + 1])[0] for row in range(12)] == without_end[:12]
    # They end at different steps, and some are cut.
    assert len({len(row) for row in expected}) > 2
    assert 1 < sum(row[-1] in ends for row in expected) < 59 or forces_eos(model.generation_config)


def test_the_graphs_are_what_engines_of_browsers_can_run(converted) -> None:
    """Without float64, with their weights inside, and with the axes and shapes that JavaScript expects."""
    model, folder, _ = converted
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
    heads = model.config.num_heads
    for name, shape in inputs.items():
        assert shape[0].dim_param == "batch_size"
        if name.startswith("past_key_values."):
            assert shape[1].dim_value == heads and shape[2].dim_param == "past" and shape[3].dim_value
    assert len(inputs) == 3 + 2 * model.config.decoder_layers
