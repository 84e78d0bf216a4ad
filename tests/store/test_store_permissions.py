"""Nobody else can read a store, and a store that others can write to is not used."""

from __future__ import annotations

import os
import stat

import pytest

from kamera_store import KVStore, StoreRefusedError


def modes(folder) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


@pytest.fixture(autouse=True)
def usual_umask():
    old = os.umask(0o022)
    yield
    os.umask(old)


def test_everything_is_private_from_creation_on(tmp_path, kit, monkeypatch):
    from kamera_store.lmdb import binding

    seen = []
    real = binding.lmdb.open

    def looking(path, *args, **kw):
        env = real(path, *args, **kw)
        seen.append(modes(tmp_path / "deep" / "store"))
        return env

    monkeypatch.setattr(binding.lmdb, "open", looking)
    folder = tmp_path / "deep" / "store"
    with KVStore.open(folder) as store:
        kit.put_chunk(store, 1)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert set(modes(folder).values()) == {0o600}
        store.compact()
        assert set(modes(folder).values()) == {0o600}
    assert set(modes(folder).values()) == {0o600} and "seal" in modes(folder)
    assert all(set(found.values()) == {0o600} for found in seen)


def test_own_folder_that_others_could_read_is_closed(tmp_path, kit):
    folder = tmp_path / "store"
    folder.mkdir(mode=0o755)
    with KVStore.open(folder) as store:
        kit.put_chunk(store, 1)
    os.chmod(folder, 0o755)
    os.chmod(folder / "data.mdb", 0o644)
    KVStore.open(folder).close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and set(modes(folder).values()) == {0o600}


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
def test_folder_that_others_can_write_to_is_refused(tmp_path, mode):
    folder = tmp_path / "store"
    folder.mkdir()
    os.chmod(folder, mode)
    with pytest.raises(StoreRefusedError, match="can be written by others") as caught:
        KVStore.open(folder)
    assert "chmod" in str(caught.value) and os.listdir(folder) == []


def test_data_file_that_others_can_write_to_is_refused(tmp_path):
    folder = tmp_path / "store"
    KVStore.open(folder).close()
    os.chmod(folder / "data.mdb", 0o666)
    with pytest.raises(StoreRefusedError, match="can be written by others"):
        KVStore.open(folder)


def test_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "store"
    KVStore.open(folder).close()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StoreRefusedError, match="belongs to user"):
        KVStore.open(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_folder_given_to_another_user_is_refused(tmp_path):
    folder = tmp_path / "store"
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    with pytest.raises(StoreRefusedError, match="belongs to user 12345"):
        KVStore.open(folder)


def test_link_in_place_of_the_data_file_is_refused(tmp_path):
    folder = tmp_path / "store"
    KVStore.open(folder).close()
    (folder / "data.mdb").rename(tmp_path / "elsewhere")
    (folder / "data.mdb").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreRefusedError, match="not a regular file"):
        KVStore.open(folder)


def test_message_is_one_line(tmp_path):
    folder = tmp_path / "store"
    folder.mkdir()
    os.chmod(folder, 0o777)
    with pytest.raises(StoreRefusedError) as caught:
        KVStore.open(folder)
    assert "\n" not in str(caught.value)
