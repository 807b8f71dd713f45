"""Reading other people's pickles without running them.

Checkpoints and dumps are other people's files.  An unpickler that follows them blindly runs what they say; this one knows a
short list of classes, makes an inert stand-in of any class it does not know (frameworks leave enums and configs of their own
in `common.pt`), and refuses, by file and name, whatever would call into the standard library.
"""

from __future__ import annotations

import pickle
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import torch
from bisect_hooks.errors import UsageError, first_line

ALLOWED: dict[str, frozenset[str]] = {
    "argparse": frozenset({"Namespace"}),
    "collections": frozenset({"OrderedDict", "defaultdict"}),
    "builtins": frozenset({"set", "frozenset", "slice", "complex", "bytearray", "dict", "list", "tuple", "int", "float", "str", "bool"}),
    "torch": frozenset({"Size", "device", "strided", "sparse_coo", "contiguous_format", "preserve_format", "channels_last"}),
    "torch._utils": frozenset({"_rebuild_tensor_v2", "_rebuild_parameter"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch.storage": frozenset({"TypedStorage", "UntypedStorage"}),
    "torch.distributed.checkpoint.metadata": frozenset({
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    }),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo", "_StoragePrefix"}),
    "torch.distributed.checkpoint.planner": frozenset({"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"}),
}  # fmt: skip


class Inert:
    """Stands in for a class that is not known: keeps what it was made of, does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.made_of = (args, kwargs)

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})

    def __repr__(self) -> str:
        made_of = self.__dict__.get("made_of", ((), {}))
        return f"<{type(self).__module__}.{type(self).__qualname__} {made_of[0] if made_of[0] else ''}>"


class SafeUnpickler(pickle.Unpickler):
    """An unpickler that refuses what is not listed.  `source` is the file that messages name."""

    source = "a pickle"

    def find_class(self, module: str, name: str) -> Any:
        # protocols 0 to 2 spell some names as Python 2 did: `__builtin__` is builtins
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        if name in ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and (isinstance(getattr(torch, name, None), torch.dtype) or name.endswith("Storage")):
            return super().find_class(module, name)
        top = module.split(".")[0]
        if top in sys.stdlib_module_names and (module, name) != ("signal", "Signals") and module != "pathlib":
            raise UsageError(
                f"{self.source} holds a pickle that would call {module}.{name}; refused, nothing in it was run",
                hint="a checkpoint has no use for that: do not load this file with anything else either",
            )
        if top == "torch":
            raise UsageError(f"{self.source} holds a pickle that names {module}.{name}, which no checkpoint needs; refused")
        return type(name, (Inert,), {"__module__": module})


def load_pickle(path: Path) -> Any:
    """The object in a plain pickle file.  Raises UsageError for one that can't be read or would call something."""
    try:
        with path.open("rb") as file:
            return _unpickler(str(path))(file).load()
    except UsageError:
        raise
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to spell
        raise UsageError(f"{path} can't be read as a pickle: {first_line(error)}") from error


def load_torch(source: Path | BinaryIO, name: str = "") -> Any:
    """The object in a torch.save file, by the same rules.  name: what messages call an open file"""
    name = name or str(source)
    unpickler = _unpickler(name)
    safe = ModuleType("safe")
    safe.__dict__.update(Unpickler=unpickler, load=lambda file, **_: unpickler(file).load(), UnpicklingError=pickle.UnpicklingError)
    try:
        return torch.load(source, map_location="cpu", weights_only=False, pickle_module=safe)
    except UsageError:
        raise
    except Exception as error:  # torch raises whatever its zip reader met
        raise UsageError(f"{name} can't be read as a torch file: {first_line(error)}") from error


def _unpickler(source: str) -> type[SafeUnpickler]:
    return type("SafeUnpicklerOf", (SafeUnpickler,), {"source": source})
