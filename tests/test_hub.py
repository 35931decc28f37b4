"""Hub downloads against a stub of the hub on the loopback interface."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from models.config import CheckpointError
from models.hub import resolve_checkpoint

ROOT = Path(__file__).parents[1]
NAME = "team/tiny-model"
COMMITS = {"main": "a" * 40, "v2": "b" * 40}
FILES = {
    "config.json": b'{"model_type": "qwen3"}',
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"template",
    "pytorch_model.bin": b"not wanted",
    "modeling_custom.py": b"not wanted",
}
WANTED = sorted(name for name, content in FILES.items() if content != b"not wanted")
SCRIPT = """
import sys
from models.config import CheckpointError
from models.hub import resolve_checkpoint
try:
    print(resolve_checkpoint(sys.argv[1], revision=sys.argv[2] if len(sys.argv) > 2 else None))
except CheckpointError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


def git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class StubHub(BaseHTTPRequestHandler):
    """Answers what huggingface_hub asks for: repository facts, its tree, file facts, files."""

    def log_message(self, *_):
        pass

    def reply(self, status, body=b"", **headers):
        self.send_response(status)
        headers = {"Content-Length": len(body), **headers}
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        self.server.seen.append((self.command, self.path, self.headers.get("Authorization")))
        path = self.path.split("?")[0]
        gated = self.server.gated and self.headers.get("Authorization") != "Bearer secret"
        if not path.startswith((f"/api/models/{NAME}", f"/{NAME}/")):
            return self.reply(404, X_Error_Code="RepoNotFound")
        if gated:
            return self.reply(401 if "/api/" in path else 403, X_Error_Code="GatedRepo")
        if "/tree/" in path:
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": git_id(content)}
                for name, content in FILES.items()
            ]
            return self.reply(200, json.dumps(tree).encode(), Content_Type="application/json")
        if path.startswith("/api/"):
            revision = path.partition("/revision/")[2] or "main"
            commit = COMMITS.get(revision)
            if commit is None:
                return self.reply(404, X_Error_Code="RevisionNotFound")
            siblings = [{"rfilename": name} for name in FILES]
            facts = {"id": NAME, "modelId": NAME, "sha": commit, "siblings": siblings}
            body = json.dumps(facts).encode()
            return self.reply(200, body, Content_Type="application/json")
        commit, _, file = path.removeprefix(f"/{NAME}/resolve/").partition("/")
        content = FILES[file]
        return self.reply(200, content, ETag=f'"{git_id(content)}"', X_Repo_Commit=commit)

    do_HEAD = do_GET


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), StubHub)
    server.seen, server.gated = [], False
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def resolve(tmp_path, *arguments, endpoint, **environment):
    """Resolves a name in a fresh process: the hub's client reads its environment at import."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING_FACE"))}
    clean |= {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": endpoint} | environment
    clean |= {"HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.run(
        command, env=clean, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )


def address(hub) -> str:
    return f"http://127.0.0.1:{hub.server_port}"


def test_downloads_once_and_only_what_is_needed(hub, tmp_path):
    first = resolve(tmp_path, NAME, endpoint=address(hub), HF_TOKEN="secret")
    assert first.returncode == 0, first.stderr
    folder = first.stdout.strip()
    assert folder.startswith(str(tmp_path / "home"))
    assert sorted(os.listdir(folder)) == WANTED
    for name in WANTED:
        with open(os.path.join(folder, name), "rb") as file:
            assert file.read() == FILES[name]
    fetched = [path for method, path, _ in hub.seen if method == "GET" and "/resolve/" in path]
    assert sorted(path.split("/")[-1] for path in fetched) == WANTED
    assert {token for _, path, token in hub.seen if NAME in path} == {"Bearer secret"}

    hub.seen.clear()
    second = resolve(tmp_path, NAME, endpoint=address(hub))
    assert second.stdout == first.stdout
    assert not [path for _, path, _ in hub.seen if "/resolve/" in path]

    hub.seen.clear()
    offline = resolve(tmp_path, NAME, endpoint=address(hub), HF_HUB_OFFLINE="1")
    assert offline.stdout == first.stdout and not hub.seen


def test_revision(hub, tmp_path):
    result = resolve(tmp_path, NAME, "v2", endpoint=address(hub))
    assert result.stdout.strip().endswith(COMMITS["v2"])


def one_line(result) -> str:
    assert result.returncode == 2 and not result.stdout
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr.strip()


def test_errors_of_the_hub_are_one_line(hub, tmp_path):
    missing = one_line(resolve(tmp_path, "team/other", endpoint=address(hub)))
    assert missing.startswith("team/other: ") and "no such repository" in missing
    revision = one_line(resolve(tmp_path, NAME, "v9", endpoint=address(hub)))
    assert revision == f"{NAME} at v9: the hub has no such revision"
    hub.gated = True
    gated = one_line(resolve(tmp_path, NAME, endpoint=address(hub)))
    assert "gated" in gated and "HF_TOKEN" in gated


def test_an_unreachable_hub_is_one_line(tmp_path):
    endpoint = "http://127.0.0.1:9"
    message = one_line(resolve(tmp_path, NAME, endpoint=endpoint))
    expected = f"{NAME}: not in the local cache, and {endpoint} cannot be reached (ConnectError)"
    assert message == expected
    offline = one_line(resolve(tmp_path, NAME, endpoint=endpoint, HF_HUB_OFFLINE="1"))
    assert offline == f"{NAME}: not in the local cache, and HF_HUB_OFFLINE is set"


def test_a_local_folder_wins(tmp_path, monkeypatch):
    (tmp_path / NAME).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint(NAME).resolve() == (tmp_path / NAME).resolve()


@pytest.mark.parametrize("name", ["no/such/folder", "./missing", "/missing", "plain"])
def test_what_cannot_be_a_hub_name_is_a_missing_folder(name):
    with pytest.raises(CheckpointError, match=f"{name}: no such folder"):
        resolve_checkpoint(name)
