"""The bytes of a store: keys, records, headers, segments, payloads, codecs. See docs/format.md."""
