"""Which frame serves which sample: the sampling rule, in exact arithmetic and without any frame."""

from __future__ import annotations

from fractions import Fraction


class Timeline:
    """Gives each sample its frame while frames pass by in order.

    Times are relative to the first displayed frame. Sample k lies at ``k / rate`` seconds and is served by
    the frame whose presentation time is nearest; of two equally near frames by the earlier one. Samples
    exist up to the end of the last frame (half-open), and there is always one.

    Parameters
    ----------
    rate : Fraction
        Samples per second.
    """

    def __init__(self, rate: Fraction) -> None:
        self.rate = rate
        self.next_sample = 0
        self._last: Fraction | None = None

    def until(self, time_s: Fraction) -> int:
        """Return the end of the samples that the last frame keeps now that a frame at `time_s` follows it.

        Parameters
        ----------
        time_s : Fraction
            Time of the following frame, above every earlier one.

        Returns
        -------
        int
            The samples ``[next_sample, end)`` belong to the last frame; `next_sample` becomes ``end``.
        """
        end = self.next_sample
        if self._last is not None:
            midpoint = (self._last + time_s) / 2
            end = max(end, _floor(midpoint * self.rate) + 1)
        self._last = time_s
        self.next_sample = end
        return end

    def finish(self, end_s: Fraction) -> int:
        """Return the end of the samples of the last frame, which is shown until `end_s`."""
        self.next_sample = max(self.next_sample, num_samples(end_s, self.rate))
        return self.next_sample


def num_samples(end_s: float | Fraction, rate: Fraction) -> int:
    """Return how many samples a clip has whose last frame is shown until `end_s`."""
    return max(_ceil(Fraction(end_s) * rate), 1)


def _floor(value: Fraction) -> int:
    return value.numerator // value.denominator


def _ceil(value: Fraction) -> int:
    return -(-value.numerator // value.denominator)
