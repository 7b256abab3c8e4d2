"""The package's dependencies, found when it is built: LibTorch's C++ interface holds within a minor version, so a wheel needs the one it was
built with. Without PyTorch (an sdist may be made so) all that the sources support.
"""

from importlib import metadata


def dynamic_metadata(field: str, settings: dict[str, object] | None = None) -> list[str]:
    """What scikit-build-core asks for."""
    try:
        major, minor, *_ = metadata.version("torch").split(".")
    except metadata.PackageNotFoundError:
        return ["torch>=2.11,<2.16", "numpy"]
    return [f"torch=={major}.{minor}.*", "numpy"]
