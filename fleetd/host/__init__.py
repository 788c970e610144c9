"""The host side: agent, supervisor and shim. Standard library and psutil; Python 3.10."""
