"""What batches of captions cost and change on a CPU: one caption at a time against four together.

    python benchmarks/caption_batches.py [--out results.json]

One layer of Qwen3-4B's width with random weights, in bfloat16 and float32, on all threads torch takes: 512 tokens, as
encoders that pad read every caption, and 40, as Qwen-Image's caption of a sentence has where nothing is padded. Four
captions of equal length, so that a batch needs no padding. Turns alternate; the best of each is taken, the ratio comes
first. `equal` tells whether the batch gives the bits of single captions, `snr_db` how far they are apart.
"""

from __future__ import annotations

import argparse
import runpy
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()

import torch  # noqa: E402
from devicebridge.tests.noise import decibels  # noqa: E402
from provenance import describe_run, print_or_write  # noqa: E402

NUM_CAPTIONS = 4
SIZES = {
    "vocab_size": 1000,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = [measure(dtype, tokens, options.turns) for dtype in (torch.bfloat16, torch.float32) for tokens in (512, 40)]
    report = {"what": __doc__.splitlines()[0], **describe_run(), "threads": torch.get_num_threads(), "rows": rows}
    print_or_write(report, options.out)


@torch.inference_mode()
def measure(dtype: torch.dtype, tokens: int, turns: int) -> dict[str, Any]:
    """Seconds per caption both ways."""
    from transformers import Qwen3Config, Qwen3Model

    model = Qwen3Model(Qwen3Config(**SIZES)).to(dtype).eval()
    ids = torch.randint(0, SIZES["vocab_size"], (NUM_CAPTIONS, tokens))
    single_s, together_s = [], []
    for _ in range(turns + 1):
        start_s = time.perf_counter()
        single = torch.cat([model(input_ids=row[None]).last_hidden_state for row in ids])
        middle_s = time.perf_counter()
        together = model(input_ids=ids).last_hidden_state
        single_s.append(middle_s - start_s)
        together_s.append(time.perf_counter() - middle_s)
    best_single_s, best_together_s = min(single_s[1:]), min(together_s[1:])  # the first turn warms up
    equal = torch.equal(single, together)
    return {
        "ratio": round(best_single_s / best_together_s, 2),
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": tokens,
        "single_s": round(best_single_s / NUM_CAPTIONS, 4),
        "together_s": round(best_together_s / NUM_CAPTIONS, 4),
        "equal": equal,
        "snr_db": None if equal else round(decibels(single, together), 1),
    }


if __name__ == "__main__":
    main()
