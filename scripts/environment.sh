# Sourced by demo.sh and test.sh: an environment with the pack in it. Reuses an active virtual environment (VIRTUAL_ENV),
# else makes .venv in the checkout. torch is never replaced: only where it is missing it is installed, on a machine
# without a GPU in the version that is tested on CPUs, else in the newest for its GPU.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"

if [ -z "${VIRTUAL_ENV:-}" ]; then
    [ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
    # shellcheck disable=SC1091
    . .venv/bin/activate
fi
echo "environment: $VIRTUAL_ENV"

has_gpu() {
    [ -e /dev/nvidiactl ] || [ -e /dev/kfd ] || command -v nvidia-smi > /dev/null 2>&1
}

if ! python -c "import torch" > /dev/null 2>&1; then
    echo "installing torch: a large download"
    if has_gpu; then
        python -m pip install --quiet torch
    else
        python -m pip install --quiet "torch==2.13.0"
    fi
fi

install_pack() { # install_pack EXTRA: the pack, importable as devicebridge, with one of pyproject's extras
    local stamp="$VIRTUAL_ENV/.devicebridge-$1" here
    here="$(cd / && python -c "import devicebridge; print(devicebridge.__path__[0])" 2> /dev/null || true)"
    if [ "$here" != "$ROOT" ] || [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ requirements.txt -nt "$stamp" ]; then
        echo "installing the pack and what it needs"
        python -m pip install --quiet --editable ".[$1]"
        touch "$stamp"
    fi
}
export HF_HUB_OFFLINE=1 # nothing here may reach for a hub
