"""The file of the built-in corpus."""

from hf_vaswani.data.pocket_corpus import SPLITS, read_pocket_corpus


def test_the_splits_have_their_sizes_and_share_no_sentence() -> None:
    corpus = read_pocket_corpus()
    assert {split: len(corpus[split]) for split in SPLITS} == {"train": 20_000, "validation": 500, "test": 500}
    for side in (0, 1):
        sentences = [pair[side] for pairs in corpus.values() for pair in pairs]
        assert len(set(sentences)) == len(sentences)
