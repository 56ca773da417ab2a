"""EngineConfig: the settings of an engine, validated before anything heavy is loaded."""

from __future__ import annotations

from pydantic import Field

from kvbm.config.engine import EmbeddedArguments, EmbeddedEngine


class EngineConfig(EmbeddedArguments):
    """The flags of a profile, and the model: `synthetic:NAME` or a local Hugging Face directory."""

    model: str = Field(min_length=1, description=EmbeddedEngine.model_fields["model"].description)

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model
