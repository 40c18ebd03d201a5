"""ComfyUI-DeviceBridge: run and train diffusion transformers over several modest GPUs. ComfyUI loads this folder under
whatever name it has; `pip install -e .` gives it the import name `devicebridge`. The body is guarded because a test
runner may import this file loosely, without a package, where relative imports fail."""

from __future__ import annotations

from typing import Any

if __package__:
    WEB_DIRECTORY = "./web"

    async def comfy_entrypoint() -> Any:
        """Called by ComfyUI when it loads the pack; only now are the nodes imported.
        Raises: RuntimeError if ComfyUI has changed what every node is made of."""
        from . import compat

        compat.check("schemas")
        from .nodes import add_page, make_extension

        add_page()
        return make_extension()
