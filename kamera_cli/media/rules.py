"""Versions of the rules by which media become chunks; part of the source index key. Imports nothing."""

RULES = "nearest-1 pixels-1 image-1 text-1"
