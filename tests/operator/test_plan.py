"""A plan that uses the wrong patch, hides a miss, or reads anything but its arguments."""

from __future__ import annotations

import itertools

import pytest

from kamera_cli.operator.plan import AUTO_MAX_KL, AUTO_MIN_ENERGY, Action, Offer, Plan, Wanted, plan

STATES = ("absent", "good", "bad", "unmeasured", "thin")
"""No such patch, a patch with KL 0.01 or 0.5, one never measured, one of low energy."""
KINDS = ("exact", "orbit", "composed")
KLS = {"good": 0.01, "bad": 0.5, "unmeasured": None, "thin": 0.0}


def offer(index: int, kind: str, state: str) -> Offer:
    key = bytes([100 + 10 * index + KINDS.index(kind)]) * 16
    return Offer((key,), kind, KLS[state], AUTO_MIN_ENERGY - 0.01 if state == "thin" else AUTO_MIN_ENERGY)


def wanted(index: int, states: tuple[str, ...] | None) -> Wanted:
    chunk = bytes([index]) * 16
    if states is None:
        return Wanted(chunk, 0)
    offers = (
        offer(index, kind, state) for kind, state in zip(KINDS, states, strict=True) if state != "absent"
    )
    return Wanted(chunk, 2, tuple(offers))


def refused(state: str, max_kl: float | None, reuse: str, kind: str) -> str | None:
    if state == "thin" and reuse == "auto":
        return "low_energy"
    if max_kl is None and reuse == "auto":
        max_kl = AUTO_MAX_KL
    if state == "unmeasured" and kind == "composed":
        return "max_kl"
    over = {"good": 0.01, "bad": 0.5, "unmeasured": float("inf"), "thin": 0.0}[state]
    return "max_kl" if max_kl is not None and over > max_kl else None


def expected(index: int, states: tuple[str, ...] | None, reuse: str, max_kl: float | None) -> Action:
    """What the rule says of one chunk, apart from the fallback of the whole arrangement."""
    if states is None:
        return Action("canonical")
    if reuse == "blind":
        return Action("blind")
    why_not = None
    for kind, state in zip(KINDS, states, strict=True):
        if state == "absent":
            continue
        reason = refused(state, max_kl, reuse, kind)
        if reason is None:
            return Action(kind, offer(index, kind, state))
        why_not = why_not or reason
    return Action("blind", why_not=why_not or "no_patch")


@pytest.mark.parametrize("max_kl", [None, 0.0, 0.01, 0.1, 1.0])
@pytest.mark.parametrize("reuse", ["auto", "patched", "blind", "none"])
def test_every_mix_of_offers_for_two_chunks(reuse, max_kl):
    all_states = [None, *itertools.product(STATES, repeat=3)]
    for states in itertools.product(all_states, repeat=2):
        arrangement = [wanted(index, mix) for index, mix in enumerate(states)]
        found = plan(arrangement, reuse=reuse, max_kl=max_kl)
        if reuse == "none":
            assert found == Plan((Action("prefilled"),) * 2, "--reuse none")
            continue
        actions = [expected(index, mix, reuse, max_kl) for index, mix in enumerate(states)]
        reasons = [action.why_not for action in actions]
        if reuse == "auto" and any(reasons):
            assert found.actions == tuple(Action("prefilled", why_not=reason) for reason in reasons)
            assert f"{sum(map(bool, reasons))} of 2" in found.fallback
            assert all(reason in found.fallback for reason in reasons if reason)
        else:
            assert found == Plan(tuple(actions))


def test_a_plan_that_changes_from_call_to_call():
    arrangement = [wanted(0, None), wanted(1, ("bad", "good", "good"))]
    assert plan(arrangement, reuse="auto", max_kl=None) == plan(list(arrangement), reuse="auto", max_kl=None)


def test_an_offer_for_a_chunk_that_needs_nothing_is_not_used():
    given = Wanted(b"c" * 16, 0, (offer(0, "exact", "good"),))
    assert plan([given], reuse="patched", max_kl=None).actions == (Action("canonical"),)
