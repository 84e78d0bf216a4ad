"""A record that only a newer program knows is refused by name, and no verb but a deletion of it changes it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable

import pytest

from kamera_store import (
    FormatVersionError,
    KVStore,
    NewerRecordError,
    NewerRecordWarning,
    salvage,
)
from kamera_store.format.header import decode_header, encode_header
from kamera_store.format.keys import checksum64
from kamera_store.format.records import Record


def with_dtype(record: Record) -> bytes:
    first = record.tensors[0]._replace(dtype="float4_e2m1")
    return encode_header(dataclasses.replace(record, tensors=(first, *record.tensors[1:])))


def with_codec(record: Record) -> bytes:
    first = record.tensors[0]
    planes = (first.planes[0]._replace(codec=2), *first.planes[1:])
    return encode_header(
        dataclasses.replace(record, tensors=(first._replace(planes=planes), *record.tensors[1:]))
    )


def with_kind(record: Record) -> bytes:
    return encode_header(dataclasses.replace(record, kind="film"))


def with_version(record: Record) -> bytes:
    value = bytearray(encode_header(record))
    value[8] = 2
    value[-8:] = checksum64((memoryview(value)[:-8],)).to_bytes(8, "little")
    return bytes(value)


NEWER = {"dtype": with_dtype, "codec": with_codec, "kind": with_kind, "version": with_version}


@pytest.fixture(params=NEWER)
def newer(request, folder, kit, raw):
    """A closed store whose patch was written by a newer program, the patch's identity, and its chunk's."""
    make: Callable[[Record], bytes] = NEWER[request.param]
    with KVStore.open(folder, quota_bytes=8 << 20) as store:
        chunk, other = kit.put_chunk(store, 1), kit.put_chunk(store, 2)
        patch = kit.put_patch(store, chunk, [other])
    with raw(folder) as access:
        record = decode_header(patch.key, access.items("records")[patch.key])
        access.put("records", patch.key, make(record))
    return folder, patch, chunk


def rows_of(access, key: bytes) -> dict[tuple[str, bytes], bytes]:
    """All rows that belong to a record."""
    return {
        (table, name): value
        for table in ("records", "segments", "ledger", "links", "quarantine")
        for name, value in access.items(table).items()
        if name[:16] == key or (table == "links" and name[17:] == key)
    }


@pytest.fixture
def unchanged(newer, raw):
    """Fails if any row of the newer record is another one after the test."""
    folder, patch, _ = newer
    with raw(folder) as access:
        before = rows_of(access, patch.key)
    assert {table for table, _ in before} == {"records", "segments", "ledger", "links"}
    yield
    with raw(folder) as access:
        assert rows_of(access, patch.key) == before


def test_it_is_refused_by_name_and_listed_with_a_warning_of_its_own(newer, unchanged, kit):
    folder, patch, chunk = newer
    with KVStore.open(folder) as store:
        for read in (lambda: store.get(patch.key), lambda: store.find(patch, tenant="t")):
            with pytest.raises(FormatVersionError, match=patch.short_id) as caught:
                read()
            assert caught.value.exit_code == 4
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert patch.id not in {record.id for record in store.iterate()}
            assert store.patches_of(chunk.key) == [] and store.resolve(patch.id) == []
        assert {warning.category for warning in caught} == {NewerRecordWarning}
        assert store.stats().count == 3


@pytest.mark.parametrize("unknown", ["float4_e2m1", "film"])
def test_the_message_names_what_is_unknown(folder, kit, unknown):
    with KVStore.open(folder) as store:
        record = store.get(kit.put_chunk(store, 1).key)
    header = with_kind(record) if unknown == "film" else with_dtype(record)
    with pytest.raises(NewerRecordError, match=f"newer kamera: .*{unknown}.*this program knows") as caught:
        decode_header(record.key, header)
    assert "\n" not in str(caught.value)


def test_a_wrong_checksum_is_damage_all_the_same(newer, kit, raw):
    folder, patch, _ = newer
    with raw(folder) as access:
        value = access.items("records")[patch.key]
        access.put("records", patch.key, value[:-1] + bytes([value[-1] ^ 1]))
    with KVStore.open(folder) as store:
        assert [damage.key for damage in store.verify().damaged] == [patch.key]


def test_verify_finds_no_damage_and_sets_nothing_aside(newer, unchanged):
    with KVStore.open(newer[0]) as store:
        for _ in range(2):
            report = store.verify()
            assert report.ok and (report.num_records, report.num_newer) == (3, 1)


def test_verify_reports_a_damaged_ledger_row_of_it_and_keeps_the_row(newer, raw):
    folder, patch, _ = newer
    with raw(folder) as access:
        row = access.items("ledger")[patch.key]
        access.put("ledger", patch.key, row[:-1] + bytes([row[-1] ^ 1]))
        before = rows_of(access, patch.key)
    with KVStore.open(folder) as store:
        (damage,) = store.verify().damaged
        assert (damage.table, damage.key, damage.quarantined) == ("ledger", patch.key, False)
    with raw(folder) as access:
        assert rows_of(access, patch.key) == before


def test_eviction_keeps_its_whole_unit_and_says_why(newer, unchanged, kit):
    folder, _, chunk = newer
    with KVStore.open(folder) as store:
        plan = store.plan_eviction(to_bytes=0)
        assert [dropped.unit.unit for dropped in plan.units] == ["unit2"] and not plan.reached
        assert [(kept.unit.unit, kept.reason) for kept in plan.kept] == [
            ("unit1", "written by a newer kamera")
        ]
        store.evict(plan)
        assert [record.id for record in store.iterate("chunk")] == [chunk.id]


def test_a_plan_made_before_it_was_written_spares_its_unit(folder, kit, raw):
    with KVStore.open(folder) as store:
        chunk = kit.put_chunk(store, 1)
        plan = store.plan_eviction(to_bytes=0)
        record = store.get(chunk.key)
    with raw(folder) as access:
        access.put("records", chunk.key, with_kind(record))
    with KVStore.open(folder) as store:
        assert store.evict(plan) == 0
        with pytest.raises(NewerRecordError):
            store.get(chunk.key)


def test_room_for_a_write_is_made_around_it(newer, kit, raw):
    folder, patch, chunk = newer
    with KVStore.open(folder) as store:
        store.touch([patch.key, chunk.key, kit.identity_of(2).key], now_s=1.0)
    with raw(folder) as access:
        before = rows_of(access, patch.key)
    with KVStore.open(folder) as store:
        for number in range(10, 30):
            kit.put_chunk(store, number, tensors=[kit.noise(500_000, number)])
        assert store.find(kit.identity_of(2), tenant="t") is None
        assert store.find(chunk, tenant="t") is not None
    with raw(folder) as access:
        assert rows_of(access, patch.key) == before


@pytest.mark.parametrize("replace", [False, True])
def test_a_write_under_its_key_is_refused(newer, unchanged, kit, replace):
    folder, patch, _ = newer
    item = {"tenant": "t", "unit": "u", "meta": {}, "tensors": kit.tensors_of(3), "cost_ms": 1.0}
    with KVStore.open(folder) as store:
        with pytest.raises(FormatVersionError):
            store.put(patch, **item, replace=replace)
        with pytest.raises(FormatVersionError):
            store.put_all(
                [{"identity": kit.identity_of(3)} | item, {"identity": patch} | item], replace=replace
            )
        assert store.get(kit.identity_of(3).key) is None


def test_a_rescue_copies_it_byte_for_byte(newer, unchanged, raw, tmp_path):
    folder, patch, _ = newer
    report = salvage(folder, tmp_path / "new")
    assert report.lost == () and report.num_records == 3
    with raw(folder) as old, raw(tmp_path / "new") as new:
        before = rows_of(old, patch.key)
        assert rows_of(new, patch.key) == before
    with KVStore.open(tmp_path / "new") as store:
        assert store.verify().ok and store.verify().num_newer == 1


def test_compaction_keeps_it(newer, unchanged):
    with KVStore.open(newer[0]) as store:
        store.compact()


def test_only_a_deletion_that_names_it_removes_it_whole(newer, raw):
    folder, patch, _ = newer
    with KVStore.open(folder) as store:
        assert store.delete([patch.key]) > 0
        assert store.get(patch.key) is None and store.verify().ok
    with raw(folder) as access:
        assert rows_of(access, patch.key) == {}


def test_a_damaged_neighbour_is_still_set_aside(newer, unchanged, raw):
    folder, _, chunk = newer
    with raw(folder) as access:
        value = access.items("records")[chunk.key]
        access.put("records", chunk.key, value[:-1] + bytes([value[-1] ^ 1]))
    with KVStore.open(folder) as store:
        assert [damage.key for damage in store.verify().damaged] == [chunk.key]
        with pytest.warns(NewerRecordWarning):
            assert len(list(store.iterate())) == 1
        assert store.verify().num_newer == 1
