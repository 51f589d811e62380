"""In from Marian and fairseq, out to Marian, CTranslate2 and ONNX: one file a format."""
