# The extension is typed by its docstrings; mypy takes every name of it as Any.
from typing import Any

def __getattr__(name: str) -> Any: ...
