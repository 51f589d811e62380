"""A model for people who do not write Python: the demo page."""
