"""Reading a module's forward source: what flows where, without running it.

The evaluator walks the syntax tree of `forward` with the real module in hand. What it knows it computes (sizes,
settings, branches); an activation becomes a `Flow` that remembers which calls it came from, a parameter a
`Weight` that remembers its axes. Nothing of the model is executed.
"""
