"""From a source to chunks in the store: options, source index, encode."""
