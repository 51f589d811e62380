"""Tables of any size through a model: shards, a manifest, one machine or many."""
