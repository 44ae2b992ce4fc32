"""A stand-in for torch and for modules that need it, backed by numpy.

The libraries whose files are compared import torch, which weighs gigabytes, but what reads and writes files needs
little of it. `install()` makes modules of these names importable: types are numpy's, `frombuffer` gives numpy arrays,
and everything else is an object that accepts any call.
"""

import abc
import importlib
import importlib.machinery
import sys
import types

import numpy

ABSENT = {"torch", "torchvision", "transformers", "boto3", "botocore", "s3transfer", "azure", "google", "oci",
          "fsspec", "lightning_sdk", "lightning_cloud", "paramiko", "databricks", "alipcs_py", "megatron"}
PARTS = {"utils", "data", "distributed", "nn"}
TYPES = {"uint8", "int8", "int16", "int32", "int64", "uint16", "float16", "float32", "float64"}


class Array(numpy.ndarray):
    def clone(self):
        return self.copy()

    def numpy(self, force=False):
        return numpy.asarray(self)


class Type:
    def __init__(self, name):
        self.name, self.numpy = name, numpy.dtype(name)
        self.itemsize = self.numpy.itemsize


class Anything:
    """Accepts every call, and is the decorated function where it is used as a decorator."""

    def __init__(self, name):
        self.name = name

    def __call__(self, *values, **named):
        if len(values) == 1 and callable(values[0]) and not named:
            return values[0]
        return None if self.name == "get_worker_info" else 0

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name)


class Class(abc.ABCMeta):
    """Classes whose methods accept every call."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name)


class Module(types.ModuleType):
    __path__ = []
    __version__ = "2.3.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__name__ == "torch" and name in TYPES:
            value = Type(name)
        elif self.__name__ == "torch" and name == "Tensor":
            value = Array
        elif name in PARTS:
            value = importlib.import_module(f"{self.__name__}.{name}")
        elif name[0].islower() and name not in ("device",):
            value = Anything(name)
        else:
            value = Class(name, (), {"__class_getitem__": classmethod(lambda cls, _: cls)})
        setattr(self, name, value)
        return value


def frombuffer(buffer, dtype, count=-1, offset=0):
    return numpy.frombuffer(buffer, dtype=dtype.numpy, count=count, offset=offset).view(Array)


class Finder:
    def __init__(self, absent):
        self.absent = absent

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.absent:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        pass


def install(real=frozenset()):
    """Makes the absent modules importable, but for those that are `real`."""
    sys.meta_path.insert(0, Finder(ABSENT - real))
    import torch
    if "torch" in real:
        if not hasattr(torch, "uint16"):
            # LitData lists it in a table; torch has it from 2.3 on.
            torch.uint16 = torch.int16
        return
    torch.frombuffer = frombuffer
    # The names that torch has for the same types.
    torch.int, torch.long, torch.short = torch.int32, torch.int64, torch.int16
    torch.float, torch.double, torch.half = torch.float32, torch.float64, torch.float16
