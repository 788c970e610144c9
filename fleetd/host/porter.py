"""The first program on a host, before there is a release: sent as text over the channel, it puts files in place and becomes the agent.

    {"do":"root","root":R}                         → facts of this interpreter and the root
    {"do":"has","kind","digest","files"}           → whether that tree lies there, every byte read
    {"do":"put","kind","digest","files","zipped"}  → "send", then the files' bytes one after the other, then what became of them
    {"do":"run","argv","seconds"}                  → what a program answered
    {"do":"tail","path","bytes"}                   → the end of a file below the root
    {"do":"start","digest","arguments"}            → "starting", and from then on this process is that program of that release

One file, standard library only: nothing else of ours is there yet. It imports nothing of fleetd, so it says in JSON what went wrong
and leaves the words to the coordinator. It writes below the root only.
"""

from __future__ import annotations

import compileall
import hashlib
import json
import os
import platform
import re
import select
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from typing import Any

SILENCE_SECONDS_MAX = 120.0
"""A coordinator that says nothing for so long is gone; its channel may not know yet."""
LINE_BYTES_MAX = 64 * 1024 * 1024
CHUNK_BYTES = 256 * 1024
OUTPUT_BYTES_MAX = 8 * 1024 * 1024
"""Of what a program answers: more is refused, since a part of an answer would be read as the whole."""
WORDS_BYTES_MAX = 4000
LOG_BYTES_MAX = 4 * 1024 * 1024
ENTRY = "fleetd/host/__main__.py"
KINDS = ("releases", "datasets", "models", "wheelhouses")
LFS_HEAD = b"version https://git-lfs.github.com/spec/"
COMPILED = ("policies", "fleetd", "libraries")
_DIGEST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
LEFTOVER = re.compile(r"\.tmp-.+-(\d+)")


class Refused(Exception):
    """An expected failure, as `kind` and what there is to say about it."""

    def __init__(self, kind: str, what: str, path: str = "") -> None:
        super().__init__(what)
        self.kind, self.what, self.path = kind, what, path


class Talk:
    """Requests and answers, one JSON object a line, with bytes between them. `do_NAME` of a subclass answers the request NAME."""

    def __init__(self, source: int, target: int) -> None:
        self.source, self.target, self.buffer = source, target, b""

    def serve(self) -> None:
        while True:
            line = self._line()
            if line is None:
                return
            request = json.loads(line)
            try:
                answer = getattr(self, f"do_{request['do']}")(request)
            except Refused as fault:
                answer = {"ok": False, "kind": fault.kind, "what": fault.what, "path": fault.path}
            except OSError as fault:
                answer = {"ok": False, "kind": "os", "errno": fault.errno, "what": str(fault.strerror or fault), "path": str(fault.filename or "")}
            if answer is not None:
                self._say(answer)

    def _line(self) -> bytes | None:
        while b"\n" not in self.buffer:
            data = self._read()
            if not data or len(self.buffer) > LINE_BYTES_MAX:
                return None
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line

    def _bytes(self) -> bytes:
        data, self.buffer = self.buffer or self._read(), b""
        if not data:
            raise SystemExit("the coordinator is gone")
        return data

    def _read(self) -> bytes:
        return os.read(self.source, CHUNK_BYTES) if self._is_readable() else b""

    def _is_readable(self) -> bool:
        """Whether there is something to read, the end included, before the other side counts as gone."""
        return bool(select.select([self.source], [], [], SILENCE_SECONDS_MAX)[0])

    def _say(self, answer: dict[str, Any]) -> None:
        # A name of a file that is no text must not make the whole answer unreadable.
        data = json.dumps(answer, ensure_ascii=False).encode(errors="replace") + b"\n"
        while data:
            data = data[os.write(self.target, data):]


class Porter(Talk):
    def __init__(self, source: int, target: int) -> None:
        super().__init__(source, target)
        self.root = ""

    def do_root(self, request: dict[str, Any]) -> dict[str, Any]:
        """Make the root, and see that it can be written."""
        self.root = request["root"]
        os.makedirs(self.root, exist_ok=True)
        probe = os.path.join(self.root, f".probe-{os.getpid()}")
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        os.unlink(probe)
        return {"ok": True, "machine": platform.machine(), "libc": platform.libc_ver()[0], "free_bytes": shutil.disk_usage(self.root).free}

    def do_has(self, request: dict[str, Any]) -> dict[str, Any]:
        folder = self._tree(request)
        if not os.path.isdir(folder):
            return {"ok": True, "present": False}
        fault = wrong_with(folder, request["files"])
        if fault is not None:
            raise Refused("damaged", fault, folder)
        return {"ok": True, "present": True}

    def do_put(self, request: dict[str, Any]) -> dict[str, Any]:
        """Write beside, verify, rename. Whatever happens, a tree under its final name is complete."""
        folder = self._tree(request)
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        sweep(os.path.dirname(folder))
        temporary = os.path.join(os.path.dirname(folder), f".tmp-{request['digest']}-{os.getpid()}")
        try:
            self._say({"ok": True, "send": True})
            self._receive(temporary, request)
            if request["kind"] == "releases":
                compile_release(temporary, folder)
            for base, _, _ in os.walk(temporary):
                sync(base)
            try:
                os.rename(temporary, folder)
            except OSError:
                if not os.path.isdir(folder):  # else somebody else brought the same digest first
                    raise
            sync(os.path.dirname(folder))
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return {"ok": True, "placed": True}

    def do_run(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            done = subprocess.run(request["argv"], stdin=subprocess.DEVNULL, capture_output=True, timeout=request["seconds"], check=False)
        except subprocess.TimeoutExpired:
            raise Refused("slow", f"no answer in {request['seconds']:.0f} s", request["argv"][0]) from None
        if len(done.stdout) > OUTPUT_BYTES_MAX:
            raise Refused("loud", f"it printed {len(done.stdout)} bytes, at most {OUTPUT_BYTES_MAX} are taken", request["argv"][0])
        words = done.stderr[-WORDS_BYTES_MAX:].decode(errors="replace")
        return {"ok": True, "status": done.returncode, "stdout": done.stdout.decode(errors="replace"), "stderr": words}

    def do_tail(self, request: dict[str, Any]) -> dict[str, Any]:
        with open(os.path.join(self.root, request["path"]), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - request["bytes"]))
            return {"ok": True, "text": file.read().decode(errors="replace")}

    def do_start(self, request: dict[str, Any]) -> None:
        assert not self.buffer, "the coordinator waits for our answer before it speaks to the agent"
        entry = os.path.join(self._tree({"kind": "releases", "digest": request["digest"]}), ENTRY)
        log = os.path.join(self.root, "agent.log")
        if os.path.exists(log) and os.path.getsize(log) > LOG_BYTES_MAX:
            os.replace(log, f"{log}.1")
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.chdir(self.root)
        self._say({"ok": True, "starting": True, "pid": os.getpid()})
        os.dup2(descriptor, 2)
        os.execv(sys.executable, [sys.executable, "-I", entry, *request["arguments"]])  # noqa: S606  (an exact argv is the point)

    def _receive(self, temporary: str, request: dict[str, Any]) -> None:
        unzip = zlib.decompressobj() if request["zipped"] else None
        ready = b""
        os.mkdir(temporary, 0o755)
        for path, size, sha256 in request["files"]:
            place = os.path.join(temporary, path)
            os.makedirs(os.path.dirname(place), exist_ok=True)
            digest, left = hashlib.sha256(), size
            with open(place, "xb") as file:
                while left:
                    if not ready:
                        data = self._bytes()
                        ready = unzip.decompress(data) if unzip is not None else data
                        continue
                    part, ready = ready[:left], ready[left:]
                    digest.update(part)
                    file.write(part)
                    left -= len(part)
                file.flush()
                os.fsync(file.fileno())
            if digest.hexdigest() != sha256:
                raise Refused("damaged", f"it arrived as SHA-256 {digest.hexdigest()}, sent was {sha256}", place)
        if unzip is not None and not unzip.eof:
            self._finish(unzip)
        self.buffer = ready + self.buffer if unzip is None else self.buffer

    def _finish(self, unzip: Any) -> None:
        """The end of a zipped stream carries its checksum and no bytes of ours."""
        while not unzip.eof:
            if unzip.decompress(self._bytes()):
                raise Refused("damaged", "more bytes came than were announced")
        self.buffer = unzip.unused_data + self.buffer

    def _tree(self, request: dict[str, Any]) -> str:
        return tree_path(self.root, request)


def tree_path(root: str, request: dict[str, Any]) -> str:
    """Where the tree of a request lies, or will lie. Refused when it would be anywhere else."""
    if request["kind"] not in KINDS or not _DIGEST.fullmatch(request["digest"]):
        raise Refused("order", f"{request['kind']}/{request['digest']} is no staged tree")
    return os.path.join(root, request["kind"], request["digest"])


def wrong_with(folder: str, files: list[list[Any]], told: Callable[[int], None] = lambda count: None) -> str | None:
    """What keeps `folder` from holding exactly these files (byte code and the manifest aside); None when nothing does. `told` hears how
    many bytes were read."""
    expected = {path: (size, sha256) for path, size, sha256 in files}
    for base, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            path = os.path.relpath(os.path.join(base, name), folder)
            if path == "manifest.json" and path not in expected:
                continue
            if path not in expected:
                return f"{path} does not belong there"
            size, sha256 = expected.pop(path)
            digest, head, whole = hashlib.sha256(), b"", size
            with open(os.path.join(folder, path), "rb") as file:
                while part := file.read(CHUNK_BYTES):
                    digest.update(part)
                    head = head or part
                    size -= len(part)
                    told(len(part))
            if size and head.startswith(LFS_HEAD):
                return f"{path} is a Git LFS pointer, not the file itself"
            if size > 0:
                return f"{path} is cut short: {whole - size} of {whole} bytes"
            if size or digest.hexdigest() != sha256:
                return f"{path} has the SHA-256 {digest.hexdigest()}, it should have {sha256}"
    return f"{next(iter(expected))} is missing" if expected else None


def compile_release(temporary: str, final: str) -> None:
    """Byte code by the interpreter that will run it, with the final path in its tracebacks."""
    for name in COMPILED:
        folder = os.path.join(temporary, name)
        if os.path.isdir(folder) and not compileall.compile_dir(folder, quiet=2, stripdir=temporary, prependdir=final):
            raise Refused("python", f"this Python can't read {name} of the release", sys.executable)


def has_ended(pid: str) -> bool:
    """Whether no process of this number can write any more: a zombie, whose parent has not looked yet, is as dead as one that is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X", b"x")
    except (FileNotFoundError, ProcessLookupError):
        return True


def sweep(folder: str) -> None:
    """Remove what dead porters left half-made."""
    for name in os.listdir(folder):
        maker = LEFTOVER.fullmatch(name)
        if maker is not None and has_ended(maker[1]):
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


def sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    Porter(0, 1).serve()
