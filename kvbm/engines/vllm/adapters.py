"""Adapters: notices that a name of a LoRA adapter stands for other weights than before.

vLLM's block hash covers the name of an adapter (from 0.32 on its path too), never its content. An adapter can be
exchanged by loading another one under its name, by loading it again in place, or by changing its files: vLLM then reads
them when the adapter next has to be loaded, at a time that it does not report. Metadata of the files tell a change, so
blocks of an adapter on tmpfs are not cached: a store through a mapping moves no time there. The same
holds on an overlay for an adapter that changed within the minute before it was loaded, and for one of the hub that is
not on this machine when it is first used.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.identity.content import QUIET_NS, Signature, hides_changes, signature_of, writes_back
from kvbm.identity.digests import Unidentified
from kvbm.identity.snapshot import hub_snapshot

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")

log = logging.getLogger(__name__)

Facts = tuple[int, str, tuple[Signature | None, ...]]  # id, path, files


class Adapters:
    """What each name has stood for. A name is in doubt if vLLM may load changed files at any time."""

    def __init__(self) -> None:
        self._known: dict[str, Facts] = {}
        self._doubtful: set[str] = set()
        self._files: dict[str, tuple[str, ...]] = {}  # by path
        self._silent: dict[str, bool] = {}  # by path: whether changes of its files leave no trace

    def load(self, adapter: LoRARequest) -> bool:
        """Note that vLLM loads an adapter now. Return whether its name may have stood for other weights."""
        self._files.pop(str(adapter.lora_path), None)
        self._silent.pop(str(adapter.lora_path), None)
        self._is_silent(adapter)
        facts, known = self._facts(adapter), self._known.get(adapter.lora_name)
        if known is not None and known[0] == facts[0] and not _is_in_place(adapter):
            return self.use(adapter)  # vLLM keeps the one that it has
        self._known[adapter.lora_name] = facts
        self._doubtful.discard(adapter.lora_name)
        return known is not None

    def use(self, adapter: LoRARequest) -> bool:
        """Note that a request uses an adapter. Return whether its name may have stood for other weights."""
        name, facts = adapter.lora_name, self._facts(adapter)
        known = self._known.setdefault(name, facts)
        self._known[name] = facts
        if known == facts:
            return False
        if known[0] == facts[0]:
            self._doubtful.add(name)
        else:
            self._doubtful.discard(name)
        return True

    def is_certain(self, adapter: LoRARequest) -> bool:
        """Return whether blocks of this adapter may be cached."""
        return adapter.lora_name not in self._doubtful and not _is_in_place(adapter) and not self._is_silent(adapter)

    def _is_silent(self, adapter: LoRARequest) -> bool:
        """Return whether the files of an adapter can change without a trace. Before, write back what is dirty."""
        path = str(adapter.lora_path)
        if path not in self._silent:
            files = self._files_of(path)
            self._silent[path] = not files or any(map(_write_back, files))
            if not files:
                log.warning(
                    "kvbm: blocks of adapter `%s` are not cached: `%s` is not on this machine yet; start again when it "
                    "is downloaded, or load it by the path of its directory",
                    adapter.lora_name,
                    path,
                )
            elif self._silent[path]:
                log.warning(
                    "kvbm: blocks of adapter `%s` are not cached: changes of %s may leave no trace, as on tmpfs or, "
                    "within a minute, on an overlay; copy it to a disk",
                    adapter.lora_name,
                    path,
                )
        return self._silent[path]

    def _facts(self, adapter: LoRARequest) -> Facts:
        path = str(adapter.lora_path)
        return adapter.lora_int_id, path, tuple(map(_signature, self._files_of(path)))

    def _files_of(self, path: str) -> tuple[str, ...]:
        if path not in self._files:
            self._files[path] = _files_of(path)
        return self._files[path]


def _files_of(path: str) -> tuple[str, ...]:
    """Return the files that tell a change of an adapter, found as vLLM finds them: in a directory, or in the snapshot
    that a name of the hub means, with the file that says which one that is. None if it is not on this machine."""
    directory = os.path.expanduser(path) if path.startswith("~") else path
    if os.path.isabs(directory) or os.path.exists(directory):
        return tuple(os.path.join(directory, name) for name in FILES)
    try:
        snapshot, reference = hub_snapshot(path)
    except Unidentified:
        return ()
    return (*(str(snapshot / name) for name in FILES), str(reference))


def _is_in_place(adapter: LoRARequest) -> bool:
    """Return whether vLLM reads the files again with every request."""
    return bool(getattr(adapter, "load_inplace", False))


def _write_back(path: str) -> bool:
    """Write dirty pages of a file back, so that later stores move its times. Return whether they may not do so."""
    with suppress(OSError):
        is_recent = time.time_ns() - signature_of(Path(path)).ctime_ns < QUIET_NS
        return hides_changes(Path(path)) or (is_recent and not writes_back(Path(path)))
    return False


def _signature(path: str) -> Signature | None:
    with suppress(OSError):
        return Signature.of(os.stat(path))
    return None
