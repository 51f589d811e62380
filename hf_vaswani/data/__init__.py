"""Reads text and turns it into batches for training."""
