"""Pictures and sounds as clients send them: files of many formats, and what differs in them only where few look.

A content is a text such as `rgb 3`: a form, and a seed. Contents with one seed have the same pixels or samples where
the form allows it.
"""

from __future__ import annotations

import base64
import io
import struct
import uuid
import wave
from collections.abc import Callable
from typing import Any

SIDE = 60  # pixels
SAMPLING_RATE = 16_000
DIRECTIONS, DIRECTION_TAG = (1, 3, 6, 8), 0x0112  # of EXIF
MIME = {"JPEG": "jpeg", "PNG": "png", "GIF": "gif", "WEBP": "webp", "BMP": "bmp", "TIFF": "tiff"}


def picture(content: str) -> Any:
    """Return a picture of Pillow. `rgba 3` and `rgba2 3` differ only in their transparency, and so on."""
    form, seed = content.split()
    return _PICTURES[form](int(seed))


def picture_file(content: str) -> tuple[str, bytes]:
    """Return a MIME type and the bytes of a file."""
    form, seed = content.split()
    kind, arguments = _FILES.get(form, ("PNG", {}))
    into = io.BytesIO()
    made = picture(content)
    arguments = arguments(int(seed)) if callable(arguments) else arguments
    made.save(into, kind, **arguments)
    return f"image/{MIME[kind]}", into.getvalue()


def url_of(content: str) -> str:
    kind, data = picture_file(content)
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def sound(seed: int, seconds: float = 2) -> Any:
    import numpy as np

    source = np.random.default_rng(seed)
    times = np.arange(int(seconds * SAMPLING_RATE)) / SAMPLING_RATE
    tones = sum(np.sin(6.283 * source.uniform(80, 4000) * times + source.uniform(0, 6)) for _ in range(5))
    return (tones * source.uniform(0.05, 0.2)).astype(np.float32)


def sound_file(content: str) -> bytes:
    """Return a WAV file. The forms are sampling rates: equal samples that are played at another speed."""
    rate, seed = map(int, content.split())
    into = io.BytesIO()
    with wave.open(into, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        samples = sound(seed)
        file.writeframes(struct.pack(f"<{len(samples)}h", *(int(one * 32767) for one in samples.clip(-1, 1))))
    return into.getvalue()


def embeddings(content: str) -> Any:
    """Return what an encoder of sounds could have made of one."""
    import torch

    return torch.randn(20, 256, generator=torch.Generator().manual_seed(int(content.split()[1])))


def _pixels(seed: int, channels: int = 3) -> Any:
    import numpy as np

    return np.random.default_rng(seed).integers(0, 255, (SIDE, SIDE, channels), dtype=np.uint8)


def _rgb(seed: int) -> Any:
    from PIL import Image

    return Image.fromarray(_pixels(seed))


def _rgba(shift: int) -> Callable[[int], Any]:
    def make(seed: int) -> Any:
        from PIL import Image

        made = _rgb(seed)
        made.putalpha(Image.fromarray(_pixels(1000 + shift)[:, :, 0]))
        return made

    return make


def _palette(shift: int) -> Callable[[int], Any]:
    """Pictures of equal indices and other colours."""

    def make(seed: int) -> Any:
        from PIL import Image

        made = Image.fromarray(_pixels(seed)[:, :, 0], "P")
        made.putpalette(_pixels(2000 + shift).tobytes()[:768])
        return made

    return make


def _as_mode(mode: str) -> Callable[[int], Any]:
    return lambda seed: _rgb(seed).convert(mode)


def _identified(seed: int) -> Any:
    """Pictures which vLLM takes for one, because their metadata have the same identifier."""
    from PIL import Image

    made = _rgb(seed)
    made.getexif()[Image.ExifTags.Base.ImageID] = uuid.UUID(int=31)
    return made


def _deep(seed: int) -> Any:
    import numpy as np
    from PIL import Image

    return Image.fromarray(_pixels(seed)[:, :, 0].astype(np.uint16) * 257)


def _animation(shift: int) -> Callable[[int], dict[str, Any]]:
    """Further frames behind the first one."""
    return lambda seed: {"save_all": True, "append_images": [_rgb(3000 + shift + seed)], "duration": 100, "loop": 0}


def _turned(number: int) -> Callable[[int], dict[str, Any]]:
    def arguments(seed: int) -> dict[str, Any]:
        from PIL import Image

        exif = Image.Exif()
        exif[DIRECTION_TAG] = DIRECTIONS[number]
        return {"exif": exif}

    return arguments


_PICTURES: dict[str, Callable[[int], Any]] = {
    "rgb": _rgb,
    **dict.fromkeys(("bmp", "tiff", "webp", "jpeg", "turned", "turned2", "gif", "gif2", "moving", "moving2"), _rgb),
    "rgba": _rgba(1),
    "rgba2": _rgba(2),
    "palette": _palette(1),
    "palette2": _palette(2),
    "gray": _as_mode("L"),
    "gray_alpha": _as_mode("LA"),
    "bits": _as_mode("1"),
    "cmyk": _as_mode("CMYK"),
    "deep": _deep,
    "identified": _identified,
}
_FILES: dict[str, Any] = {
    "bmp": ("BMP", {}),
    "tiff": ("TIFF", {}),
    "webp": ("WEBP", {"lossless": True}),
    "jpeg": ("JPEG", {}),
    "cmyk": ("JPEG", {}),
    "turned": ("PNG", _turned(1)),
    "turned2": ("PNG", _turned(2)),
    "gif": ("GIF", _animation(1)),
    "gif2": ("GIF", _animation(2)),
    "moving": ("WEBP", lambda seed: _animation(1)(seed) | {"lossless": True}),
    "moving2": ("WEBP", lambda seed: _animation(2)(seed) | {"lossless": True}),
}
FORMS = tuple(_PICTURES)[:-1]  # the last one exists in memory only
