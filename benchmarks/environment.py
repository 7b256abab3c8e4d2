"""What every benchmark prints first."""

import os
import platform

import torch


def describe(*more: str) -> str:
    return ", ".join(
        [f"torch {torch.__version__}", f"Python {platform.python_version()}", f"{os.cpu_count()} cores", *more]
    )
