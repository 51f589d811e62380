"""What a corpus is like: repeated, damaged and held-out pairs, and words that translate each other."""
