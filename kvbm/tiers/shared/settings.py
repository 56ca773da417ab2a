"""Settings of the shared tier: frozen values for its process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

KEY_VARIABLE = "KVBM_SHARED_KEY"  # the secret of `protection`, if there is no `key_file`


@dataclass(frozen=True, slots=True)
class SharedSettings:
    """The keys of `tiers.shared` in a profile. The credentials of the store are not among them: its client reads
    `AWS_*`, `GOOGLE_*` and `AZURE_*` variables, the files that these name, and the role of the machine.

    `expire_s` is the age at which the store deletes objects, 0 if it never does. With `writes` False, this engine only
    reads.
    """

    url: str
    protection: str = "none"  # none | hmac | aes-gcm
    key_file: Path | None = None
    expire_s: float = 0.0
    writes: bool = True
    requests: int = 16
    list_interval_s: float = 60.0
    node_directory: Path | None = None  # where engines of this machine share what one of them has read


def directory_of(url: str) -> Path | None:
    """Return the directory of a `file:` URL, None for another store."""
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None
