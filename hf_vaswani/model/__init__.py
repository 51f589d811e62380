"""The model: these files travel to the Hub beside the weights."""
