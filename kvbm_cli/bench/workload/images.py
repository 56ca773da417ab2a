"""Images of prompts. A URL is sent as it is, a file as base64 in a `data:` URL."""

from __future__ import annotations

import base64
import mimetypes
from pathlib import Path

from kvbm.config.files import require_file
from kvbm.errors import UsageError
from kvbm_cli.bench.workload.script import Image

URLS = ("http://", "https://", "data:image/")
MAX_BYTES = 20 << 20


def is_url(place: str) -> bool:
    return place.startswith(URLS)


def image_of(place: str) -> Image:
    """Return the image at a URL or in a file. UsageError for a file that is none."""
    if is_url(place):
        return Image(place)
    path = Path(place)
    require_file(path, "image", hint=f"an image is a file, or begins with {', '.join(f'`{one}`' for one in URLS)}")
    kind, _ = mimetypes.guess_type(path.name)
    if kind is None or not kind.startswith("image/"):
        raise UsageError(f"the name of the image `{path}` does not end like that of an image, such as `.png`")
    if path.stat().st_size > MAX_BYTES:
        raise UsageError(f"the image `{path}` is larger than {MAX_BYTES >> 20} MiB")
    return Image(f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}")
