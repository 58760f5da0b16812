"""The command line, one file a command.

A command's module has ``add_parser(subparsers)``, which adds its options, and ``run(args) -> int``, which does
the work and returns the exit code. Modules import nothing heavy at the top, so that ``--help`` is quick.
"""
