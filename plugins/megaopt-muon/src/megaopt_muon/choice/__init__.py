"""Which way each shape is iterated, and the rates that it is chosen by."""
