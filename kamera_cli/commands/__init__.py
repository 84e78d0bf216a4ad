"""One file per command: parse, call the engine or the store, print."""
