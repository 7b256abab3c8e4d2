"""Says what CMake needs to know of the installed PyTorch, as a list: version, C++ ABI flag, folder of libraries, folders of headers."""

from pathlib import Path

import torch

root = Path(torch.__file__).parent
include = root / "include"
api_include = include / "torch" / "csrc" / "api" / "include"
print(torch.__version__, int(torch.compiled_with_cxx11_abi()), root / "lib", include, api_include, sep=";")
