"""Visualization of a model: the explorer page, and figures of attention."""
