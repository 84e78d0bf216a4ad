"""Kamera: reuse the KV cache of video, image and text chunks at any position, in any order."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kamera-kv")
except PackageNotFoundError:  # running from a source tree that was never installed
    __version__ = "0.1.0"
