"""The caption that a sample is trained with, made of what its file says."""

from __future__ import annotations

from ..config.job import DataConfig, FolderConfig

_PLACE = "[trigger]"  # in caption files, as other trainers have it


def make_caption(text: str, config: DataConfig, folder: FolderConfig) -> str:
    """With the trigger word, as the dataset and the folder say; of regularisation images without it."""
    trigger = "" if folder.regularisation else config.trigger_word.strip()
    template = folder.caption_template or config.caption_template
    text = _tidy(text.replace(_PLACE, trigger)) if _PLACE in text else text
    if template:
        return _tidy(template.replace("{trigger}", trigger).replace("{caption}", text))
    if not trigger or trigger.lower() in text.lower():
        return text
    return _tidy(f"{trigger}, {text}")


def _tidy(text: str) -> str:
    """Without what is left of a list whose ends are empty."""
    return text.strip().strip(",").strip()
