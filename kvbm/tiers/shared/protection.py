"""Protection: proves who wrote an object (HMAC), and hides its content (AES-GCM).

A checksum proves no origin: a user who may write to the store could place chosen KV under a predictable name. With a
secret that only trusted engines have, an object of anybody else is a miss. The key of a tenant is derived from the
secret, so that an object cannot be moved to another one. Engines with different secrets have different namespaces, so
that they do not replace each other's objects for ever.

    hmac       tag of 32 bytes over header and payload, HMAC-SHA256
    aes-gcm    nonce of 12 bytes, then a tag of 16 bytes; the payload is encrypted, the header authenticated
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from kvbm.errors import EnvironmentProblem
from kvbm.tiers.shared.settings import KEY_VARIABLE

MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096
NONCE_BYTES = 12
TAG_BYTES = 16
Buffer = bytes | bytearray | memoryview


class Protection(Protocol):
    """`code` names it in the header, `seal_bytes` is the length of what it adds to the header."""

    code: int
    seal_bytes: int

    def namespace(self, digest: bytes) -> bytes:
        """Return the namespace of engines with this secret, given that of their blocks. It does not show the
        secret."""
        ...

    def seal(self, tenant: bytes, header: Buffer, payload: Sequence[Buffer]) -> tuple[bytes, Sequence[Buffer]]:
        """Return the seal, and the payload to be stored."""
        ...

    def opened(self, tenant: bytes, header: Buffer, seal: bytes, payload: Sequence[Buffer]) -> Sequence[Buffer] | None:
        """Return the payload of a stored object; None if its origin is not proven."""
        ...


class NoProtection:
    code = 0
    seal_bytes = 0

    def namespace(self, digest: bytes) -> bytes:
        return digest

    def seal(self, tenant: bytes, header: Buffer, payload: Sequence[Buffer]) -> tuple[bytes, Sequence[Buffer]]:
        return b"", payload

    def opened(self, tenant: bytes, header: Buffer, seal: bytes, payload: Sequence[Buffer]) -> Sequence[Buffer] | None:
        return payload


class _WithSecret:
    """A protection whose keys follow from a secret and from `purpose`."""

    purpose: bytes

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def namespace(self, digest: bytes) -> bytes:
        return self._key(b" namespace", digest)[: len(digest)]

    def _key(self, use: bytes, owner: bytes) -> bytes:
        text = b"kvbm shared tier\0" + self.purpose + use + b"\0" + owner
        return hmac.new(self._secret, text, hashlib.sha256).digest()


class HmacProtection(_WithSecret):
    code = 1
    seal_bytes = 32
    purpose = b"hmac"

    def seal(self, tenant: bytes, header: Buffer, payload: Sequence[Buffer]) -> tuple[bytes, Sequence[Buffer]]:
        digest = hmac.new(self._key(b"", tenant), header, hashlib.sha256)
        for part in payload:
            digest.update(part)
        return digest.digest(), payload

    def opened(self, tenant: bytes, header: Buffer, seal: bytes, payload: Sequence[Buffer]) -> Sequence[Buffer] | None:
        expected, _ = self.seal(tenant, header, payload)
        return payload if hmac.compare_digest(expected, seal) else None


class AesProtection(_WithSecret):
    code = 2
    seal_bytes = NONCE_BYTES + TAG_BYTES
    purpose = b"aes-gcm"

    def __init__(self, secret: bytes) -> None:
        """Raise EnvironmentProblem without the library."""
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise EnvironmentProblem(
                "`tiers.shared.protection: aes-gcm` requires the package `cryptography`",
                hint="run `pip install 'kvbm-cli[shared]'`",
            ) from error
        super().__init__(secret)
        self._cipher = AESGCM

    def seal(self, tenant: bytes, header: Buffer, payload: Sequence[Buffer]) -> tuple[bytes, Sequence[Buffer]]:
        nonce = os.urandom(NONCE_BYTES)
        hidden = self._cipher(self._key(b"", tenant)).encrypt(nonce, b"".join(payload), bytes(header))
        return nonce + hidden[-TAG_BYTES:], [memoryview(hidden)[:-TAG_BYTES]]

    def opened(self, tenant: bytes, header: Buffer, seal: bytes, payload: Sequence[Buffer]) -> Sequence[Buffer] | None:
        from cryptography.exceptions import InvalidTag

        nonce, tag = seal[:NONCE_BYTES], seal[NONCE_BYTES:]
        cipher = self._cipher(self._key(b"", tenant))
        try:
            return [cipher.decrypt(nonce, b"".join((*payload, tag)), bytes(header))]
        except InvalidTag:
            return None


def protection_of(kind: str, key_file: Path | None) -> Protection:
    """Return the protection of a profile. Raises EnvironmentProblem if its secret is missing or too short."""
    if kind == "none":
        return NoProtection()
    secret = _secret(key_file)
    return HmacProtection(secret) if kind == "hmac" else AesProtection(secret)


def _secret(key_file: Path | None) -> bytes:
    if key_file is None:
        secret, where = os.environ.get(KEY_VARIABLE, "").encode(), f"variable `{KEY_VARIABLE}`"
    else:
        where = f"`{key_file}`"
        try:
            with key_file.expanduser().open("rb") as file:
                secret = file.read(MAX_SECRET_BYTES + 1).strip()
        except OSError as error:
            raise EnvironmentProblem(
                f"cannot read the key file {where} of `tiers.shared.key_file`: {error.strerror}"
            ) from error
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise EnvironmentProblem(
            f"`tiers.shared.protection` requires a secret of {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes, but "
            f"{where} has {len(secret)}",
            hint=f"run `openssl rand -hex 32 > FILE`, and set `tiers.shared.key_file: FILE` or `{KEY_VARIABLE}`",
        )
    return secret
