"""The explorer's page: complete, faithful to the model, small, and safe with any text."""

import base64
import html
import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest
import torch

from hf_vaswani import (
    VaswaniForCausalLM,
    VaswaniForMaskedLM,
    VaswaniForSequenceClassification,
    VaswaniForTokenClassification,
)
from hf_vaswani.data.tokenizer import train_tokenizer
from hf_vaswani.model.cache_vaswani import find_change
from hf_vaswani.model.modeling_vaswani import sinusoids
from hf_vaswani.visualization import explorer
from hf_vaswani.visualization.attention import collect_attention
from hf_vaswani.visualization.explorer import NEIGHBOURS, explore, position_encodings, project_embeddings

from ..networks import random_model, tiny_config, tiny_model


def data_of(page: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(re.search(r'id="data">(.*?)</script>', page.html, re.DOTALL)[1])
    return found


def test_the_page_says_what_the_model_does(tokenizer) -> None:
    model = random_model(0)
    page = explore(model, tokenizer, "abc ab", name="me/model", settings={"num_beams": 3})
    data = data_of(page)
    ids = tokenizer("abc ab", return_tensors="pt").input_ids
    expected = model.generate(ids, num_beams=3, return_dict_in_generate=True)
    best = data["search"]["hypotheses"][0]
    assert best["text"] == tokenizer.decode(expected.sequences[0], skip_special_tokens=True)
    assert best["score"] == pytest.approx(float(expected.sequences_scores[0]), abs=1e-3)
    assert "".join(part[0] for part in data["words"]["source"]) == "abc ab"
    assert "".join(part[0] for part in data["words"]["target"]) == best["text"]
    assert data["name"] == "me/model"
    attention = collect_attention(model, tokenizer, "abc ab", expected.sequences[0, 1:].tolist())
    for kind, weights in attention.weights.items():
        stored = data["attention"][kind]
        assert stored["shape"] == list(weights.shape)
        assert (len(stored["rows"]), len(stored["columns"])) == weights.shape[2:]
        numbers = numpy.frombuffer(base64.b64decode(stored["weights"]), "<u2").reshape(weights.shape) / 65535
        assert numpy.abs(numbers - weights.numpy()).max() < 1e-5
    # A word's probability is that of its tokens.
    words = attention.target.words()
    for word, probability in zip(words, data["words"]["probabilities"], strict=True):
        assert probability == pytest.approx(math.exp(sum(attention.log_probs[i] for i in word.tokens)), abs=1e-3)
    (positions,) = data["positions"]
    assert positions["shape"] == [max(weights.shape[2] for weights in attention.weights.values()), 24]
    points = data["embeddings"]["plots"][0]["points"]
    assert len(points) == len({*attention.source.ids, *attention.target.ids})


def test_the_page_needs_nothing_else_and_text_is_no_markup(tmp_path) -> None:
    text = "</script><script>alert(1)</script> <b>&amp; {{DATA}} \u2028"
    tokenizer = train_tokenizer([text], 60, kind="characters")
    page = explore(random_model(0, vocab_size=tokenizer.vocab_size), tokenizer, text, name="<i>me</i>")
    assert "".join(part[0] for part in data_of(page)["words"]["source"]) == text
    # The page's own scripts.
    assert page.html.count("<script") == 2 and "<i>" not in page.html
    assert set(re.findall(r"https?://[^\s\"']+", page.html)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"""(?:src|href)=["'](?!data:|#)|@import|url\(|fetch\(|XMLHttp|import\s""", page.html)
    assert "default-src 'none'" in page.html
    page.save(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_bytes().decode() == page.html
    frame = page._repr_html_()
    assert html.unescape(re.search(r'srcdoc="([^"]*)"', frame)[1]) == page.html
    assert 'sandbox="allow-scripts"' in frame


@pytest.mark.slow
def test_sixty_pieces_of_a_base_model_are_a_small_page(tokenizer) -> None:
    model = tiny_model(0, d_model=512, d_ff=2048, num_heads=8, encoder_layers=6, decoder_layers=6)
    settings = {"num_beams": 4, "max_new_tokens": 60, "min_new_tokens": 60}
    page = explore(model, tokenizer, ("ab " * 20)[:59], settings=settings)
    assert data_of(page)["attention"]["cross"]["shape"] == [6, 8, 60, 60]
    assert len(page.html.encode()) <= 3_000_000


def test_separate_embeddings_have_a_plot_each(tokenizer) -> None:
    model = random_model(0, share_embeddings=False, tie_word_embeddings=False)
    embeddings = data_of(explore(model, tokenizer, "abc ab"))["embeddings"]
    assert [{point[1] for point in plot["points"]} for plot in embeddings["plots"]] == [{"source"}, {"target"}]
    assert not embeddings["shared"]


def test_learned_positions_of_both_sides(tokenizer) -> None:
    model = random_model(0, position_encoding="learned", max_position_embeddings=40)
    data = data_of(explore(model, tokenizer, "abc ab"))
    for plot, stack, side in zip(
        data["positions"], (model.get_encoder(), model.get_decoder()), ("source", "target"), strict=True
    ):
        assert plot["side"] == side
        values = numpy.frombuffer(base64.b64decode(plot["values"]), numpy.int8).reshape(plot["shape"])
        table = stack.positions.table.weight[: plot["shape"][0]].numpy()
        assert numpy.abs(values / 127 * plot["scale"] - table).max() <= plot["scale"] / 127


@pytest.mark.slow
def test_threads_make_the_same_pages(tokenizer) -> None:
    model = random_model(0)
    expected = explore(model, tokenizer, "abc ab", settings={"num_beams": 3}).html
    with ThreadPoolExecutor(4) as threads:
        pages = threads.map(lambda _: explore(model, tokenizer, "abc ab", settings={"num_beams": 3}).html, range(12))
        assert set(pages) == {expected}
    assert find_change(model) is None


def test_a_decoder_on_its_own(tokenizer) -> None:
    model = tiny_model(kind=VaswaniForCausalLM, position_encoding="learned", max_position_embeddings=40)
    data = data_of(explore(model, tokenizer, "abc ab", settings={"num_beams": 1}))
    ids = tokenizer("abc ab", return_tensors="pt").input_ids[:, :-1]
    expected = model.generate(ids, num_beams=1, max_new_tokens=20)[0]
    assert data["search"]["hypotheses"][0]["text"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert list(data["attention"]) == ["decoder"]
    assert data["words"]["source"] is None
    # The prompt is given.
    assert data["words"]["probabilities"][0] is None
    assert data["attention"]["decoder"]["predicted"] is not None


def encoder(kind: type, **fields: Any) -> Any:
    torch.manual_seed(0)
    return kind(tiny_config(**fields)).eval()


def test_encoders_on_their_own(tokenizer) -> None:
    labels = {"id2label": {0: "good", 1: "bad"}, "label2id": {"good": 0, "bad": 1}}
    ids = tokenizer("abc ab", return_tensors="pt").input_ids
    classifier = encoder(VaswaniForSequenceClassification, **labels)
    data = data_of(explore(classifier, tokenizer, "abc ab"))
    assert list(data["attention"]) == ["encoder"]
    assert "search" not in data
    with torch.no_grad():
        expected = classifier(ids).logits[0].softmax(dim=-1)
    (table,) = data["predictions"]
    assert dict(table["rows"]) == {
        name: pytest.approx(float(expected[i]), abs=1e-4) for i, name in labels["id2label"].items()
    }
    tagger = encoder(VaswaniForTokenClassification, **labels)
    assert len(data_of(explore(tagger, tokenizer, "abc ab"))["predictions"]) == ids.shape[1]


def test_masked_tokens_are_predicted() -> None:
    tokenizer = train_tokenizer(["ab abc"], 20, kind="characters")
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    tokenizer.split_special_tokens = False
    (table,) = data_of(explore(encoder(VaswaniForMaskedLM), tokenizer, "a<mask>c"))["predictions"]
    probabilities = [probability for _, probability in table["rows"]]
    assert table["title"] == "<mask> (token 2)" and len(probabilities) == 5
    assert probabilities == sorted(probabilities, reverse=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("  ", "There is no text to explore"),
        ("abc" * 200, "has 601 tokens, but a page shows from 1 to 200: shorten it"),
        (["abc"], "The text must be a str, but it is a list"),
    ],
)
def test_text_that_is_no_sentence(tokenizer, text, message) -> None:
    with pytest.raises(ValueError, match=message):
        explore(random_model(0), tokenizer, text)
    with pytest.raises(ValueError, match="needs a Vaswani model, but it is a Linear"):
        explore(torch.nn.Linear(1, 1), tokenizer, text)


def test_a_text_of_a_million_characters_is_not_read(tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(explorer, "read", lambda *_: pytest.fail("reads it"))
    with pytest.raises(ValueError, match="has 1,000,000 characters, but a page shows at most 200 tokens: shorten it"):
        explore(random_model(0), tokenizer, "ab " * 333_333 + "a")


# ---- Embeddings and positions, against plain computations --------------------------------------------------------


def test_points_of_a_plane_keep_their_distances() -> None:
    generator = torch.Generator().manual_seed(0)
    plane, _ = torch.linalg.qr(torch.randn(16, 2, generator=generator))
    matrix, tokens = torch.randn(30, 2, generator=generator) @ plane.T + 3, [4, 7, 9, 12, 20]
    found = project_embeddings(matrix, tokens)
    expected = torch.cdist(matrix[tokens], matrix[tokens])
    torch.testing.assert_close(torch.cdist(found.points, found.points), expected, atol=1e-3, rtol=0)
    assert found.explained.sum() == pytest.approx(1, abs=1e-4) and found.explained[0] >= found.explained[1]
    # Neighbours are projected as the tokens are.
    between = (matrix[tokens][:, None] - matrix[found.neighbours]).norm(dim=-1)
    distances = (found.points[:, None] - found.neighbour_points).norm(dim=-1)
    torch.testing.assert_close(distances, between, atol=1e-3, rtol=0)


def test_neighbours_have_the_greatest_cosines() -> None:
    matrix, tokens = torch.randn(30, 8, generator=torch.Generator().manual_seed(1)), [3, 5]
    found = project_embeddings(matrix, tokens, excluded=[0, 1])
    for token, neighbours, cosines in zip(tokens, found.neighbours.tolist(), found.cosines.tolist(), strict=True):
        every = torch.cosine_similarity(matrix[token], matrix, dim=1)
        every[[0, 1, token]] = -torch.inf
        assert neighbours == every.topk(NEIGHBOURS).indices.tolist()
        assert cosines == pytest.approx(every[neighbours].tolist(), abs=1e-5)


@pytest.mark.parametrize("tokens", [[5], [5, 6]])
def test_few_tokens_and_a_small_vocabulary(tokens) -> None:
    found = project_embeddings(torch.randn(8, 4, generator=torch.Generator().manual_seed(2)), tokens, [0, 1, 2, 3])
    assert found.points.shape == (len(tokens), 2) and found.points.isfinite().all()
    assert found.neighbours.shape == (len(tokens), 3)


@pytest.mark.parametrize("layout", ["interleaved", "concatenated", "tensor2tensor"])
def test_positions_are_those_of_the_model(layout) -> None:
    found = position_encodings(tiny_model(sinusoid_layout=layout).get_encoder(), 9)
    torch.testing.assert_close(found, sinusoids(torch.arange(9), 16, layout))
    learned = tiny_model(position_encoding="learned", max_position_embeddings=12)
    assert torch.equal(position_encodings(learned.get_decoder(), 12), learned.model.decoder.positions.table.weight)
    with pytest.raises(ValueError, match="max_position_embeddings"):
        position_encodings(learned.get_decoder(), 13)
