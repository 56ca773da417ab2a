"""Reports CUDA support of torch: versions of torch, its CUDA and the driver, and the number of usable devices."""

import json
import re
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/version")


def main() -> None:
    answer: dict[str, object] = {"torch": None, "cuda": None, "driver": _driver(), "devices": 0, "error": None}
    try:
        import torch
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        answer["torch"], answer["cuda"] = torch.__version__, torch.version.cuda
        answer["devices"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
    print(json.dumps(answer), flush=True)


def _driver() -> str | None:
    try:
        found = re.search(r"Kernel Module\D*([\d.]+)", DRIVER.read_text())
    except OSError:
        return None
    return found[1] if found else None


if __name__ == "__main__":
    main()
