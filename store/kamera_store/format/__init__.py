"""The bytes of a store: keys, records, headers, segments, payloads, codecs. See FORMAT.md."""
