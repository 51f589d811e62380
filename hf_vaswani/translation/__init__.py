"""Translation of texts by a model."""
