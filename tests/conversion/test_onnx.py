"""ONNX Runtime computes the same logits, for any batch size and length, with and without a cache."""

import io
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, GenerationConfig

from hf_vaswani.conversion.formats import Loaded
from hf_vaswani.translation.loading import load_translator

from ..conftest import dear
from ..networks import random_batch

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from hf_vaswani.conversion.onnx import read_graphs, save  # noqa: E402 - it needs both

from .test_ctranslate2 import save_random  # noqa: E402

MODELS = {
    "post": {"layer_norm_eps": 0.05, "sinusoid_layout": "tensor2tensor", "position_offset": 2, "type_vocab_size": 3}
    | {"embedding_norm": True, "scale_embedding": False},
    "pre": {"norm_position": "pre", "position_encoding": "learned", "max_position_embeddings": 30}
    | {"activation_function": "gelu", "attention_bias": True, "lm_head_bias": True, "d_k": 5, "d_v": 7}
    | {"tie_word_embeddings": False, "share_embeddings": False, "encoder_layers": 1, "decoder_layers": 3},
}


@pytest.fixture(scope="module", params=[dear("post"), dear("pre")])
def converted(request, tmp_path_factory):
    """A random model, the folder of its graphs, and the model in ONNX Runtime."""
    folder = tmp_path_factory.mktemp("model")
    model = save_random(folder / "ours", seed=4, max_length_offset=20, **MODELS[request.param])
    with redirect_stdout(io.StringIO()) as said:
        loaded = Loaded(*load_translator(folder / "ours", torch.float32), folder / "ours")
        (folder / "onnx").mkdir()
        foreign = save(loaded, folder / "onnx")
    # The exporters' own reports are suppressed.
    assert said.getvalue() == ""
    assert foreign.translate is None and "The graphs compute logits alone" in foreign.notes[0]
    return model, folder / "onnx", foreign


def ids_of_shape(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return random_batch(range(3, 51), range(1, 51), shape)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 9, 4), (5, 3, 1), (2, 7, 13), (6, 25, 3)], ids=str)
def test_logits_are_ours_for_any_sizes(converted, shape) -> None:
    model, _, foreign = converted
    ids, mask, targets = ids_of_shape(*shape)
    expected = model(input_ids=ids, attention_mask=mask, decoder_input_ids=targets).logits
    torch.testing.assert_close(foreign.logits(ids, mask, targets), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("parts", [(1, 1, 1, 1, 1), (3, 1, 1), (2, 3)], ids=str)
def test_decoding_with_the_cache_equals_decoding_at_once(converted, parts) -> None:
    model, folder, _ = converted
    ids, mask, targets = ids_of_shape(4, 6, 5)
    expected = model(input_ids=ids, attention_mask=mask, decoder_input_ids=targets).logits
    encoder, decoder = graphs(folder)
    keys, values = encoder.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
    source = {"attention_mask": mask.numpy(), "cross_keys": keys, "cross_values": values}
    past, found = [keys[:, :, :, :0], values[:, :, :, :0]], []
    for tokens in targets.split(parts, dim=1):
        inputs = {"decoder_input_ids": tokens.numpy(), "self_keys": past[0], "self_values": past[1]}
        logits, *past = decoder.run(None, inputs | source)
        found.append(torch.from_numpy(logits))
    torch.testing.assert_close(torch.cat(found, dim=1), expected, atol=1e-4, rtol=0)


def graphs(folder: Path) -> list:
    return [onnxruntime.InferenceSession(folder / f"{name}.onnx") for name in ("encoder", "decoder")]


def test_the_folder_is_complete_and_contains_no_paths_of_this_machine(converted) -> None:
    model, folder, _ = converted
    graphs = {f"{name}.onnx{end}" for name in ("encoder", "decoder") for end in ("", ".data")}
    texts = {f"{name}.json" for name in ("config", "generation_config", "tokenizer", "tokenizer_config")}
    assert {path.name for path in folder.iterdir()} == graphs | texts
    assert "auto_map" not in (folder / "config.json").read_text("utf-8")
    config = AutoConfig.from_pretrained(folder)
    expected = {name: value for name, value in model.config.to_dict().items() if name != "auto_map"}
    assert config.to_dict() | {"_name_or_path": ""} == expected
    assert GenerationConfig.from_pretrained(folder).max_length_offset == 20
    for path in folder.glob("*.onnx"):
        content = path.read_bytes()
        assert b".py" not in content and str(Path(__file__).parent.parent).encode() not in content


def test_dynamic_axes_have_names(converted) -> None:
    model, folder, _ = converted
    config, sides = model.config, dict(zip(("encoder", "decoder"), graphs(folder), strict=True))
    found = {side: {each.name: each.shape for each in sides[side].get_inputs()} for side in sides}
    assert found["encoder"] == {name: ["batch", "source"] for name in ("input_ids", "attention_mask")}
    heads = [config.decoder_layers, "batch", config.num_heads]
    assert [shape[:4] for name, shape in found["decoder"].items() if name.endswith(("keys", "values"))] == [
        [*heads, "past"],
        [*heads, "past"],
        [*heads, "source"],
        [*heads, "source"],
    ]
    logits, keys, _ = sides["decoder"].get_outputs()
    assert logits.shape == ["batch", "target", config.vocab_size]
    assert set(keys.shape[3].split(" + ")) == {"past", "target"}


def test_threads_are_those_of_this_process(converted, monkeypatch) -> None:
    session, threads = onnxruntime.InferenceSession, []

    def open_session(path, settings, **options):
        threads.append(settings.intra_op_num_threads)
        return session(path, settings, **options)

    monkeypatch.setattr(onnxruntime, "InferenceSession", open_session)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    read_graphs(converted[1])
    assert threads == [3, 3]
