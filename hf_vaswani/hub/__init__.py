"""The model card, its curve, and publishing."""
