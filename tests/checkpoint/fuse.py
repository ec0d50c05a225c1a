"""A file system of our own, mounted: `python -m tests.checkpoint.fuse BACKING MOUNT [DIES_AT]`.

The kernel's side is real (mount(2), /dev/fuse, the protocol of linux/fuse.h); a Python process answers it out of the
folder BACKING. A directory cannot be renamed (EXDEV, as overlay and object stores behind FUSE have it), and a file is
renamed by copying it over the other, piece by piece, and removing it: a rename is no one step, and who dies has left
half. What was synced is appended to BACKING.synced. With DIES_AT the process kills itself at that request.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys

import pytest

HEADER, BUFFER = struct.Struct("<IIQQIIIHH"), 1 << 20
_MOST_WRITE, _PIECE = 128 << 10, 16
_LIBC = ctypes.CDLL(None, use_errno=True)
_NOSUID_NODEV, _DETACH = 2 | 4, 2
_REQUESTS = 1 << 40  # the number of a node


def mount(fd: int, at: str) -> None:
    """mount(2). Raises OSError."""
    options = f"fd={fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other".encode()
    if _LIBC.mount(b"fmegatron-test", at.encode(), b"fuse", ctypes.c_ulong(_NOSUID_NODEV), options):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), at)


def unmount(at: str) -> None:
    """umount2(2), also when its process is gone or files are open."""
    _LIBC.umount2(at.encode(), _DETACH)


def why_not(folder) -> str | None:
    """Why this machine mounts none; None: it does."""
    at = os.path.join(str(folder), "mount-probe")
    os.makedirs(at, exist_ok=True)
    try:
        fd = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        return f"/dev/fuse: {error}"
    try:
        mount(fd, at)
        unmount(at)
    except OSError as error:
        return f"mount(2) of a FUSE file system: {error}"
    finally:
        os.close(fd)
        os.rmdir(at)
    return None


def require(folder) -> None:
    """Leave the test out, with the reason, where this machine mounts none."""
    if why := why_not(folder):
        pytest.skip(f"no FUSE file system can be mounted here: {why}")


class Mounted:
    """A mount point while the block lasts, with a process that answers; `restart` after that has died."""

    def __init__(self, backing, at):
        self.backing, self.at, self.process = str(backing), str(at), None

    def __enter__(self):
        os.makedirs(self.backing, exist_ok=True)
        os.makedirs(self.at, exist_ok=True)
        self.restart()
        return self

    def restart(self, dies_at: int = 0) -> None:
        """Mount it anew."""
        self.__exit__()
        command = [sys.executable, "-m", "tests.checkpoint.fuse", self.backing, self.at, str(dies_at)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout.readline() == b"mounted\n"

    def __exit__(self, *_) -> None:
        unmount(self.at)
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()
            self.process = None

    def requests(self) -> int:
        """How many were answered since it was mounted."""
        return int(os.readlink(f"{self.at}/.requests"))

    def synced(self) -> list[str]:
        """Paths below the mount that were synced, in order."""
        with contextlib.suppress(FileNotFoundError), open(f"{self.backing}.synced") as f:
            return f.read().splitlines()
        return []


class Server:
    """Nodes by number, open files by number, and an answer to each request."""

    def __init__(self, backing: str, dies_at: int = 0):
        self.backing, self.dies_at, self.requests = backing, dies_at, 0
        self.paths, self.nodes, self.next = {1: ""}, {"": 1}, 2  # relative to the folder
        self.files, self.lists, self.handle = {}, {}, 0
        self.log = open(f"{backing}.synced", "a", buffering=1)  # noqa: SIM115
        self.answers = {
            1: self.lookup, 3: self.getattr, 4: self.setattr, 5: self.readlink, 6: self.symlink, 9: self.mkdir,
            10: self.unlink, 11: self.rmdir, 12: self.rename, 14: self.open, 15: self.read, 16: self.write,
            17: self.statfs, 18: self.release, 20: self.fsync, 25: lambda *_: b"", 26: self.init, 27: self.opendir,
            28: self.readdir, 29: self.releasedir, 30: self.fsyncdir, 35: self.create, 45: self.rename2,
        }  # fmt: skip

    def serve(self, fd: int) -> None:
        """Until it is unmounted."""
        while True:
            try:
                data = os.read(fd, BUFFER)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):  # of a request that was interrupted
                    continue
                return
            _, code, unique, node, *_ = HEADER.unpack_from(data)
            body = data[HEADER.size :]
            if code in (2, 36, 38, 42):  # forget, interrupt, destroy, forget many: no answer
                continue
            self.tick()
            number, reply = 0, b""
            try:
                answer = self.answers.get(code)
                if answer is None:
                    raise OSError(errno.ENOSYS, "")
                reply = answer(node, body)
            except OSError as error:
                number = error.errno or errno.EIO
            with contextlib.suppress(OSError):  # nobody waits for it any more
                os.write(fd, struct.pack("<IiQ", 16 + len(reply), -number, unique) + reply)

    def tick(self) -> None:
        """One more thing done; perhaps the last."""
        self.requests += 1
        if self.requests == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    # ---- names

    def at(self, node: int, name: bytes | None = None) -> str:
        path = self.paths.get(node)
        if path is None:
            raise OSError(errno.ESTALE, "")
        at = os.path.join(self.backing, path) if path else self.backing
        return at if name is None else os.path.join(at, os.fsdecode(name))

    def entry(self, at: str) -> bytes:
        found, path = os.lstat(at), os.path.relpath(at, self.backing)
        node = self.nodes.get(path)
        if node is None:
            node, self.next = self.next, self.next + 1
            self.nodes[path], self.paths[node] = node, path
        return struct.pack("<QQQQII", node, 0, 0, 0, 0, 0) + attributes(found, node)

    def gone(self, at: str) -> None:
        node = self.nodes.pop(os.path.relpath(at, self.backing), None)
        if node is not None:
            self.paths[node] = None

    # ---- requests

    def init(self, node, body):
        _, _, ahead, flags = struct.unpack_from("<IIII", body)
        return struct.pack("<IIIIHHIIHHI28x", 7, 31, ahead, flags & (1 << 5), 16, 12, _MOST_WRITE, 1, 0, 0, 0)

    def lookup(self, node, body):
        if (node, body) == (1, b".requests\0"):  # a link that nobody has made, to their number
            found = os.stat_result((stat.S_IFLNK | 0o777, 0, 0, 1, 0, 0, 20, 0, 0, 0))
            return struct.pack("<QQQQII", _REQUESTS, 0, 0, 0, 0, 0) + attributes(found, _REQUESTS)
        return self.entry(self.at(node, body.rstrip(b"\0")))

    def getattr(self, node, body):
        flags, _, handle = struct.unpack_from("<IIQ", body)
        found = os.fstat(self.files[handle]) if flags & 1 and handle in self.files else os.lstat(self.at(node))
        return struct.pack("<QII", 0, 0, 0) + attributes(found, node)

    def setattr(self, node, body):
        valid, _, handle, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, *_ = struct.unpack_from(
            "<IIQQQQQQIIIIIIII", body
        )
        at = self.files[handle] if valid & 64 and handle in self.files else self.at(node)
        if valid & 8:
            os.truncate(at, size)
        if valid & 1:
            os.chmod(at, stat.S_IMODE(mode))
        if valid & (16 | 32):
            found = os.stat(at)
            times = [found.st_atime_ns, found.st_mtime_ns]
            for i, (bit, now, seconds, ns) in enumerate(((16, 128, atime, atime_ns), (32, 256, mtime, mtime_ns))):
                if valid & bit and not valid & now:
                    times[i] = seconds * 10**9 + ns
            os.utime(at, ns=tuple(times)) if not valid & (128 | 256) else os.utime(at)
        found = os.fstat(at) if isinstance(at, int) else os.lstat(at)
        return struct.pack("<QII", 0, 0, 0) + attributes(found, node)

    def readlink(self, node, body):
        if node == _REQUESTS:
            return str(self.requests).encode()
        return os.fsencode(os.readlink(self.at(node)))

    def symlink(self, node, body):
        name, target, _ = body.split(b"\0")
        os.symlink(os.fsdecode(target), self.at(node, name))
        return self.entry(self.at(node, name))

    def mkdir(self, node, body):
        at = self.at(node, body[8:].rstrip(b"\0"))
        os.mkdir(at, struct.unpack_from("<I", body)[0])
        return self.entry(at)

    def unlink(self, node, body):
        at = self.at(node, body.rstrip(b"\0"))
        os.unlink(at)
        self.gone(at)
        return b""

    def rmdir(self, node, body):
        at = self.at(node, body.rstrip(b"\0"))
        os.rmdir(at)
        self.gone(at)
        return b""

    def rename(self, node, body, header=8):
        (into,) = struct.unpack_from("<Q", body)
        name, to, _ = body[header:].split(b"\0")
        source, target = self.at(node, name), self.at(into, to)
        if stat.S_ISDIR(os.lstat(source).st_mode):
            raise OSError(errno.EXDEV, "")
        if os.path.islink(source):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(target)
            os.symlink(os.readlink(source), target)
        else:
            with open(source, "rb") as f, open(target, "wb", 0) as g:
                while piece := f.read(_PIECE):
                    self.tick()
                    g.write(piece)
            shutil.copystat(source, target)
        self.tick()
        os.unlink(source)
        self.gone(source)
        return b""

    def rename2(self, node, body):
        if struct.unpack_from("<QI", body)[1]:
            raise OSError(errno.EINVAL, "")
        return self.rename(node, body, 16)

    def open(self, node, body):
        (flags,) = struct.unpack_from("<I", body)
        return self.opened(os.open(self.at(node), flags & ~(os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)))

    def opened(self, fd):
        self.handle += 1
        self.files[self.handle] = fd
        return struct.pack("<QIi", self.handle, 0, 0)

    def create(self, node, body):
        flags, mode, *_ = struct.unpack_from("<IIII", body)
        at = self.at(node, body[16:].rstrip(b"\0"))
        fd = os.open(at, flags | os.O_CREAT, stat.S_IMODE(mode))
        return self.entry(at) + self.opened(fd)

    def read(self, node, body):
        handle, offset, size, *_ = struct.unpack_from("<QQI", body)
        return os.pread(self.files[handle], size, offset)

    def write(self, node, body):
        handle, offset, size, *_ = struct.unpack_from("<QQI", body)
        return struct.pack("<II", os.pwrite(self.files[handle], body[40 : 40 + size], offset), 0)

    def statfs(self, node, body):
        s = os.statvfs(self.backing)
        return struct.pack(
            "<QQQQQIIII24x", s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree, s.f_bsize, 255, s.f_frsize, 0
        )

    def release(self, node, body):
        os.close(self.files.pop(struct.unpack_from("<Q", body)[0]))
        return b""

    def fsync(self, node, body):
        self.log.write(f"{self.paths[node]}\n")
        return b""

    fsyncdir = fsync

    def opendir(self, node, body):
        self.handle += 1
        with os.scandir(self.at(node)) as entries:
            self.lists[self.handle] = [
                (e.name, e.inode(), 4 if e.is_dir(follow_symlinks=False) else 0) for e in entries
            ]
        return struct.pack("<QIi", self.handle, 0, 0)

    def readdir(self, node, body):
        handle, offset, size, *_ = struct.unpack_from("<QQI", body)
        reply = b""
        for i, (name, inode, kind) in enumerate(self.lists[handle][offset:], offset + 1):
            raw = os.fsencode(name)
            one = struct.pack("<QQII", inode, i, len(raw), kind) + raw
            one += b"\0" * (-len(one) % 8)
            if len(reply) + len(one) > size:
                break
            reply += one
        return reply

    def releasedir(self, node, body):
        del self.lists[struct.unpack_from("<Q", body)[0]]
        return b""


def attributes(s: os.stat_result, node: int) -> bytes:
    """struct fuse_attr."""
    times = [(ns // 10**9, ns % 10**9) for ns in (s.st_atime_ns or 0, s.st_mtime_ns or 0, s.st_ctime_ns or 0)]
    return struct.pack(
        "<QQQQQQIIIIIIIIII", node, s.st_size, s.st_blocks or 0, *(t[0] for t in times), *(t[1] for t in times),
        s.st_mode, s.st_nlink, s.st_uid, s.st_gid, s.st_rdev or 0, 4096, 0,
    )  # fmt: skip


if __name__ == "__main__":
    device = os.open("/dev/fuse", os.O_RDWR)
    mount(device, sys.argv[2])
    print("mounted", flush=True)
    Server(sys.argv[1], int(sys.argv[3])).serve(device)
