"""dloop_train: loop-aware training of speculative-decoding drafters."""

__version__ = "0.1.0"


def __getattr__(name: str):
    # Loaded on use: `import dloop_train` should not import torch.
    if name in ("load", "LoopedModel"):
        from dloop_train import serving

        return getattr(serving, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
