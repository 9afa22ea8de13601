"""The schemes, one in a file, and receivers that ask a function: `getter`."""
