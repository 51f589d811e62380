"""Analysis of a corpus: repeated, damaged and held-out pairs, and a lexicon of word translations."""
