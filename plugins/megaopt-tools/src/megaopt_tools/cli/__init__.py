"""The program `megaopt`: parsing, the commands of plugins, and how commands print."""
