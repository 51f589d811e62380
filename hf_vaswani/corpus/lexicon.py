"""Which entries translate which: probabilities by IBM Model 1 (Brown et al., 1993), from ids of sentence pairs."""

from collections.abc import Iterator, Sequence

import numpy as np

# After three, the ranking of the candidates hardly changes.
ITERATIONS = 3
# Products of source and target tokens in a part of the text.
PRODUCTS = 2**22

Ids = Sequence[Sequence[int]]


def likely_translations(
    sources: Ids, targets: Ids, vocab_size: int, count: int, excluded: Sequence[int] = ()
) -> dict[int, list[int]]:
    """
    Finds the most probable translations of each entry of a vocabulary.

    Args:
        sources (`Sequence[Sequence[int]]`), targets (`Sequence[Sequence[int]]`): ids of both sides of each pair.
        vocab_size (`int`): size of the vocabulary.
        count (`int`): number of translations of an entry.
        excluded (`Sequence[int]`): entries that are no translations here.

    Returns:
        `dict[int, list[int]]`: for each entry that has translations, at most `count` entries, the most probable first.
    """
    keys, probabilities = train_model_1(sources, targets, vocab_size)
    source, target = np.divmod(keys, vocab_size)
    # Source `vocab_size` is the empty word.
    is_candidate = (source < vocab_size) & ~np.isin(target, excluded)
    source, target, probabilities = source[is_candidate], target[is_candidate], probabilities[is_candidate]
    order = np.lexsort((-probabilities, source))
    source, target = source[order], target[order]
    starts = np.searchsorted(source, np.arange(vocab_size + 1))
    spans = zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    return {
        entry: target[start : min(end, start + count)].tolist()
        for entry, (start, end) in enumerate(spans)
        if end > start
    }


def train_model_1(sources: Ids, targets: Ids, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """
    Estimates t(target | source) by expectation maximization, with an empty word in each source.

    Args:
        sources, targets, vocab_size: as in [`likely_translations`].

    Returns:
        `np.ndarray` of shape `(n,)`: source * `vocab_size` + target, in ascending order, for the entries that occur
        together; the empty word is source `vocab_size`. And their probabilities, of the same shape.
    """
    # For each part: its distinct keys, and for each product the index of its key and the position of its target token.
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for found, positions in _products(sources, targets, vocab_size):
        own, indices = np.unique(found, return_inverse=True)
        parts.append((own, indices.astype(np.int32), positions.astype(np.int32)))
    keys = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *(own for own, _, _ in parts)]))
    placed = [(np.searchsorted(keys, own), indices, positions) for own, indices, positions in parts]
    probabilities = np.ones(len(keys))
    for _ in range(ITERATIONS):
        expected = np.zeros(len(keys))
        for places, indices, positions in placed:
            weights = probabilities[places][indices]
            weights /= np.bincount(positions, weights)[positions]
            expected[places] += np.bincount(indices, weights)
        source = keys // vocab_size
        probabilities = expected / np.bincount(source, expected)[source]
    return keys, probabilities


def _products(sources: Ids, targets: Ids, vocab_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the keys of all pairs of source and target tokens, and the positions of their target tokens."""
    sizes = np.array([(1 + len(s)) * len(t) for s, t in zip(sources, targets, strict=True)], dtype=np.int64)
    # A part ends behind the pair with which it is full.
    parts = np.cumsum(sizes) // PRODUCTS
    for part in np.unique(parts):
        chosen = np.flatnonzero(parts == part).tolist()
        source_lengths = np.array([1 + len(sources[i]) for i in chosen])
        target_lengths = np.array([len(targets[i]) for i in chosen])
        source = np.concatenate([[vocab_size, *sources[i]] for i in chosen]).astype(np.int64)
        target = np.concatenate([np.asarray(targets[i], dtype=np.int64) for i in chosen])
        # Each source token has a block of all target tokens of its pair.
        width = np.repeat(target_lengths, source_lengths)
        block_starts = np.repeat(np.cumsum(width) - width, width)
        first_targets = np.repeat(np.cumsum(target_lengths) - target_lengths, source_lengths)
        positions = np.arange(len(block_starts)) - block_starts + np.repeat(first_targets, width)
        yield np.repeat(source, width) * vocab_size + target[positions], positions
