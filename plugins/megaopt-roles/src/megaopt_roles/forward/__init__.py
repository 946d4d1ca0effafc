"""Reading a module's forward source: what flows where, without running it.

The evaluator walks the syntax tree of `forward` with the real module in hand. What it knows it computes (sizes,
settings, branches); an activation becomes a `Flow` that remembers which calls it came from, a parameter a
`Weight` that remembers its axes. Nothing of the model is executed.

From the bottom up: `sources` looks at Python without running it; the files of this folder hold what is computed with
(`values`) and noted (`trace`); `weights`, `shapes` and `operations` say what functions of torch do to weights, to
shapes and to activations; `objects` are the other things that a forward handles; `evaluation` walks through it;
`analysis` says what came of it.
"""
