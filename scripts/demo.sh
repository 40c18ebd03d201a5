#!/usr/bin/env bash
# The main job on real input: caches captions and latents of real photographs, trains a LoRA of a small FLUX.2 (over all
# GPUs there are, or the CPU), and shows the loss and pictures before and after. Sets up everything it needs; results go
# to demo_run/.
#
#   bash scripts/demo.sh            start anew
#   bash scripts/demo.sh --resume   continue a demo that was interrupted
. "$(dirname "$0")/environment.sh"
install_pack demo

# A model this small gains little from threads, and loses much where something else is running.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
RUN="$ROOT/demo_run"
if [ "${1:-}" != "--resume" ]; then
    rm -rf "$RUN"
fi
mkdir -p "$RUN"
echo "making images and a small model; the model takes a minute or more"
[ -e "$RUN/data/.complete" ] || { python scripts/demo_data.py "$RUN/data" && touch "$RUN/data/.complete"; }
[ -e "$RUN/model/.complete" ] || { python scripts/demo_model.py "$RUN/model" && touch "$RUN/model/.complete"; }
cp scripts/demo.toml "$RUN/job.toml"
devicebridge train "$RUN/job.toml" ${1:+"$1"}
python scripts/demo_report.py "$RUN"
