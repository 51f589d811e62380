"""A corpus through a model."""
