"""Names of weights in fairseq, which transformers' Marian model shares, translated to ours."""

import re

# Regular expressions with their replacements, applied in this order.
NAMES = {
    r"^(encoder|decoder)\.": r"model.\1.",
    r"^model\.decoder\.output_projection": "lm_head",
    r"^(model\.\w+)\.layer_norm": r"\1.norm",
    r"embed_positions": "positions.table",
    r"encoder_attn": "cross_attn",
    r"attn_layer_norm": "attn_norm.layer_norm",
    r"final_layer_norm": "feed_forward_norm.layer_norm",
    r"\.(fc\d)": r".feed_forward.\1",
}


def our_name(name: str) -> str:
    """Returns our name of a weight; a name that both share stays as it is."""
    for pattern, replacement in NAMES.items():
        name = re.sub(pattern, replacement, name)
    return name
