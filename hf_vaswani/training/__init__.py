"""Training: the loop, its preparation, its state, optimization and validation."""
