"""What our classes inside vLLM's processes need to know, carried as vLLM's additional_config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`scratch` holds board, vectors and captures; `parent_pid` is the process to die with."""

    scratch: str
    parent_pid: int
    in_process: bool
    mode: str

    @property
    def board_path(self) -> Path:
        """The status board's file."""
        return Path(self.scratch) / "board"

    @property
    def vectors_path(self) -> Path:
        """The folder of stored vectors."""
        return Path(self.scratch) / "vectors"

    @property
    def captures_path(self) -> Path:
        """The folder of capture regions."""
        return Path(self.scratch) / "captures"

    def compute_hash(self) -> str:
        """Name what changes compiled code: that its layers steer, not where or for whom."""
        return f"tiller-layer-op-2-{self.mode}"


def engine_settings(config: VllmConfig) -> EngineSettings:
    """Read the settings that `VllmEngine` put into the configuration."""
    settings = config.additional_config
    assert isinstance(settings, EngineSettings)
    return settings
