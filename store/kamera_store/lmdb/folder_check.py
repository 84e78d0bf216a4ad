"""What a folder must be before a store is opened in it: ours, closed to others, on a local file system."""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path

from kamera_store.errors import NotAStoreError, StoreRefusedError

DATA_FILE, LMDB_LOCK_FILE, STORE_LOCK_FILE, SEAL_FILE = "data.mdb", "lock.mdb", "gate", "seal"
_OWN_FILES = frozenset((DATA_FILE, LMDB_LOCK_FILE, STORE_LOCK_FILE, SEAL_FILE))
SCRATCH_PREFIX = "scratch-"

_NETWORK = frozenset((
    "nfs", "nfs3", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "9p", "lustre", "afs", "ceph", "gpfs",
    "beegfs", "glusterfs", "ocfs2", "gfs2", "pvfs2", "orangefs", "coda", "ncpfs", "davfs", "vboxsf",
    "prl_fs", "virtiofs", "drvfs", "fuse.sshfs", "fuse.s3fs", "fuse.rclone", "fuse.gcsfuse",
    "fuse.glusterfs", "fuse.ceph", "fuse.davfs", "fuse.davfs2", "fuse.mountpoint-s3", "fuse.goofys",
    "fuse.juicefs", "fuse.beegfs", "fuse.lustre", "fuse.vmhgfs-fuse", "fuse.grpcfuse", "fuse.blobfuse2",
    "fuse.curlftpfs", "fuse.nfs",
))  # fmt: skip


def refused_file_system(fstype: str) -> bool:
    """Whether locks or memory maps on this file system cannot be trusted between machines."""
    return fstype.lower() in _NETWORK


def file_system_of(path: str, mounts: str | None = None) -> str:
    """Type of the file system that holds a path, as the kernel's mount table names it; ``unknown`` elsewhere.

    Parameters
    ----------
    path : str
        Absolute real path.
    mounts : str, optional
        Content of a mount table, for tests; the system's own by default.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mounts").read_text(errors="surrogateescape")
        except OSError:
            return "unknown"
    best, fstype = -1, "unknown"
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = (
            fields[1]
            .replace("\\040", " ")
            .replace("\\011", "\t")
            .replace("\\012", "\n")
            .replace("\\134", "\\")
        )
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            best, fstype = len(point), fields[2]
    return fstype


def require_local(path: str) -> None:
    """Refuse network file systems.

    Raises
    ------
    StoreRefusedError
        Names the file system and what to set.
    """
    if sys.byteorder != "little":
        raise StoreRefusedError("the store's byte order is little-endian, this machine's is not")
    fstype = file_system_of(path)
    if refused_file_system(fstype):
        raise StoreRefusedError(
            f"store {path} is on {fstype}, where locks and memory maps are not safe; "
            "set KAMERA_STORE or --store to a folder on a local disk"
        )


def prepare_folder(path: str, create: bool) -> None:
    """Make the folder with mode 0700, or check that an existing one is ours and nobody else can write to it.

    Raises
    ------
    NotAStoreError
        If nothing is there and nothing may be made, or something else stands there.
    StoreRefusedError
        If it belongs to another user or others may write to it.
    """
    if not os.path.lexists(path):
        if not create:
            raise NotAStoreError(path, "nothing there")
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
        except OSError as error:
            raise StoreRefusedError(
                f"store {path} cannot be made: {error.strerror}; choose another path"
            ) from error
    try:
        found = os.stat(path)
        names = set(os.listdir(path)) if stat.S_ISDIR(found.st_mode) else set()
    except OSError as error:
        raise StoreRefusedError(f"store {path} cannot be looked into: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise NotAStoreError(path, "not a folder")
    _require_ours(path, found)
    if DATA_FILE not in names:
        strangers = sorted(name for name in names - _OWN_FILES if not name.startswith(SCRATCH_PREFIX))
        if strangers:
            raise NotAStoreError(path, f"a folder with other things in it ({strangers[0]!r})")
        if not create:
            raise NotAStoreError(path, "an empty folder")
    _close_to_others(path, found, 0o700)
    for name in names & _OWN_FILES:
        file = os.path.join(path, name)
        found = os.lstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise StoreRefusedError(f"{file} is not a regular file; remove it or choose another path")
        _require_ours(file, found)
        _close_to_others(file, found, 0o600)


def _close_to_others(path: str, found: os.stat_result, mode: int) -> None:
    if not stat.S_IMODE(found.st_mode) & 0o077:
        return
    try:
        os.chmod(path, mode)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise StoreRefusedError(
                f"{path} can be read by others and that cannot be changed: {error.strerror}"
            ) from error


def _require_ours(path: str, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise StoreRefusedError(
            f"{path} belongs to user {found.st_uid}, this process is user {os.geteuid()}; "
            "choose a store of your own"
        )
    if stat.S_IMODE(found.st_mode) & 0o022:
        raise StoreRefusedError(
            f"{path} can be written by others (mode {stat.S_IMODE(found.st_mode):04o}); "
            f"check its content, then chmod go-rwx {path}"
        )
