"""Conversion from Marian and fairseq, and to Marian, CTranslate2, ONNX and transformers.js: one module per format."""

# Formats that can be written; here, where the command line reads them without torch.
TARGETS = ("vaswani", "marian", "ctranslate2", "onnx", "transformers.js")
