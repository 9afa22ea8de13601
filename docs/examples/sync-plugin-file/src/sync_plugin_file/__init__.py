"""The scheme `file`: every version of the weights is a safetensors file in a directory."""

from sync_plugin_file.scheme import FileOptions, FileScheme

__version__ = "0.1.0"

__all__ = ["FileOptions", "FileScheme"]
