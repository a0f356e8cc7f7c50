"""Drafter checkpoints: recognise a public layout, load strictly, write, and verify what was written."""

import hashlib
import importlib
import json
import pickle
import pkgutil
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import dloop_train.checkpoints as layouts
from dloop_train.checkpoints.parts import renamed
from dloop_train.config import DATA, check
from dloop_train.drafters.base import Drafter, DrafterConfig, DrafterShape, frequent_ids, with_vocabulary
from dloop_train.ranks import say
from dloop_train.runs import write_atomic
from dloop_train.targets.head import TargetHead
from dloop_train.types import TargetSpec

SECTION = "dloop"
"""The section of config.json with this package's own settings."""


def layout_modules() -> dict[str, ModuleType]:
    """Every file of this folder that describes a public layout, by name. Adding one registers it."""
    names = [module.name for module in pkgutil.iter_modules(layouts.__path__)]
    modules = {name: importlib.import_module(f"{layouts.__name__}.{name}") for name in names if name != "files"}
    return {name: module for name, module in modules.items() if hasattr(module, "matches")}


def layout_of(config: dict, where: Path | str) -> ModuleType:
    found = [module for module in layout_modules().values() if module.matches(config)]
    known = "; ".join(f"{name} ({module.WHAT})" for name, module in layout_modules().items())
    check(
        len(found) == 1,
        f"{where}: config.json with architectures {config.get('architectures')} is of {len(found)} known layouts. "
        f"Known: {known}",
    )
    return found[0]


def read_config(folder: Path) -> dict:
    path = folder / "config.json"
    check(
        path.is_file(), f"{folder} has no config.json; a drafter's folder with config.json and safetensors was expected"
    )
    return read_json(path)


def read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) cannot be read as JSON: {error}; it may be truncated, fetch it again"
        ) from error
    check(isinstance(value, dict), f"{path} holds a {type(value).__name__}, an object of keys and values was expected")
    return value


def read_tensors(folder: Path, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a checkpoint whose names start with `prefix`.

    Reads one safetensors file, several with an index, or a pytorch_model.bin of plain tensors. Other tensors of
    safetensors files are not read, and with an index, files without a matching tensor are not opened.
    """
    return {name: tensor for file in weight_files(folder, prefix) for name, tensor in load_safely(file, prefix).items()}


def weight_files(folder: Path, prefix: str = "") -> list[Path]:
    """The files that hold tensors whose names start with `prefix`. Raises ValueError if one is missing."""
    index, single, pickled = (
        folder / "model.safetensors.index.json",
        folder / "model.safetensors",
        folder / "pytorch_model.bin",
    )
    if not index.is_file():
        check(single.is_file() or pickled.is_file(), f"{folder} has no model.safetensors, index or pytorch_model.bin")
        return [single if single.is_file() else pickled]
    places = read_json(index).get("weight_map")
    check(isinstance(places, dict), f"{index} has no weight_map; fetch it again")
    files = sorted({file for name, file in places.items() if name.startswith(prefix)})
    missing = [name for name in files if not (folder / name).is_file()]
    check(not missing, f"{index} names {missing}, which do not exist; the download is incomplete")
    return [folder / name for name in files]


def load_safely(path: Path, prefix: str = "") -> dict[str, Tensor]:
    if path.suffix == ".bin":
        return {name: tensor for name, tensor in load_pickled(path).items() if name.startswith(prefix)}
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys() if name.startswith(prefix)}
    except SafetensorError as error:
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) cannot be read as safetensors: {error}; "
            "it may be truncated, fetch it again"
        ) from error


def load_pickled(path: Path) -> dict[str, Tensor]:
    """Load a torch.save file of named tensors. Code in the pickle is never executed."""
    check(
        zipfile.is_zipfile(path),
        f"{path} ({path.stat().st_size} bytes) is not a file written by torch.save; "
        "it may be truncated, fetch it again",
    )
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise ValueError(
            f"{path} cannot be read as plain tensors: it holds code, which is not run, or is damaged; "
            "fetch it again, or take safetensors"
        ) from error
    check(
        isinstance(tensors, dict) and all(isinstance(tensor, Tensor) for tensor in tensors.values()),
        f"{path} holds more than named tensors; save its state dict alone, as safetensors",
    )
    return tensors


def weights_digest(folder: Path) -> str:
    """A hash of a checkpoint's config and weights."""
    digest, config = hashlib.sha256(), read_config(folder)
    for path in [folder / "config.json", *weight_files(folder, getattr(layout_of(config, folder), "PREFIX", ""))]:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def read_shape(folder: Path, config: dict | None = None) -> DrafterShape:
    config = config or read_config(folder)
    return layout_of(config, folder).read_shape(config)


def load_drafter(
    folder: Path,
    settings: DrafterConfig,
    head: TargetHead | None,
    *,
    dtype: torch.dtype = torch.float32,
    target: TargetSpec | None = None,
    taps: Sequence[int] = (),
) -> Drafter:
    """Load the drafter of a folder and account for every tensor.

    `head` is the target's. Copies of the target's tensors in the checkpoint must be equal to it in bfloat16. With
    `target`, all facts in config.json about the drafter's target must be true of this one; `taps` are the run's tapped
    layers, if it has any. Raises ValueError for every mismatch.
    """
    config = read_config(folder)
    layout = layout_of(config, folder)
    require_family(layout, settings, folder)
    shape = layout.read_shape(config)
    require_alignment(shape, settings, folder)
    if target is not None:
        shape = shape.on(target, taps)
        require_fit(shape, target, taps or shape.taps, folder)
    shape = looped_as(shape, settings, config, folder)
    own = own_tensors(folder, layout)
    copies = {role: own.pop(name) for role, name in layout.COPIES.items() if name in own}
    kept = own["d2t"] + torch.arange(len(own["d2t"])) if "d2t" in own else None
    drafter = settings.build(shape, merge_heads(copies, head, shape.head_scales, folder, dtype, kept))
    fill(drafter, own, folder)
    return drafter.to(dtype)


def require_family(layout: ModuleType, settings: DrafterConfig, folder: Path) -> None:
    check(
        settings.family == layout.FAMILY,
        f"{folder} is of family {layout.FAMILY} ({layout.__name__.rpartition('.')[2]}), "
        f"the run wants {settings.family}; "
        f"choose +drafter={layout.FAMILY} or another init",
    )


def own_tensors(folder: Path, layout: ModuleType) -> dict[str, Tensor]:
    """The tensors of a folder, under the parameter names of this package's modules."""
    return layout.from_public(
        renamed(
            read_tensors(folder, getattr(layout, "PREFIX", "")),
            lambda name: name.removeprefix("_orig_mod.").removeprefix("model."),
        )
    )


def require_alignment(shape: DrafterShape, settings: DrafterConfig, folder: Path) -> None:
    wanted, found = settings.alignment, shape.alignment
    check(
        wanted in ("", found),
        f"{folder} is {found}, but drafter.alignment is {wanted}; "
        f"the wrong one only costs acceptance, so set it to {found}",
    )


def looped_as(shape: DrafterShape, settings: DrafterConfig, config: dict, folder: Path) -> DrafterShape:
    """The shape with the loop settings of the run.

    Raises ValueError if the checkpoint was trained loop-aware with another form of own states (`state`, `slot`).
    """
    looped, section = settings.with_loop_settings(shape), config.get(SECTION) or {}
    for name in ("state", "slot") if section.get("trained_depth_exposure") else ():
        found, wanted = section.get(name), getattr(looped, name)
        check(found in (None, wanted), f"{folder} was trained with {name}={found}, but drafter.{name} is {wanted}")
    return looped


def merge_heads(
    copies: dict[str, Tensor],
    head: TargetHead | None,
    scales: tuple[float, float | None] | None,
    folder: Path,
    dtype: torch.dtype,
    kept: Tensor | None = None,
) -> TargetHead | None:
    """The frozen head that the drafter uses: the target's, or one made of the copies in the checkpoint.

    The copies are used if `head` is None; without an embedding among them the result is None. With a `head` the copies
    are only compared, in bfloat16, since checkpoints are written in it. `kept` are the target ids of a reduced draft
    vocabulary, [V_draft]: a copy of the lm_head then has only these rows.
    """
    faulty = [role for role, copy in copies.items() if not copy.isfinite().all()]
    check(not faulty, f"{folder}: its copies of the target's {faulty} have NaN or infinite values; fetch it again")
    if head is None:
        if "embed" not in copies:
            return None
        scale, softcap = scales or (1.0, None)
        embed = copies["embed"].to(dtype)
        return TargetHead(
            embed, copies["lm_head"].to(dtype) if "lm_head" in copies else embed, embed_scale=scale, softcap=softcap
        )
    theirs = (head.embed_scale, head.softcap)
    check(
        scales in (None, theirs),
        f"{folder} was made for a target with embedding scale and logit softcap {scales}, "
        f"this one has {theirs}: another target",
    )
    for role, copy in copies.items():
        theirs = getattr(head, f"{role}_weight")
        theirs = theirs[kept.to(theirs.device)] if role == "lm_head" and kept is not None else theirs
        check(
            copy.shape == theirs.shape,
            f"{folder}: its copy of the target's {role} is {tuple(copy.shape)}, "
            f"the target's is {tuple(theirs.shape)}: another target",
        )
        check(
            torch.equal(copy.to(theirs.device, torch.bfloat16), theirs.to(torch.bfloat16)),
            f"{folder}: its copy of the target's {role} has other values: it was made for another target",
        )
    return head


def fill(drafter: Drafter, tensors: dict[str, Tensor], where: Path) -> None:
    """Load all tensors. Raises ValueError that lists unknown, missing, misshapen, quantised and non-finite ones."""
    wanted = drafter.state_dict()
    faults = [f"unknown {name}" for name in tensors.keys() - wanted.keys()] + [
        f"missing {name}" for name in wanted.keys() - tensors.keys()
    ]
    for name in sorted(tensors.keys() & wanted.keys()):
        if tensors[name].shape != wanted[name].shape:
            faults.append(f"{name} is {tuple(tensors[name].shape)}, expected {tuple(wanted[name].shape)}")
        elif tensors[name].is_floating_point() != wanted[name].is_floating_point() or tensors[name].itemsize < min(
            2, wanted[name].itemsize
        ):
            faults.append(
                f"{name} is {tensors[name].dtype}, expected plain numbers like {wanted[name].dtype}: "
                "quantised files are not supported"
            )
        elif tensors[name].is_floating_point() and not tensors[name].isfinite().all():
            faults.append(f"{name} has NaN or infinite values")
    check(not faults, f"{where} does not fit a {type(drafter).__name__}:\n  " + "\n  ".join(sorted(faults)))
    drafter.load_state_dict(tensors)


def save_drafter(
    drafter: Drafter,
    folder: Path,
    *,
    section: dict,
    target: TargetSpec | None,
    dtype: torch.dtype = torch.bfloat16,
    copies: bool = True,
) -> None:
    """Write config.json and model.safetensors in the drafter's public layout.

    `section` becomes the dloop section of config.json. With `copies`, the layout's copies of the target's embedding and
    lm_head are written too.
    """
    layout = layout_modules()[drafter.shape.format]
    own = {
        name: tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()
        for name, tensor in drafter.state_dict().items()
    }
    if copies and drafter.head is not None:
        own |= {
            name: getattr(drafter.draft_head, f"{role}_weight").detach().to(dtype)
            for role, name in layout.COPIES.items()
        }
    tensors = {name: tensor.contiguous().clone() for name, tensor in layout.to_public(own).items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = layout.write_config(drafter.shape) | {"dtype": str(dtype).removeprefix("torch."), SECTION: section}
    if target is not None:
        config |= {
            key: target.text_config[key]
            for key in ("bos_token_id", "eos_token_id", "pad_token_id")
            if target.text_config.get(key) is not None
        }
    write_atomic(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")


def check_export(
    folder: Path, drafter: Drafter, settings: DrafterConfig, *, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Re-read an export: every tensor finite and equal to the drafter's, none unknown, none missing."""
    again = load_drafter(folder, settings, drafter.head, dtype=dtype)
    for name, tensor in drafter.state_dict().items():
        check(
            torch.equal(again.state_dict()[name], tensor.to(again.state_dict()[name].dtype)),
            f"{folder}: {name} differs after being read back",
        )


def locate_drafter(init: str, revision: str = "main") -> Path:
    """The local folder for `starter:<name>`, the path of a folder, or a hub id, which is downloaded."""
    if init.startswith("starter:"):
        folder = DATA / "starters" / init.removeprefix("starter:")
        known = sorted(path.parent.name for path in (DATA / "starters").glob("*/config.json"))
        check((folder / "config.json").is_file(), f"there is no {init}; this package has {known}")
        return folder
    if Path(init).expanduser().is_dir():
        return Path(init).expanduser()
    from dloop_train.targets.sources import download

    return download(init, revision)


def create_drafter(
    settings: DrafterConfig,
    target: TargetSpec,
    head: TargetHead,
    taps: list[int],
    *,
    dtype: torch.dtype = torch.float32,
) -> Drafter:
    """The drafter of a run: from released weights, checked against the target, or from scratch."""
    if settings.init == "scratch":
        return settings.build(settings.shape(target, taps), head).to(dtype)
    folder = locate_drafter(settings.init, settings.revision)
    drafter, own = load_drafter(folder, settings, head, dtype=dtype, target=target, taps=taps), read_shape(folder)
    if settings.draft_vocab_size and not own.reduced:
        # Placeholder ids of the right number: token counts are known only when there are responses (start_vocabulary).
        drafter = with_vocabulary(
            drafter,
            settings,
            frequent_ids(Counter(), replace(own, draft_vocab_size=settings.draft_vocab_size), target.stop_ids),
        )
    trained, looped = (getattr(shape, "width", None) for shape in (own, drafter.shape))
    if trained != looped:
        say(f"{folder}: a block of {trained} slots, looped with drafter.width={looped}")
    return drafter


def fill_backbone(drafter: Drafter, folder: Path) -> None:
    """Copy layers, fc and norms from another block drafter's checkpoint. The token heads of the two may differ."""
    require_backbone(drafter.shape, folder)
    tensors = own_tensors(folder, layout_of(read_config(folder), folder))
    backbone = {name for name in drafter.state_dict() if name.split(".")[0] in ("layers", "norm", "fc", "hidden_norm")}
    heads = {name: tensor for name, tensor in drafter.state_dict().items() if name not in backbone}
    fill(drafter, heads | {name: tensor for name, tensor in tensors.items() if name in backbone}, folder)


def require_backbone(shape: DrafterShape, folder: Path) -> None:
    """Raise ValueError that lists all fields in which a checkpoint's backbone differs from a block drafter's."""
    theirs = read_shape(folder)
    check(
        len(theirs.layers) == len(shape.layers),
        f"{folder} cannot be this drafter's backbone: it has {len(theirs.layers)} layers, "
        f"the drafter {len(shape.layers)}; "
        f"set drafter.layers={len(theirs.layers)}",
    )
    differ = [
        f"{name}: it has {getattr(theirs, name, None)}, the drafter has {getattr(shape, name)}"
        for name in ("layers", "taps", "alignment", "mask_token_id")
        if getattr(theirs, name, None) != getattr(shape, name)
    ]
    check(not differ, f"{folder} cannot be this drafter's backbone:\n  " + "\n  ".join(differ))


def require_fit(shape: DrafterShape, target: TargetSpec, taps: Sequence[int], folder: Path) -> None:
    """Raise ValueError that lists all fields in which a checkpoint does not match the target."""
    differ = [
        f"{name}: the checkpoint has {getattr(shape, name)}, target {target.name} has {value}"
        for name, value in shape.expected_fields(target, taps).items()
        if getattr(shape, name) != value
    ]
    check(not differ, f"{folder} was made for another target:\n  " + "\n  ".join(differ))
