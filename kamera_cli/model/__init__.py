"""Loading, fingerprint, prompt, capture and positions: the only package that imports transformers."""

from kamera_cli.model.deferred import defer_packages

defer_packages()
