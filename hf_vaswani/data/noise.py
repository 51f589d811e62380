"""The noise of pre-training: masked tokens (BERT), corrupted spans (T5), infilled and reordered text (BART, MASS).

Each function takes the ids of a text and a generator of random numbers, and returns new lists; the same numbers make
the same noise.
"""

import math
import random
from collections.abc import Sequence
from itertools import pairwise

# Shares of the predicted tokens that BERT masks, and that it replaces by a random token.
MASKED, REPLACED = 0.8, 0.1


def masked_tokens(
    ids: Sequence[int],
    rate: float,
    mask: int,
    replacements: Sequence[int],
    rng: random.Random,
    words: Sequence[bool] | None = None,
) -> tuple[list[int], list[int]]:
    """
    Chooses tokens to predict: of these, 80 % are masked, 10 % replaced by a random token and 10 % kept (Devlin et al.,
    2018, Section 3.1).

    Args:
        ids (`Sequence[int]`): the text.
        rate (`float`): share of the tokens to predict; at least one is.
        mask (`int`): id of `<mask>`.
        replacements (`Sequence[int]`): ids that may replace a token.
        rng (`random.Random`): source of the choices.
        words (`Sequence[bool]`, *optional*): whether a word begins at each token. Words are then chosen whole, as long
            as they fit, and each of their tokens is masked, replaced or kept by itself.

    Returns:
        `list[int]` and `list[int]`: the input, and the labels: the true token where it is to be predicted, else -100.
    """
    wanted = max(1, round(rate * len(ids)))
    units = [[i] for i in range(len(ids))] if words is None else _whole_words(words)
    rng.shuffle(units)
    chosen: list[int] = []
    for unit in units:
        # The first unit is taken at any length: some token must be predicted.
        if not chosen or len(chosen) + len(unit) <= wanted:
            chosen += unit
        if len(chosen) >= wanted:
            break
    inputs, labels = list(ids), [-100] * len(ids)
    for i in sorted(chosen):
        labels[i] = ids[i]
        draw = rng.random()
        if draw < MASKED:
            inputs[i] = mask
        elif draw < MASKED + REPLACED:
            inputs[i] = rng.choice(replacements)
    return inputs, labels


def _whole_words(begins: Sequence[bool]) -> list[list[int]]:
    """Groups the places of a text's tokens by words."""
    words: list[list[int]] = []
    for i, begin in enumerate(begins):
        if begin or not words:
            words.append([])
        words[-1].append(i)
    return words


def corrupted_spans(
    ids: Sequence[int], rate: float, mean_length: float, sentinels: Sequence[int], rng: random.Random
) -> tuple[list[int], list[int]]:
    """
    Replaces spans of a text by sentinels, and asks for the spans (Raffel et al., 2019, Section 3.1.4). As in the code
    of T5, the number of tokens and spans follows from the length of the text, and a text never begins with a span.

    Args:
        ids (`Sequence[int]`): the text.
        rate (`float`): share of the tokens in spans.
        mean_length (`float`): mean length of the spans.
        sentinels (`Sequence[int]`): ids of `<extra_0>`, `<extra_1>`, ...; one more than there are spans.
        rng (`random.Random`): source of the choices.

    Returns:
        `list[int]` and `list[int]`: the text with a sentinel in place of each span; and the spans, each behind its
        sentinel, with one more sentinel at the end. A text of one token is left whole, and nothing is asked for.
    """
    if len(ids) < 2:
        return list(ids), [sentinels[0]]
    noise = min(max(round(rate * len(ids)), 1), len(ids) - 1)
    count = min(max(round(noise / mean_length), 1), noise, len(ids) - noise, len(sentinels) - 1)
    kept, spans = _parts(len(ids) - noise, count, rng), _parts(noise, count, rng)
    source, target, place = [], [], 0
    for sentinel, before, length in zip(sentinels, kept, spans, strict=False):
        source += [*ids[place : place + before], sentinel]
        place += before
        target += [sentinel, *ids[place : place + length]]
        place += length
    return source, [*target, sentinels[count]]


def _parts(total: int, count: int, rng: random.Random) -> list[int]:
    """Cuts a length into `count` parts of at least 1, each way with the same probability."""
    cuts = [0, *sorted(rng.sample(range(1, total), count - 1)), total]
    return [end - start for start, end in pairwise(cuts)]


def infilled(ids: Sequence[int], rate: float, mean_length: float, mask: int, rng: random.Random) -> list[int]:
    """
    Replaces spans of a text by a single mask each (text infilling, Lewis et al., 2019, Section 2.2). The lengths of
    the spans are drawn from a Poisson distribution; a span of length 0 inserts a mask. Those that
    would make the text longer by more than one token are left out.

    Args:
        ids (`Sequence[int]`): the text.
        rate (`float`): share of the tokens in spans, rounded to whole tokens.
        mean_length (`float`): mean of the Poisson distribution.
        mask (`int`): id of `<mask>`.
        rng (`random.Random`): source of the choices.

    Returns:
        `list[int]`: the text with masks, at most one token longer than before.
    """
    masked, lengths = round(rate * len(ids)), list[int]()
    left, kept = masked, len(ids) - masked
    # No two spans are neighbours, so each needs a place of its own among the tokens that are kept.
    while left and len(lengths) <= kept:
        lengths.append(min(_poisson(mean_length, rng), left))
        left -= lengths[-1]
    if left:
        lengths[-1] += left
    if len(lengths) > masked + 1:
        lengths = sorted(lengths, reverse=True)[: masked + 1]
    rng.shuffle(lengths)
    spans = dict(zip(sorted(rng.sample(range(kept + 1), len(lengths))), lengths, strict=True))
    noisy, place = [], 0
    for i in range(kept + 1):
        if i in spans:
            noisy.append(mask)
            place += spans[i]
        if i < kept:
            noisy.append(ids[place])
            place += 1
    return noisy


def _poisson(mean: float, rng: random.Random) -> int:
    """Draws from a Poisson distribution (Knuth, The Art of Computer Programming, volume 2, 3.4.1)."""
    count, product, limit = 0, rng.random(), math.exp(-mean)
    while product > limit:
        count += 1
        product *= rng.random()
    return count


def masked_fragment(ids: Sequence[int], rate: float, mask: int, rng: random.Random) -> list[int]:
    """
    Masks the tokens of one fragment of a text (MASS, Song et al., 2019, Section 3.2).

    Args:
        ids (`Sequence[int]`): the text.
        rate (`float`): length of the fragment as a share of the text's; at least one token.
        mask (`int`): id of `<mask>`.
        rng (`random.Random`): source of the choices.

    Returns:
        `list[int]`: the text, as long as before.
    """
    length = min(len(ids), max(1, round(rate * len(ids))))
    start = rng.randint(0, len(ids) - length)
    return [*ids[:start], *[mask] * length, *ids[start + length :]]


def reordered(ids: Sequence[int], ends: Sequence[int], rng: random.Random) -> list[int]:
    """
    Puts the sentences of a text in random order (sentence permutation, Lewis et al., 2019, Section 2.2).

    Args:
        ids (`Sequence[int]`): the text.
        ends (`Sequence[int]`): places behind the last token of each sentence, in ascending order.
        rng (`random.Random`): source of the order.

    Returns:
        `list[int]`: the same tokens.
    """
    sentences = [list(ids[start:end]) for start, end in pairwise([0, *ends])]
    rng.shuffle(sentences)
    return [token for sentence in sentences for token in sentence]
