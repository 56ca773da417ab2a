"""An extension of vLLM's worker with a method of its own that changes the weights, as trainers have one."""

from __future__ import annotations

from typing import Any


class OwnUpdate:
    reload_weights: Any

    def take_weights(self, directory: str) -> None:
        self.reload_weights(weights_path=directory)
