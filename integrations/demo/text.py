"""Byte-level text that every Python installation has: the reference topics behind ``help()``."""

from __future__ import annotations

import pydoc_data.topics

import torch
from torch import Tensor

__all__ = ["VOCABULARY", "TextBlocks"]

VOCABULARY = 256


class TextBlocks(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Consecutive blocks of ``length`` bytes; inputs and labels are the same, the model shifts them."""

    def __init__(self, length: int) -> None:
        topics = pydoc_data.topics.topics
        text = "\n".join(topics[name] for name in sorted(topics)).encode("utf-8")
        blocks = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // length * length]
        self._blocks = blocks.view(-1, length).to(torch.int64)

    def __len__(self) -> int:
        return self._blocks.shape[0]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._blocks[index], "labels": self._blocks[index].clone()}
