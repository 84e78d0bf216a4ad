"""A plan that uses the wrong patch, hides a miss, or reads anything but its arguments."""

from __future__ import annotations

import itertools

import pytest

from kamera_cli.operator.plan import AUTO_MAX_KL, AUTO_MIN_ENERGY, Action, Offer, Plan, Wanted, plan

KINDS = ("first", "absent", "good", "bad", "unmeasured", "thin")
"""Nothing before the chunk, no patch, a patch with KL 0.01 or 0.5, one never measured, one of low energy."""


def wanted(index: int, kind: str) -> Wanted:
    chunk, patch = bytes([index]) * 16, bytes([100 + index]) * 16
    if kind == "first":
        return Wanted(chunk, 0)
    kls = {"good": 0.01, "bad": 0.5, "unmeasured": None, "thin": 0.0}
    energy = AUTO_MIN_ENERGY - 0.01 if kind == "thin" else AUTO_MIN_ENERGY
    return Wanted(chunk, 2, None if kind == "absent" else Offer(patch, "exact", kls[kind], energy))


def refused(kind: str, max_kl: float | None, reuse: str) -> str | None:
    if kind == "absent":
        return "no_patch"
    if kind == "thin" and reuse == "auto":
        return "low_energy"
    if max_kl is None and reuse == "auto":
        max_kl = AUTO_MAX_KL
    over = {"good": 0.01, "bad": 0.5, "unmeasured": float("inf"), "first": 0.0, "thin": 0.0}[kind]
    return "max_kl" if max_kl is not None and over > max_kl else None


@pytest.mark.parametrize("max_kl", [None, 0.0, 0.01, 0.1, 1.0])
@pytest.mark.parametrize("reuse", ["auto", "patched", "blind", "none"])
def test_all_arrangements_of_three_chunks(reuse, max_kl):
    for kinds in itertools.product(KINDS, repeat=3):
        arrangement = [wanted(index, kind) for index, kind in enumerate(kinds)]
        found = plan(arrangement, reuse=reuse, max_kl=max_kl)
        assert found == plan(list(arrangement), reuse=reuse, max_kl=max_kl)
        why = [refused(kind, max_kl, reuse) for kind in kinds]
        assert len(found.actions) == 3
        if reuse == "none":
            assert found == Plan((Action("prefilled"),) * 3, "--reuse none")
        elif reuse == "auto" and any(why):
            assert [(action.used, action.patch, action.why_not) for action in found.actions] == [
                ("prefilled", None, reason) for reason in why
            ]
            assert f"{sum(map(bool, why))} of 3" in found.fallback
            assert all(reason in found.fallback for reason in why if reason)
        else:
            assert found.fallback is None
            for index, (kind, reason) in enumerate(zip(kinds, why, strict=True)):
                if kind == "first":
                    expected = Action("canonical")
                elif reuse == "blind":
                    expected = Action("blind")
                elif reason:
                    expected = Action("blind", why_not=reason)
                else:
                    expected = Action("exact", patch=bytes([100 + index]) * 16)
                assert found.actions[index] == expected


def test_an_offer_for_a_chunk_that_needs_nothing_is_not_used():
    offer = Offer(b"p" * 16, "exact", 0.0, 1.0)
    assert plan([Wanted(b"c" * 16, 0, offer)], reuse="patched", max_kl=None).actions == (Action("canonical"),)
