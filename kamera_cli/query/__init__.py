"""From a question to an answer with its receipt: arrange, read, prefill, decode."""
