"""One file per attention family: what is captured, what is rotated, how it goes back into the model's cache."""
