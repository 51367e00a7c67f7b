"""The models of ``fp4dispatch demo``: a language model, and a sentence-embedding model."""
