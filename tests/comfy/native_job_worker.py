"""nodes/host/native/start.py with tiny encoders in the place of what files give, in ComfyUI's Python.

native_job_worker.py COMFYUI BASE train job.toml      a command of `devicebridge`
native_job_worker.py COMFYUI BASE save NAME FILE      writes a tiny checkpoint of tiny_checkpoints.FAMILIES
"""

import runpy
import sys
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
START = runpy.run_path(str(ROOT / "nodes" / "host" / "native" / "start.py"))


def main() -> int:
    folder, base, *command = sys.argv[1:]
    sys.argv = sys.argv[:1]
    START["prepare"](folder, base)
    runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()
    if command[0] == "save":
        from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES, save_checkpoint

        save_checkpoint(FAMILIES[command[1]], Path(command[2]))
        return 0
    import comfy.sd
    from devicebridge.cli.main import main as run
    from devicebridge.nodes.host.native import files
    from devicebridge.tests.comfy.stock_encoders import make_clip, make_vae

    with (
        mock.patch.object(comfy.sd, "load_clip", lambda paths, **given: make_clip("flux2")),
        mock.patch.object(files, "load_vae", lambda path: make_vae("flux2_native")),
    ):
        return run(command)


if __name__ == "__main__":
    sys.exit(main())
