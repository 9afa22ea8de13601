"""The layers, by what they do to weights on the way; `sync_plugin_std` exports their classes."""
