"""Small files in the formats of real models, for tests of the identity."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path

from kvbm.identity import content

LONG_AGO_NS = 1_000_000_000_000_000_000


def safetensors(path: Path, tensors: dict[str, bytes], *, metadata: dict[str, str] | None = None) -> Path:
    """Write tensors of bytes in the format of safetensors."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, values in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(values)], "data_offsets": [at, at + len(values)]}
        at += len(values)
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))
    return path


def model(directory: Path, **tensors: bytes) -> Path:
    """A directory with a configuration and one weight file."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text('{"model_type": "llama", "rope_theta": 10000.0}')
    safetensors(directory / "model.safetensors", tensors or {"a": bytes(64), "b": bytes(64), "c": bytes(64)})
    return directory


def exchange(path: Path, content: bytes) -> None:
    """Write other bytes into a file and set its old time, as `cp -p` and `rsync -a` do."""
    facts = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def aged(directory: Path, monkeypatch, *, by_s: float = 100.0) -> Path:
    """Let the clock of this process run ahead, so that the files are not recent any more. The file system, which may be
    an overlay, counts as one that shows changes."""
    known = content.LIVE_FILE_SYSTEMS | {content.file_system_type(directory)}
    monkeypatch.setattr(content, "LIVE_FILE_SYSTEMS", known)
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + int(by_s * 1e9))
    return directory
