"""Inlay: the layer right after the tokenizer. Ids in, position-aware vectors out."""
