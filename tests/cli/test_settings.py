"""Settings: what beats what, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from kamera_cli.errors import UsageError
from kamera_cli.settings import Settings, parse_bytes, parse_duration_s


def test_a_flag_beats_the_environment_and_the_environment_the_default() -> None:
    environ = {"KAMERA_STORE": "/e/store", "KAMERA_MODEL": "from-environment", "KAMERA_TENANT": "ann"}
    assert Settings.from_environment(environ={}).model == "kamera-tiny"
    assert Settings.from_environment(environ=environ).model == "from-environment"
    resolved = Settings.from_environment(environ=environ, model="from-flag", store=None)
    assert (resolved.model, resolved.store, resolved.tenant) == ("from-flag", Path("/e/store"), "ann")


def test_a_misspelt_variable_is_an_error_and_not_ignored() -> None:
    with pytest.raises(UsageError, match=r"KAMERA_STROE.*did you mean KAMERA_STORE"):
        Settings.from_environment(environ={"KAMERA_STROE": "/x"})


def test_an_empty_variable_counts_as_not_set() -> None:
    assert Settings.from_environment(environ={"KAMERA_MODEL": ""}).model == "kamera-tiny"


def test_the_default_store_is_the_users_own_and_no_shared_temporary_folder() -> None:
    store = Settings.from_environment(environ={}).store
    assert store.is_absolute()
    assert store.is_relative_to(Path.home())


@pytest.mark.parametrize("tenant", ["", "a/b", "a\nb", "\udcff"])
def test_a_tenant_that_could_meet_another_ones_windows_is_refused(tenant: str) -> None:
    with pytest.raises(UsageError, match="tenant"):
        Settings.from_environment(environ={}, tenant=tenant)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("10GB", 10**10), ("512MiB", 512 * 2**20), ("1.5kb", 1500), ("7 B", 7), ("2TiB", 2**41)],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "10G", "-1GB", "GB", "1e3", "10 XB", "١GB", "nan"])
def test_sizes_that_nobody_can_be_sure_of_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_bytes(text)


@pytest.mark.parametrize(("text", "expected"), [("7d", 604800), ("12h", 43200), ("1.5m", 90), ("0s", 0)])
def test_durations(text: str, expected: float) -> None:
    assert parse_duration_s(text) == expected


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "1y"])
def test_durations_without_a_unit_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_duration_s(text)


def test_the_quota_is_read_as_a_size() -> None:
    assert Settings.from_environment(environ={"KAMERA_QUOTA": "10GB"}).quota_bytes == 10**10
