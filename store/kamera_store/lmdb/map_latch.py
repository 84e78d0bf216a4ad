"""Lets the transactions of a process pass together, and whoever changes the memory map alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turnstile:
    """Lets transactions pass together, and whoever changes the map alone."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = 0
        self._closed = False
        self._own = threading.local()

    def enter(self) -> None:
        """Begin a transaction; waits while somebody changes the map, unless this thread is inside already."""
        depth = getattr(self._own, "depth", 0)
        if depth == 0:
            with self._condition:
                while self._closed:
                    self._condition.wait()
                self._inside += 1
        self._own.depth = depth + 1

    def leave(self) -> None:
        """End what `enter` began."""
        self._own.depth -= 1
        if self._own.depth == 0:
            with self._condition:
                self._inside -= 1
                if self._closed:
                    self._condition.notify_all()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Both, around a block."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def shut(self) -> None:
        """Let nobody in and wait until all are out, except this thread itself."""
        own = 1 if getattr(self._own, "depth", 0) else 0
        with self._condition:
            while self._closed:
                self._condition.wait()
            self._closed = True
            while self._inside > own:
                self._condition.wait()

    def reopen(self) -> None:
        """End what `shut` began."""
        with self._condition:
            self._closed = False
            self._condition.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else is inside during the block."""
        assert not getattr(self._own, "depth", 0), "the map cannot be changed from inside a transaction"
        self.shut()
        try:
            yield
        finally:
            self.reopen()
