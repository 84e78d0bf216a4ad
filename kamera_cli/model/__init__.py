"""Loading, fingerprint, prompt, capture and positions: the only package that imports transformers."""
