"""A simulated CUDA device: CPU tensors that report cuda:0, and errors where devices are mixed.

A tensor's simulated device is recorded at its storage. Inside `simulated()` a device argument of cuda records cuda:0
for the new storage, and results get the device of their inputs. Every operation checks that its inputs are on one
device, by CUDA's rules. Only one thread is supported, and compiled code is not simulated.
"""

import contextlib
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HERE, THERE = torch.device("cpu"), torch.device("cuda", 0)
REAL = {name: getattr(Tensor, name) for name in ("device", "to", "numpy")} | {"tensor": torch.tensor}
aten = torch.ops.aten
INDEXED = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)
JOINING = (aten.cat.default, aten.stack.default)
ANYWHERE = (aten.copy_.default, aten._to_copy.default, aten.set_.source_Tensor, aten.set_.source_Storage)


class WrongDevice(RuntimeError):
    """The error that a GPU would raise."""


def storage_of(tensor: Tensor):
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # inside vmap
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()


def place_of(tensor: Tensor) -> torch.device | None:
    """Simulated device of a tensor; None for one made inside an operation, which may be used on any device."""
    return REAL["device"].__get__(tensor) if tensor.is_meta else getattr(storage_of(tensor), "place", HERE)


def put(tensor: Tensor, place: torch.device | None) -> Tensor:
    storage_of(tensor).place = place
    return tensor


def moved(tensor: Tensor, *args, **keywords) -> Tensor:
    """Replacement for Tensor.to."""
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    copy = keywords.pop("copy", False)
    device, dtype, _, form = torch._C._nn._parse_to(*args, **keywords)
    place = place_of(tensor) if device is None else THERE if device.type == "cuda" else device
    form = {} if form is None else {"memory_format": form}
    if place == place_of(tensor) or place.type == "meta":
        return REAL["to"](
            tensor,
            **({} if place.type != "meta" else {"device": place}),
            dtype=dtype or tensor.dtype,
            copy=copy,
            **form,
        )
    return put(REAL["to"](tensor, dtype=dtype or tensor.dtype, copy=True, **form), place)


def tensor(data, *, device=None, **keywords) -> Tensor:
    """Replacement for torch.tensor."""
    made = REAL["tensor"](data, **keywords)
    return made if device is None else moved(made, device)


def as_array(tensor: Tensor, **keywords):
    if place_of(tensor) == THERE:
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )
    return REAL["numpy"](tensor, **keywords)


def common_place(function, tensors: list[Tensor], args) -> torch.device | None:
    """Device of the inputs; WrongDevice if they are on different ones.

    As in CUDA, a CPU scalar may be combined with GPU tensors, and a CPU index tensor may index them.
    """
    if function in INDEXED:
        indices = [each for each in args[1] if each is not None and place_of(each) == HERE]
        tensors = [each for each in tensors if not any(each is index for index in indices)]
    if function in ANYWHERE and place_of(tensors[0]) is not None:
        tensors = tensors[:1]
    found = [(place_of(each), each.dim()) for each in tensors]
    places = {place for place, dim in found if place is not None and (dim or place != HERE or function in JOINING)}
    if len(places) > 1:
        raise WrongDevice(
            f"{function} got tensors on different devices: "
            + ", ".join(f"{tuple(each.shape)} on {place_of(each)}" for each in tensors)
        )
    return places.pop() if places else HERE if any(place == HERE for place, _ in found) else None


class Operations(TorchDispatchMode):
    """Checks every operation, including those of a backward pass and inside composite operations."""

    def __torch_dispatch__(self, function, types, args=(), keywords=None):
        keywords = dict(keywords or {})
        tensors, device = (
            [each for each in tree_leaves((args, keywords)) if isinstance(each, Tensor)],
            keywords.get("device"),
        )
        if device is not None and device.type == "cuda":
            place, keywords["device"] = THERE, HERE
        elif function is aten.lift_fresh.default:  # torch.tensor, torch.frombuffer
            place = HERE
        elif not tensors:  # calls from Python pass pin_memory, those inside a composite operation do not
            place = HERE if "pin_memory" in keywords else None
        else:
            place = common_place(function, tensors, args)
        if place == THERE and isinstance(keywords.get("generator"), torch.Generator):
            raise WrongDevice(f"{function}: a CUDA generator was expected, got one of the CPU")
        result = function(*args, **keywords)
        for made in [result] if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(made, Tensor) and not made.is_meta and getattr(storage_of(made), "place", None) is None:
                put(made, place)
        return result


@contextlib.contextmanager
def simulated():
    """Simulate a machine with one GPU."""
    patches = {
        "device": property(lambda self: place_of(self) or HERE),
        "is_cuda": property(lambda self: place_of(self) == THERE),
        "to": moved,
        "numpy": as_array,
        "cpu": lambda self, **form: moved(self, "cpu", **form),
        "cuda": lambda self, device=None, **form: moved(self, "cuda", **form),
    }
    if torch.cuda.is_available():
        torch.cuda.init()  # C++ calls _lazy_init only once, and would call the patched one below
    with contextlib.ExitStack() as stack:
        for name, patch in patches.items():
            stack.enter_context(mock.patch.object(Tensor, name, patch, create=True))
        stack.enter_context(mock.patch.multiple(torch.cuda, _lazy_init=lambda: None, is_available=lambda: True))
        stack.enter_context(mock.patch.object(torch.accelerator, "synchronize", lambda device=None: None))
        stack.enter_context(mock.patch.object(torch, "tensor", tensor))
        stack.enter_context(Operations())
        yield
