from __future__ import annotations

import hashlib
import io
import socket
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from safari.data.cifar10 import FOLDER, fetch_cifar10
from safari.data.download import fetch_folder
from safari.errors import DataError


def archive(members: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for name, to in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, to
            tar.addfile(info)
    return buffer.getvalue()


# Incompressible, so that half of the archive is far from all of it.
FILES = {f"data_batch_{i}.bin": hashlib.shake_256(bytes([i])).digest(300_000) for i in range(1, 6)}
GOOD = archive({f"{FOLDER}/{name}": content for name, content in FILES.items()})
BODIES = {"good": GOOD, "unannounced": GOOD}


class Handler(BaseHTTPRequestHandler):
    """/NAME serves a body; /cut/NAME promises all of it and hangs up half way."""

    def do_GET(self) -> None:
        cut, _, name = self.path[1:].rpartition("/")
        if name not in BODIES:
            self.send_error(404)
            return
        body = BODIES[name]
        self.send_response(200)
        if name != "unannounced":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def md5(raw: bytes) -> str:
    return hashlib.md5(raw).hexdigest()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def advice(url: str, root: Path) -> str:
    return f"By hand: fetch {url} and unpack it in {root}, so that {root / FOLDER} exists"


@pytest.mark.parametrize("name", ["good", "unannounced"])
def test_a_good_archive_lands_in_place(server, tmp_path, name):
    root, seen = tmp_path / "new" / "data", []
    fetch_cifar10(root, url=f"{server}/{name}", md5=md5(GOOD), progress=lambda *step: seen.append(step))
    assert contents(root / FOLDER) == FILES
    assert [path.name for path in root.iterdir()] == [FOLDER]
    received = [step[0] for step in seen]
    assert received == sorted(received)
    assert len(received) > 1
    assert seen[-1] == (len(GOOD), len(GOOD) if name == "good" else None)


def test_what_is_there_stays_untouched(server, tmp_path):
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "mine").write_text("precious")
    fetch_cifar10(tmp_path, url=f"{server}/good", md5=md5(GOOD))
    assert contents(tmp_path / FOLDER) == {"mine": b"precious"}


def failed(root: Path, url: str, checksum: str = md5(GOOD)) -> str:
    root.mkdir(exist_ok=True)
    (root / "neighbour").write_text("kept")
    with pytest.raises(DataError) as error:
        fetch_cifar10(root, url=url, md5=checksum)
    assert [path.name for path in root.iterdir()] == ["neighbour"]
    return str(error.value)


def test_a_wrong_checksum(server, tmp_path):
    url = f"{server}/good"
    assert failed(tmp_path, url, "0" * 32) == (
        f"{url}: expected an archive with md5 {'0' * 32}, found {md5(GOOD)} ({len(GOOD)} bytes); "
        f"nothing was kept. {advice(url, tmp_path)}"
    )


def test_not_found(server, tmp_path):
    url = f"{server}/nowhere"
    assert failed(tmp_path, url) == f"{url}: the server answered 404 Not Found. {advice(url, tmp_path)}"


def test_a_connection_cut_half_way(server, tmp_path):
    url = f"{server}/cut/good"
    assert failed(tmp_path, url) == (
        f"{url}: the connection was cut: expected {len(GOOD)} bytes, found {len(GOOD) // 2}; "
        f"nothing was kept. {advice(url, tmp_path)}"
    )


def test_a_cut_that_only_the_checksum_can_see(server, tmp_path):
    message = failed(tmp_path, f"{server}/cut/unannounced")
    assert f"found {md5(GOOD[: len(GOOD) // 2])} ({len(GOOD) // 2} bytes)" in message


def test_no_server_at_the_address(tmp_path):
    with socket.socket() as held:
        # Bound and not listening: the port stays ours, and refuses.
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}/good"
        message = failed(tmp_path, url)
    assert message.startswith(f"{url}: the download failed after 0 bytes: ")
    assert "refused" in message
    assert message.endswith(advice(url, tmp_path))


def test_a_server_that_speaks_no_http(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"hello\n")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/good"
        message = failed(tmp_path, url)
        thread.join()
    assert message.startswith(f"{url}: the download failed after 0 bytes: ")


def test_a_silent_server_times_out(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/good"
        with pytest.raises(DataError, match="the download failed after 0 bytes: timed out"):
            fetch_folder(url, md5(GOOD), tmp_path / FOLDER, timeout=0.2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"plain text", "expected a tar archive, found something else: "),
        (GOOD[: len(GOOD) // 2], "expected a tar archive, found something else: "),
        (archive({"other/file": b"x"}), f"expected a folder {FOLDER} with files in the archive, found none"),
    ],
)
def test_a_checksum_of_something_else(server, tmp_path, raw, message):
    BODIES["else"] = raw
    url = f"{server}/else"
    assert failed(tmp_path, url, md5(raw)).startswith(f"{url}: {message}")


def test_an_archive_cannot_write_elsewhere(server, tmp_path):
    root = tmp_path / "root"
    evil = archive(
        {
            f"{FOLDER}/good.bin": b"good",
            "../escaped": b"evil",
            f"{FOLDER}/../escaped": b"evil",
            f"{FOLDER}/deep/../../../escaped": b"evil",
            str(tmp_path / "absolute"): b"evil",
            f"{FOLDER}/deep/file": b"unwanted",
        },
        links={f"{FOLDER}/link": "/etc/passwd", FOLDER + "/up": ".."},
    )
    BODIES["evil"] = evil
    fetch_cifar10(root, url=f"{server}/evil", md5=md5(evil))
    assert contents(root / FOLDER) == {"good.bin": b"good"}
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
    assert [path.name for path in root.iterdir()] == [FOLDER]


def test_a_root_that_cannot_be_written(server, tmp_path):
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / FOLDER
    with pytest.raises(DataError) as error:
        fetch_cifar10(tmp_path / "file", url=f"{server}/good", md5=md5(GOOD))
    assert str(error.value) == f"{target}: could not be written: File exists"


def test_a_full_disk(server, tmp_path):
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(GOOD) // 2, hard))
    try:
        with pytest.raises(DataError) as error:
            fetch_cifar10(tmp_path, url=f"{server}/good", md5=md5(GOOD))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(error.value) == f"{tmp_path / FOLDER}: could not be written: File too large"
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_download_leaves_nothing(server, tmp_path):
    def interrupt(received: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_cifar10(tmp_path, url=f"{server}/good", md5=md5(GOOD), progress=interrupt)
    assert list(tmp_path.iterdir()) == []
