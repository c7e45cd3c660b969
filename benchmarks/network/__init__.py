"""Hosts as network namespaces of this machine, with a limit on what each of them sends."""
