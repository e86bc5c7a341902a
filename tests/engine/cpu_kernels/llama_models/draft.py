"""The draft."""

from sglang.srt.models.llama_eagle3 import EntryClass

__all__ = ["EntryClass"]
