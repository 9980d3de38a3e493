"""The version of hookscope. The build reads it here, and so does the program: importlib.metadata takes 25 ms."""

__version__ = "0.1.0"
