"""The training loop, and what it changes."""
