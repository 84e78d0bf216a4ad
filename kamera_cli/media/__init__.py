"""Turn a file into chunks: decode, sample, make upright, convert to 8-bit RGB."""
