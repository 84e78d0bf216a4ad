"""LMDB as the store uses it: opening checks, transactions, growth, locks."""
