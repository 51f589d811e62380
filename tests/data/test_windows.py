"""Windows of text are encoded in parts, with all their pairs, by this process or by others."""

from hf_vaswani.data.renewal import Renewal
from hf_vaswani.data.tokenizer import train_tokenizer
from hf_vaswani.data.windows import ENCODE_BATCH, Window, WindowEncoder, WindowText
from hf_vaswani.recipe import AugmentRecipe

SENTENCES = [f"lower newer wider {i}." for i in range(ENCODE_BATCH + 5)]


def test_a_window_is_encoded_in_parts_like_one() -> None:
    tokenizer = train_tokenizer(SENTENCES, 300)
    # Many pairs of one source, a few of another, and none of a third.
    texts = [
        WindowText(SENTENCES, SENTENCES, range(1, len(SENTENCES) + 1), [0] * len(SENTENCES), None),
        WindowText(SENTENCES[:3], SENTENCES[:3], [7, 8, 9], [0, 0, 1], None),
        WindowText([], [], [], [], None),
    ]
    window = Window(0, {}, {}, len(SENTENCES) + 3, (0, 0), texts)
    returned, table = WindowEncoder(tokenizer)[window]
    assert not returned.texts and returned.pairs == window.pairs
    rows = table.to_pylist()
    assert [row["number"] for row in rows] == [*range(1, len(SENTENCES) + 1), 7, 8, 9]
    assert [row["source_ids"] for row in rows] == tokenizer(SENTENCES + SENTENCES[:3])["input_ids"]
    renewal = Renewal(tokenizer, 1, AugmentRecipe(no_final_mark=0.5), bpe_dropout=0.2)
    _, renewed = WindowEncoder(tokenizer, renewal)[window]
    for row, plain in zip(renewed.to_pylist(), rows, strict=True):
        # Both sides are the same text, with different pieces.
        source, target = (tokenizer.decode(row[side]).removesuffix("</s>") for side in ("source_ids", "target_ids"))
        assert source == target and tokenizer.decode(plain["source_ids"][:-1]).removesuffix(".").startswith(
            source.removesuffix(".")
        )
    assert renewed != table
