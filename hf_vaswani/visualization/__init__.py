"""What a model does, to look at: the explorer's page, and attention as figures."""
