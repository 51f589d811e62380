"""Conversion from Marian and fairseq, and to Marian, CTranslate2 and ONNX: one module per format."""
