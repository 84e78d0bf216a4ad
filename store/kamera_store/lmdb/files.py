"""The files of a store beside LMDB: the folder, what the data file says, a walk by a child, the seal, scratch."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kamera_store.errors import (
    FormatVersionError,
    KameraStoreError,
    NotAStoreError,
    StoreDamagedError,
    StoreRefusedError,
)

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

BLOCK_BYTES = 4096
_META_MAGIC = 0xBEEFC0DE
_META_VERSION = 1
_META_AT = 16
_META_PAGE_AT, _META_LAST_PAGE_AT, _META_TXN_AT, _META_END = 40, 136, 144, 152
_PAGE_HEADER = struct.Struct("<QHH")
_META_FLAG = 0x08
_WALK_TIMEOUT_S = 300
_START = "import sys; sys.path[:] = {path!r}; from kamera_store.{module} import {name}; {name}(*{rest!r})"

# The folder: ours, closed to others, on a local file system


_MOUNT_ESCAPES = (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\"))


def refused_file_system(fstype: str) -> bool:
    """Whether locks or memory maps on this file system cannot be trusted between machines."""
    return fstype.lower() in _NETWORK


def file_system_of(path: str, mounts: str | None = None) -> str:
    """Type of the file system that holds a real path, by the system's mount table; ``unknown`` without one."""
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
        point = fields[1]
        for escape, character in _MOUNT_ESCAPES:
            point = point.replace(escape, character)
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            best, fstype = len(point), fields[2]
    return fstype


def require_local(path: str) -> None:
    """Refuse (`StoreRefusedError`) network file systems."""
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
    NotAStoreError, StoreRefusedError
        If nothing is there and nothing may be made, or something else stands there; if it is not ours alone.
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


# The data file


@dataclass(frozen=True)
class DataFile:
    """What a data file's newer meta page says (last page in use, last committed transaction), and the file system."""

    page_bytes: int
    last_page: int
    txn_id: int
    file_bytes: int
    mtime_ns: int

    @property
    def needed_bytes(self) -> int:
        """Length below which pages in use may be missing."""
        return (self.last_page + 1) * self.page_bytes

    @property
    def seal(self) -> str:
        """What a clean shutdown writes down."""
        return f"{self.file_bytes} {self.mtime_ns} {self.txn_id}\n"


def read_data_file(folder: str) -> DataFile | None:
    """Read the two meta pages of a data file without mapping it; None when there is no file or an empty one.

    Raises
    ------
    StoreDamagedError
        If neither page is a meta page, or the file is shorter than the pages.
    FormatVersionError
        If the data file is of another LMDB format.
    """
    path = os.path.join(folder, DATA_FILE)
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return None
            first = file.read(_META_END)
            meta = _parse_meta(folder, first)
            if meta is None:
                raise StoreDamagedError(
                    folder, "first meta page", "an LMDB meta page", first[:28].hex() or "nothing"
                )
            page_bytes = meta[0]
            file.seek(page_bytes)
            second = _parse_meta(folder, file.read(_META_END))
            # Measured after the pages were read: a writer lengthens the file before it names a longer one.
            found = os.fstat(file.fileno())
    except FileNotFoundError:
        return None
    if second is None or second[0] != page_bytes:
        raise StoreDamagedError(
            folder, "second meta page", "an LMDB meta page", f"file of {found.st_size} bytes"
        )
    newest = max(meta, second, key=lambda item: item[2])
    return DataFile(*newest, found.st_size, found.st_mtime_ns)


def _parse_meta(folder: str, data: bytes) -> tuple[int, int, int] | None:
    if len(data) < _META_END:
        return None
    _, _, flags = _PAGE_HEADER.unpack_from(data)
    magic, version = struct.unpack_from("<II", data, _META_AT)
    if not flags & _META_FLAG or magic != _META_MAGIC:
        return None
    if version != _META_VERSION:
        raise FormatVersionError(version, _META_VERSION, f"data file in {folder}")
    (page_bytes,) = struct.unpack_from("<I", data, _META_PAGE_AT)
    last_page, txn_id = struct.unpack_from("<QQ", data, _META_LAST_PAGE_AT)
    if page_bytes < 512 or page_bytes & (page_bytes - 1) or page_bytes > 1 << 16:
        return None
    return page_bytes, last_page, txn_id


def check_data_file(folder: str, *, alone: bool, read_only: bool) -> DataFile | None:
    """What the data file says of itself, after a walk through it where that is called for; None for an empty one.

    Parameters
    ----------
    alone : bool
        Whether this process is alone in the store: without a seal the file is then walked through.
    read_only : bool
        Whether an empty file is an error.

    Raises
    ------
    NotAStoreError
        If the file is empty or absent and nothing may be made.
    StoreDamagedError
        If the walk does not come to its end.
    """
    data = read_data_file(folder)
    if data is None:
        if read_only:
            raise NotAStoreError(folder, "an empty data file")
        return None
    short = data.file_bytes < data.needed_bytes
    if short or (alone and not _is_sealed(folder, data)):
        # Tail pages that no table uses may never have been written, so a short file alone proves nothing.
        failure = walk_in_child(folder, touch_values=short, writable=not read_only)
        if failure is not None:
            expected, found = "a readable tree", failure
            if short:
                expected, found = f"{data.needed_bytes} bytes", f"{data.file_bytes} bytes"
            raise StoreDamagedError(folder, "data file", expected, found)
    return data


def child_command(module: str, name: str, *arguments: object) -> list[str]:
    """Command line of a process that calls one function of this package, with this process's import path."""
    code = _START.format(path=sys.path, module=module, name=name, rest=arguments)
    return [sys.executable, "-I", "-S", "-c", code]


def walk_in_child(folder: str, touch_values: bool, writable: bool) -> str | None:
    """`binding.walk` in a child process, with its parameters; None when it came to its end, otherwise what ended it."""
    # Only a store without a seal is walked through, and other opens should not wait for this import.
    import signal
    import subprocess

    command = child_command("lmdb.binding", "walk", folder, touch_values, writable)
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=_WALK_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return f"no end of the walk within {_WALK_TIMEOUT_S} s"
    if done.returncode < 0:
        return f"the walk ended by {signal.Signals(-done.returncode).name}"
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"the walk ended with code {done.returncode}"
    return None


def _is_sealed(folder: str, data: DataFile) -> bool:
    """Whether the last user left in order and nobody touched the data file since."""
    try:
        with open(os.path.join(folder, SEAL_FILE), encoding="ascii", errors="replace") as file:
            return file.read(100) == data.seal
    except OSError:
        return False


def unseal(folder: str) -> None:
    """Say that the store is in use."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(folder, SEAL_FILE))


def seal(folder: str) -> None:
    """Say that the data file was closed in order, so that the next open need not walk through it."""
    with contextlib.suppress(KameraStoreError, OSError):
        data = read_data_file(folder)
        if data is not None:
            fd = os.open(os.path.join(folder, SEAL_FILE), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(fd, "w", encoding="ascii") as file:
                file.write(data.seal)


def remove_scratch(folder: str) -> None:
    """Remove what a compaction left that was killed."""
    for name in os.listdir(folder):
        if name.startswith(SCRATCH_PREFIX):
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


@dataclass(frozen=True)
class CompactReport:
    """Length of the data file before and after, in bytes."""

    before_bytes: int
    after_bytes: int


@contextlib.contextmanager
def scratch_folder(folder: str) -> Iterator[str]:
    """A folder beside the data file for the block; what a killed process left of it goes with `remove_scratch`."""
    scratch = os.path.join(folder, f"{SCRATCH_PREFIX}{os.getpid()}")
    os.mkdir(scratch, 0o700)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def sync(path: str) -> None:
    """Bring a file or folder to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
